"""Sketches that keep rows of x: a uniform subset, CRS and WTA-CRS, all without a device synchronisation.

Uniform. A subset without replacement: the cheapest sketch, and the baseline of all others. Its variance has the finite
population's factor: (n - r) / (r (n - 1)) * (n s - C).

CRS. Rows drawn with replacement, p_i proportional to ||x_i|| (Drineas, Kannan and Mahoney 2006, "Fast Monte Carlo
algorithms for matrices I"). Of r independent draws of g_i x_i^T / p_i the variance is
(sum_i ||x_i||^2 ||g_i||^2 / p_i - C) / r.

WTA-CRS (Liu et al. 2023, "Winner-Take-All Column Row Sampling", arXiv 2305.15265, section 3). The k rows of largest
probability are kept exactly, the others drawn with replacement from the rest, with q = p renormalised there. k
minimises (1 - sum of its p) / (r - k), the factor in front of the drawn part's variance
(sum over the rest of ||x_i||^2 ||g_i||^2 / q_i - ||sum over the rest of g_i x_i^T||^2) / (r - k).

Importance sampling runs on integer weights: w_i = round(2**40 * norm_i / max norm), at least 1 if the norm is not zero
(fewer bits beyond 2**22 rows, so that the sum fits). The probabilities are then exactly p_i = w_i / sum(w), an int64
cumulative sum is deterministic on every device (a float sum on CUDA is not), and the scales use exactly the p_i of the
draws, so that the rounding adds no bias.

With norms c_i of the gradient's rows, which `rmm_linear.norm_cache` remembers from the previous epoch, rows are drawn
by the products ||x_i|| c_i, as WTA-CRS was published; see `sampling_norms`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import ObliviousSketch, SavedSketch, Sketch, Stored, accumulate_dtype, register
from rmm_linear.sketches.closed_forms import gradient_sums

_WEIGHT_BITS = 40
_SUM_BITS = 62
# Elements of x that are cast at a time.
_SLAB_ELEMENTS = 1 << 20
# Part of the probabilities that is proportional to ||x_i|| alone, for any norms of the gradient's rows.
_OWN_SHARE = 0.1


def gather_rows(x: Tensor, index: Tensor, mean: Tensor | None, scale: Tensor | float = 1.0) -> Tensor:
    """Return scale * (x[index] - mean), shape (rank, features), in float32 (float64 for float64).

    A tensor of scales has the shape (rank, 1).
    """
    out = x.index_select(0, index).to(accumulate_dtype(x.dtype))
    return (out if mean is None else out - mean.to(out.dtype)) * scale


def row_norms(x: Tensor, mean: Tensor | None) -> Tensor:
    """Return the Euclidean norm of every row of x - 1 mean^T, shape (rows,), float64."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float64)
    # float64: the squares of 1e-30 and 1e30 neither vanish nor overflow. By slabs: a float64 copy of x would be large.
    slabs = x.split(max(1, _SLAB_ELEMENTS // x.shape[1]))
    wide = (slab.double() if mean is None else slab.double() - mean.double() for slab in slabs)
    return torch.cat([torch.linalg.vector_norm(slab, dim=1) for slab in wide])


def sampling_norms(x: Tensor, mean: Tensor | None, gradient_norms: Tensor | None) -> Tensor:
    """Return the weights by which rows are drawn, shape (rows,), float64: ||x_i||, or 0.9 ||x_i|| c_i + 0.1 ||x_i||.

    Both terms of the sum are divided by their totals. c_i (rows,) is an earlier norm of the gradient's row: the less
    the norm has changed, the smaller the variance. The estimate is unbiased for any c_i, since a row with a norm keeps
    a tenth of the weight that it had without c_i (a defensive mixture, Hesterberg 1995, "Weighted Average Importance
    Sampling and Defensive Mixture Distributions"). A c_i that is negative or not finite is unknown, and replaced by the
    mean of the known norms.

    Raises:
        ValueError: If there is not one norm for each row.
    """
    norms = row_norms(x, mean)
    if gradient_norms is None:
        return norms
    if gradient_norms.shape != norms.shape:
        raise ValueError(
            f"{x.shape[0]} rows have gradient norms of shape {tuple(gradient_norms.shape)}; pass one norm a row"
        )
    known = gradient_norms.to(torch.float64)
    is_known = known.isfinite() & (known >= 0)
    average = torch.where(is_known, known, 0).sum() / is_known.sum().clamp(min=1)
    products = norms * torch.where(is_known, known, average)
    total, own = products.sum(), norms.sum()
    mixed = (1 - _OWN_SHARE) * products / total + _OWN_SHARE * norms / own
    return torch.where(total > 0, mixed, norms)


def integer_weights(norms: Tensor) -> Tensor:
    """Return the sampling weights of rows with these norms, up to a common factor; shape (rows,), int64."""
    # A row with a NaN or an infinity gets the largest weight; `_nan_if_not_finite` makes the gradient NaN.
    finite = torch.where(norms.isfinite(), norms, 0)
    largest = finite.amax().clamp(min=torch.finfo(torch.float64).tiny)
    relative = torch.where(norms.isfinite(), finite / largest, 1)
    weights = torch.round(relative * 2.0 ** min(_WEIGHT_BITS, _SUM_BITS - norms.numel().bit_length())).to(torch.int64)
    weights = torch.maximum(weights, (relative > 0).to(torch.int64))
    # If all rows are zero, every draw gives a zero row: draw uniformly.
    return torch.where(weights.amax() > 0, weights, torch.ones_like(weights))


def _nan_if_not_finite(y: Tensor) -> Tensor:
    """1, or NaN if there is a NaN or an infinity: sampling may miss its row, but the exact gradient would be NaN."""
    dtype = accumulate_dtype(y.dtype)
    if not y.numel():
        return y.new_ones((), dtype=dtype)
    low, high = y.aminmax()
    # a float: compilers take the product with an integer 0 for 0
    return 1 + 0.0 * low.to(dtype) + 0.0 * high.to(dtype)


def _variance_of_draws(x: Tensor, g: Tensor, weights: Tensor, draws: int) -> Tensor:
    """(sum_i ||x_i||^2 ||g_i||^2 / p_i - C) / draws, with p_i = weights_i / sum(weights)."""
    sums, weights = gradient_sums(x, g), weights.double()
    products = sums.x_rows * sums.g_rows
    # A row of weight 0 is a zero row: its product is 0 as well.
    weighted = torch.where(weights > 0, products * weights.sum() / weights.clamp(min=1), 0)
    # rounding may give a value slightly below 0
    return (weighted.sum() - sums.gradient_squared).clamp(min=0) / draws


def _targets(fractions: Tensor, total: Tensor) -> Tensor:
    return torch.minimum((fractions * total.to(torch.float64)).to(torch.int64), (total - 1).clamp(min=0))


def winners(weights: Tensor, *, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose WTA-CRS's kept set: k is `rank` if at most `rank` rows are not zero.

    Returns:
        Row numbers in falling order of weight (rows,), their weights, cumulative weights, and k, 0-d; all int64.
    """
    weights, order = torch.sort(weights, descending=True, stable=True)
    ends = weights.cumsum(0)
    total = ends[-1].to(torch.float64)
    sizes = torch.arange(rank, device=weights.device)
    before = torch.cat((ends.new_zeros(1), ends[: rank - 1]))
    objective = (total - before.to(torch.float64)) / (rank - sizes).to(torch.float64)
    size = torch.argmin(objective)
    return order, weights, ends, torch.where(ends[rank - 1] == ends[-1], rank, size)


@register
@dataclass(frozen=True)
class RowsWithoutReplacement(ObliviousSketch):
    """A uniform subset of `rank` rows."""

    name: ClassVar[str] = "rows_without_replacement"

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        rows, rank = y.shape[0], self.rank(y.shape[0])
        index = backend.random.subset(seed, rows, rank)
        if not gradient:
            return gather_rows(y, index, mean).to(y.dtype)
        return gather_rows(y, index, mean, rows / max(1, rank) * _nan_if_not_finite(y if mean is None else mean))

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        rows, rank = x.shape[0], self.rank(x.shape[0])
        index = backend.random.subset(seeds, rows, rank)
        dense = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
        return dense.scatter_(1, index.unsqueeze(1), (rows / max(1, rank)) ** 0.5)

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        sums = gradient_sums(x, g)
        rank = self.rank(sums.rows)
        if rank == sums.rows:
            return torch.zeros_like(sums.gradient_squared)
        population = (sums.rows - rank) / (rank * (sums.rows - 1))
        # rounding may give a value slightly below 0
        return population * (sums.rows * sums.row_products - sums.gradient_squared).clamp(min=0)


@dataclass(frozen=True)
class ColumnRowSampling(Sketch):
    """Rows sampled with probabilities proportional to their norms; S depends on x.

    The rows are stored unscaled, and the entries of S multiply the rows of g alone: the stored rows can't overflow.
    """

    def stored(self, rows: int, features: int, dtype: torch.dtype) -> tuple[Stored, ...]:
        kept = (self.rank(rows),)
        return *super().stored(rows, features, dtype), (kept, torch.int32), (kept, accumulate_dtype(dtype))

    def compress(
        self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None, gradient_norms: Tensor | None = None
    ) -> SavedSketch:
        rank = self.rank(x.shape[0])
        if rank == 0:
            empty = (x.new_empty(shape, dtype=dtype) for shape, dtype in self.stored(0, x.shape[1], x.dtype))
            return SavedSketch(seed, tuple(empty))
        index, squared = self.sample(sampling_norms(x, mean, gradient_norms), seed, rank=rank)
        index = index.to(torch.int32)
        rows = gather_rows(x, index, mean).to(x.dtype)
        return SavedSketch(seed, (rows, index, squared.to(accumulate_dtype(x.dtype))))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        _, index, squared = saved.tensors
        factor = _nan_if_not_finite(g if mean is None else mean)
        return gather_rows(g, index, mean, factor * squared.to(factor.dtype).unsqueeze(1))

    @abstractmethod
    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        """Draw rows of these norms, up to a common factor, shape (rows,), float64, for seeds (...,), int64.

        Returns:
            Row numbers (..., rank), int64, and squared entries of S (..., rank), float64.
        """

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        rows, rank = x.shape[0], self.rank(x.shape[0])
        dense = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
        if rows == 0:
            return dense
        index, squared = self.sample(row_norms(x, None), seeds, rank=rank)
        return dense.scatter_(1, index.unsqueeze(1), squared.sqrt().unsqueeze(1))


@register
@dataclass(frozen=True)
class CRS(ColumnRowSampling):
    """Rows drawn with replacement, with probabilities proportional to their norms."""

    name: ClassVar[str] = "crs"

    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        weights, factor = integer_weights(norms), _nan_if_not_finite(norms)
        ends = weights.cumsum(0)
        total = ends[-1]
        index = torch.searchsorted(ends, _targets(backend.random.fractions(seeds, rank), total), right=True)
        return index, factor * total.to(torch.float64) / (rank * weights[index].to(torch.float64))

    def variance(self, x: Tensor, g: Tensor, *, gradient_norms: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        return _variance_of_draws(x, g, integer_weights(sampling_norms(x, None, gradient_norms)), self.rank(rows))


@register
@dataclass(frozen=True)
class WTACRS(ColumnRowSampling):
    """The rows of largest norm, kept exactly, and other rows drawn with replacement by their norms."""

    name: ClassVar[str] = "wta_crs"

    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        fractions, factor = backend.random.fractions(seeds, rank), _nan_if_not_finite(norms)
        order, weights, ends, size = winners(integer_weights(norms), rank=rank)
        # gather: indexing with a 0-d tensor would synchronise
        before_tail = torch.where(size > 0, ends.gather(0, (size - 1).clamp(min=0).view(1)).squeeze(0), 0)
        tail = ends[-1] - before_tail
        position = torch.searchsorted(ends, _targets(fractions, tail) + before_tail, right=True)
        slot = torch.arange(rank, device=ends.device)
        keep = slot < size
        position = torch.where(keep, slot, position.clamp(max=order.numel() - 1))
        drawn = (rank - size).clamp(min=1).to(torch.float64) * weights[position].to(torch.float64).clamp(min=1)
        return order[position], factor * torch.where(keep, 1.0, tail.to(torch.float64) / drawn)

    def variance(self, x: Tensor, g: Tensor, *, gradient_norms: Tensor | None = None) -> Tensor:
        rows, rank = x.shape[0], self.rank(x.shape[0])
        if rows == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        order, weights, _, size = winners(integer_weights(sampling_norms(x, None, gradient_norms)), rank=rank)
        kept = int(size)
        if kept == rank:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        return _variance_of_draws(x[order[kept:]], g[order[kept:]], weights[kept:], rank - kept)
