"""Dense sketches: S has independent entries of mean 0 and variance 1 / rank.

Gaussian. N(0, 1 / rank) entries (Bershatsky et al. 2022, the paper's main choice). Its variance is (P Q + C) / r, by
Isserlis' theorem on the products of four normals. The variance does not vanish at ratio 1.

Rademacher. +-1 / sqrt(rank) entries. The diagonal of S S^T is 1 in every draw, and two entries off it are uncorrelated
unless they are the same pair, with mean square 1 / r. Its variance is (P Q + C - 2 s) / r, slightly less.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import ObliviousSketch, SavedSketch, accumulate_dtype, register
from rmm_linear.sketches.closed_forms import gradient_sums


@dataclass(frozen=True)
class DenseProjection(ObliviousSketch):
    """Independent entries of mean 0 and variance 1 / rank, for rows * rank * in multiply-adds."""

    gaussian: ClassVar[bool]

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        rank = self.rank(y.shape[0])
        scale, dtype = max(1, y.shape[0]) ** -0.5, y.dtype
        if gradient:
            scale, dtype = _gradient_scale(y.shape[0], rank), accumulate_dtype(dtype)
        return backend.run(
            "random_projection", y, seed, mean, rank=rank, gaussian=self.gaussian, scale=scale, dtype=dtype
        )

    def grad_weight(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        found = None
        # plain torch takes the cheaper of two orders of products; a subclass with its own `project` has one order
        if all(getattr(type(self), name) is getattr(DenseProjection, name) for name in ("project", "sketch_gradient")):
            sketched_x = saved.tensors[0]
            scale = _gradient_scale(g.shape[0], sketched_x.shape[0])
            found = backend.projected_grad_weight(g, saved.seed, sketched_x, mean, gaussian=self.gaussian, scale=scale)
        return super().grad_weight(g, saved, mean=mean) if found is None else found

    def multiply_adds(self, rows: int) -> int:
        return rows * self.rank(rows)

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        rows, rank = x.shape[0], self.rank(x.shape[0])
        return backend.projection_dense(seeds, rows=rows, rank=rank, gaussian=self.gaussian, dtype=torch.float64)


@register
@dataclass(frozen=True)
class Gaussian(DenseProjection):
    """Independent normal entries, for rows * rank * in multiply-adds, rows / 64 times as many as `Hadamard`."""

    name: ClassVar[str] = "gaussian"
    gaussian: ClassVar[bool] = True

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        sums = gradient_sums(x, g)
        return (sums.x_squared * sums.g_squared + sums.gradient_squared) / max(1, self.rank(sums.rows))


@register
@dataclass(frozen=True)
class Rademacher(DenseProjection):
    """Independent fair signs over sqrt(rank), at the Gaussian's cost; one random word gives 32 entries."""

    name: ClassVar[str] = "rademacher"
    gaussian: ClassVar[bool] = False

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        sums = gradient_sums(x, g)
        pairs = sums.x_squared * sums.g_squared + sums.gradient_squared - 2 * sums.row_products
        # rounding may give a value slightly below 0
        return pairs.clamp(min=0) / max(1, self.rank(sums.rows))


def _gradient_scale(rows: int, rank: int) -> float:
    """The factor of +-1 or normal entries on g; its product with the factor on x is 1 / rank."""
    return max(1, rows) ** 0.5 / max(1, rank)
