"""What a sketch is: an object with two verbs, and the registry of their names.

A sketch replaces x by S^T x and a seed in the forward pass and forms an unbiased estimate of g^T x from S^T x and
S^T g in the backward pass. The autograd function knows nothing but `compress` and `backward`; planners add
`saved_bytes`, estimators `variance`, and tests `dense`, which is S itself.

Sketches are frozen dataclasses: hashable, comparable, with no state between calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.sketches.sizes import larger, smaller

SEED_BYTES = 8
# Decimal ratios such as 0.3 are meant exactly: 0.3 of 10 rows is 3, although the float is slightly less.
_RATIO_DENOMINATOR = 10**6


class SavedSketch(NamedTuple):
    """All that a layer keeps for its weight gradient: tensors only, so that checkpointing can replay it.

    Attributes:
        seed: 0-d int64; S is a function of it (and, for some sketches, of x).
        tensors: What the sketch stores, most often one tensor S^T x of shape (rank, in).
    """

    seed: Tensor
    tensors: tuple[Tensor, ...]


class GradientPass(NamedTuple):
    """What one reading of g gives, for a product with the stored sketch.

    Attributes:
        sketched: S^T g over the storage scale (see `rmm_linear.ops`), shape (rank, out).
        sums: Sums of parts of g over their rows, shape (parts, out), float32 (float64 for float64); None where the sum
            of g was not wanted and is not free.
        scale: Factor that `sketched` lacks.
        divisor: What else it lacks, as `ops.sketched_grad_weight` takes it.
    """

    sketched: Tensor
    sums: Tensor | None
    scale: float
    divisor: int = 1


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sketches sum: float64 for float64, else float32.

    Returns:
        `torch.float64` or `torch.float32`.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def whole_mean(x: Tensor) -> Tensor:
    """Return the column mean.

    Args:
        x: Shape (rows, features), any float dtype.

    Returns:
        Shape (features,), float32 (float64 for float64); 0 of no rows.
    """
    return x.sum(0, dtype=accumulate_dtype(x.dtype)) / larger(1, x.shape[0])


def mean_taken_off(x: Tensor) -> Tensor:
    """Return m, which centred sketches take off x before they sketch it; see `rmm_linear.sketches.centered`.

    Args:
        x: Shape (rows, features), any float dtype.

    Returns:
        Shape (features,), float32 (float64 for float64): the mean itself on a CPU, about that elsewhere.
    """
    return whole_mean(x) if ops.is_on_cpu(x) else ops.sampled_mean(x)


@dataclass(frozen=True)
class Sketch(ABC):
    """A random compression of the rows of x that lets g^T x be estimated without bias.

    Subclasses set `name`, under which `RMMConfig(sketch=...)` finds them, and prove themselves by a subclass of
    `rmm_linear.sketches.contract.SketchContract`.

    Attributes:
        ratio: Rows kept over rows, in (0, 1].
        numerator: Of the ratio as the decimal fraction that the user wrote, in integers that a compiler can trace.
        denominator: Of the same, up to a million.
        variance_is_affine_in_inverse_rank: Whether `variance` is a + b / rank at all ratios, a and b depending on the
            pair (x, g) alone; see `variance_family`. A subclass says so.
    """

    ratio: float
    numerator: int = field(init=False, repr=False, compare=False)
    denominator: int = field(init=False, repr=False, compare=False)
    name: ClassVar[str]
    variance_is_affine_in_inverse_rank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fraction = Fraction(self.ratio).limit_denominator(_RATIO_DENOMINATOR)
        object.__setattr__(self, "numerator", max(1, fraction.numerator))
        object.__setattr__(self, "denominator", fraction.denominator if fraction else _RATIO_DENOMINATOR)

    def rank(self, rows: int) -> int:
        """Return how many rows are kept of `rows`: round(ratio * rows), at least 1 of any row.

        Args:
            rows: Number of rows; may be a SymInt while a compiler traces.
        """
        kept = (2 * self.numerator * rows + self.denominator) // (2 * self.denominator)
        return smaller(rows, larger(1, kept))

    def is_exact(self, rows: int) -> bool:
        """Tell whether S S^T = I in every draw: the estimate is then the gradient itself, up to rounding.

        Returns:
            False unless the sketch is an orthogonal one at full rank.
        """
        return rows == 0

    def takes_runs(self) -> bool:
        """Tell whether `compress` and what it calls take x as `ops.in_runs` returns it, too: without a copy.

        Returns:
            False, unless a class says otherwise of itself: of others, its subclasses among them, x is a matrix.
        """
        return False

    @abstractmethod
    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        """Sketch the input: the forward pass.

        Args:
            x: Activations, shape (rows, in), any float dtype; or in runs, of a sketch that takes them.
            seed: 0-d int64 on x's device.
            mean: Shape (in,): sketch x - 1 mean^T instead of x (see `Centered`).

        Returns:
            What is to be kept for `backward`. Its first tensor is S^T x, of shape (rank, in), and `sketch_gradient`
            does not read that one: `LowBit` puts other values in its place.
        """

    def compress_with_mean(self, x: Tensor, seed: Tensor) -> tuple[SavedSketch, Tensor]:
        """Sketch x - 1 m^T, m being about the mean of x, and average x: in one reading of it, where a subclass can.

        Args:
            x: Activations, shape (rows, in), any float dtype.
            seed: 0-d int64 on x's device.

        Returns:
            What `compress` returns of m = `mean_taken_off(x)`; and what the sum of g is to be multiplied by beside
            S^T g, shape (in,), float32 (float64 for float64): the mean of x itself, where g is centred before it is
            sketched. Where `one_pass` or `one_pass_backward` sketches g as it is, the mean less X^T (S^T 1) / rows, X
            being the sketch of x - 1 m^T as it is stored; see `Centered`.
        """
        x = ops.as_matrix(x)
        mean = whole_mean(x)
        return self.compress(x, seed, mean=mean if ops.is_on_cpu(x) else ops.sampled_mean(x)), mean

    def compress_low_bit(
        self, x: Tensor, seed: Tensor, *, center: bool, kind: str, group: int
    ) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
        """Sketch the input and round the sketch to a few bits in one pass, where there is one.

        Args:
            x: Activations, shape (rows, in).
            seed: 0-d int64, of the sketch and of the rounding.
            center: Whether about the mean is taken off x, as `compress_with_mean` does.
            kind: How S^T x is held; see `LowBit`.
            group: Rows of S^T x that share, in a column, a step and an offset.

        Returns:
            Codes, steps and offsets (see `ops.quantize`) in place of the first tensor of `compress`, then its others;
            and, centred, the second result of `compress_with_mean`. None in place of both where the two steps are
            as good: always, unless a subclass says otherwise.
        """
        return None

    @abstractmethod
    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Return S^T (g - 1 mean^T) for the S that `compress` used, scaled to go with the stored sketch.

        Args:
            g: Gradient of the output, shape (rows, out).
            saved: What `compress` returned.
            mean: Shape (out,), or None.

        Returns:
            Shape (rank, out), float32 (float64 for float64).
        """

    def stored_input(self, saved: SavedSketch, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sketch of x out of what is stored.

        Args:
            saved: What `compress` returned.
            dtype: Dtype in which it will be multiplied, for storages that have to be converted anyway; None for
                float32.

        Returns:
            Shape (rank, in), any float dtype.
        """
        return saved.tensors[0]

    def operand(self, saved: SavedSketch, dtype: torch.dtype) -> Tensor | ops.Codes:
        """Return the sketch of x as the product with that of g takes it.

        Args:
            saved: What `compress` returned.
            dtype: Dtype in which it will be multiplied.

        Returns:
            `stored_input`, or the codes of it.
        """
        return self.stored_input(saved, dtype=dtype)

    def one_pass(self, g: Tensor, saved: SavedSketch, *, need_sum: bool = True) -> GradientPass | None:
        """Sketch g and sum it over its rows in one reading of it, where that is faster than two.

        A subclass that defines this defines `compress_with_mean` as well, and both go by the same rule: what the
        forward pass has kept of the mean is for a g that is sketched as it is, or for one that is centred.

        Args:
            g: Gradient of the output, shape (rows, out).
            saved: What `compress` returned.
            need_sum: Whether the sum is wanted.

        Returns:
            None where `sketch_gradient` and a sum are as good: always, unless a subclass says otherwise.
        """
        return None

    def backward(
        self,
        g: Tensor,
        saved: SavedSketch,
        *,
        need_weight: bool = True,
        need_bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Estimate g^T x, and sum g over its rows: the backward pass.

        Args:
            g: Gradient of the output, shape (rows, out).
            saved: What `compress` returned.
            need_weight: Whether the weight gradient is wanted.
            need_bias: Whether the bias gradient is wanted.
            dtype: Dtype of the estimate; float32 (float64 for float64) if None. Sums are formed in float32 anyway.

        Returns:
            The estimate of g^T x, shape (out, in); and the exact column sum of g, shape (out,), in g's dtype; None
            where not wanted.
        """
        if not need_weight:
            return None, g.sum(0) if need_bias else None
        dtype = dtype or accumulate_dtype(g.dtype)
        found = self.one_pass_backward(g, saved, None, need_bias=need_bias, dtype=dtype)
        if found is not None:
            return found
        return self.weight_gradient(g, saved, dtype=dtype), g.sum(0) if need_bias else None

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
        """Form the estimate of g^T x out of g and what is stored.

        Args:
            g: Gradient of the output, shape (rows, out).
            saved: What `compress` returned.
            dtype: Dtype of the estimate.
            mean: Subtracted from every row of g, shape (out,), or None.
            total: Sum of g, shape (out,), to be multiplied by `kept_mean` and added; or None.
            kept_mean: Shape (in,), or None.

        Returns:
            (S^T (g - 1 mean^T))^T X + total kept_mean^T, shape (out, in), for the stored sketch X.
        """
        sketched, scale = ops.as_operand(self.sketch_gradient(g, saved, mean=mean), g, self.ratio)
        stored = self.operand(saved, sketched.dtype)
        sums = None if total is None else total.unsqueeze(0)
        return ops.sketched_grad_weight(sketched, stored, sums, kept_mean, scale=scale, dtype=dtype)[0]

    def one_pass_backward(
        self, g: Tensor, saved: SavedSketch, mean: Tensor | None, *, need_bias: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None] | None:
        """Form what `backward` returns out of one reading of g, where that is faster than two.

        A subclass that defines this defines `one_pass` as well, which another sketch around it asks, and both go by the
        same rule.

        Args:
            g: Gradient of the output, shape (rows, out).
            saved: What `compress` returned.
            mean: What the sum of g is to be multiplied by, as `compress_with_mean` returned it, or None.
            need_bias: Whether the bias gradient is wanted.
            dtype: Dtype of the estimate.

        Returns:
            What `one_pass` and the product make of it; None where that is None, unless a subclass has a way of its own.
        """
        read = self.one_pass(g, saved, need_sum=need_bias or mean is not None)
        if read is None:
            return None
        assert mean is None or read.sums is not None
        stored = self.operand(saved, read.sketched.dtype)
        sums = read.sums if need_bias or mean is not None else None
        bias_dtype = g.dtype if need_bias and sums is not None else None
        grad_weight, bias = ops.sketched_grad_weight(
            read.sketched,
            stored,
            sums,
            mean,
            scale=read.scale,
            dtype=dtype,
            bias_dtype=bias_dtype,
            divisor=read.divisor,
        )
        if not need_bias:
            return grad_weight, None
        return grad_weight, g.sum(0) if bias_dtype is None else bias

    def saved_bytes(self, rows: int, features: int, dtype: torch.dtype, valid_rows: int | None = None) -> int:
        """Return the bytes that a forward pass keeps, all-in: the sketch, the seed, and whatever goes with them.

        Args:
            rows: Rows of x.
            features: Columns of x.
            dtype: Dtype of x.
            valid_rows: Rows that are sketched, where others (padding) are left out; all rows by default.
        """
        kept = self.rank(rows if valid_rows is None else valid_rows)
        return kept * features * dtype.itemsize + SEED_BYTES

    @abstractmethod
    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return E||estimate - g^T x||_F^2 in closed form.

        Args:
            x: Activations, shape (rows, in).
            g: Gradient of the output, shape (rows, out).

        Returns:
            0-d float64.
        """

    def variance_family(self, rows: int) -> Hashable | None:
        """Return a key of the sketches whose variances lie on one line in 1 / rank.

        Where two sketches have equal keys for a number of rows, each pair (x, g) has an a and a b such that
        `variance` is a + b / rank(rows) for both, and where `is_exact`, 0. Two evaluations then serve all ratios.

        Returns:
            A key; None for a sketch that stands alone.
        """
        return self.name if self.variance_is_affine_in_inverse_rank else None

    @abstractmethod
    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S itself for many seeds. Large: for tests.

        Args:
            x: Activations, shape (rows, in); some sketches depend on them.
            seeds: Shape (draws,), int64.

        Returns:
            Shape (draws, rows, rank), float64.
        """


class ObliviousSketch(Sketch):
    """A sketch whose S depends on the seed and the number of rows alone, not on x."""

    @abstractmethod
    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        """Return S^T (y - 1 mean^T), times or over the storage scale (see `rmm_linear.ops`).

        Args:
            y: Shape (rows, features), any float dtype.
            seed: 0-d int64.
            mean: Shape (features,), or None.
            gradient: False for the stored sketch of x, true for that of g.

        Returns:
            Shape (rank, features); in y's dtype for x, in float32 (float64 for float64) for g.
        """

    def compress(self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None) -> SavedSketch:
        """Sketch the input; see `Sketch.compress`."""
        return SavedSketch(seed, (self.project(x, seed, mean, gradient=False),))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Return S^T (g - 1 mean^T) over the storage scale; see `Sketch.sketch_gradient`."""
        return self.project(g, saved.seed, mean, gradient=True)


SKETCHES: dict[str, type[Sketch]] = {}


def register(sketch: type[Sketch]) -> type[Sketch]:
    """Enter a sketch class under its `name`; a decorator for third-party sketches as well.

    Args:
        sketch: A concrete subclass of `Sketch` constructible as `sketch(ratio=...)`.

    Returns:
        The class itself.

    Raises:
        ValueError: If the name is taken by another class.
    """
    present = SKETCHES.get(sketch.name)
    if present is not None and present is not sketch:
        raise ValueError(f"sketch name {sketch.name!r} is taken by {present.__qualname__}; choose another name")
    SKETCHES[sketch.name] = sketch
    return sketch


def available_sketches() -> tuple[str, ...]:
    """Return the names that `RMMConfig(sketch=...)` accepts.

    Returns:
        Names, in alphabetical order.
    """
    return tuple(sorted(SKETCHES))
