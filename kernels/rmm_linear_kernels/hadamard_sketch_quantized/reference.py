"""The strided-block Hadamard sketch rounded to a few bits, in plain torch: one op after the other.

The sketch goes from one to the other in float32. A sketch that is kept in half precision before it is rounded to codes
(`hadamard_sketch` into the dtype of x, then `low_bit.quantize`) is rounded once more.
"""

from typing import Any

import torch
from torch import Tensor

from ..hadamard_sketch.reference import hadamard_sketch
from ..low_bit.reference import quantize
from ..quantize_and_mean.reference import quantize_and_mean, rounded_dtype
from ..strides import as_matrix


def hadamard_sketch_quantized(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round scale * sqrt(kept) * S^T (x - 1 mean^T) to 8, 4, 3 or 2 bits an element, for the Hadamard S.

    Args:
        x: Input, shape (rows, features), any float dtype, any strides; or in runs, see `strides.in_runs`.
        seed: 0-d int64, of the sketch and of the rounding.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share, in a column, a step and an offset.

    Returns:
        Codes, steps and offsets of the (blocks * kept, features) sketch, as `low_bit.quantize` returns them; and, with
        a mean, that of x less X^T (S^T 1) / rows, with X what the codes stand for, rounded as
        `quantize_and_mean.reference.rounded_dtype` says, (features,), otherwise (0,), float32 (float64 for float64).
    """
    x = as_matrix(x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sketch = hadamard_sketch(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=wide)
    if mean is None:
        return *quantize(sketch, seed, None, kind=kind, group=group), x.new_empty(0, dtype=wide)
    sums, decoded = x.sum(0, dtype=wide, keepdim=True), rounded_dtype(x.dtype, kind, blocks)
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": 1 / (kept * scale), "kind": kind}
    return quantize_and_mean(sketch, seed, None, sums, rows=x.shape[0], **options, group=group, decoded=decoded)
