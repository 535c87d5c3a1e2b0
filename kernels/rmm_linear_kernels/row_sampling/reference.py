"""Rows of a matrix, their norms, and draws of them, in plain torch, without a host synchronisation.

Importance sampling runs on integer weights: w_i = round(2**40 * norm_i / max norm), at least 1 where the norm is not
zero (fewer bits beyond 2**22 rows, so that the sum fits). The probabilities are then exactly p_i = w_i / sum(w), an
int64 cumulative sum is deterministic on every device (a float one on CUDA is not), and the scales use the very p_i that
the draws have, so that the rounding costs no bias.
"""

import torch
from torch import Tensor

from ..philox.reference import choose_with_replacement, choose_without_replacement, random_fractions

_WEIGHT_BITS = 40
_SUM_BITS = 62
# Elements of x that are widened at a time.
_SLAB_ELEMENTS = 1 << 20

# What `weights_and_ends` returns, and `draw_by_weight` reads.
Weights = tuple[Tensor, Tensor, Tensor]


def gather_rows(
    x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None, *, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * scales_j * (x[index_j] - mean), row by row.

    Args:
        x: Input, shape (rows, features), any float dtype.
        index: Row numbers, shape (rank,), any integer dtype.
        mean: Shape (features,), or None.
        scales: Factor of each row, shape (rank,), or None for 1.
        scale: Factor of all rows.
        dtype: Dtype of the result; formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (rank, features).
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.index_select(0, index).to(compute)
    if mean is not None:
        out = out - mean.to(compute)
    if scales is not None:
        out = out * scales.to(compute).unsqueeze(1)
    return (out * scale).to(dtype)


def row_norms(x: Tensor, mean: Tensor | None) -> Tensor:
    """Return the Euclidean norm of every row of x - 1 mean^T.

    Args:
        x: Input, shape (rows, features), any float dtype.
        mean: Shape (features,), or None.

    Returns:
        Shape (rows,), float64.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float64)
    # float64: the squares of 1e-30 and 1e30 neither vanish nor overflow. By slabs: a wide copy of x would be large.
    slabs = x.split(max(1, _SLAB_ELEMENTS // x.shape[1]))
    wide = (slab.double() if mean is None else slab.double() - mean.double() for slab in slabs)
    return torch.cat([torch.linalg.vector_norm(slab, dim=1) for slab in wide])


def uniform_rows(seed: Tensor, *, rows: int, rank: int, replacement: bool) -> Tensor:
    """Draw row numbers uniformly.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        rows: Number of rows to draw from.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.

    Returns:
        Row numbers, shape (..., rank), int64.
    """
    choose = choose_with_replacement if replacement else choose_without_replacement
    return choose(seed, rows, rank)


def unit_of(rows: int) -> float:
    """Return the weight of the heaviest row.

    Returns:
        A power of 2.
    """
    return 2.0 ** min(_WEIGHT_BITS, _SUM_BITS - rows.bit_length())


def integer_weights(norms: Tensor) -> Tensor:
    """Return the integer sampling weights of the rows.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64, not negative.

    Returns:
        Weights, shape (rows,), int64; p_i is weight i over their sum.
    """
    # A row with a NaN or an infinity counts as a heavy one; `weights_and_ends` makes the gradient show it.
    finite = torch.where(norms.isfinite(), norms, 0)
    largest = finite.amax().clamp(min=torch.finfo(torch.float64).tiny)
    relative = torch.where(norms.isfinite(), finite / largest, 1)
    weights = torch.round(relative * unit_of(norms.numel())).to(torch.int64)
    weights = torch.maximum(weights, (relative > 0).to(torch.int64))
    # No row at all has a norm: every draw gives a zero row, so draw uniformly.
    return torch.where(weights.amax() > 0, weights, torch.ones_like(weights))


def weights_and_ends(norms: Tensor) -> Weights:
    """Return the integer sampling weights, and what the draws need beside them.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64, not negative.

    Returns:
        Weights and their cumulative sums, (rows,), int64; and a factor of the squared entries of S, 0-d float64: 1, or
        NaN where a row holds a NaN or an infinity, which sampling may miss and the exact gradient would not.
    """
    weights = integer_weights(norms)
    factor = norms.new_ones(()).masked_fill_(norms.isfinite().all().logical_not(), torch.nan)
    return weights, weights.cumsum(0), factor


def draw_by_weight(
    fractions: Tensor, weights: Weights, *, order: Tensor | None = None, size: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw rows with replacement, by their weights; after the heaviest ones, where there is an order.

    Args:
        fractions: Independent uniforms in [0, 1), one for each row drawn, shape (..., rank), float64.
        weights: What `weights_and_ends` returned; in falling order where there is one.
        order: Row numbers in the order of the weights, (rows,), int64; None for the rows' own.
        size: With an order: how many of the first are kept as they are, 0-d int64.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, (..., rank), float64.
    """
    rank = fractions.shape[-1]
    each, ends, factor = weights
    tail = total = ends[-1]
    if size is not None:
        # gathered: an index of no dimension would be read by the host
        first_of_tail = torch.where(size > 0, ends.gather(0, (size - 1).clamp(min=0).view(1)).squeeze(0), 0)
        tail = total - first_of_tail
    target = (fractions * tail.to(torch.float64)).to(torch.int64)
    target = torch.minimum(target, (tail - 1).clamp(min=0))
    if order is None or size is None:
        index = torch.searchsorted(ends, target, right=True)
        return index, factor * total.to(torch.float64) / (rank * each[index].to(torch.float64))
    position = torch.searchsorted(ends, target + first_of_tail, right=True).clamp(max=order.numel() - 1)
    slot = torch.arange(rank, device=each.device)
    keep = slot < size
    position = torch.where(keep, slot, position)
    drawn = (rank - size).clamp(min=1).to(torch.float64) * each[position].to(torch.float64).clamp(min=1)
    return order[position], factor * torch.where(keep, 1.0, tail.to(torch.float64) / drawn)


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
    return draw_by_weight(random_fractions(seed, rank), weights_and_ends(norms))


def winners(weights: Tensor, *, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose WTA-CRS's kept set: the rows of largest probability, as many as minimise the rest's weight.

    The size k minimises (1 - sum of the k largest p) / (rank - k) over k = 0 .. rank - 1, or is `rank` where no more
    than `rank` rows have a norm (Liu et al. 2023, arXiv 2305.15265, section 3).

    Args:
        weights: What `integer_weights` returned, shape (rows,), int64.
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
    return draw_after_winners(norms, random_fractions(seed, rank))


def draw_after_winners(norms: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
    """Draw what `sample_rows_winner_take_all` does, out of what is random about it.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64.
        fractions: Independent uniforms in [0, 1), one for each row drawn, shape (..., rank), float64.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, (..., rank), float64.
    """
    weights, _, factor = weights_and_ends(norms)
    order, weights, ends, size = winners(weights, rank=fractions.shape[-1])
    return draw_by_weight(fractions, (weights, ends, factor), order=order, size=size)
