"""Dense random projections in plain torch: S with independent Gaussian or +-1 entries, never held as a whole.

A counter of the projection stream serves neighbouring rows of one column, so that whoever makes a tile of S computes
few counters, and may begin at any row that is a multiple of theirs. Both indices are in the counter, so that S may be
of any size, and has the same first columns whatever its rank:

    signs     element (row, column) = bit row % 32 of word row % 128 // 32 of cell (row // 128, column)
    normals   element (row, column) = normal row % 4 of cell (row // 4, column)

`philox.reference.cell_counters` tells which counter a cell has.
"""

import math

import torch
from torch import Tensor

from ..philox.reference import PROJECTION_STREAM, cell_counters, randint4x, randn4x

# Rows of a column that one counter serves.
SIGN_ROWS = 128
NORMAL_ROWS = 4
# Elements of S generated at a time.
_SLAB_ELEMENTS = 1 << 20
# Counters that normals are made of at a time: the integers of one large piece would not fit a processor's cache.
_PIECE = 1 << 13


def projection_slab(
    seed: Tensor, *, first_row: int, rows: int, rank: int, gaussian: bool, dtype: torch.dtype
) -> Tensor:
    """Return rows [first_row, first_row + rows) of the unscaled projection: standard normals or fair signs.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        first_row: First row of the slab, a multiple of 4 for normals and of 128 for signs.
        rows: Rows of the slab.
        rank: Columns of S.
        gaussian: Standard normals if true, signs otherwise.
        dtype: Floating dtype of the result (normals are formed in float32).

    Returns:
        Shape (..., rows, rank).
    """
    per_counter = NORMAL_ROWS if gaussian else SIGN_ROWS
    assert first_row % per_counter == 0
    make = _normals if gaussian else _signs
    slab = make(seed, first_row // per_counter, math.ceil(rows / per_counter), rank, dtype)
    return slab.flatten(-3, -2)[..., :rows, :]


def _normals(seed: Tensor, first: int, groups: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Normals of some groups of rows, shape (..., groups, 4, rank)."""
    entries = torch.empty((*seed.shape, groups, NORMAL_ROWS, rank), dtype=dtype, device=seed.device)
    step = max(1, _PIECE // max(1, rank))
    for start in range(0, groups, step):
        count = min(step, groups - start)
        counters = cell_counters(first + start, count, rank, stream=PROJECTION_STREAM, device=seed.device)
        normals = randn4x(seed, *counters).unflatten(-1, (count, rank))
        entries[..., start : start + count, :, :] = normals.movedim(0, -2)
    return entries


def _signs(seed: Tensor, first: int, groups: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Signs of some groups of rows, shape (..., groups, 128, rank)."""
    counters = cell_counters(first, groups, rank, stream=PROJECTION_STREAM, device=seed.device)
    words = randint4x(seed, *counters).unflatten(-1, (groups, rank)).movedim(0, -2)
    # Bit b of a word goes where a float32 has its sign, the rest becomes the bits of 1.0.
    shift = torch.arange(31, -1, -1, dtype=torch.int32, device=seed.device).unsqueeze(1)
    bits = words.to(torch.int32).unsqueeze(-2) << shift
    signs = bits.bitwise_and_(-(1 << 31)).bitwise_or_(0x3F800000).view(torch.float32)
    return signs.flatten(-3, -2).to(dtype)


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * R^T (x - 1 mean^T), R having independent standard normal or +-1 entries.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        rank: Columns of R.
        gaussian: Standard normals if true, signs otherwise.
        scale: Factor; `1 / sqrt(rank)` makes it an unbiased sketch.
        dtype: Dtype of the result; sums are formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (rank, features).
    """
    rows, features = x.shape
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_zeros((rank, features), dtype=compute)
    ones = x.new_zeros((rank,), dtype=compute)
    # A multiple of the rows that a counter serves, of either kind.
    step = max(1, _SLAB_ELEMENTS // (max(rank, features, 1) * SIGN_ROWS)) * SIGN_ROWS
    for first in range(0, rows, step):
        slab = projection_slab(
            seed, first_row=first, rows=min(step, rows - first), rank=rank, gaussian=gaussian, dtype=compute
        )
        # The factor goes on S: the bare sums of 1e30-sized rows could overflow.
        slab = slab.mul_(scale)
        out.addmm_(slab.t(), x[first : first + step].to(compute))
        if mean is not None:
            ones += slab.sum(0)
    if mean is not None:
        out.addr_(ones, mean.to(compute), alpha=-1)
    return out.to(dtype)
