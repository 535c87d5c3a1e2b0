"""Rows of a matrix, their norms, and draws of them by integer weights, without a host synchronisation.

Importance sampling runs on integer weights: w_i = round(2**40 * norm_i / max norm), at least 1 where the norm is not
zero (fewer bits beyond 2**22 rows, so that the sum fits). The probabilities are then exactly p_i = w_i / sum(w), an
int64 cumulative sum is deterministic on every device (a float one on CUDA is not), and the scales use the very p_i that
the draws have, so that the rounding costs no bias.
"""

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import accumulate_dtype

_WEIGHT_BITS = 40
_SUM_BITS = 62
# Elements of x that are widened at a time.
_SLAB_ELEMENTS = 1 << 20


def gather_rows(
    x: Tensor,
    index: Tensor,
    mean: Tensor | None,
    *,
    scales: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> Tensor:
    """Return scale * scales_j * (x[index_j] - mean), row by row, shape (rank, features).

    Args:
        x: Input, shape (rows, features), any float dtype.
        index: Row numbers, shape (rank,), any integer dtype.
        mean: Shape (features,), or None.
        scales: Factor of each row, shape (rank,), or None for 1.
        scale: Factor of all rows.
        dtype: Dtype of the result; formed in float32, or float64 for a float64 `x`.
    """
    compute = accumulate_dtype(x.dtype)
    out = x.index_select(0, index).to(compute)
    if mean is not None:
        out = out - mean.to(compute)
    if scales is not None:
        out = out * scales.to(compute).unsqueeze(1)
    return (out * scale).to(dtype)


def row_norms(x: Tensor, mean: Tensor | None) -> Tensor:
    """Return the Euclidean norm of every row of x - 1 mean^T, shape (rows,), float64."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float64)
    # float64: the squares of 1e-30 and 1e30 neither vanish nor overflow. By slabs: a wide copy of x would be large.
    slabs = x.split(max(1, _SLAB_ELEMENTS // x.shape[1]))
    wide = (slab.double() if mean is None else slab.double() - mean.double() for slab in slabs)
    return torch.cat([torch.linalg.vector_norm(slab, dim=1) for slab in wide])


def integer_weights(norms: Tensor) -> Tensor:
    """Return the integer sampling weights of the rows, shape (rows,), int64: p_i is weight i over their sum.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64, not negative.
    """
    # A row with a NaN or an infinity counts as a heavy one; `_nan_if_not_finite` makes the gradient show it.
    finite = torch.where(norms.isfinite(), norms, 0)
    largest = finite.amax().clamp(min=torch.finfo(torch.float64).tiny)
    relative = torch.where(norms.isfinite(), finite / largest, 1)
    weights = torch.round(relative * 2.0 ** min(_WEIGHT_BITS, _SUM_BITS - norms.numel().bit_length())).to(torch.int64)
    weights = torch.maximum(weights, (relative > 0).to(torch.int64))
    # No row at all has a norm: every draw gives a zero row, so draw uniformly.
    return torch.where(weights.amax() > 0, weights, torch.ones_like(weights))


def _nan_if_not_finite(norms: Tensor) -> Tensor:
    """1, or NaN where a row holds a NaN or an infinity, which sampling may miss and the exact gradient would not."""
    return norms.new_ones(()).masked_fill_(norms.isfinite().all().logical_not(), torch.nan)


def sample_rows(norms: Tensor, seed: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """Column-row sampling (CRS): draw rows with replacement, p_i proportional to `norms`.

    Drineas, Kannan and Mahoney 2006, "Fast Monte Carlo algorithms for matrices I".

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64, not negative.
        seed: 64-bit seeds, shape (...,), int64.
        rank: Number of draws r.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, 1 / (r p_i), (..., rank), float64.
    """
    weights, factor = integer_weights(norms), _nan_if_not_finite(norms)
    ends = weights.cumsum(0)
    total = ends[-1]
    index = torch.searchsorted(ends, _targets(backend.random.fractions(seed, rank), total), right=True)
    return index, factor * total.to(torch.float64) / (rank * weights[index].to(torch.float64))


def _targets(fractions: Tensor, total: Tensor) -> Tensor:
    """Uniform numbers below a total, int64."""
    return torch.minimum((fractions * total.to(torch.float64)).to(torch.int64), (total - 1).clamp(min=0))


def winners(weights: Tensor, *, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose WTA-CRS's kept set: the rows of largest probability, as many as minimise the rest's weight.

    The size k minimises (1 - sum of the k largest p) / (rank - k) over k = 0 .. rank - 1, or is `rank` where no more
    than `rank` rows have a norm (Liu et al. 2023, arXiv 2305.15265, section 3).

    Args:
        weights: As `integer_weights` returns them, shape (rows,), int64.
        rank: Number of rows to keep in all.

    Returns:
        Row numbers in falling order of weight (rows,), int64; their weights (rows,), int64; cumulative sums of these
        (rows,), int64; and k, 0-d int64.
    """
    weights, order = torch.sort(weights, descending=True, stable=True)
    ends = weights.cumsum(0)
    total = ends[-1].to(torch.float64)
    sizes = torch.arange(rank, device=weights.device)
    before = torch.cat((ends.new_zeros(1), ends[: rank - 1]))
    objective = (total - before.to(torch.float64)) / (rank - sizes).to(torch.float64)
    size = torch.argmin(objective)
    return order, weights, ends, torch.where(ends[rank - 1] == ends[-1], rank, size)


def sample_rows_winner_take_all(norms: Tensor, seed: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """WTA-CRS: keep the k rows of largest probability as they are, draw the other rank - k with replacement.

    Args:
        norms: Row norms (or row norms of x times those of g) up to a common factor, shape (rows,), float64.
        seed: 64-bit seeds, shape (...,), int64.
        rank: Number of rows to keep in all, r, at most the number of rows.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, (..., rank), float64: 1 for the kept ones,
        1 / ((r - k) q_i) for the drawn ones, q being p renormalised outside the kept set.
    """
    fractions, factor = backend.random.fractions(seed, rank), _nan_if_not_finite(norms)
    order, weights, ends, size = winners(integer_weights(norms), rank=rank)
    # gathered: an index of no dimension would be read by the host
    before_tail = torch.where(size > 0, ends.gather(0, (size - 1).clamp(min=0).view(1)).squeeze(0), 0)
    tail = ends[-1] - before_tail
    position = torch.searchsorted(ends, _targets(fractions, tail) + before_tail, right=True)
    slot = torch.arange(rank, device=ends.device)
    keep = slot < size
    position = torch.where(keep, slot, position.clamp(max=order.numel() - 1))
    drawn = (rank - size).clamp(min=1).to(torch.float64) * weights[position].to(torch.float64).clamp(min=1)
    return order[position], factor * torch.where(keep, 1.0, tail.to(torch.float64) / drawn)
