"""Low-bit storage: unbiased element by element, never clipped, as many bytes as it says."""

import math

import pytest
import torch

from rmm_linear_kernels.low_bit import cpu, reference
from rmm_linear_kernels.low_bit.reference import dequantize, quantize, rounding_variance
from rmm_linear_kernels.philox.reference import random_halves, random_words

BITS = {"int8": 8, "int4": 4, "int2": 2}
KINDS = tuple(BITS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GROUP = 16


def uneven(rows=37, features=9):
    """Columns of very different sizes and means, one of them constant, one zero."""
    y = torch.randn(rows, features, dtype=torch.float64) * torch.logspace(-3, 3, features, dtype=torch.float64)
    y += 3 * torch.randn(features, dtype=torch.float64)
    y[:, 2], y[:, 3] = 1.2345678, 0
    return y


def round_trip(y, seed, mean=None, *, kind, group=GROUP):
    codes = quantize(y, seed, mean, kind=kind, group=group)
    return dequantize(*codes, seed, kind=kind, group=group, features=y.shape[-1])


@pytest.fixture(params=[reference, cpu], ids=["of a GPU", "of a CPU"])
def codec(request, monkeypatch):
    """An implementation in the place of this module's functions."""
    for name in ("quantize", "dequantize"):
        monkeypatch.setattr(f"{__name__}.{name}", getattr(request.param, name))


@pytest.mark.montecarlo
@pytest.mark.usefixtures("codec")
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_unbiased_with_the_variance_it_says(kind, mean):
    """4,000 draws of each element, 100 of them side by side.

    They see 3 % of a step and 9 % of its variance in one element, and 0.3 % and 1 % in all elements together.
    """
    (rows, features), copies, seeds = (37, 9), 100, 40
    y = uneven(rows, features)
    centre = y.mean(0) if mean else None
    exact = y if centre is None else y - centre
    step = quantize(y, torch.tensor(0), centre, kind=kind, group=GROUP)[1].double()
    step = step.repeat_interleave(GROUP, 0)[:rows]
    wide, wide_centre = y.repeat(1, copies), None if centre is None else centre.repeat(copies)
    drawn = torch.stack(
        [round_trip(wide, torch.tensor(seed), wide_centre, kind=kind).double() for seed in range(seeds)]
    )
    error = drawn.unflatten(-1, (copies, features)).transpose(1, 2).flatten(0, 1) - exact
    # where float32 can tell the values apart
    seen = step > 2**-12 * exact.abs().clamp(min=1e-30)
    assert seen.sum() > 150
    variance = rounding_variance(y, centre, kind=kind, group=GROUP)
    torch.testing.assert_close(variance, step.square() / 12)
    error, draws = error[:, seen] / step[seen], copies * seeds
    # uniform on +-1/2: 1e-6 by Bonferroni over 333 elements
    assert (error.mean(0) * (12 * draws) ** 0.5).abs().max() < 6.1
    assert ((error.var(0) * 12 - 1) / (0.8 / draws) ** 0.5).abs().max() < 6.1
    # the mean over all elements; errors of a row have a part in common in one draw
    assert abs(float(error.mean())) < 0.003
    assert abs(float(error.square().mean()) * 12 - 1) < 0.01
    assert error.abs().max() < 0.501


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_element_moves_by_more_than_half_a_step(kind, dtype):
    y = uneven(300, 50).to(dtype)
    got = round_trip(y, torch.tensor(5), kind=kind).double()
    for start in range(0, 300, GROUP):
        part, error = y[start : start + GROUP].double(), (got - y.double())[start : start + GROUP].abs()
        spread = part.amax(0) - part.amin(0)
        # steps and offsets are rounded outwards by at most 2**-7 of themselves
        bound = (spread + part.amin(0).abs() * 2**-7) * 1.01 / reference.LEVELS[kind] / 2
        assert (error <= bound + part.abs() * 2**-20).all()


def test_high_codes_are_not_biased():
    # 200 + u has no room for u's last bits in float32: a sum would round up where it must not, once in 2**16
    y = torch.full((256, 1 << 12), 200.0)
    # a step of 1
    y[0], y[1] = 0, 255 - 2**-11
    for seed in range(4):
        assert (round_trip(y, torch.tensor(seed), kind="int8", group=256) - y).abs().max() <= 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_offsets_are_the_reference_s_and_tiles_do_not_show(kind, dtype, monkeypatch):
    for rows, features in ((0, 5), (1, 1), (100, 7), (161, 24)):
        y, seed = (torch.randn(rows, features) + 1).to(dtype), torch.tensor(3)
        for mean in (None, torch.randn(features)):
            whole = cpu.quantize(y, seed, mean, kind=kind, group=GROUP)
            expected = reference.quantize(y, seed, mean, kind=kind, group=GROUP)
            assert [part.shape for part in whole] == [part.shape for part in expected]
            assert all(torch.equal(one, other) for one, other in zip(whole[1:], expected[1:], strict=True))
            values = cpu.dequantize(*whole, seed, kind=kind, group=GROUP, features=features, dtype=dtype)
            assert values.dtype == dtype
            for elements in (1, 5 * features, 40 * features):
                with monkeypatch.context() as patch:
                    patch.setattr(cpu, "_TILE_ELEMENTS", elements)
                    parts = cpu.quantize(y, seed, mean, kind=kind, group=GROUP)
                    assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))
                    again = cpu.dequantize(*parts, seed, kind=kind, group=GROUP, features=features, dtype=dtype)
                assert torch.equal(again, values)


@pytest.mark.usefixtures("codec")
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_values_do_not_overflow(kind):
    y = torch.tensor([[2.4e38, 2e38], [-2.4e38, -2e38], [1e38, 1e38], [0.0, 1.0]])
    for seed in range(20):
        got = round_trip(y, torch.tensor(seed), kind=kind)
        assert got.isfinite().all()
        assert ((got / 2.4e38 - y / 2.4e38).abs() <= 1.05 / reference.LEVELS[kind]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_slabs_do_not_show(kind, monkeypatch):
    y, seed = torch.randn(150, 7), torch.tensor(3)
    whole = quantize(y, seed, None, kind=kind, group=GROUP)
    variance = rounding_variance(y, None, kind=kind, group=GROUP)
    monkeypatch.setattr(reference, "_SLAB_ELEMENTS", 1)
    assert all(
        torch.equal(one, other)
        for one, other in zip(quantize(y, seed, None, kind=kind, group=GROUP), whole, strict=True)
    )
    assert torch.equal(round_trip(y, seed, kind=kind), dequantize(*whole, seed, kind=kind, group=GROUP, features=7))
    assert torch.equal(rounding_variance(y, None, kind=kind, group=GROUP), variance)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_a_constant_column_stays_near(kind):
    assert torch.equal(round_trip(torch.zeros(20, 3), torch.tensor(1), kind=kind), torch.zeros(20, 3))
    constant = round_trip(torch.full((20, 3), 1.2345678), torch.tensor(1), kind=kind)
    assert (constant / 1.2345678 - 1).abs().max() < 2**-7


@pytest.mark.usefixtures("codec")
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("features", [0, 1, 6, 7, 8, 9, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_dtypes(kind, features, rows):
    seed = torch.tensor(0)
    codes, steps, offsets = quantize(torch.randn(rows, features), seed, None, kind=kind, group=GROUP)
    assert codes.shape == (rows, math.ceil(features * BITS[kind] / 8))
    assert codes.dtype == torch.uint8
    assert steps.shape == (math.ceil(rows / GROUP), features)
    assert offsets.shape == steps.shape
    assert steps.dtype == offsets.dtype == torch.bfloat16
    back = dequantize(codes, steps, offsets, seed, kind=kind, group=GROUP, features=features)
    assert (back.shape, back.dtype) == ((rows, features), torch.float32)


@pytest.mark.parametrize("features", range(1, 18))
@pytest.mark.parametrize("kind", ["int4", "int2"])
def test_a_rows_codes_are_a_string_of_bits(kind, features):
    codes = torch.randint(0, reference.LEVELS[kind] + 1, (2, 5, features), dtype=torch.uint8)
    codes[0, 0] = reference.LEVELS[kind]
    packed = reference.packed(codes, kind)
    width = math.ceil(features * BITS[kind] / 8)
    assert packed.shape == (2, 5, width)
    assert reference.packed_width(features, kind) == width
    for row, of_row in zip(packed.flatten(0, 1).tolist(), codes.flatten(0, 1).tolist(), strict=True):
        # what is left of the last byte is 0
        assert int.from_bytes(bytes(row), "little") == sum(code << BITS[kind] * j for j, code in enumerate(of_row))
    assert torch.equal(reference.unpacked(packed, features, kind).to(torch.uint8), codes)


@pytest.mark.parametrize("kind", KINDS)
def test_many_seeds_at_once_are_those_one_by_one(kind):
    y, seeds = torch.randn(5, 40, 7), torch.tensor([0, -1, 7, 1 << 40, -(1 << 63)])
    for together, alone in zip(
        zip(*quantize(y, seeds, None, kind=kind, group=GROUP)[:2], strict=True),
        (quantize(each, seed, None, kind=kind, group=GROUP)[:2] for each, seed in zip(y, seeds, strict=True)),
        strict=True,
    ):
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e3, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_all_magnitudes(kind, size):
    y = torch.randn(40, 7) * size
    error = (round_trip(y, torch.tensor(0), kind=kind) / size - y / size).norm() / (y / size).norm()
    assert error < {"int8": 0.006, "int4": 0.1, "int2": 0.5}[kind]


@pytest.mark.usefixtures("codec")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows_in_its_column(kind, value):
    y = torch.randn(40, 7)
    y[20, 3] = value
    got = round_trip(y, torch.tensor(0), kind=kind)
    assert not got[16:32, 3].isfinite().any()
    assert (~got.isfinite()).sum() == 16


def test_halves_are_the_words_of_the_stream_in_order():
    seed = torch.tensor([3, -5])
    words = random_words(seed, 40, stream=3)
    expected = torch.stack((words % 65536, words // 65536), -1).flatten(-2)
    for count in (0, 1, 13, 70, 80):
        assert torch.equal(random_halves(seed, count, stream=3), expected[:, :count])


@pytest.mark.parametrize("kind", KINDS)
def test_roundings_are_uncorrelated(kind):
    y = torch.randn(128, 64)
    draws = torch.stack([round_trip(y, torch.tensor(seed), kind=kind, group=64) - y for seed in range(400)]).double()
    errors = draws / rounding_variance(y, None, kind=kind, group=64).clamp(min=1e-12).sqrt()
    errors = errors.clamp(-4, 4)
    first, second = errors[:, :64], errors[:, 64:]
    for one, other in (
        (errors[:, 1:], errors[:, :-1]),
        (errors[:, :, 1:], errors[:, :, :-1]),
        (errors[1:], errors[:-1]),
        (first, second),
        (errors[:, 7:, 5:], errors[:, :-7, :-5]),
    ):
        product = (one * other).flatten(1).mean(1)
        # the draws are independent of each other: 1e-6 a comparison
        assert abs(product.mean()) < 5 * product.std() / product.numel() ** 0.5 + 1e-4


def test_any_two_elements_have_independent_dithers():
    # corners of a rectangle are where the sum of a row's and a column's part could show
    of_rows, of_columns = reference._dither(torch.arange(40_000), 2, 2)
    u = (reference._sum_of(of_rows, of_columns).double() + 0.5).mul(2.0**-15).flatten(1)
    for one in range(4):
        counts = torch.histc(u[:, one], 16, 0, 1)
        assert ((counts - 2500) ** 2 / 2500).sum() < 50
        for other in range(one):
            cells = torch.histogramdd(u[:, [one, other]], [8, 8], range=[0.0, 1.0, 0.0, 1.0]).hist
            # chi-squared with 63 degrees of freedom: 1e-6 at 131
            assert ((cells - 625) ** 2 / 625).sum() < 131
