"""LowBit: the contract, with rounding in it; bytes; and what a configuration makes of a storage."""

import itertools
import math

import pytest
import torch
from sketch_contract import Estimates, SketchContract, assert_unbiased

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.functional import linear
from rmm_linear.memory import measure_kept_bytes
from rmm_linear.sketches import STORAGES, Centered, Hadamard, LowBit, available_sketches
from rmm_linear_kernels.low_bit.reference import dequantize, quantize


def low_bit_of(sketch):
    return sketch.inner if isinstance(sketch, Centered) else sketch


class LowBitContract(SketchContract):
    """The contract of what is not S^T x any more, but a random rounding of it."""

    draws = 4

    def stored(self, sketch, x, seed):
        return low_bit_of(sketch).decoded(sketch.compress(x, self._seed(seed))).double()

    def scale(self, sketch, rows):
        """What S^T x is stored times: +-1 combinations of the rows times a power of 2."""
        if low_bit_of(sketch).inner is None:
            return 1.0
        blocks, kept = low_bit_of(sketch).inner.geometry(max(1, rows))
        return kept**0.5 * 2.0 ** round(math.log2(blocks / max(1, rows)) / 2)

    def _expected(self, sketch, x, g, seed):
        dense = sketch.dense(x, self._seed(seed).unsqueeze(0))[0]
        plain_x, plain_g, known = self.sketched_pair(sketch, x.double(), g.double())
        scale = self.scale(sketch, x.shape[0])
        stored, sketched_g = self.stored(sketch, x, seed), dense.t() @ plain_g / scale
        # at most a step from what is to be stored
        values = scale * (dense.t() @ plain_x)
        if values.numel() and values.isfinite().all():
            # a centred column may be nothing but the rounding of its mean
            largest = values.abs().amax(0) + 1e-5 * x.double().abs().amax()
            steps = {"int8": 255, "int4": 15, "int2": 3}[low_bit_of(sketch).storage]
            assert ((stored - values).abs() <= (2.1 / steps + 0.02) * largest).all()
        expected = sketched_g.t() @ stored
        size = sketched_g.norm() * stored.norm()
        if known is not None:
            expected, size = expected + known, size + known.norm()
        return expected, size + torch.finfo(torch.float64).tiny

    @pytest.mark.grid
    def test_mean_of_s_s_transposed_is_identity(self):
        super().test_mean_of_s_s_transposed_is_identity()

    def test_dense_is_that_of_the_sketch_without_rounding(self):
        """To the bit, so that its mean is measured by that sketch's own contract."""
        low_bit, (x, _), seeds = low_bit_of(self.make(0.5)), self._pair(67), torch.arange(50)
        assert torch.equal(self.make(0.5).dense(x, seeds), low_bit.inner.dense(x, seeds))

    def test_different_seeds_give_different_sketches(self):
        x, _ = self._pair(67)
        stored = torch.stack([self.stored(self.make(0.5), x, seed) for seed in (0, 1, -1, 1 << 32, 1 << 62)])
        assert (torch.cdist(stored.flatten(1), stored.flatten(1)) + torch.eye(5)).min() > 0

    def _draw_estimates(self, rows, ratio):
        if (rows, ratio) not in self._estimates:
            sketch, (x, g) = self.make(ratio), self._pair(rows)
            self._estimates[rows, ratio] = self.draw(sketch, x, g)
        return self._estimates[rows, ratio]

    def draw(self, sketch, x, g):
        plain_x, plain_g, _ = self.sketched_pair(sketch, x, g)
        low_bit, scale, exact = low_bit_of(sketch), self.scale(sketch, x.shape[0]), plain_g.t() @ plain_x
        how = {"kind": low_bit.storage, "group": low_bit.group}
        size, found = exact.norm(), []
        for seeds in torch.arange(1, 1 + self.gradient_draws).split(1000):
            dense = sketch.dense(x, seeds).transpose(1, 2)
            codes = quantize(scale * (dense @ plain_x), seeds, None, **how)
            stored = dequantize(*codes, seeds, **how, features=x.shape[1]).double()
            error = ((dense @ plain_g / scale).transpose(1, 2) @ stored - exact).flatten(1)
            along, total = error @ exact.flatten() / size.square(), error.sum(1) / (size * exact.numel() ** 0.5)
            found.append(torch.stack((along, total, error.square().sum(1))))
        return Estimates(*torch.cat(found, 1).unbind())

    def test_variance_equals_the_closed_form(self):
        # more draws than anybody else needs: the rounding's part to a fraction of the standard error
        self.draws = 2000
        super().test_variance_equals_the_closed_form()


class HoldsTheInput(LowBitContract):
    """Without a sketch: nothing of the contract that is about S, and rounding is all the noise there is."""

    gradient_cases = ((37, 1.0), (67, 1.0))
    gradient_draws = 4_000
    test_kept_rows_follow_the_ratio = None
    test_mean_of_s_s_transposed_is_identity = None
    test_dense_is_that_of_the_sketch_without_rounding = None

    def _shapes(self):
        return ((rows, 1.0) for rows in (0, 1, 2, 3, 13, 64, 67, 200, 257, 600))


def contract_of(name, kind, *, base=LowBitContract, is_centred=False, **knobs):
    def make(self, ratio):
        sketch = LowBit(None, kind) if base is HoldsTheInput else LowBit(Hadamard(ratio=ratio), kind, draws=self.draws)
        return Centered(sketch) if is_centred else sketch

    return type(name, (base,), {"make": make, "seed": int(is_centred), "__module__": __name__, **knobs})


TestInt8Hadamard = pytest.mark.slow(contract_of("TestInt8Hadamard", "int8"))
TestInt4Hadamard = pytest.mark.slow(contract_of("TestInt4Hadamard", "int4"))
# a larger part of the variance is the rounding's
TestInt2Hadamard = contract_of("TestInt2Hadamard", "int2", gradient_draws=9_000)
TestCenteredInt4Hadamard = contract_of("TestCenteredInt4Hadamard", "int4", is_centred=True, gradient_draws=6_000)
TestInt4Input = contract_of("TestInt4Input", "int4", base=HoldsTheInput)
TestCenteredInt4Input = contract_of("TestCenteredInt4Input", "int4", base=HoldsTheInput, is_centred=True)


CONFIGS = [
    RMMConfig(ratio=ratio, sketch=sketch, center=center, storage=storage, min_rows=1)
    for storage in STORAGES
    for ratio, sketch in ((1.0, "hadamard"), (0.4, "hadamard"), (0.4, "gaussian"), (0.4, "crs"), (0.4, "wta_crs"))
    for center in (False, True)
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_keeps_the_bytes_that_its_config_says(config, dtype):
    layer = RMMLinear(33, 7, config=config, dtype=dtype)
    # a ragged group, and an odd width
    promised = config.saved_bytes(300, 33, dtype)
    assert measure_kept_bytes(layer, torch.randn(300, 33, dtype=dtype)) == promised
    width, group = {"int8": (33, 128), "int4": (17, 256), "int2": (9, 512)}[config.storage]
    rank = config.sketch_object.rank(300)
    assert promised >= rank * width + 4 * 33 * math.ceil(rank / group)


def test_the_bytes_of_a_wide_layer_are_a_quarter_and_3_percent():
    config, whole = RMMConfig(ratio=1.0, storage="int4", center=False), 4096 * 768 * 2
    assert config.saved_bytes(4096, 768, torch.bfloat16) / whole == pytest.approx(0.25 * (1 + 4 / 128), rel=1e-5)
    assert RMMConfig(ratio=0.4, storage="int4").saved_bytes(4096, 768, torch.bfloat16) / whole < 0.1 * 1.04
    # one row of int8 and its scales are more than one row of bfloat16
    plain, rounded = (RMMConfig(ratio=0.01, storage=each) for each in (None, "int8"))
    assert rounded.saved_bytes(128, 768, torch.bfloat16) > plain.saved_bytes(128, 768, torch.bfloat16)


@pytest.mark.montecarlo
@pytest.mark.parametrize(
    ("sketch", "storage", "center"),
    [
        *((sketch, None, True) for sketch in ("hadamard", "rows_without_replacement", "crs")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(available_sketches(), (None, *STORAGES), (False, True))
        ),
    ],
)
def test_a_layer_that_draws_its_own_seeds_is_unbiased(sketch, storage, center):
    """False-alarm rate 3e-6 each; a bias of 1 %, or 5 % with a storage, is 6 standard errors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(67, 48, generator=generator, dtype=torch.float64)
    g = x @ torch.linalg.qr(torch.randn(48, 48, generator=generator, dtype=torch.float64))[0]
    weight = torch.zeros(48, 48, dtype=torch.float64, requires_grad=True)
    config = RMMConfig(ratio=0.6, sketch=sketch, storage=storage, center=center, min_rows=1)
    torch.manual_seed(0)

    def draw():
        return torch.autograd.grad(linear(x, weight, config=config), weight, g)[0]

    assert_unbiased(draw, g.t() @ x, draws=1300, bias=0.01 if storage is None else 0.05)


def test_rounding_costs_little_next_to_the_rank_that_it_buys():
    contract = TestInt4Hadamard()
    x, g = contract._pair(200)
    full = Hadamard(ratio=0.1).variance(x, g)
    # the same bytes of bfloat16
    assert LowBit(Hadamard(ratio=0.4), "int4").variance(x, g) < 0.3 * full
    assert LowBit(Hadamard(ratio=0.8), "int2").variance(x, g) < 0.3 * full


def test_what_cannot_be_rounded_as_one_is_refused():
    for inner in (Centered(Hadamard(ratio=0.5)), LowBit(Hadamard(ratio=0.5), "int8")):
        with pytest.raises(ValueError, match="whose tensors can't be rounded together; put Centered around LowBit"):
            LowBit(inner, "int8")
    with pytest.raises(ValueError, match="draws=0 give no average"):
        LowBit(None, "int8", draws=0)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_default_draws_are_good_to_3_percent(storage):
    x, g = TestInt4Hadamard()._pair(200)
    few, many = (LowBit(Hadamard(ratio=0.4), storage, **draws).variance(x, g) for draws in ({}, {"draws": 1500}))
    assert abs(few / many - 1) < 0.03


def test_a_storage_is_a_knob_like_the_others():
    for storage in STORAGES:
        config = RMMConfig(ratio=0.5, storage=storage)
        assert RMMConfig.from_dict(config.to_dict()) == config
        assert config.sketch_object == Centered(LowBit(Hadamard(ratio=0.5), storage))
    assert RMMConfig(ratio=1.0, storage="int8", center=False).sketch_object == LowBit(None, "int8")
    assert RMMConfig(ratio=1.0, storage="int8").sketches(4096)
    assert not RMMConfig(ratio=1.0).sketches(4096)
    with pytest.raises(ValueError, match="storage='bf16' is unknown"):
        LowBit(None, "bf16")


@pytest.mark.parametrize("ratio", [0.4, 0.004, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_a_gradient_of_equal_rows_has_no_noise(storage, dtype, ratio):
    """It is zero once it is centred; in blocks of 64 rows and of 550, and of x itself."""
    x, g = (torch.randn(1100, 12) + 2).to(dtype), torch.ones(1100, 10, dtype=dtype)
    sketch = RMMConfig(ratio=ratio, storage=storage).sketch_object
    found, bias = sketch.backward(g, sketch.compress(x, torch.tensor(5)), dtype=torch.float32)
    expected = x.double().sum(0).expand(10, 12)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max()))
    assert bias.tolist() == torch.full((10,), 1100.0).to(dtype).tolist()
