"""Subsampled randomised trigonometric transforms in plain torch.

S = sqrt(rows / rank) * D Q[:, columns]: random row signs D, an orthonormal (rows, rows) transform Q, and `rank` of
its columns, uniformly without replacement. Q is the DCT-II, or the real form of the DFT, in which the real and the
imaginary part of a frequency are two columns.
"""

import math

import torch
from torch import Tensor

from ..philox.reference import signs_and_keys, smallest_keys

# Elements of S generated at a time.
_SLAB_ELEMENTS = 1 << 20


def dct_columns(columns: Tensor, *, first_row: int, rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return entries of the orthonormal DCT-II: sqrt(2 / n) cos(pi (2 i + 1) c / 2 n), and 1 / sqrt(n) for c = 0.

    Args:
        columns: Column numbers c, shape (..., rank), int64.
        first_row: First row i returned.
        rows: Rows returned.
        length: The transform's length n.
        dtype: Dtype of the result.

    Returns:
        Shape (..., rows, rank).
    """
    row = torch.arange(first_row, first_row + rows, device=columns.device).unsqueeze(1)
    # Reduced in integers: the cosine of a large float32 angle would lose its low bits.
    phase = ((2 * row + 1) * columns.unsqueeze(-2)) % (4 * length)
    entries = torch.cos(phase.to(dtype) * (math.pi / (2 * length))) * math.sqrt(2 / length)
    return torch.where(columns.unsqueeze(-2) == 0, 1 / math.sqrt(length), entries)


def dft_columns(columns: Tensor, *, first_row: int, rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return entries of the real orthonormal DFT.

    Column 0 is constant; columns 2 f - 1 and 2 f are sqrt(2 / n) times the cosine and sine of 2 pi i f / n;
    for an even n the last column is the alternating one.

    Args:
        columns: Column numbers, shape (..., rank), int64.
        first_row: First row i returned.
        rows: Rows returned.
        length: The transform's length n.
        dtype: Dtype of the result.

    Returns:
        Shape (..., rows, rank).
    """
    columns = columns.unsqueeze(-2)
    row = torch.arange(first_row, first_row + rows, device=columns.device).unsqueeze(1)
    frequency = (columns + 1) // 2
    angle = ((row * frequency) % length).to(dtype) * (2 * math.pi / length)
    entries = torch.where(columns % 2 == 1, torch.cos(angle), torch.sin(angle)) * math.sqrt(2 / length)
    lone = (columns == 0) | (2 * frequency == length)
    return torch.where(lone, torch.cos(angle) / math.sqrt(length), entries)


def trigonometric_slab(
    columns: Tensor, signs: Tensor, *, first_row: int, length: int, kind: str, dtype: torch.dtype
) -> Tensor:
    """Return rows of D Q[:, columns], unscaled.

    Args:
        columns: Chosen columns, shape (..., rank), int64.
        signs: Signs of the rows wanted, shape (..., rows).
        first_row: First row.
        length: The transform's length.
        kind: "dct" or "dft".
        dtype: Dtype of the result.

    Returns:
        Shape (..., rows, rank).
    """
    transform = dct_columns if kind == "dct" else dft_columns
    rows = signs.shape[-1]
    return transform(columns, first_row=first_row, rows=rows, length=length, dtype=dtype).mul_(signs.unsqueeze(-1))


def trigonometric_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, kind: str, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * (D Q[:, columns])^T (x - 1 mean^T).

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
    signs, keys = signs_and_keys(seed, x.shape[0], x.shape[0], dtype=compute)
    return transformed(x, signs, smallest_keys(keys, rank), mean, kind=kind, scale=scale, dtype=dtype)


def transformed(
    x: Tensor,
    signs: Tensor,
    columns: Tensor,
    mean: Tensor | None,
    *,
    kind: str,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return `trigonometric_sketch` out of what is random about it.

    Args:
        x: Input, shape (rows, features), any float dtype.
        signs: Signs of the rows, shape (rows,), in the dtype of the sums.
        columns: Chosen columns, shape (rank,), int64.
        mean: Shape (features,), subtracted from every row, or None.
        kind: "dct" or "dft".
        scale: Factor.
        dtype: Dtype of the result.

    Returns:
        Shape (rank, features).
    """
    (rows, features), rank, compute = x.shape, columns.shape[0], signs.dtype
    out = x.new_zeros((rank, features), dtype=compute)
    ones = x.new_zeros((rank,), dtype=compute)
    step = max(1, _SLAB_ELEMENTS // max(rank, features, 1))
    for first in range(0, rows, step):
        slab = trigonometric_slab(
            columns, signs[first : first + step], first_row=first, length=rows, kind=kind, dtype=compute
        ).mul_(scale)
        out.addmm_(slab.t(), x[first : first + step].to(compute))
        if mean is not None:
            ones += slab.sum(0)
    if mean is not None:
        out.addr_(ones, mean.to(compute), alpha=-1)
    return out.to(dtype)


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
        return torch.zeros((seeds.numel(), 0, rank), dtype=dtype, device=seeds.device)
    signs, keys = signs_and_keys(seeds, rows, rows, dtype=dtype)
    return dense_of(signs, smallest_keys(keys, rank), kind=kind)


def dense_of(signs: Tensor, columns: Tensor, *, kind: str) -> Tensor:
    """Return S out of what is random about it.

    Args:
        signs: Signs of the rows, shape (draws, rows), at least one row.
        columns: Chosen columns, shape (draws, rank), int64.
        kind: "dct" or "dft".

    Returns:
        Shape (draws, rows, rank), in the dtype of the signs.
    """
    rows, rank = signs.shape[-1], columns.shape[-1]
    slab = trigonometric_slab(columns, signs, first_row=0, length=rows, kind=kind, dtype=signs.dtype)
    return slab.mul_(math.sqrt(rows / max(1, rank)))
