"""Column-row sampling: rows drawn with replacement, p_i proportional to ||x_i|| (Drineas, Kannan and Mahoney 2006).

Variance. r independent draws of g_i x_i^T / p_i: (sum_i ||x_i||^2 ||g_i||^2 / p_i - C) / r.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.sketches.column_row_sampling import ColumnRowSampling
from rmm_linear.sketches.row_sampling import integer_weights, row_norms, sample_rows


@register
@dataclass(frozen=True)
class CRS(ColumnRowSampling):
    """Rows drawn with replacement, with probabilities proportional to their norms."""

    name: ClassVar[str] = "crs"
    variance_is_affine_in_inverse_rank: ClassVar[bool] = True

    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        """Draw rows; see `ColumnRowSampling.sample`."""
        return sample_rows(norms, seeds, rank=rank)

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return (sum_i ||x_i||^2 ||g_i||^2 / p_i - C) / r."""
        rows = x.shape[0]
        if rows == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        weights = integer_weights(row_norms(x, None)).double()
        sums = gradient_sums(x, g)
        products = sums.x_rows * sums.g_rows
        # A row of weight 0 is a zero row: its product is 0 as well.
        weighted = torch.where(weights > 0, products * weights.sum() / weights.clamp(min=1), 0)
        # rounding may leave a little less than nothing
        return (weighted.sum() - sums.gradient_squared).clamp(min=0) / self.rank(rows)
