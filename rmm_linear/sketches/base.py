"""The base class of sketches, which keep S^T x and a seed in place of x, and the registry of sketches by name.

The forward pass keeps S^T x and the seed (`compress`); the backward pass forms an unbiased estimate of g^T x from
S^T x and S^T g (`backward`).

The stored sketch of x is S^T x times a storage scale of about sqrt(rank / rows), in x's dtype: its entries then have
the size of x's own, where S^T x itself would overflow float16. The sketch of g is S^T g over that scale, in float32
(float64 for float64), whose range is large enough. The product is unchanged.

Sketches are frozen dataclasses: hashable, comparable, with no state between calls.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rmm_linear import backend

SEED_BYTES = 8
# Decimal ratios such as 0.3 count as exact fractions: 0.3 of 10 rows is 3, although the float is slightly less.
_RATIO_DENOMINATOR = 10**6
# Shape and dtype of a tensor.
Stored = tuple[tuple[int, ...], torch.dtype]


def larger(a: int, b: int) -> int:
    """Return the larger of two sizes, which may be SymInts: `max` would add a guard of the compiler."""
    # sym_max of plain numbers can't be traced by torch 2.11
    return torch.sym_max(a, b) if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt) else max(a, b)


def smaller(a: int, b: int) -> int:
    """Return the smaller of two sizes, which may be SymInts."""
    return torch.sym_min(a, b) if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt) else min(a, b)


class SavedSketch(NamedTuple):
    """The seed and the tensors that a layer keeps for its weight gradient.

    Attributes:
        seed: 0-d int64; S is a function of it (and, for some sketches, of x).
        tensors: For most sketches one tensor, S^T x of shape (rank, in).
    """

    seed: Tensor
    tensors: tuple[Tensor, ...]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sketches sum: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Sketch(ABC):
    """A random compression of the rows of x that lets g^T x be estimated without bias.

    Subclasses set `name`, under which `RMMConfig(sketch=...)` finds them. Each has to pass the test in
    `tests/contracts/sketch_contract.py` of this project.

    Attributes:
        ratio: Rows kept over rows, in (0, 1].
        numerator: Numerator of the ratio as an exact decimal fraction, an integer that a compiler can trace.
        denominator: Denominator of that fraction, at most a million.
    """

    ratio: float
    numerator: int = field(init=False, repr=False, compare=False)
    denominator: int = field(init=False, repr=False, compare=False)
    name: ClassVar[str]

    def __post_init__(self) -> None:
        fraction = Fraction(self.ratio).limit_denominator(_RATIO_DENOMINATOR)
        object.__setattr__(self, "numerator", max(1, fraction.numerator))
        object.__setattr__(self, "denominator", fraction.denominator if fraction else _RATIO_DENOMINATOR)

    def rank(self, rows: int) -> int:
        """Return the number of sketch rows for `rows` (a SymInt in a compiler): round(ratio * rows), at least 1."""
        kept = (2 * self.numerator * rows + self.denominator) // (2 * self.denominator)
        return smaller(rows, larger(1, kept))

    def stored(self, rows: int, features: int, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Return the shapes and dtypes of the tensors that `compress` returns, for compilers."""
        return (((self.rank(rows), features), dtype),)

    @abstractmethod
    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        """Sketch the input: the forward pass.

        Args:
            x: Activations, shape (rows, in), any float dtype.
            seed: 0-d int64 on x's device.
            mean: Shape (in,): sketch x - 1 mean^T instead of x (see `Centered`).

        Returns:
            The seed and the tensors to keep for the backward pass. The first tensor is S^T x, of shape (rank, in), and
            `sketch_gradient` does not read that tensor, which `LowBit` replaces by codes.
        """

    @abstractmethod
    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Return S^T (g - 1 mean^T) for the S that `compress` used, scaled to go with the stored sketch.

        `g` has shape (rows, out) and the result (rank, out), in float32 (float64 for float64).
        """

    def grad_weight(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Estimate (g - 1 mean^T)^T x, shape (out, in), float32 (float64 for float64); the caller may write into it."""
        sketched = self.sketch_gradient(g, saved, mean=mean)
        return backend.estimate(sketched, saved.tensors[0], backend.product_dtype(g), self.headroom)

    @property
    def headroom(self) -> float:
        """The largest power of 2 up to 2 / ratio: S^T g over the storage scale is about 1 / ratio times g's size."""
        return 2.0 ** math.floor(math.log2(2 / self.ratio))

    def backward(
        self, g: Tensor, saved: SavedSketch, *, need_bias: bool = True, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Estimate g^T x, and sum g over its rows: the backward pass.

        Args:
            g: Gradient of the output, shape (rows, out).
            saved: The result of `compress`.
            need_bias: Whether to return the bias gradient.
            dtype: Dtype of the estimate; float32 (float64 for float64) if None. Sums are formed in float32 anyway.

        Returns:
            The estimate of g^T x, shape (out, in); and the exact column sum of g, shape (out,), in g's dtype, or None.
        """
        grad_weight = self.grad_weight(g, saved)
        return grad_weight if dtype is None else grad_weight.to(dtype), g.sum(0) if need_bias else None

    def saved_bytes(self, rows: int, features: int, dtype: torch.dtype) -> int:
        """Return the bytes kept of x (rows, features): all stored tensors and the seed."""
        return sum(math.prod(shape) * each.itemsize for shape, each in self.stored(rows, features, dtype)) + SEED_BYTES

    def multiply_adds(self, rows: int) -> int:
        """Return the multiply-adds of S^T x per column of x, as a FLOP counter counts: of matrix products alone."""
        return 0

    @abstractmethod
    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return E||estimate - g^T x||_F^2 in closed form, 0-d float64, for x (rows, in) and g (rows, out).

        The variance is 0 if S S^T = I in every draw, so that the estimate is the exact gradient.
        """

    @abstractmethod
    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S itself for seeds (draws,), int64: shape (draws, rows, rank), float64. Only for tests: S is large."""


class ObliviousSketch(Sketch):
    """A sketch whose S depends on the seed and the number of rows alone, not on x."""

    @abstractmethod
    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        """Return S^T (y - 1 mean^T), shape (rank, features).

        With `gradient` the result is the sketch of g: over the storage scale, in float32 (float64 for float64).
        Otherwise it is the sketch of x: times the scale, in y's dtype.
        """

    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        return SavedSketch(seed, (self.project(x, seed, mean, gradient=False),))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        return self.project(g, saved.seed, mean, gradient=True)


SKETCHES: dict[str, type[Sketch]] = {}


def register(sketch: type[Sketch]) -> type[Sketch]:
    """Register a sketch class, made as `sketch(ratio=...)`, under its `name`; a decorator, also for other packages.

    Raises:
        ValueError: If the name is taken by another class.
    """
    present = SKETCHES.get(sketch.name)
    if present is not None and present is not sketch:
        raise ValueError(f"sketch name {sketch.name!r} is taken by {present.__qualname__}; choose another name")
    SKETCHES[sketch.name] = sketch
    return sketch


def available_sketches() -> tuple[str, ...]:
    """Return the names that `RMMConfig(sketch=...)` accepts, in alphabetical order."""
    return tuple(sorted(SKETCHES))
