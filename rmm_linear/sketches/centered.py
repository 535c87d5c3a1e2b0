"""Centering: keep the column mean of x exactly, sketch only what is left.

    grad_weight = (column sum of g) mu^T  +  sketched (g - 1 nu^T)^T (x - 1 m^T),      mu, nu the column means

The first term is exact and nearly free, since the column sum of g is the bias gradient. The rows of g - 1 nu^T add up
to zero, so that the second is (g - 1 nu^T)^T x for every m, and any vector will do for m that S does not depend on. It
decides the variance alone: the closed form is the inner sketch's on x - 1 m^T and g - 1 nu^T. mu itself is best, and
a CPU takes it. A GPU does not know it before x has been read: there m is about mu, out of 256 rows (of all, where there
are no more), and x is read once, for its sketch and its sum. `rmm_linear_kernels.sampled_mean` tells which rows, why
they can't go far wrong, and what m costs next to mu: less than one percent of the variance for rows alike.

On a GPU g is read once, and its mean is not known before it is sketched. It need not be: with X the sketch of
x - 1 m^T, S^T (g - 1 nu^T) = S^T g - (S^T 1) nu^T changes the product by a matrix of rank one, and n nu is the column
sum of g:

    grad_weight = (S^T g)^T X + (column sum of g) (mu - X^T (S^T 1) / n)^T

The last vector is known in the forward pass, where x, X and S^T 1 are at hand, and is kept in place of mu. X is the
sketch as it is stored: the rounding to half precision or to codes is then multiplied by the sketch of the centred g, as
all else is. (By S^T g, it would have more variance by the square of g's mean over its deviation, and for a rounding to
nearest a mean, since it changes its sign with S as S^T 1 does.) What is rounded of S^T g itself on its way to the
tensor cores, in half precision or TF32, is not centred by anything: it shows where g's mean is a hundred times its
deviation, by a tenth more variance in bfloat16, and by less than 1e-4 of the gradient in its mean.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.sketches.base import SavedSketch, Sketch, accumulate_dtype, mean_taken_off
from rmm_linear.sketches.sizes import larger


def centred(y: Tensor) -> Tensor:
    """Return y - 1 mean^T.

    Args:
        y: Shape (rows, features), any float dtype.

    Returns:
        The same shape, float32 (float64 for float64).
    """
    wide = y.to(accumulate_dtype(y.dtype))
    return wide - wide.mean(0) if y.shape[0] else wide


def centred_input(x: Tensor) -> Tensor:
    """Return x - 1 m^T: what is sketched of x.

    Args:
        x: Shape (rows, in), any float dtype.

    Returns:
        The same shape, float32 (float64 for float64).
    """
    return x.to(accumulate_dtype(x.dtype)) - mean_taken_off(x)


# What a sketch has, what it needs then to be centred, and why.
_NEEDED = (
    (
        "one_pass",
        "compress_with_mean",
        "a gradient that is not centred when it is sketched needs what is left of the mean",
    ),
    ("one_pass_backward", "one_pass", "a sketch around it takes what is left of the mean, and asks for that"),
)


@dataclass(frozen=True)
class Centered(Sketch):
    """Any sketch, applied to the centred input. Not in the registry: `RMMConfig(center=True)` puts it around one.

    Attributes:
        inner: The sketch of the centred rows.
    """

    name: ClassVar[str] = "centered"
    ratio: float = field(init=False)
    inner: Sketch

    def __post_init__(self) -> None:
        # another sketch may be around the one that reads g
        sketch: object = self.inner
        while isinstance(sketch, Sketch):
            of = type(sketch)
            for name, needed, why in _NEEDED:
                if getattr(of, name) is not getattr(Sketch, name) and getattr(of, needed) is getattr(Sketch, needed):
                    raise ValueError(
                        f"{of.__qualname__} has a {name} and no {needed} of its own; define it as well: {why}"
                    )
            sketch = getattr(sketch, "inner", None)
        object.__setattr__(self, "ratio", self.inner.ratio)
        super().__post_init__()

    def rank(self, rows: int) -> int:
        """Return the inner sketch's rank."""
        return self.inner.rank(rows)

    def is_exact(self, rows: int) -> bool:
        """Tell whether the inner sketch is exact."""
        return rows <= 1 or self.inner.is_exact(rows)

    def takes_runs(self) -> bool:
        """Ask the inner sketch; see `Sketch.takes_runs`."""
        return type(self) is Centered and self.inner.takes_runs()

    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        """Sketch x - 1 m^T and keep mu, or what is left of it; see `Sketch.compress`.

        Returns:
            The inner sketch's tensors and, last, mu (in,), float32 (float64 for float64): rounding it to a half
            precision would leave a bias of 2**-9 of the mean's part, since g is centred on the strength of it. On a GPU
            mu - X^T (S^T 1) / n, where the inner sketch reads g once.
        """
        assert mean is None
        saved, kept_mean = self.inner.compress_with_mean(x, seed)
        return SavedSketch(seed, (*saved.tensors, kept_mean))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Return S^T (g - 1 mean^T) of the inner sketch; see `Sketch.sketch_gradient`."""
        return self.inner.sketch_gradient(g, SavedSketch(saved.seed, saved.tensors[:-1]), mean=mean)

    def stored_input(self, saved: SavedSketch, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the inner sketch's; see `Sketch.stored_input`."""
        return self.inner.stored_input(SavedSketch(saved.seed, saved.tensors[:-1]), dtype=dtype)

    def operand(self, saved: SavedSketch, dtype: torch.dtype) -> Tensor | ops.Codes:
        """Return the inner sketch's; see `Sketch.operand`."""
        return self.inner.operand(SavedSketch(saved.seed, saved.tensors[:-1]), dtype)

    def backward(
        self,
        g: Tensor,
        saved: SavedSketch,
        *,
        need_weight: bool = True,
        need_bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Estimate g^T x, the mean's part exactly; see `Sketch.backward`."""
        compute = accumulate_dtype(g.dtype)
        dtype = dtype or compute
        if need_weight:
            inner, mean = SavedSketch(saved.seed, saved.tensors[:-1]), saved.tensors[-1]
            found = self.inner.one_pass_backward(g, inner, mean, need_bias=need_bias, dtype=dtype)
            if found is not None:
                return found
        # The bias gradient is summed as nn.Linear sums it; a half-precision sum is too coarse for the mean's part.
        column_sum = g.sum(0) if need_bias or g.dtype == compute else None
        grad_weight = None
        if need_weight:
            total = column_sum if g.dtype == compute else g.sum(0, dtype=compute)
            assert total is not None
            centre = total / larger(1, g.shape[0])
            grad_weight = self.weight_gradient(g, saved, dtype=dtype, mean=centre, total=total, kept_mean=mean)
        return grad_weight, column_sum if need_bias else None

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
        """Form the estimate as the inner sketch does; see `Sketch.weight_gradient`."""
        inner = SavedSketch(saved.seed, saved.tensors[:-1])
        return self.inner.weight_gradient(g, inner, dtype=dtype, mean=mean, total=total, kept_mean=kept_mean)

    def saved_bytes(self, rows: int, features: int, dtype: torch.dtype, valid_rows: int | None = None) -> int:
        """Return the inner sketch's bytes and the mean's; see `Sketch.saved_bytes`."""
        mean_bytes = features * accumulate_dtype(dtype).itemsize
        return self.inner.saved_bytes(rows, features, dtype, valid_rows) + mean_bytes

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the inner sketch's closed form on x - 1 m^T and g - 1 nu^T."""
        return self.inner.variance(centred_input(x), centred(g))

    def variance_family(self, rows: int) -> Hashable | None:
        """Return the inner sketch's key, marked; see `Sketch.variance_family`."""
        inner = self.inner.variance_family(rows)
        return None if inner is None else (self.name, inner)

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return the inner sketch's S for x - 1 m^T."""
        return self.inner.dense(centred_input(x), seeds)
