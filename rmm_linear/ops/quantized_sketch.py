"""The Hadamard sketch, or x itself, on its way to codes: what is stored of x in low bits, and of its mean."""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import run
from rmm_linear.ops.projections import hadamard_scales
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear.ops.storage import empty_codes
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.hadamard_sketch_quantized import reference as _quantized
from rmm_linear_kernels.hadamard_sketch_quantized.shapes import holds
from rmm_linear_kernels.low_bit import reference as _low_bit
from rmm_linear_kernels.quantize_and_mean import reference as _quantize_and_mean_twin
from rmm_linear_kernels.strides import number_of_rows


@define(
    "hadamard_sketch_quantized(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, str kind, int group)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def _hadamard_sketch_quantized(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # here, where sizes are numbers: a compiled model would otherwise be compiled anew for either answer
    rows = number_of_rows(x)
    scale, factor = hadamard_scales(rows, blocks, kept)
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale}
    if holds(x, blocks=blocks, kept=kept, kind=kind, group=group):
        twin = _quantized.hadamard_sketch_quantized
        codes, steps, offsets, rest = run(
            "hadamard_sketch_quantized", twin, x, seed, mean, **options, kind=kind, group=group
        )
        return codes, steps, offsets, rest
    if mean is None:
        sketch = run("hadamard_sketch", _hadamard.hadamard_sketch, x, seed, None, **options, dtype=x.dtype)
        codes, steps, offsets = run("quantize", _low_bit.quantize, sketch, seed, None, kind=kind, group=group)
        return codes, steps, offsets, x.new_empty(0, dtype=result_dtype(x, True))
    with_sums = _hadamard.hadamard_sketch_and_sums
    sketch, sums = run("hadamard_sketch_and_sums", with_sums, x, seed, mean, **options, dtype=x.dtype)
    options |= {"scale": factor, "kind": kind, "group": group}
    return codes_and_mean(sketch, seed, None, sums, rows=rows, **options)


def codes_and_mean(
    y: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    sums: Tensor | None,
    *,
    rows: int,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T, and return the mean of x less X^T (S^T 1) / rows for what its codes stand for as X.

    A part of two operators.

    Args:
        y: The Hadamard sketch of x in x's dtype, or x itself.
        seed: 0-d int64, of the sketch and of the rounding.
        mean: Shape (features,), subtracted from every row of y, or None.
        sums: Sums of parts of x over their rows, shape (parts, features), float32 (float64 for float64); None for x
            itself.
        rows: Rows of x.
        blocks: Number of strided blocks of the sketch; 0 for x itself.
        kept: Hadamard rows kept of each block; 1 for x itself.
        scale: Factor of the +-1 combinations of g.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of y that share, in a column, a step and an offset.

    Returns:
        Codes, steps and offsets; and what is left of the mean, shape (features,), in the dtype of the sums.
    """
    decoded = _quantize_and_mean_twin.rounded_dtype(y.dtype, kind, blocks)
    options: dict[str, Any] = {"rows": rows, "blocks": blocks, "kept": kept, "scale": scale, "decoded": decoded}
    twin = _quantize_and_mean_twin.quantize_and_mean
    codes, steps, offsets, rest = run("quantize_and_mean", twin, y, seed, mean, sums, **options, kind=kind, group=group)
    return codes, steps, offsets, rest


@torch.library.register_fake("rmm_linear::hadamard_sketch_quantized")
def _(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest = x.new_empty((0 if mean is None else x.shape[-1],), dtype=result_dtype(x, True))
    return *empty_codes(x, blocks * kept, kind, group), rest


def hadamard_sketch_quantized(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of the Hadamard sketch S^T (x - 1 mean^T), times the storage scale, without the sketch itself.

    Where the groups are whole blocks that one program holds, the sketch goes from float32 to codes and never into
    memory. Otherwise it is `quantize` of `hadamard_sketch`, which rounds it to x's dtype in between. x is read once in
    either case.

    Args:
        x: Input, shape (rows, features), any float dtype; or in runs, as `in_runs` returns it.
        seed: 0-d int64, of the sketch and of the rounding.
        mean: Shape (features,), or None.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share, in a column, a step and an offset.

    Returns:
        Codes, steps and offsets of (blocks * kept, features) values, see `quantize`; and, with a mean, what is left of
        x's (see `hadamard_sketch_and_mean`) next to what the codes stand for, (features,), (0,) without one, float32
        (float64 for float64).
    """
    return _hadamard_sketch_quantized(x, seed, mean, blocks, kept, kind, group)


@define(
    "quantize_and_mean(Tensor x, Tensor seed, Tensor mean, str kind, int group) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _quantize_and_mean(
    x: Tensor, seed: Tensor, mean: Tensor, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options: dict[str, Any] = {"rows": x.shape[0], "blocks": 0, "kept": 1, "scale": 1.0}
    return codes_and_mean(x, seed, mean, None, **options, kind=kind, group=group)


@torch.library.register_fake("rmm_linear::quantize_and_mean")
def _(x: Tensor, seed: Tensor, mean: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *empty_codes(x, x.shape[0], kind, group), x.new_empty((x.shape[1],), dtype=result_dtype(x, True))


def quantize_and_mean(
    x: Tensor, seed: Tensor, mean: Tensor, *, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round x - 1 mean^T to 8, 4, 3 or 2 bits an element, and return what is left of the mean of x next to it.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of a column that share a step and an offset.

    Returns:
        What `quantize` does; and the mean of x less that of what the codes stand for, (features,), float32 (float64 for
        float64).
    """
    return _quantize_and_mean(x, seed, mean, kind, group)
