"""What the Gaussian and the Rademacher sketch share: a dense S of independent entries, generated slab by slab."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.sketches.base import ObliviousSketch


@dataclass(frozen=True)
class DenseProjection(ObliviousSketch):
    """Independent entries of mean 0 and variance 1 / rank. Costs rows * rank * in multiply-adds."""

    variance_is_affine_in_inverse_rank: ClassVar[bool] = True
    gaussian: ClassVar[bool]

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
        rank = self.rank(y.shape[0])
        return ops.random_projection(y, seed, mean, rank=rank, gaussian=self.gaussian, gradient=gradient)

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S; see `Sketch.dense`.

        Args:
            x: Activations, shape (rows, in); only the number of rows matters.
            seeds: Shape (draws,), int64.

        Returns:
            Shape (draws, rows, rank), float64.
        """
        rows, rank = x.shape[0], self.rank(x.shape[0])
        slab = ops.projection_slab(
            seeds, first_row=0, rows=rows, rank=rank, gaussian=self.gaussian, dtype=torch.float64
        )
        return slab / max(1, rank) ** 0.5
