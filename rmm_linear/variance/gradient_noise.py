"""The noise of one layer's weight gradient, in closed form: the sketch's, and the minibatch's own.

For the activations x (rows, in) and the gradient of the output g (rows, out) of one step, the exact weight gradient is
G = g^T x, a sum over rows, and over sequences:

    sketch's variance     E||estimate - G||^2 over the draws of S: each sketch derives its own (`Sketch.variance`)
    over rows             (n s - C) / (n - 1): the variance of G if its n rows were drawn independently, by which
                          Bershatsky et al. 2022 (sec. 3) define the noise of SGD; s = sum_i ||g_i||^2 ||x_i||^2
    over sequences        (b t - C) / (b - 1): the variance of G with the b sequences of the batch drawn independently,
                          as they are, and t = the sum over the sequences of ||g_k^T x_k||^2

with C = ||G||^2. Tokens of one sequence are correlated, so that the variance over sequences is a minibatch's.

All variances have the scale of ||G||^2, the gradient of this batch; none is divided by the batch size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.config import RMMConfig, config_for
from rmm_linear.rows import kept_first, layout_of, sequences_of, split
from rmm_linear.sketches.closed_forms import gradient_sums, product, product_dtype, row_squares
from rmm_linear.sketches.low_bit import with_draws


@dataclass(frozen=True)
class GradientNoise:
    """Variances of one layer's weight gradient on one batch; see the module's docstring for their scale.

    Attributes:
        gradient_squared: C = ||g^T x||^2, of the exact gradient.
        sketch_variance: E||estimate - g^T x||^2; 0 where the configuration does not sketch.
        row_variance: The minibatch's variance with independent rows (the paper's definition); nan for a single row.
        sequence_variance: The same with independent sequences; None for a matrix, nan for a single sequence.
        alpha: C / (||x||^2 ||g||^2), in [0, 1]: the alignment of x and g (Bershatsky et al. 2022, sec. 3).
    """

    gradient_squared: float
    sketch_variance: float
    row_variance: float
    sequence_variance: float | None
    alpha: float

    @property
    def relative_variance(self) -> float:
        """The sketch's variance over the squared gradient: noise inflates the norm by sqrt(1 + this)."""
        return _ratio(self.sketch_variance, self.gradient_squared)

    @property
    def noise_ratio(self) -> float:
        """The sketch's variance over `minibatch_variance`."""
        return _ratio(self.sketch_variance, self.minibatch_variance)

    @property
    def minibatch_variance(self) -> float:
        """The minibatch's variance: over sequences if x has sequences, else over rows."""
        return self.row_variance if self.sequence_variance is None else self.sequence_variance


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else float("inf")
    return part / whole


def _of_samples(count: int, squares: float, c: float) -> float:
    """The variance of a sum of independent samples, by their number, the sum of squares, and the squared sum."""
    spread = (count * squares - c) / (count - 1) if count > 1 else float("nan")
    # rounding may give a value slightly below 0; nan stays
    return 0.0 if spread < 0 else spread


def gradient_noise(
    x: Tensor,
    g: Tensor,
    config: RMMConfig,
    *,
    index: Tensor | None = None,
    draws: int | None = None,
) -> GradientNoise:
    """Return the noise of a layer's weight gradient on one batch, in closed form.

    The computation takes the memory of one weight gradient in float64 and of a slab of rows; with centering, also a
    float32 copy of x and g; with rows left out or kept, also a copy of the other rows.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig
        >>> from rmm_linear.variance import gradient_noise
        >>> _ = torch.manual_seed(0)
        >>> x, g = torch.randn(4, 64, 16), torch.randn(4, 64, 8)
        >>> noise = gradient_noise(x, g, RMMConfig(ratio=0.5))
        >>> 0.8 < noise.relative_variance < 1.1
        True

    Args:
        x: The layer's input, shape (..., in), any float dtype. With three dimensions or more, the first runs over the
            sequences; a matrix has no sequences.
        g: Gradient of the layer's output, shape (..., out), with the same leading dimensions.
        config: The layer's configuration.
        index: Numbers of the rows that are no padding, ascending, shape (kept,), int32 or int64: `g` is zero at the
            padding rows, which do not count. All rows by default.
        draws: Draws of S over which the variance of a low-bit storage's rounding is averaged, 32 by default.

    Raises:
        ValueError: If shapes do not fit, `config` is no RMMConfig, or there are no draws.
    """
    config = config_for(None, config)
    sketched_x, sketched_g, kept = dealt_rows(x, g, config.keep_tokens, index)
    count = x.shape[0] if sequences_of(x.shape) and x.numel() else 0
    x, g = _rows(x, g)
    squares = _sum_of_squared_norms(x, g, count) if count else 0.0
    if not kept:
        x, g = sketched_x, sketched_g
    elif index is not None:
        x, g = x.index_select(0, index), g.index_select(0, index)
    sums = gradient_sums(x, g)
    n, c = sums.rows, float(sums.gradient_squared)
    sketch = 0.0
    if config.sketches(n, kept):
        known = config.sketch_object if draws is None else with_draws(config.sketch_object, draws)
        sketch = float(known.variance(sketched_x, sketched_g))
    return GradientNoise(
        gradient_squared=c,
        sketch_variance=sketch,
        row_variance=_of_samples(n, float(sums.row_products), c),
        sequence_variance=_of_samples(count, squares, c) if count else None,
        alpha=_ratio(c, float(sums.x_squared * sums.g_squared)),
    )


def dealt_rows(x: Tensor, g: Tensor, keep_tokens: tuple[int, ...], index: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return the rows of x (..., in) and g (..., out) that a layer sketches, and the number of kept rows."""
    layout = layout_of(x.shape, keep_tokens, index)
    x, g = _rows(x, g)
    if index is not None and layout.kept:
        index = kept_first(index, layout.sequences, layout.length, keep_tokens)
    return split(x, layout, index)[1], split(g, layout, index)[1], layout.kept


@dataclass(frozen=True)
class Measured:
    """A Monte Carlo estimate, its standard error, and its number of draws."""

    value: float
    standard_error: float
    draws: int


def measure_sketch_variance(
    x: Tensor, g: Tensor, config: RMMConfig, *, index: Tensor | None = None, draws: int = 200, seed: int = 0
) -> Measured:
    """Measure the mean of ||estimate - g^T x||_F^2 with real sketches, to compare with the closed form.

    `x`, `g`, `config` and `index` are as in `gradient_noise`; `seed` seeds the generator of the draws' seeds.

    Raises:
        ValueError: If shapes do not fit, `config` is no RMMConfig, or `draws` is below 2.
    """
    config = config_for(None, config)
    if draws < 2:
        raise ValueError(f"draws={draws} leave no standard error; pass at least 2")
    sketched_x, sketched_g, kept = dealt_rows(x, g, config.keep_tokens, index)
    if not config.sketches(sketched_x.shape[0] + kept, kept):
        return Measured(0.0, 0.0, draws)
    exact = sketched_g.double().t() @ sketched_x.double()
    generator = torch.Generator().manual_seed(seed)
    errors = torch.empty(draws, dtype=torch.float64)
    for draw in range(draws):
        key = torch.randint(-(1 << 63), (1 << 63) - 1, (), generator=generator).to(x.device)
        saved = config.sketch_object.compress(sketched_x, key)
        estimate, _ = config.sketch_object.backward(sketched_g, saved, need_bias=False)
        errors[draw] = (estimate.double() - exact).square().sum()
    return Measured(float(errors.mean()), float(errors.std()) / draws**0.5, draws)


def _rows(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    for name, tensor in (("x", x), ("g", g)):
        if tensor.dim() == 0 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected rows of floats"
            )
    if x.shape[:-1] != g.shape[:-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and g {tuple(g.shape)}; all dimensions but the last must be equal"
        )
    x, g = x.detach(), g.detach()
    return x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])


def _sum_of_squared_norms(x: Tensor, g: Tensor, count: int) -> float:
    """The sum over the sequences of ||g_k^T x_k||_F^2."""
    dtype, total = product_dtype(x, g), 0.0
    for part_x, part_g in zip(x.chunk(count), g.chunk(count), strict=True):
        # leave out padding, whose rows of x may be NaN
        rows = row_squares(part_g, dtype).nonzero().squeeze(1)
        a, b = (part.index_select(0, rows).to(dtype) for part in (part_x, part_g))
        # by the smaller product: g^T x, or the Gram matrices of the rows
        if rows.numel() * (x.shape[1] + g.shape[1]) < x.shape[1] * g.shape[1]:
            total += float((product(a, a.t()).double() * product(b, b.t())).sum())
        else:
            total += float(product(b.t(), a).double().square().sum())
    return total
