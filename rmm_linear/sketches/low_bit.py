"""Low-bit storage: hold a sketch, or the input itself, in 8, 4 or 2 bits, rounded with a random dither.

Rounding that is unbiased for every stored element leaves the estimate of g^T x unbiased: (S^T g)^T E[q(S^T x)] =
(S^T g)^T (S^T x). Steps and offsets belong to groups of rows of a column (see `rmm_linear_kernels.low_bit`). They add
3 % to the bytes if the stored rows fill their groups; a group that is not full adds 2 or 4 bytes a column. Four bits
instead of sixteen an element allow four times the rank in the same bytes, which lowers the variance far more than
rounding raises it.

Variance. The errors of any two elements are pairwise independent and, given S, independent of x and g:

    E||estimate - g^T x||^2 = inner sketch's + E_S[ sum_k ||(S^T g)_k||^2 sum_j e_kj ]

with e_kj = step_kj^2 / 12. Steps follow the largest and the smallest element of S^T x, so that the second term has no
closed form in x and g; `LowBit.variance` averages it over draws of S. Without a sketch (S = I) the formula is exact.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import SavedSketch, Sketch, Stored, accumulate_dtype
from rmm_linear.sketches.centered import Centered
from rmm_linear.sketches.closed_forms import row_squares

STORAGES = tuple(backend.STORAGE_BITS)
# Bits of a column's codes that share a step and an offset of 32 bits: 128 rows of int8, 256 of int4, 512 of int2, for
# 3.125 % more bytes.
_GROUP_BITS = 1024
# Number of tensors of a quantized matrix: codes, steps, offsets.
_PARTS = 3


@dataclass(frozen=True)
class LowBit(Sketch):
    """Any sketch, or none, held in 8, 4 or 2 bits a value. Not in the registry: `RMMConfig(storage=...)` makes it.

    Attributes:
        inner: The sketch whose S^T x is held, or None to hold x itself (ratio 1).
        storage: "int8", "int4" or "int2".
        group: Rows of a column that share a step and an offset.
        draws: Draws of S, with fixed seeds, over which `variance` averages the rounding's part. With 32 draws its
            relative error is about 2 % for layers of a few dozen features, and less for wider layers; rows that a
            sketch draws rarely and that alone have a gradient may be missed.

    Raises:
        ValueError: If the storage is unknown, there are no draws, or `inner` is centred or low-bit itself.
    """

    ratio: float = field(init=False)
    inner: Sketch | None
    storage: str
    group: int = field(init=False, repr=False, compare=False)
    draws: int = field(default=32, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.storage not in STORAGES:
            raise ValueError(f"storage={self.storage!r} is unknown; choose one of {', '.join(STORAGES)}, or None")
        if isinstance(self.inner, (Centered, LowBit)):
            raise ValueError(
                f"inner is a {type(self.inner).__name__}, whose tensors can't be rounded together; put Centered around"
                " LowBit"
            )
        if self.draws < 1:
            raise ValueError(f"draws={self.draws} give no average; pass at least 1")
        object.__setattr__(self, "group", _GROUP_BITS // backend.STORAGE_BITS[self.storage])
        object.__setattr__(self, "ratio", 1.0 if self.inner is None else self.inner.ratio)
        super().__post_init__()

    def rank(self, rows: int) -> int:
        return rows if self.inner is None else self.inner.rank(rows)

    def stored(self, rows: int, features: int, dtype: torch.dtype) -> tuple[Stored, ...]:
        kept = self.rank(rows)
        scales = (kept + self.group - 1) // self.group, features
        codes = (kept, backend.packed_width(features, self.storage)), torch.uint8
        rest = () if self.inner is None else self.inner.stored(rows, features, dtype)[1:]
        return codes, (scales, backend.SCALE_DTYPE), (scales, backend.SCALE_DTYPE), *rest

    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        if self.inner is None:
            return SavedSketch(seed, backend.run("quantize", x, seed, mean, kind=self.storage, group=self.group))
        values, *rest = self.inner.compress(x, seed, mean=mean).tensors
        codes = backend.run("quantize", values, seed, None, kind=self.storage, group=self.group)
        return SavedSketch(seed, (*codes, *rest))

    def decoded(self, saved: SavedSketch, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that the codes stand for, shape (rank, in), in float32, bfloat16 or float16."""
        codes, steps, offsets = saved.tensors[:_PARTS]
        how = {"kind": self.storage, "group": self.group, "features": steps.shape[-1], "dtype": dtype}
        return backend.run("dequantize", codes, steps, offsets, saved.seed, **how)

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        if self.inner is None:
            wide = g.to(accumulate_dtype(g.dtype))
            if mean is None:
                return wide
            # in place if `to` has made a copy: a second float32 copy of g would be large
            return wide - mean if wide is g else wide.sub_(mean)
        # The inner sketch does not read its first tensor, in whose place the codes are, but needs its other tensors.
        inner = SavedSketch(saved.seed, (saved.tensors[0], *saved.tensors[_PARTS:]))
        return self.inner.sketch_gradient(g, inner, mean=mean)

    def grad_weight(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        sketched, dtype = self.sketch_gradient(g, saved, mean=mean), backend.product_dtype(g)
        values = self.decoded(saved, torch.float32 if dtype == torch.float64 else dtype)
        return backend.estimate(sketched, values, dtype, self.headroom)

    def multiply_adds(self, rows: int) -> int:
        return 0 if self.inner is None else self.inner.multiply_adds(rows)

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        if self.inner is None:
            return self._rounding(x, g)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for draw in range(self.draws if x.shape[0] else 0):
            seed = torch.full((), draw, dtype=torch.int64, device=x.device)
            saved = self.inner.compress(x, seed)
            total += self._rounding(saved.tensors[0], self.inner.sketch_gradient(g, saved))
        return self.inner.variance(x, g) + total / self.draws

    def _rounding(self, values: Tensor, sketched_g: Tensor) -> Tensor:
        elements = backend.rounding_variance(values, None, kind=self.storage, group=self.group)
        return (row_squares(sketched_g) * elements.sum(1)).sum()

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return the inner sketch's S, or the identity; the stored values differ from S^T x by the rounding."""
        if self.inner is not None:
            return self.inner.dense(x, seeds)
        rows = x.shape[0]
        return torch.eye(rows, dtype=torch.float64, device=x.device).expand(seeds.numel(), rows, rows)


def with_draws(sketch: Sketch, draws: int) -> Sketch:
    """Return the sketch with another number of draws in `LowBit.variance`: a few suffice to monitor a training run."""
    if isinstance(sketch, Centered):
        return Centered(with_draws(sketch.inner, draws))
    return replace(sketch, draws=draws) if isinstance(sketch, LowBit) else sketch
