"""The trigonometric sketches on a CPU: the reference's, drawn by torch's own generator."""

import torch
from torch import Tensor

from .. import cpu_generator
from ..philox.reference import CHOICE_STREAM, SIGN_STREAM
from .reference import dense_of, transformed


def trigonometric_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, kind: str, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * (D Q[:, columns])^T (x - 1 mean^T); see `reference.trigonometric_sketch`.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        rank: Number of columns kept, at most `rows`.
        kind: "dct" or "dft".
        scale: Factor; `sqrt(rows / rank)` makes it an unbiased sketch.
        dtype: Dtype of the result; sums are formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (rank, features).
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return transformed(x, *_drawn(seed, x.shape[0], rank, compute), mean, kind=kind, scale=scale, dtype=dtype)


def trigonometric_dense(seeds: Tensor, *, rows: int, rank: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Return S itself for many seeds.

    Args:
        seeds: Shape (draws,), int64.
        rows: Rows of x.
        rank: Columns kept.
        kind: "dct" or "dft".
        dtype: Dtype of the result.

    Returns:
        Shape (draws, rows, rank).
    """
    if rows == 0:
        return torch.zeros((seeds.numel(), 0, rank), dtype=dtype)
    return dense_of(*_drawn(seeds, rows, rank, dtype), kind=kind)


def _drawn(seed: Tensor, rows: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Signs of the rows, and the columns that are kept."""
    signs = cpu_generator.for_each(seed, SIGN_STREAM, lambda g: cpu_generator.random_signs(g, (rows,), dtype=dtype))
    columns = cpu_generator.for_each(seed, CHOICE_STREAM, lambda g: torch.randperm(rows, generator=g, device="cpu"))
    return signs, columns[..., :rank]
