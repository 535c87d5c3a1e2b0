"""Centering: keep the column mean of x exactly, sketch the rest.

    grad_weight = (column sum of g) mu^T  +  sketched (g - 1 nu^T)^T (x - 1 mu^T),      mu, nu the column means

The first term is exact and nearly free, since the column sum of g is the bias gradient. The rows of x - 1 mu^T add up
to zero, so that g may be centred too without storing nu. The variance is the inner sketch's on both centred matrices,
without the energy of both means.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rmm_linear.sketches.base import SavedSketch, Sketch, Stored, accumulate_dtype


def column_means(y: Tensor) -> Tensor:
    """Return the column means of y (rows, features) in float32 (float64 for float64)."""
    return y.sum(0, dtype=accumulate_dtype(y.dtype)) / max(1, y.shape[0])


def centred(y: Tensor) -> Tensor:
    """Return y - 1 mean^T in float32 (float64 for float64)."""
    return y.to(accumulate_dtype(y.dtype)) - column_means(y)


@dataclass(frozen=True)
class Centered(Sketch):
    """Any sketch, applied to the centred input. Not in the registry: `RMMConfig(center=True)` wraps a sketch.

    Attributes:
        inner: The sketch of the centred rows.
    """

    ratio: float = field(init=False)
    inner: Sketch

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.inner.ratio)
        super().__post_init__()

    def rank(self, rows: int) -> int:
        return self.inner.rank(rows)

    def stored(self, rows: int, features: int, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Return the inner sketch's tensors, and the mean.

        Since g is centred too, a mean rounded to half precision would give the first term a relative bias of 2**-9.
        """
        return *self.inner.stored(rows, features, dtype), ((features,), accumulate_dtype(dtype))

    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        assert mean is None
        mean = column_means(x)
        return SavedSketch(seed, (*self.inner.compress(x, seed, mean=mean).tensors, mean))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        return self.inner.sketch_gradient(g, _without_mean(saved), mean=mean)

    def grad_weight(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        return self.inner.grad_weight(g, _without_mean(saved), mean=mean)

    def backward(
        self, g: Tensor, saved: SavedSketch, *, need_bias: bool = True, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        column_sum = g.sum(0) if need_bias else None
        compute = accumulate_dtype(g.dtype)
        # The bias gradient is summed as in nn.Linear; a half-precision sum is too coarse for the first term.
        total = column_sum if column_sum is not None and g.dtype == compute else g.sum(0, dtype=compute)
        grad_weight = self.grad_weight(g, saved, mean=total / max(1, g.shape[0]))
        grad_weight.addr_(total, saved.tensors[-1].to(compute))
        return grad_weight if dtype is None else grad_weight.to(dtype), column_sum

    def multiply_adds(self, rows: int) -> int:
        return self.inner.multiply_adds(rows)

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        return self.inner.variance(centred(x), centred(g))

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        return self.inner.dense(centred(x), seeds)


def _without_mean(saved: SavedSketch) -> SavedSketch:
    return SavedSketch(saved.seed, saved.tensors[:-1])
