"""Low bits, and what is left of the mean of x next to a sketch of x that is held in them, in plain torch.

With mu the column mean of x, X what the codes stand for and n rows, that is mu - X^T (S^T 1) / n, as for a sketch that
is stored as it is (`hadamard_sketch.reference.hadamard_sketch_and_mean`). X may be rounded to the dtype in which it
will be multiplied by the sketch of g: what that rounds is then centred as all else is. Where S = I, it has to be, as
equal rows are rounded alike; and fp8's, as its numbers lie no closer than those of half precision by much. The random
signs of a sketch make a noise of mean 0 of what is rounded off integer codes, which need not be rounded there.
"""

from typing import Any

import torch
from torch import Tensor

from ..hadamard_sketch.reference import hadamard_sketch
from ..low_bit.reference import FP8, dequantize, quantize


def rounded_dtype(dtype: torch.dtype, kind: str, blocks: int) -> torch.dtype:
    """Return the dtype that X has to be rounded to, see the module's docstring.

    Args:
        dtype: Dtype of x.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        blocks: Number of strided blocks of the sketch; 0 for S = I.

    Returns:
        That of x in half precision, for fp8 or without a sketch; otherwise float32, which rounds nothing.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return dtype if is_half and (blocks == 0 or kind == FP8) else torch.float32


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
    decoded: torch.dtype,
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
        decoded: Dtype that X is rounded to; float32 for none.

    Returns:
        Shape (features,), in the dtype of the sums; 0 of no rows.
    """
    values = dequantize(codes, steps, offsets, seed, kind=kind, group=group, features=steps.shape[1], dtype=decoded)
    ones = torch.ones((rows, 1), dtype=sums.dtype, device=sums.device)
    if blocks:
        # whole numbers
        ones = hadamard_sketch(ones, seed, None, blocks=blocks, kept=kept, scale=1.0, dtype=sums.dtype)
    total = values.to(sums.dtype).t() @ ones
    return (sums.sum(0) - total.squeeze(1) * scale) / max(1, rows)


def quantize_and_mean(
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
    decoded: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to a few bits, and return what is left of the mean of x next to that.

    Args:
        y: The sketch of x, shape (blocks * kept, features), or x itself, any float dtype, any strides.
        seed: The seed of both the sketch and the codes, 0-d int64.
        mean: Shape (features,), subtracted from every row of y, or None.
        sums: Sums of parts of x over their rows, shape (parts, features), at least one part of any row; None where y is
            x itself.
        rows: Rows of x.
        blocks: Number of strided blocks K of the Hadamard sketch; 0 where y is x itself, S = I.
        kept: Hadamard rows kept of each block, p; 1 for S = I.
        scale: What X and S^T 1, as sums of +-1, are multiplied by: that of the sketch of g.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of y that share a step.
        decoded: Dtype that what the codes stand for is rounded to; float32 for none.

    Returns:
        Codes, steps and offsets as `low_bit.quantize` returns them; and what `mean_less_codes` does, (features,),
        float32 (float64 for float64).
    """
    stored = quantize(y, seed, mean, kind=kind, group=group)
    if sums is None:
        sums = y.sum(0, dtype=torch.float64 if y.dtype == torch.float64 else torch.float32, keepdim=True)
    options: dict[str, Any] = {"rows": rows, "blocks": blocks, "kept": kept, "scale": scale}
    return *stored, mean_less_codes(sums, *stored, seed, **options, kind=kind, group=group, decoded=decoded)
