"""Winner-take-all column-row sampling (Liu et al. 2023, "Winner-Take-All Column Row Sampling", arXiv 2305.15265).

The rows of largest probability are kept as they are, the others drawn with replacement from what is left. The kept
set's size k minimises (1 - sum of its p) / (r - k), the factor in front of the drawn part's variance.

Variance. Only the drawn part is random: with q = p renormalised outside the kept set,
(sum over the rest of ||x_i||^2 ||g_i||^2 / q_i - ||sum over the rest of g_i x_i^T||^2) / (r - k).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.sketches.column_row_sampling import ColumnRowSampling
from rmm_linear.sketches.row_sampling import integer_weights, row_norms, sample_rows_winner_take_all, winners


@register
@dataclass(frozen=True)
class WTACRS(ColumnRowSampling):
    """The heaviest rows as they are, the rest drawn with replacement by their norms."""

    name: ClassVar[str] = "wta_crs"

    def is_exact(self, rows: int) -> bool:
        """Tell whether all rows are kept."""
        return self.rank(rows) == rows

    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        """Draw rows; see `ColumnRowSampling.sample`."""
        return sample_rows_winner_take_all(norms, seeds, rank=rank)

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the drawn part's variance; see the module's docstring."""
        rows, rank = x.shape[0], self.rank(x.shape[0])
        if rows == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        order, weights, _, size = winners(integer_weights(row_norms(x, None)), rank=rank)
        kept = int(size)
        if kept == rank:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        rest, weights = order[kept:], weights[kept:].double()
        sums = gradient_sums(x[rest], g[rest])
        products = sums.x_rows * sums.g_rows
        weighted = torch.where(weights > 0, products * weights.sum() / weights.clamp(min=1), 0)
        # rounding may leave a little less than nothing
        return (weighted.sum() - sums.gradient_squared).clamp(min=0) / (rank - kept)
