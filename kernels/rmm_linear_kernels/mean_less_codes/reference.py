"""What is left of the mean of x next to a sketch of x that is held in low bits, in plain torch.

With mu the column mean of x, X what the codes stand for and n rows, that is mu - X^T (S^T 1) / n, as for a sketch that
is stored as it is (`hadamard_sketch.reference.hadamard_sketch_and_mean`). On its way to a half-precision product X is
rounded once more. That is left out here: what a value has next to the numbers of half precision is, by the dither that
was taken off, as good as uniform, so that this rounding is a noise of mean 0, of 2**-9 of X in bfloat16.
"""

import torch
from torch import Tensor

from ..hadamard_sketch.reference import hadamard_sketch
from ..low_bit.reference import dequantize


def mean_less_codes(
    sums: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    *,
    rows: int,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
) -> Tensor:
    """Return the mean of x less X^T (S^T 1) / rows, for what the codes stand for as X.

    Args:
        sums: Sums of parts of x over their rows, shape (parts, features), float32 (float64 for float64), at least one
            part of any row.
        codes: As `low_bit.quantize` returns them, shape (blocks * kept, ...).
        steps: As `low_bit.quantize` returns them.
        offsets: As `low_bit.quantize` returns them.
        seed: The seed of both the sketch and the codes, 0-d int64.
        rows: Rows of x.
        blocks: Number of strided blocks K of the Hadamard sketch; 0 where the codes are those of x itself, S = I.
        kept: Hadamard rows kept of each block, p; 1 for S = I.
        scale: What X and S^T 1, as sums of +-1, are multiplied by: that of the sketch of g.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share a step.

    Returns:
        Shape (features,), in the dtype of the sums; 0 of no rows.
    """
    values = dequantize(codes, steps, offsets, seed, kind=kind, group=group, features=steps.shape[1])
    ones = torch.ones((rows, 1), dtype=sums.dtype, device=sums.device)
    if blocks:
        # whole numbers
        ones = hadamard_sketch(ones, seed, None, blocks=blocks, kept=kept, scale=1.0, dtype=sums.dtype)
    total = values.to(sums.dtype).t() @ ones
    return (sums.sum(0) - total.squeeze(1) * scale) / max(1, rows)
