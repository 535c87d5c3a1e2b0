"""SketchContract: the test that every sketch has to pass, for subclassing under pytest.

    class TestMySketch(SketchContract):
        def make(self, ratio):
            return MySketch(ratio=ratio)

A sketch that is wrong still trains: a gradient with a bias of 2 %, or with twice the variance that it should have,
shows in no loss curve of a short run. So the contract measures, in four steps:

1. In every draw `compress` and `backward` give (S^T g)^T (S^T x) with the S of `dense`: in every dtype, for every
   awkward shape. From here on it is enough to look at `dense`.
2. E[S S^T] = I, entry by entry.
3. The mean gradient, projected on the exact one and on ones, is the exact gradient's.
4. E||estimate - g^T x||^2 equals the closed form `variance`. Only this step sees a sketch that is unbiased but noisier
   than it has to be: fixed columns, missing signs, signs shared by blocks.

The tests of this project hold a collection of wrong sketches, each of which one of these checks has to catch.

False alarms. Seeds and sample sizes are fixed, so that the contract gives the same verdict every time; the rates speak
of a new sketch, or of new seeds. Every comparison, or family of comparisons with Bonferroni's correction, has a
false-alarm rate of `FALSE_ALARM` = 1e-6 by the normal approximation. One subclass makes nine: 9e-6 a sketch.

Power. The randomised checks compute their standard errors from the sample, and raise ValueError where one is too large,
with the number of draws that would do. So these are caught, whatever the sketch:

    one row of S scaled by 1 %             with a probability of 0.99         standard error of E[S S^T]_ii <= 0.25 %
    a bias of 1 % along the gradient       0.86, and 2 % with 1 - 1e-12       standard error <= 1 % / 6
    a variance off by 2.2 %                0.99, and 3 % with 1 - 1e-6        standard error <= 0.3 %

The module needs torch alone, and pytest only to collect the subclasses.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rmm_linear.config import _OTHERS, RMMConfig
from rmm_linear.functional import linear
from rmm_linear.memory import SavedTensors
from rmm_linear.sketches.base import Sketch, accumulate_dtype
from rmm_linear.sketches.centered import Centered, centred

FALSE_ALARM = 1e-6
"""False-alarm rate of each randomised comparison, or family of them, by the normal approximation."""

# Elements of S, of S S^T or of the estimates that are held at a time: a megabyte, which stays in the cache.
_CHUNK_ELEMENTS = 1 << 17
# Relative error that float64 rounding may leave, on the scale of ||S^T g|| ||S^T x||.
_ROUNDING = 1e-12
# Rows and ratio of the fine check of E[S S^T] = I.
_FINE = (12, 0.75)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_numbers = itertools.count()


def z_bound(comparisons: int = 1, false_alarm: float = FALSE_ALARM) -> float:
    """Return the |z| that any of so many two-sided comparisons exceeds by chance with at most the given probability.

    By Bonferroni's correction: 4.9 for one comparison at 1e-6, 6.4 for 5,000.
    """
    return -NormalDist().inv_cdf(false_alarm / (2 * comparisons))


def assert_unbiased(
    draw_gradient: Callable[[], Tensor],
    exact: Tensor,
    *,
    draws: int = 3500,
    bias: float = 0.01,
    false_alarm: float = FALSE_ALARM,
    rounding: float = 1e-6,
) -> None:
    """Assert that independent draws of a gradient have the exact one as their mean.

    Three comparisons, each with the given false-alarm rate: the mean's projection on the exact gradient; its sum over
    all entries; and its entries one by one, with Bonferroni's correction. A bias of the size `bias` along the exact
    gradient has at least 6 standard errors and is caught with a probability of at least 0.86, twice that bias with
    certainty (1 - 1e-12). All draws alike (one seed for all steps) fail as well, unless they are exact.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig
        >>> from rmm_linear.functional import linear
        >>> x, weight, g = torch.randn(64, 32), torch.randn(16, 32, requires_grad=True), torch.randn(64, 16)
        >>> config = RMMConfig(ratio=0.9, min_rows=1)
        >>> def draw_gradient():
        ...     return torch.autograd.grad(linear(x, weight, config=config), weight, g)[0]
        >>> assert_unbiased(draw_gradient, g.t() @ x, draws=300, bias=0.1)

    Args:
        draw_gradient: Returns one new, independent draw at each call.
        exact: The gradient that the draws estimate.
        draws: Number of draws.
        bias: Relative bias that has to be detectable.
        false_alarm: False-alarm rate of each of the three comparisons.
        rounding: Relative error that the rounding of the draws' dtype may leave in their mean.

    Raises:
        ValueError: If the draws pass, but are too few or too noisy to show a bias of the size `bias`, or `rounding` may
            hide that bias.
    """
    exact = exact.detach().double()
    size = exact.norm()
    assert size > 0, "the exact gradient is zero: nothing can be said about a bias relative to it"
    along, total = torch.empty(2, draws, dtype=torch.float64).unbind()
    error, squared = torch.zeros_like(exact), torch.zeros_like(exact)
    for draw in range(draws):
        deviation = draw_gradient().detach().double() - exact
        along[draw] = (deviation * exact).sum() / size.square()
        total[draw] = deviation.sum() / (size * exact.numel() ** 0.5)
        error += deviation
        squared += deviation.square()
    for name, sample in (("projected on the exact gradient", along), ("summed over all entries", total)):
        z = _z_score(sample.mean(), sample.var(), draws, rounding)
        assert abs(z) <= z_bound(1, false_alarm), (
            f"biased: the mean gradient, {name}, is off by {sample.mean():+.4f} of the exact one's size: z = {z:+.1f}"
            f" in {draws} draws with a standard deviation of {sample.std():.4f}"
        )
    mean = error / draws
    spread = (squared / draws - mean.square()).clamp(min=0)
    z = _z_score(mean, spread, draws, rounding * size / exact.numel() ** 0.5).abs().max()
    assert z <= z_bound(exact.numel(), false_alarm), (
        f"biased: an entry of the mean gradient is off by z = {z:.1f} in {draws} draws; by chance the largest of"
        f" {exact.numel()} would be below {z_bound(exact.numel(), false_alarm):.1f}"
    )
    limit = (bias / 6) ** 2 - rounding**2
    if limit <= 0:
        raise ValueError(f"rounding={rounding} may hide a bias of {bias:.1%}; it has to be below a sixth of the bias")
    standard_error = along.std().item() / draws**0.5
    _require_power(standard_error, limit**0.5, draws, f"a bias of {bias:.1%} at 6 standard errors")


def config_around(sketch: Sketch) -> RMMConfig:
    """Return a configuration around a sketch, which need not be in the registry, for inputs of any row count."""
    config = RMMConfig(ratio=sketch.ratio, min_rows=1, storage="int8" if sketch.ratio == 1 else None)
    object.__setattr__(config, "sketch_object", sketch)
    object.__setattr__(config, "graph_key", f"contract/{next(_numbers)}")
    return _OTHERS.setdefault(config.graph_key, config)


def _z_score(mean: Tensor, variance: Tensor, draws: int, rounding: Tensor | float) -> Tensor:
    """Mean over its standard error, which is not let below what rounding can do."""
    return mean / (variance / draws + torch.as_tensor(rounding, dtype=torch.float64, device=mean.device) ** 2).sqrt()


def _require_power(standard_error: float, limit: float, draws: int, aim: str) -> None:
    if standard_error > limit:
        needed = math.ceil(draws * (standard_error / limit) ** 2 * 1.05 / 100) * 100
        raise ValueError(
            f"draws={draws} give a standard error of {standard_error:.3%}, which is too large to see {aim}; make it"
            f" {needed}"
        )


def structured_pair(rows: int, features: int, outputs: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return activations and a gradient with what real ones have, and independent normal numbers lack.

    Neighbouring rows are alike, as tokens of one sentence are; the columns have means; some rows are heavy; and g
    depends on x. Without these, mixed-up blocks, missing signs and wrong probabilities have the right variance. x is
    (rows, features) and g (rows, outputs), float64, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    fresh = normal(rows, features)
    x = fresh.clone()
    for row in range(1, rows):
        x[row] = 0.8 * x[row - 1] + 0.6 * fresh[row]
    width = max(features, outputs)
    rotation = torch.linalg.qr(normal(width, width))[0][:features, :outputs]
    g = 0.7 * (x @ rotation + normal(rows, outputs))
    number = torch.arange(rows).unsqueeze(1)
    x = x * (1 + 1.0 * (number % 7 == 3)) + 0.5 * normal(features)
    g = g * (1 + 0.5 * (number % 11 == 3)) + 0.5 * normal(outputs)
    return x, g


class Products(NamedTuple):
    """Many draws of S S^T against the identity."""

    # mean of S S^T - I, and the variance of its entries, (rows, rows)
    deviation: Tensor
    spread: Tensor


class Estimates(NamedTuple):
    """Many estimates of g^T x against g^T x, each of shape (draws,)."""

    # projection of the error on the exact gradient, relative to that
    along: Tensor
    # sum of the error, over the exact gradient's size and the root of its number of entries
    total: Tensor
    # ||estimate - g^T x||^2
    squared_error: Tensor


def _drawn(sketch: Sketch, x: Tensor, draws: int, seed: int, largest: int) -> Iterator[Tensor]:
    """S for many seeds, as many at a time as keep `largest` elements each within bounds."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (draws,), generator=generator).to(x.device)
    for chunk in seeds.split(max(1, _CHUNK_ELEMENTS // largest)):
        dense, shape = sketch.dense(x, chunk), (chunk.numel(), x.shape[0], sketch.rank(x.shape[0]))
        assert dense.shape == shape, f"dense has shape {tuple(dense.shape)}; expected (draws, rows, rank) = {shape}"
        yield dense


def draw_products(sketch: Sketch, x: Tensor, *, draws: int, seed: int) -> Products:
    """Draw S many times, by `dense`, and compare S S^T with the identity."""
    rows = x.shape[0]
    identity = torch.eye(rows, dtype=torch.float64, device=x.device)
    first, second = torch.zeros_like(identity), torch.zeros_like(identity)
    for dense in _drawn(sketch, x, draws, seed, rows * max(rows, sketch.rank(rows))):
        error = torch.bmm(dense, dense.transpose(1, 2)).sub_(identity)
        first += error.sum(0)
        second += error.square_().sum(0)
    deviation = first / draws
    return Products(deviation, (second / draws - deviation.square()).clamp(min=0))


def draw_estimates(sketch: Sketch, x: Tensor, g: Tensor, *, draws: int, seed: int) -> Estimates:
    """Draw S many times, by `dense`, and compare the estimates of g^T x with it; both centred for a centred sketch."""
    rows, rank = x.shape[0], sketch.rank(x.shape[0])
    exact = g.t() @ x
    size = exact.norm()
    found = []
    for dense in _drawn(sketch, x, draws, seed, max(rows * rank, exact.numel())):
        transposed = dense.transpose(1, 2).reshape(-1, rows)
        sketched_x, sketched_g = ((transposed @ y).unflatten(0, (-1, rank)) for y in (x, g))
        error = torch.bmm(sketched_g.transpose(1, 2), sketched_x).sub_(exact).flatten(1)
        along = (error @ exact.flatten()) / size.square()
        total = error.sum(1) / (size * exact.numel() ** 0.5)
        found.append(torch.stack((along, total, error.square_().sum(1))))
    return Estimates(*torch.cat(found, 1).unbind())


class SketchContract:
    """What a sketch must do. Subclass it with a name that pytest collects, and define `make`.

    Examples:
        >>> from rmm_linear.sketches import Centered, Hadamard
        >>> class TestCenteredHadamard(SketchContract):
        ...     def make(self, ratio):
        ...         return Centered(Hadamard(ratio=ratio))
        >>> TestCenteredHadamard().test_zeros_give_zeros()

    Attributes:
        seed: Seed of the data and of the draws.
        reads_every_row: Whether a NaN in any row of x has to show in the weight gradient. Sketches that merely pick
            rows do not read the others.
        identity_draws: Number of draws with which E[S S^T] = I is checked to a fine standard error, at few rows.
        gradient_cases: Rows and ratios at which mean and variance of the gradient are checked.
        gradient_draws: Number of draws in each.
        montecarlo: Names of the randomised checks, for a marker.
    """

    seed: ClassVar[int] = 0
    reads_every_row: ClassVar[bool] = True
    identity_draws: ClassVar[int] = 60_000
    # 67 is prime and, for sketches in blocks of 64, makes two ragged ones.
    gradient_cases: ClassVar[tuple[tuple[int, float], ...]] = ((37, 0.6), (67, 0.5))
    gradient_draws: ClassVar[int] = 12_000

    montecarlo: ClassVar[tuple[str, ...]] = (
        "test_mean_of_s_s_transposed_is_identity",
        "test_gradient_is_unbiased",
        "test_variance_equals_the_closed_form",
    )

    _estimates: ClassVar[dict[tuple[int, float], Estimates]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # the two checks of the estimates share their draws
        cls._estimates = {}

    def make(self, ratio: float) -> Sketch:
        """Return the sketch under test, of a ratio in (0, 1]; to be defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has to define make(self, ratio)")

    def sketched_pair(self, sketch: Sketch, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Split g^T x into a product that is sketched and a part that is known. Override for other wrappers.

        Returns:
            x' and g', such that the estimate is known + (S^T g')^T (S^T x'); and known (out, in), or None.
        """
        if not isinstance(sketch, Centered) or x.shape[0] == 0:
            return x, g, None
        return centred(x), g - g.mean(0), torch.outer(g.sum(0), x.mean(0))

    # Step 1: in every draw the two verbs do what S says.

    def test_gradient_is_the_product_with_dense(self) -> None:
        """Every row count and ratio, ragged, prime, one row and no row: float64, to rounding, in every draw.

        The seed decides alone: the default generator is neither read nor moved.
        """
        state = torch.get_rng_state()
        for rows, ratio in self._shapes():
            sketch = self.make(ratio)
            x, g = self._pair(rows)
            for seed in (0, -1, 1 << 40):
                got = self._gradient(sketch, x, g, seed)
                expected, scale = self._expected(sketch, x, g, seed)
                assert got.shape == expected.shape, f"{_at(rows, ratio)}: gradient of shape {tuple(got.shape)}"
                assert (got - expected).norm() <= _ROUNDING * scale, (
                    f"{_at(rows, ratio)}, seed {seed}: the gradient differs from (S^T g)^T (S^T x) by"
                    f" {(got - expected).norm() / scale:.1e} of ||S^T g|| ||S^T x||"
                )
        assert torch.equal(torch.get_rng_state(), state), "the sketch moves the default generator"

    def test_layer_is_linear_with_the_sketch_s_weight_gradient(self) -> None:
        """Output, grad_input and grad_bias are bit-equal to `F.linear`'s; the weight gradient is the sketch's own."""
        sketch = self.make(0.3)
        config = config_around(sketch)
        for dtype in _DTYPES:
            for shape in ((24,), (67, 24), (5, 13, 24), (3, 1, 23, 24)):
                data, g = (y.to(dtype) for y in self._pair(math.prod(shape[:-1])))
                parameters = self._pair(20)
                weight, bias = parameters[0].to(dtype).requires_grad_(), parameters[1][0].to(dtype).requires_grad_()
                x = data.reshape(shape).requires_grad_()
                output, exact = linear(x, weight, bias, config=config, seed=3), F.linear(x, weight, bias)
                assert torch.equal(output, exact), f"{dtype}, {shape}: the output is not bit-equal"
                shaped = g.reshape(output.shape)
                got = torch.autograd.grad(output, (x, weight, bias), shaped)
                expected = torch.autograd.grad(exact, (x, bias), shaped)
                assert torch.equal(got[0], expected[0]), f"{dtype}, {shape}: grad_input is not bit-equal"
                assert torch.equal(got[2], expected[1]), f"{dtype}, {shape}: grad_bias is not bit-equal"
                own = self._gradient(sketch, data.detach(), g, 3).to(dtype)
                assert torch.equal(got[1], own), f"{dtype}, {shape}: grad_weight is not the sketch's own"

    def test_non_contiguous_inputs_give_the_same_gradient(self) -> None:
        """Transposed, sliced with a stride, and expanded x and g, against contiguous copies of them."""
        for dtype, tolerance in ((torch.float64, _ROUNDING), (torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
            sketch = self.make(0.4)
            for (name, x), (_, g) in zip(self._views(24, dtype), self._views(20, dtype), strict=True):
                assert not x.is_contiguous(), f"{name} is contiguous: this tests nothing"
                assert not g.is_contiguous(), f"{name} is contiguous: this tests nothing"
                got = self._gradient(sketch, x, g, 7)
                expected = self._gradient(sketch, x.contiguous(), g.contiguous(), 7)
                _, scale = self._expected(sketch, x, g, 7)
                assert (got - expected).norm() <= tolerance * scale, f"{name}, {dtype}: differs from a contiguous copy"

    def test_bias_gradient_is_the_column_sum(self) -> None:
        """The bias gradient is the plain column sum of g to the bit, None where it is not wanted."""
        for dtype in _DTYPES:
            sketch = self.make(0.4)
            x, g = (y.to(dtype) for y in self._pair(67))
            saved = sketch.compress(x, self._seed(1))
            grad_weight, grad_bias = sketch.backward(g, saved)
            assert grad_bias is not None, f"{dtype}: there is none"
            assert torch.equal(grad_bias, g.sum(0)), f"{dtype}: it is not g.sum(0) to the bit"
            assert torch.equal(grad_weight, self._gradient(sketch, x, g, 1)), f"{dtype}: need_bias changes grad_weight"
            assert sketch.backward(g, saved, need_bias=False)[1] is None, f"{dtype}: a bias gradient that is not wanted"

    def test_zeros_give_zeros(self) -> None:
        """An all-zero x or g gives an all-zero gradient: no row norm or maximum is divided by."""
        for rows in (1, 67):
            sketch = self.make(0.4)
            x, g = self._pair(rows)
            for name, got in (
                ("x", self._gradient(sketch, torch.zeros_like(x), g, 1)),
                ("g", self._gradient(sketch, x, torch.zeros_like(g), 1)),
            ):
                assert torch.equal(got, torch.zeros_like(got)), f"{rows} rows, {name} = 0: the gradient is not 0"

    def test_gradients_are_finite_and_right_at_all_magnitudes(self) -> None:
        """|x| from 1e-4 to 1e3 in float16, from 1e-30 to 1e30 otherwise; in all rows, or in every second one."""
        wide = [10.0**exponent for exponent in range(-30, 31, 10)]
        for dtype, sizes in ((torch.float16, [1e-4, 1e-2, 1.0, 1e3]), (torch.bfloat16, wide), (torch.float32, wide)):
            sketch = self.make(0.1)
            x, g = self._pair(67)
            # Entries of one sign add up to the largest sums. g is small, or the exact gradient would overflow float16.
            x = 0.5 + 0.5 * x.abs() / x.abs().amax()
            g = 0.1 * g
            for size in sizes:
                for step in (1, 2):
                    scaled = x.clone()
                    scaled[::step] *= size
                    scaled, low_g = scaled.to(dtype), g.to(dtype)
                    got = self._gradient(sketch, scaled, low_g, 11)
                    where = f"{dtype}, |x| = {size:g} in {'all rows' if step == 1 else 'every second row'}"
                    assert got.dtype == accumulate_dtype(dtype), f"{dtype}: the gradient has dtype {got.dtype}"
                    assert got.to(dtype).isfinite().all(), f"{where}: the gradient is not finite"
                    # Rows that all but vanish are equal once they are centred: which of them a sampling sketch prefers
                    # is then a matter of rounding, and float64 is no yardstick.
                    if step == 2:
                        continue
                    expected, scale = self._expected(sketch, scaled, low_g, 11)
                    error = ((got - expected).norm() / scale).item()
                    assert error <= 4 * torch.finfo(dtype).eps + 1e-5, f"{where}: relative error {error:.1e}"

    def test_non_finite_input_shows_in_the_gradient(self) -> None:
        """A NaN or an infinity in x or g must reach the weight gradient, or loss scaling and NaN guards miss it."""
        places = itertools.product(_DTYPES, (0, 31, 66), (math.nan, math.inf), (0, 1) if self.reads_every_row else (1,))
        for dtype, row, value, which in places:
            pair = [y.to(dtype) for y in self._pair(67)]
            pair[which][row, 5] = value
            got = self._gradient(self.make(0.1), *pair, 1)
            where = f"row {row} of {'xg'[which]}"
            assert not got.isfinite().all(), f"{dtype}: {value} in {where} does not show in the gradient"

    # What is exact, stays exact.

    def test_exact_where_the_closed_form_is_zero(self) -> None:
        """Where the closed form is 0, every draw is the exact gradient, and all rows are kept."""
        for rows, ratio in (*self._shapes(), (12, 1.0), (37, 1.0)):
            sketch = self.make(ratio)
            x, g = self._pair(rows)
            scale = x.square().sum() * g.square().sum()
            # two centred rows, +v and -v, tell each other, and one is nothing
            if rows <= 2 or sketch.variance(x, g) > _ROUNDING * scale:
                continue
            assert sketch.rank(rows) == rows, f"{_at(rows, ratio)}: exact with fewer rows kept than there are"
            for seed in (1, 2):
                error = (self._gradient(sketch, x, g, seed) - g.t() @ x).norm()
                assert error <= _ROUNDING * scale.sqrt(), f"{_at(rows, ratio)}: a variance of 0, and not exact"

    def test_different_seeds_give_different_sketches(self) -> None:
        """Neighbouring seeds, and seeds that differ in their high or low 32 bits alone, have nothing in common."""
        x, _ = self._pair(67)
        seeds = [*range(-8, 8), *(1 << bit for bit in range(4, 63)), -(1 << 63), (1 << 63) - 1]
        dense = self.make(0.5).dense(x, torch.tensor(seeds)).flatten(1)
        distances = torch.cdist(dense, dense, compute_mode="donot_use_mm_for_euclid_dist")
        equal = (distances == 0).triu(1).nonzero().tolist()
        assert not equal, f"seeds {seeds[equal[0][0]]} and {seeds[equal[0][1]]} draw the same S"

    # What is kept.

    def test_saved_bytes_are_kept_and_the_input_is_freed(self) -> None:
        """By what autograd saves of the layer, parameters excluded; nothing else keeps x alive."""
        for rows, ratio in ((1, 0.3), (37, 0.6), (67, 0.01), (200, 0.3)):
            sketch = self.make(ratio)
            for dtype in _DTYPES:
                data, g = (y.to(dtype) for y in self._pair(rows))
                weight = torch.zeros(g.shape[1], data.shape[1], dtype=dtype, requires_grad=True)
                bias = torch.zeros(g.shape[1], dtype=dtype, requires_grad=True)
                # made by an op that does not keep its result
                x = data.requires_grad_() * 1.0
                storage = StorageWeakRef(x.untyped_storage())
                with SavedTensors(weight, bias) as seen:
                    output = linear(x, weight, bias, config=config_around(sketch))
                del x
                promised = sketch.saved_bytes(rows, data.shape[1], dtype)
                where = f"{_at(rows, ratio)}, {dtype}"
                assert storage.expired(), f"{where}: x is alive after the forward pass"
                assert seen.bytes == promised, f"{where}: autograd keeps {seen.bytes} bytes, {promised} promised"
                output.backward(g)
                assert weight.grad is not None
                assert weight.grad.isfinite().all(), f"{where}: the weight gradient is not finite"

    def test_kept_rows_follow_the_ratio(self) -> None:
        """Between half of ratio * rows and round(ratio * rows) + 8, and never more than there are rows."""
        row_counts = (*range(1, 2001), 4096, 7919, 65536, 104729, 1 << 20)
        for ratio in (0.001, 0.01, 0.03125, 0.05, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0):
            sketch = self.make(ratio)
            assert sketch.rank(0) == 0, f"{sketch.rank(0)} rows kept of none"
            for rows in row_counts:
                rank, most = sketch.rank(rows), min(rows, round(ratio * rows) + 8)
                least = max(1, math.floor(ratio * rows / 2))
                assert least <= rank <= most, f"{_at(rows, ratio)}: {rank} rows kept, expected {least} to {most}"

    # Steps 2 to 4: the claims in expectation.

    def test_mean_of_s_s_transposed_is_identity(self) -> None:
        """E[S S^T] = I entry by entry.

        False-alarm rate 1e-6 a case, Bonferroni over the entries on and above the diagonal. A row of S scaled by 1 %
        moves its diagonal entry by 2 %, which is caught with a probability of at least 99 % at `identity_draws`.
        """
        for rows, ratio in (_FINE, *self.gradient_cases):
            fine = (rows, ratio) == _FINE
            draws = self.identity_draws if fine else self.gradient_draws
            found = draw_products(self.make(ratio), self._pair(rows)[0], draws=draws, seed=self.seed + 1)
            upper = torch.ones(rows, rows).triu().bool()
            bound = z_bound(int(upper.sum()))
            z = _z_score(found.deviation, found.spread, draws, _ROUNDING).abs()[upper].max()
            assert z <= bound, (
                f"{_at(rows, ratio)}: E[S S^T] is not I: an entry is off by z = {z:.1f} in {draws} draws; by chance the"
                f" largest of {int(upper.sum())} would be below {bound:.1f}"
            )
            if fine:
                worst = found.spread.diagonal().max().sqrt().item() / draws**0.5
                _require_power(worst, 0.0025, draws, "one row scaled by 1 % (identity_draws)")

    def test_gradient_is_unbiased(self) -> None:
        """The mean gradient, projected on the exact one and on ones.

        False-alarm rate 1e-6 for each of the two. A bias of 1 % of the gradient has 6 standard errors.
        """
        for rows, ratio in self.gradient_cases:
            found = self._draw_estimates(rows, ratio)
            for name, sample in (("the exact gradient", found.along), ("ones", found.total)):
                z = _z_score(sample.mean(), sample.var(), self.gradient_draws, _ROUNDING)
                assert abs(z) <= z_bound(), (
                    f"{_at(rows, ratio)}: the mean gradient's projection on {name} is off by {sample.mean():+.4f}:"
                    f" z = {z:+.1f} in {self.gradient_draws} draws"
                )
            standard_error = found.along.std().item() / self.gradient_draws**0.5
            _require_power(standard_error, 0.01 / 6, self.gradient_draws, "a bias of 1 % (gradient_draws)")

    def test_variance_equals_the_closed_form(self) -> None:
        """The mean of ||estimate - g^T x||^2 is `variance(x, g)`.

        False-alarm rate 1e-6 a case, at a standard error of at most 0.3 %: a deviation of 2.2 % is caught with a
        probability of at least 99 %, one of 3 % with 1 - 1e-6.
        """
        for rows, ratio in self.gradient_cases:
            found = self._draw_estimates(rows, ratio)
            sketch = self.make(ratio)
            closed_form = sketch.variance(*self._pair(rows)).item()
            assert closed_form > 0, f"{_at(rows, ratio)}: the closed form is {closed_form}"
            relative = found.squared_error / closed_form
            z = _z_score(relative.mean() - 1, relative.var(), self.gradient_draws, _ROUNDING)
            assert abs(z) <= z_bound(), (
                f"{_at(rows, ratio)}: the variance is {relative.mean():.4f} times the closed form: z = {z:+.1f} in"
                f" {self.gradient_draws} draws"
            )
            standard_error = relative.std().item() / self.gradient_draws**0.5
            _require_power(standard_error, 0.003, self.gradient_draws, "a variance off by 2.2 % (gradient_draws)")

    # How the checks are made.

    def _shapes(self) -> Iterator[tuple[int, float]]:
        for rows in (0, 1, 2, 3, 5, 13, 52, 63, 64, 65, 67, 127, 128, 129, 200):
            for ratio in (0.01, 0.3, 0.9, 1.0, 1 / max(1, rows)):
                yield rows, ratio

    def _pair(self, rows: int) -> tuple[Tensor, Tensor]:
        return structured_pair(rows, 24, 20, seed=self.seed)

    def _views(self, features: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        wide = structured_pair(134, 2 * features, 1, seed=self.seed)[0].to(dtype)
        yield "transposed", wide[:67, :features].t().contiguous().t()
        yield "every second row", wide[::2, :features]
        yield "every second column", wide[:67, ::2]
        yield "one row, expanded", wide[:1, :features].expand(67, features)

    def _seed(self, seed: int) -> Tensor:
        return torch.tensor(seed, dtype=torch.int64)

    def _gradient(self, sketch: Sketch, x: Tensor, g: Tensor, seed: int) -> Tensor:
        gradient, _ = sketch.backward(g, sketch.compress(x, self._seed(seed)), need_bias=False)
        return gradient

    def _expected(self, sketch: Sketch, x: Tensor, g: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The gradient by `dense` in float64, and the scale of its rounding errors."""
        dense = sketch.dense(x, self._seed(seed).unsqueeze(0))[0]
        x, g, known = self.sketched_pair(sketch, x.double(), g.double())
        sketched_x, sketched_g = dense.t() @ x, dense.t() @ g
        expected = sketched_g.t() @ sketched_x
        scale = sketched_g.norm() * sketched_x.norm()
        if known is not None:
            expected, scale = expected + known, scale + known.norm()
        return expected, scale + torch.finfo(torch.float64).tiny

    def _draw_estimates(self, rows: int, ratio: float) -> Estimates:
        if (rows, ratio) not in self._estimates:
            sketch = self.make(ratio)
            x, g, _ = self.sketched_pair(sketch, *self._pair(rows))
            drawn = draw_estimates(sketch, x, g, draws=self.gradient_draws, seed=self.seed + 1)
            self._estimates[rows, ratio] = drawn
        return self._estimates[rows, ratio]


def _at(rows: int, ratio: float) -> str:
    return f"{rows} rows, ratio {ratio:g}"
