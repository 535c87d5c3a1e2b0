"""Sketches with a mistake, each of which the contract has to catch, by the right check.

The contract has to catch what no training run would show. Most telling are the Hadamard sketch with fixed columns,
columns with replacement, no signs, or signs shared by its blocks: all of them unbiased, and only noisier.
"""

import pytest
import torch
from sketch_contract import SketchContract

from rmm_linear.sketches import CRS, SKETCHES, Centered, Gaussian, Hadamard, RowsWithoutReplacement, SavedSketch, Sketch
from rmm_linear.sketches.base import accumulate_dtype
from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.sketches.row_sampling import integer_weights, row_norms
from rmm_linear_kernels.hadamard.reference import hadamard_entries, hadamard_order
from rmm_linear_kernels.philox.reference import (
    CHOICE_STREAM,
    choose_without_replacement,
    random_fractions,
    random_signs,
    random_words,
)

IDENTITY = "test_mean_of_s_s_transposed_is_identity"
UNBIASED = "test_gradient_is_unbiased"
VARIANCE = "test_variance_equals_the_closed_form"
PRODUCT = "test_gradient_is_the_product_with_dense"
LAYER = "test_layer_is_linear_with_the_sketch_s_weight_gradient"
STRIDES = "test_non_contiguous_inputs_give_the_same_gradient"
BIAS = "test_bias_gradient_is_the_column_sum"
ZEROS = "test_zeros_give_zeros"
MAGNITUDES = "test_gradients_are_finite_and_right_at_all_magnitudes"
NON_FINITE = "test_non_finite_input_shows_in_the_gradient"
EXACT = "test_exact_where_the_closed_form_is_zero"
OTHER_SEED = "test_different_seeds_give_different_sketches"
BYTES = "test_saved_bytes_are_kept_and_the_input_is_freed"
KEPT_ROWS = "test_kept_rows_follow_the_ratio"
CHECKS = tuple(name for name in dir(SketchContract) if name.startswith("test_"))


def choose_with_replacement(seeds, population, chosen):
    return (random_words(seeds, chosen, stream=CHOICE_STREAM) * population) >> 32


class DenseSketch(Sketch):
    """A sketch that is whatever `dense` says. It keeps S, and says so."""

    def compress(self, x, seed, *, mean=None):
        compute = accumulate_dtype(x.dtype)
        y = x.to(compute) if mean is None else x.to(compute) - mean
        dense = self.dense(y, seed.unsqueeze(0))[0]
        return SavedSketch(seed, ((dense.to(compute).t() @ y * self._scale(dense)).to(x.dtype), dense))

    def sketch_gradient(self, g, saved, *, mean=None):
        compute, dense = accumulate_dtype(g.dtype), saved.tensors[1]
        y = g.to(compute) if mean is None else g.to(compute) - mean
        return dense.to(compute).t() @ y / self._scale(dense)

    @staticmethod
    def _scale(dense):
        rows, rank = dense.shape
        return (max(1, rank) / max(1, rows)) ** 0.5

    def stored(self, rows, features, dtype):
        return ((self.rank(rows), features), dtype), ((rows, self.rank(rows)), torch.float64)


# The Hadamard sketch, written once more from its definition, with places to go wrong.


class DenseHadamard(DenseSketch, Hadamard):
    def signs(self, seeds, rows, blocks):
        return random_signs(seeds, rows, dtype=torch.float64)

    def columns(self, seeds, order, kept):
        return choose_without_replacement(seeds, order, kept)

    def places(self, rows, blocks):
        row = torch.arange(rows)
        return row % blocks, row // blocks

    def dense(self, x, seeds):
        rows = x.shape[0]
        blocks, kept = self.geometry(rows)
        dense = torch.zeros(seeds.numel(), rows, blocks, kept, dtype=torch.float64)
        if rows == 0:
            return dense.flatten(2)
        order = hadamard_order(-(-rows // blocks))
        matrix = hadamard_entries(torch.arange(order), order=order, width=order, dtype=torch.float64)
        block, place = self.places(rows, blocks)
        chosen = matrix[self.columns(seeds, order, kept)][:, :, place]
        signed = chosen * self.signs(seeds, rows, blocks).unsqueeze(1)
        dense[:, torch.arange(rows), block] = signed.transpose(1, 2) / kept**0.5
        return dense.flatten(2)


def changed(*bases, **methods):
    """A class with other methods than its bases; `base.method(self, ...)` calls the method of a base."""
    return type("Changed", bases, methods)


def first_columns(self, seeds, order, kept):
    return torch.arange(kept).expand(len(seeds), kept)


def signs_of_places(self, seeds, rows, blocks):
    return DenseHadamard.signs(self, seeds, rows, blocks)[:, self.places(rows, blocks)[1]]


def contiguous_places(self, rows, blocks):
    """Right in itself, but the closed form is that of strided blocks."""
    row, block_rows = torch.arange(rows), -(-rows // blocks)
    return row // block_rows, row % block_rows


ContiguousBlocks = changed(DenseHadamard, places=contiguous_places)


class ContiguousBlocksWithTheirClosedForm(ContiguousBlocks):
    def variance(self, x, g):
        rows = x.shape[0]
        blocks, _ = self.geometry(rows)
        block_rows = -(-rows // blocks)
        # Contiguous block k, row i goes where the strided blocks look for it: to i * blocks + k. The last block alone
        # may be short, by less than one stride.
        padded = torch.arange(blocks * block_rows).view(blocks, block_rows).t().flatten()
        order = padded[padded < rows]
        return super().variance(x[order], g[order])


def papers_closed_form(self, x, g):
    sums = gradient_sums(x, g)
    return (sums.x_squared * sums.g_squared - sums.gradient_squared) / max(1, self.rank(sums.rows))


def rows_with_replacement(self, x, seeds):
    rows, rank = x.shape[0], self.rank(x.shape[0])
    index = choose_with_replacement(seeds, max(1, rows), rank)
    dense = torch.zeros(seeds.numel(), rows, rank, dtype=torch.float64)
    return dense.scatter_(1, index.unsqueeze(1), (rows / max(1, rank)) ** 0.5)


RowsWithReplacement = changed(DenseSketch, RowsWithoutReplacement, dense=rows_with_replacement)


def rows_drawn(weights, scale_weights, seeds, rank):
    """CRS by `weights`, scaled as if it were by `scale_weights`."""
    dense = torch.zeros(seeds.numel(), weights.numel(), rank, dtype=torch.float64)
    if not weights.numel():
        return dense
    p, q = weights / weights.sum(), scale_weights / scale_weights.sum()
    index = torch.searchsorted(p.cumsum(0), random_fractions(seeds, rank), right=True).clamp(max=p.numel() - 1)
    return dense.scatter_(1, index.unsqueeze(1), (1 / (rank * q[index])).sqrt().unsqueeze(1))


def weights_of(x):
    if not x.shape[0]:
        return x.new_zeros(0, dtype=torch.float64)
    return integer_weights(row_norms(x, None)).double()


def crs_by(probabilities):
    """CRS with rows drawn, and scaled, by two functions of the right weights."""

    def dense(self, x, seeds):
        return rows_drawn(*probabilities(weights_of(x)), seeds, self.rank(x.shape[0]))

    return changed(DenseSketch, CRS, dense=dense)


RightCRS = crs_by(lambda weights: (weights, weights))


# Wrappers and what is kept.


class OneRowScaled(DenseSketch):
    """Any sketch with its first row scaled by 1 %."""

    def dense(self, x, seeds):
        dense = super().dense(x, seeds)
        if dense.shape[1]:
            dense[:, 0] *= 1.01
        return dense


def with_zero_mean(self, g, saved, **options):
    *tensors, mean = saved.tensors
    return Centered.backward(self, g, SavedSketch(saved.seed, (*tensors, torch.zeros_like(mean))), **options)


def hiding_the_input(self, x, seed, *, mean=None):
    object.__setattr__(self, "x", x)
    return Hadamard.compress(self, x, seed, mean=mean)


class StoresLargeNumbers(Gaussian):
    """S^T x times a factor that float16 has no room for."""

    def compress(self, x, seed, *, mean=None):
        saved = super().compress(x, seed, mean=mean)
        return SavedSketch(seed, (saved.tensors[0] * 256,))

    def sketch_gradient(self, g, saved, *, mean=None):
        return super().sketch_gradient(g, saved, mean=mean) / 256


def summed_in_half_precision(self, g, saved, *, mean=None):
    sketched = Gaussian.sketch_gradient(self, g, saved, mean=mean)
    return sketched.to(torch.bfloat16).to(sketched.dtype) if g.dtype == torch.float32 else sketched


def without_strides(self, x, seed, *, mean=None):
    rows, features = x.shape
    is_right = x.is_contiguous() or x.stride(0) < features
    return Hadamard.compress(self, x if is_right else x.as_strided((rows, features), (features, 1)), seed, mean=mean)


def dense_as(dense):
    """A Hadamard sketch whose `dense` is a function of the right one's and of the seeds."""
    right = DenseHadamard.dense
    return changed(DenseHadamard, dense=lambda self, x, seeds: dense(lambda seeds: right(self, x, seeds), seeds))


def compressed_as(compress):
    """A Hadamard sketch whose `compress` is a function of the right one's and of x."""

    def compressed(self, x, seed, *, mean=None):
        return compress(lambda x: Hadamard.compress(self, x, seed, mean=mean), x)

    return changed(Hadamard, compress=compressed)


def saved_with(tensor, saved):
    return SavedSketch(saved.seed, (*saved.tensors, tensor))


def divided_by_the_largest(compress, x):
    saved, largest = compress(x), x.abs().amax() if x.numel() else 1
    return SavedSketch(saved.seed, (saved.tensors[0] / largest * largest,))


def bias_rounded(self, g, saved, *, need_bias=True, dtype=None):
    grad_weight, _ = Hadamard.backward(self, g, saved, need_bias=False, dtype=dtype)
    return grad_weight, g.to(torch.bfloat16).sum(0).to(g.dtype) if need_bias else None


def with_another_seed(self, x, seed, *, mean=None):
    return DenseHadamard.compress(self, x, torch.randint(1 << 62, (), dtype=torch.int64), mean=mean)


def around_hadamard(**methods):
    """Centring with other methods."""
    return lambda ratio: changed(Centered, **methods)(Hadamard(ratio=ratio))


def contract_of(make, **knobs):
    """A contract for the sketch that `make(ratio=...)` returns."""
    return type("Contract", (SketchContract,), {"make": lambda self, ratio: make(ratio=ratio), **knobs})


BY_NORM = {"identity_draws": 360_000}
# name -> knobs of the contract
KNOBS = {
    "rows with replacement": {"reads_every_row": False, "identity_draws": 240_000, "gradient_draws": 18_000},
    "scaled by other probabilities": BY_NORM,
    "squared norms": {"identity_draws": 480_000},
}
# Without signs the gradient is so noisy that the check of its bias asks for more draws.
MORE_DRAWS = {"no signs": {"gradient_draws": 150_000}}

# name -> sketch, checks that have to fail; the first one is the right one, the others follow
MUTANTS = {
    "fixed columns": (changed(DenseHadamard, columns=first_columns), VARIANCE),
    "columns with replacement": (
        changed(DenseHadamard, columns=staticmethod(choose_with_replacement)),
        *(VARIANCE, EXACT),
    ),
    "no signs": (changed(DenseHadamard, signs=lambda self, *args: DenseHadamard.signs(self, *args).abs()), VARIANCE),
    "signs shared by blocks": (changed(DenseHadamard, signs=signs_of_places), VARIANCE),
    "contiguous blocks, closed form of strided ones": (ContiguousBlocks, VARIANCE),
    "one seed": (
        dense_as(lambda dense, seeds: dense(torch.zeros_like(seeds))),
        *(OTHER_SEED, IDENTITY, UNBIASED, VARIANCE),
    ),
    "32 bits of the seed": (dense_as(lambda dense, seeds: dense(seeds & 0xFFFFFFFF)), OTHER_SEED),
    "default generator": (
        changed(DenseHadamard, compress=with_another_seed),
        *(PRODUCT, LAYER, STRIDES, MAGNITUDES, BIAS),
    ),
    "scale wrong by half a percent": (
        dense_as(lambda dense, seeds: dense(seeds) * 1.005),
        *(UNBIASED, IDENTITY, VARIANCE, EXACT),
    ),
    "the paper's closed form": (changed(Gaussian, variance=papers_closed_form), VARIANCE),
    "rows with replacement": (RowsWithReplacement, VARIANCE, EXACT),
    # 5 % of the uniform probabilities mixed into the scales, and not into the draws
    "scaled by other probabilities": (crs_by(lambda w: (w, 0.95 * w + 0.05 * w.mean())), IDENTITY),
    # unbiased, but not the probabilities of which the closed form speaks
    "squared norms": (crs_by(lambda w: (w.square(), w.square())), VARIANCE),
    "only the input centred": (
        around_hadamard(grad_weight=lambda self, g, saved, mean: Centered.grad_weight(self, g, saved)),
        *(PRODUCT, MAGNITUDES),
    ),
    "mean forgotten": (around_hadamard(backward=with_zero_mean), PRODUCT, MAGNITUDES, EXACT),
    "input among the saved": (compressed_as(lambda compress, x: saved_with(x[:0], compress(x))), BYTES),
    "input on the sketch": (changed(Hadamard, compress=hiding_the_input), BYTES),
    "seed not counted": (changed(Hadamard, saved_bytes=lambda self, *a: Hadamard.saved_bytes(self, *a) - 8), BYTES),
    "claims to be exact": (
        changed(Hadamard, variance=lambda self, x, g: (self.ratio < 1) * Hadamard.variance(self, x, g)),
        EXACT,
    ),
    "too many rows kept": (
        changed(Gaussian, rank=lambda self, rows: min(rows, Gaussian.rank(self, rows) + rows // 64)),
        KEPT_ROWS,
    ),
    "overflow in float16": (StoresLargeNumbers, MAGNITUDES),
    "sums in bfloat16": (changed(Gaussian, sketch_gradient=summed_in_half_precision), MAGNITUDES),
    "divided by the largest": (compressed_as(divided_by_the_largest), ZEROS),
    "nan_to_num": (compressed_as(lambda compress, x: compress(x.nan_to_num(posinf=0.0))), NON_FINITE),
    "strides ignored": (changed(Hadamard, compress=without_strides), STRIDES),
    "bias gradient rounded": (changed(Hadamard, backward=bias_rounded), BIAS, LAYER),
}
SCALED_ROW_KNOBS = {"crs": BY_NORM, "wta_crs": BY_NORM}
# Sketches written a second time, without a mistake. Contiguous blocks differ in the closed form of their variance.
CONTROLS = {
    "hadamard": (DenseHadamard, {}),
    "contiguous blocks": (ContiguousBlocksWithTheirClosedForm, {}),
    "crs": (RightCRS, BY_NORM),
}


def failing(contract, checks):
    failed = set()
    for check in checks:
        try:
            getattr(contract(), check)()
        except AssertionError:
            failed.add(check)
    return failed


@pytest.mark.montecarlo
@pytest.mark.parametrize("name", MUTANTS)
def test_the_right_check_catches_the_mutant(name):
    """Deterministic, or seen at 5 standard errors beyond the bound: see the contract for the power of each check."""
    make, expected, *_ = MUTANTS[name]
    with pytest.raises(AssertionError):
        getattr(contract_of(make, **KNOBS.get(name, {}))(), expected)()


# Fixed and random diagonals of S S^T: to the check the other sketches are like these.
ONE_OF_EACH_KIND = ("hadamard", "gaussian", "rows_without_replacement")


@pytest.mark.montecarlo
@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH_KIND else pytest.param(name, marks=pytest.mark.grid) for name in SKETCHES]
)
def test_one_row_scaled_by_a_percent_is_caught(name):
    """Whichever the sketch; with a probability of at least 0.99 each by the contract's own bound on its errors."""
    contract = contract_of(changed(OneRowScaled, SKETCHES[name]), **SCALED_ROW_KNOBS.get(name, {}))
    with pytest.raises(AssertionError, match="S S"):
        getattr(contract(), IDENTITY)()


def test_every_check_of_the_contract_catches_some_mutant():
    assert {check for _, *expected in MUTANTS.values() for check in expected} == set(CHECKS)


@pytest.mark.slow
@pytest.mark.montecarlo
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name):
    """False-alarm rate at most 1.2e-5 a mutant, see the contract."""
    make, *expected = MUTANTS[name]
    contract = contract_of(make, **KNOBS.get(name, {}), **MORE_DRAWS.get(name, {}))
    assert failing(contract, CHECKS) == set(expected)


@pytest.mark.slow
@pytest.mark.montecarlo
@pytest.mark.parametrize("name", CONTROLS)
def test_a_second_implementation_passes_the_whole_contract(name):
    """False-alarm rate 1.2e-5 each, see the contract."""
    make, knobs = CONTROLS[name]
    assert failing(contract_of(make, **knobs), CHECKS) == set()
