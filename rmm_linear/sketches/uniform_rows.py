"""Uniform row sampling without replacement: the cheapest sketch, and the baseline of all others.

Variance, with the finite population's factor: (n - r) / (r (n - 1)) * (n s - C).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import ObliviousSketch, accumulate_dtype, register
from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.sketches.row_sampling import gather_rows


@register
@dataclass(frozen=True)
class RowsWithoutReplacement(ObliviousSketch):
    """A uniform subset of `rank` rows."""

    name: ClassVar[str] = "rows_without_replacement"
    variance_is_affine_in_inverse_rank: ClassVar[bool] = True

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        """Return the drawn rows of y - 1 mean^T; see `ObliviousSketch.project`."""
        rows, rank = y.shape[0], self.rank(y.shape[0])
        index = backend.random.subset(seed, rows, rank)
        if not gradient:
            return gather_rows(y, index, mean, dtype=y.dtype)
        return gather_rows(y, index, mean, scale=rows / max(1, rank), dtype=accumulate_dtype(y.dtype))

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S; see `Sketch.dense`."""
        rows, rank = x.shape[0], self.rank(x.shape[0])
        index = backend.random.subset(seeds, rows, rank)
        dense = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
        return dense.scatter_(1, index.unsqueeze(1), (rows / max(1, rank)) ** 0.5)

    def is_exact(self, rows: int) -> bool:
        """Tell whether all rows are kept."""
        return self.rank(rows) == rows

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return (n - r) / (r (n - 1)) * (n s - C)."""
        sums = gradient_sums(x, g)
        if self.is_exact(sums.rows):
            return torch.zeros_like(sums.gradient_squared)
        rank = self.rank(sums.rows)
        population = (sums.rows - rank) / (rank * (sums.rows - 1))
        # rounding may leave a little less than nothing
        return population * (sums.rows * sums.row_products - sums.gradient_squared).clamp(min=0)
