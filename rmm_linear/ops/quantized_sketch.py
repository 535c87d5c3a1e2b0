"""The Hadamard sketch on its way to codes: what is stored of x in low bits, and of its mean."""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import HALVES, run
from rmm_linear.ops.grad_weight import product_of_codes
from rmm_linear.ops.projections import hadamard_scales
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear.ops.storage import Codes, empty_codes
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.hadamard_sketch_quantized import reference as _quantized
from rmm_linear_kernels.hadamard_sketch_quantized.shapes import holds
from rmm_linear_kernels.low_bit import reference as _low_bit

# Rows of a block whose sum of signs bfloat16 holds; of more, it is held in two parts.
_EXACT_ROWS = 256


@define(
    "hadamard_sketch_quantized(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, str kind, int group)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def _hadamard_sketch_quantized(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # here, where sizes are numbers: a compiled model would otherwise be compiled anew for either answer
    rows = x.shape[0]
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": hadamard_scales(rows, blocks, kept)[0]}
    if rows and holds(rows, blocks=blocks, kept=kept, kind=kind, group=group):
        twin = _quantized.hadamard_sketch_quantized
        *parts, column_sum = run("hadamard_sketch_quantized", twin, x, seed, mean, **options, kind=kind, group=group)
    else:
        column_sum = None
        if mean is None:
            sketch = run("hadamard_sketch", _hadamard.hadamard_sketch, x, seed, None, **options, dtype=x.dtype)
        else:
            with_sums = _hadamard.hadamard_sketch_and_sums
            sketch, sums = run("hadamard_sketch_and_sums", with_sums, x, seed, mean, **options, dtype=x.dtype)
            column_sum = sums.sum(0)
        parts = run("quantize", _low_bit.quantize, sketch, seed, None, kind=kind, group=group)
    codes, steps, offsets = parts
    if mean is None:
        return codes, steps, offsets, x.new_empty(0, dtype=result_dtype(x, True))
    return codes, steps, offsets, _rest(x, column_sum, Codes(codes, steps, offsets, seed, kind, group), blocks, kept)


def _rest(x: Tensor, column_sum: Tensor, codes: Codes, blocks: int, kept: int) -> Tensor:
    """The mean of x less X^T (S^T 1) / rows, for what the codes stand for as X."""
    rows = x.shape[0]
    _, factor = hadamard_scales(rows, blocks, kept)
    # S^T 1 but for a factor: whole numbers. Codes are decoded for it as they will be for the sketch of g.
    is_exact = x.dtype not in HALVES or rows <= _EXACT_ROWS * blocks
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": 1.0}
    options["dtype"] = x.dtype if is_exact else torch.float32
    ones = run("hadamard_sketch", _hadamard.hadamard_sketch, x.new_ones((rows, 1)), codes.seed, None, **options)
    if not is_exact:
        high = ones.to(x.dtype)
        ones = torch.cat((high, (ones - high).to(x.dtype)), 1)
    total, _ = product_of_codes(ones, codes, None, None, 1.0, result_dtype(x, True), None)
    return (column_sum - (total[0] if is_exact else total.sum(0)) * factor) / max(1, rows)


@torch.library.register_fake("rmm_linear::hadamard_sketch_quantized")
def _(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest = x.new_empty((0 if mean is None else x.shape[1],), dtype=result_dtype(x, True))
    return *empty_codes(x, blocks * kept, kind, group), rest


def hadamard_sketch_quantized(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, kind: str, group: int
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
        Codes, steps and offsets of (blocks * kept, features) values, see `quantize`; and, with a mean, what is left of
        x's (see `hadamard_sketch_and_mean`) next to what the codes stand for, (features,), (0,) without one, float32
        (float64 for float64).
    """
    return _hadamard_sketch_quantized(x, seed, mean, blocks, kept, kind, group)
