"""What the Gaussian and the Rademacher sketch share: a dense S of independent entries, generated slab by slab."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.sketches.base import ObliviousSketch, SavedSketch


@dataclass(frozen=True)
class DenseProjection(ObliviousSketch):
    """Independent entries of mean 0 and variance 1 / rank. Costs rows * rank * in multiply-adds."""

    variance_is_affine_in_inverse_rank: ClassVar[bool] = True
    gaussian: ClassVar[bool]

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        """Return S^T (y - 1 mean^T); see `ObliviousSketch.project`."""
        rank = self.rank(y.shape[0])
        return ops.random_projection(y, seed, mean, rank=rank, gaussian=self.gaussian, gradient=gradient)

    def weight_gradient(
        self,
        g: Tensor,
        saved: SavedSketch,
        *,
        dtype: torch.dtype,
        mean: Tensor | None = None,
        total: Tensor | None = None,
        kept_mean: Tensor | None = None,
    ) -> Tensor:
        """Take the cheaper one of two orders of products on a CPU; see `Sketch.weight_gradient`."""
        if not ops.is_on_cpu(g) or type(self).sketch_gradient is not DenseProjection.sketch_gradient:
            others = {"mean": mean, "total": total, "kept_mean": kept_mean}
            return super().weight_gradient(g, saved, dtype=dtype, **others)
        grad_weight = ops.projected_grad_weight(g, saved.seed, saved.tensors[0], mean, gaussian=self.gaussian)
        if total is not None and kept_mean is not None:
            grad_weight.addr_(total, kept_mean)
        return grad_weight.to(dtype)

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S; see `Sketch.dense`."""
        rows, rank = x.shape[0], self.rank(x.shape[0])
        return ops.projection_dense(seeds, rows=rows, rank=rank, gaussian=self.gaussian, dtype=torch.float64)
