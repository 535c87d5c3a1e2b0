"""Low-bit storage: values, or what is sketched on the way, to codes; and back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import run
from rmm_linear.ops.projections import _hadamard_scales
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.hadamard_sketch_quantized import reference as _quantized
from rmm_linear_kernels.hadamard_sketch_quantized.shapes import holds
from rmm_linear_kernels.low_bit import reference as _low_bit


class Codes(NamedTuple):
    """Values in low bits, and what it takes to read them.

    Attributes:
        codes: As `quantize` returns them, shape (rows, ceil(features * bits / 8)).
        steps: As `quantize` returns them, shape (groups, features).
        offsets: As `quantize` returns them.
        seed: The seed that `quantize` had.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
    """

    codes: Tensor
    steps: Tensor
    offsets: Tensor
    seed: Tensor
    kind: str
    group: int


@define("quantize(Tensor y, Tensor seed, Tensor? mean, str kind, int group) -> (Tensor, Tensor, Tensor)")
def _quantize(y: Tensor, seed: Tensor, mean: Tensor | None, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return run("quantize", _low_bit.quantize, y, seed, mean, kind=kind, group=group)


@torch.library.register_fake("rmm_linear::quantize")
def _(y: Tensor, seed: Tensor, mean: Tensor | None, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(y, y.shape[0], kind, group)


def _empty(y: Tensor, rows: int, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and offsets of so many rows, as wide as y."""
    features = y.shape[1]
    codes = y.new_empty((rows, _low_bit.packed_width(features, kind)), dtype=torch.uint8)
    steps = y.new_empty(((rows + group - 1) // group, features), dtype=_low_bit.SCALE_DTYPE)
    return codes, steps, steps.new_empty(0) if kind == _low_bit.FP8 else torch.empty_like(steps)


def quantize(y: Tensor, seed: Tensor, mean: Tensor | None, *, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to 8, 4, 3 or 2 bits an element, at random and without bias.

    Args:
        y: Shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of a column that share a step and an offset.

    Returns:
        Codes (rows, ceil(features * bits / 8)), uint8; steps (groups, features) in bfloat16; offsets like the steps,
        (0,) for fp8.
    """
    return _quantize(y, seed, mean, kind, group)


@define(
    "hadamard_sketch_quantized(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, str kind, int group)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def _hadamard_sketch_quantized(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # here, where sizes are numbers: a compiled model would otherwise be compiled anew for either answer
    rows = x.shape[0]
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": _hadamard_scales(rows, blocks, kept)[0]}
    if rows and holds(rows, blocks=blocks, kept=kept, kind=kind, group=group):
        twin = _quantized.hadamard_sketch_quantized
        options |= {"kind": kind, "group": group}
        return run("hadamard_sketch_quantized", twin, x, seed, mean, **options)
    options["dtype"] = x.dtype
    if mean is None:
        sketch = run("hadamard_sketch", _hadamard.hadamard_sketch, x, seed, None, **options)
        rest = x.new_empty(0, dtype=result_dtype(x, True))
    else:
        with_mean = _hadamard.hadamard_sketch_and_mean
        sketch, rest = run("hadamard_sketch_and_mean", with_mean, x, seed, mean, **options)
    return *run("quantize", _low_bit.quantize, sketch, seed, None, kind=kind, group=group), rest


@torch.library.register_fake("rmm_linear::hadamard_sketch_quantized")
def _(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest = x.new_empty((0 if mean is None else x.shape[1],), dtype=result_dtype(x, True))
    return *_empty(x, blocks * kept, kind, group), rest


def hadamard_sketch_quantized(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    kind: str,
    group: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of the Hadamard sketch S^T (x - 1 mean^T), times the storage scale, without the sketch itself.

    Where the groups are whole blocks that one program holds, the sketch goes from float32 to codes and never into
    memory. Otherwise it is `quantize` of `hadamard_sketch`, which rounds it to x's dtype in between. x is read once in
    either case.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64, of the sketch and of the rounding.
        mean: Shape (features,), or None.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share, in a column, a step and an offset.

    Returns:
        Codes, steps and offsets of (blocks * kept, features) values, see `quantize`; and, with a mean, what
        is left of x's as `hadamard_sketch_and_mean` returns it, (features,), (0,) without one, float32 (float64 for
        float64).
    """
    return _hadamard_sketch_quantized(x, seed, mean, blocks, kept, kind, group)


@define(
    "dequantize(Tensor codes, Tensor steps, Tensor offsets, Tensor seed, str kind, int group, ScalarType? dtype)"
    " -> Tensor"
)
def _dequantize(
    codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, kind: str, group: int, dtype: torch.dtype | None
) -> Tensor:
    wanted = dtype or torch.float32
    return run(
        "dequantize",
        _low_bit.dequantize,
        codes,
        steps,
        offsets,
        seed,
        kind=kind,
        group=group,
        features=steps.shape[-1],
        dtype=wanted,
    )


@torch.library.register_fake("rmm_linear::dequantize")
def _(
    codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, kind: str, group: int, dtype: torch.dtype | None
) -> Tensor:
    return steps.new_empty((codes.shape[0], steps.shape[1]), dtype=dtype or torch.float32)


def dequantize(
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    *,
    kind: str,
    group: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `quantize`'s codes stand for.

    Args:
        codes: As `quantize` returns them.
        steps: As `quantize` returns them.
        offsets: As `quantize` returns them.
        seed: 0-d int64, the seed that `quantize` had.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        dtype: Dtype of the result, float32 if None.

    Returns:
        Shape (rows, features).
    """
    return _dequantize(codes, steps, offsets, seed, kind, group, dtype)
