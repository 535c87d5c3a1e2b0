"""Dense Gaussian sketch: S has independent N(0, 1 / rank) entries (Bershatsky et al. 2022, the paper's main choice).

Variance. E||estimate - g^T x||^2 = (P Q + C) / r, by Isserlis' theorem on the products of four normals. It carries no
factor that vanishes at full rank: at ratio 1 the gradient is still noisy.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.sketches.base import ObliviousSketch, register
from rmm_linear.sketches.closed_forms import gradient_sums


@register
@dataclass(frozen=True)
class Gaussian(ObliviousSketch):
    """Independent normal entries. Costs rows * rank * in multiply-adds, rows / 64 times what `Hadamard` needs."""

    name: ClassVar[str] = "gaussian"

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        """Return S^T (y - 1 mean^T); see `ObliviousSketch.project`.

        Args:
            y: Shape (rows, features).
            seed: 0-d int64.
            mean: Shape (features,), or None.
            gradient: Whether `y` is the gradient.

        Returns:
            Shape (rank, features).
        """
        return ops.random_projection(y, seed, mean, rank=self.rank(y.shape[0]), gaussian=True, gradient=gradient)

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return (P Q + C) / r.

        Args:
            x: Activations, shape (rows, in).
            g: Gradient of the output, shape (rows, out).

        Returns:
            0-d float64.
        """
        sums = gradient_sums(x, g)
        return (sums.x_squared * sums.g_squared + sums.gradient_squared) / max(1, self.rank(sums.rows))

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S; see `Sketch.dense`.

        Args:
            x: Activations, shape (rows, in); only the number of rows matters.
            seeds: Shape (draws,), int64.

        Returns:
            Shape (draws, rows, rank), float64.
        """
        rows, rank = x.shape[0], self.rank(x.shape[0])
        slab = ops.projection_slab(seeds, first_row=0, rows=rows, rank=rank, gaussian=True, dtype=torch.float64)
        return slab / max(1, rank) ** 0.5
