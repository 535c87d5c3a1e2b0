"""Codes, steps and offsets of the Triton kernels are those of the reference, bit for bit."""

import itertools
import math

import pytest
import torch
from operands import DTYPES, grid

from rmm_linear_kernels.low_bit import kernel, reference

pytestmark = pytest.mark.usefixtures("nan_poison")

KINDS = tuple(reference.BITS)
GROUP = 16
SOME_KINDS = [kind if kind in ("int8", "int2") else grid(kind) for kind in KINDS]
# of strides and of groups that are read twice: 2 bits are packed as well
PACKED = [kind if kind == "int2" else grid(kind) for kind in KINDS]
# each kind in one dtype, and each dtype with one kind
FIRST_PAIRS = list(zip(KINDS, 2 * DTYPES, strict=False))
PAIRS = [*FIRST_PAIRS, *(grid(*pair) for pair in itertools.product(KINDS, DTYPES) if pair not in FIRST_PAIRS)]


def uneven(rows, features):
    """Columns of very different sizes and means, the first constant, the second zero."""
    y = torch.randn(rows, features) * torch.logspace(-3, 2, features) + 3 * torch.randn(features)
    y[:, 0] = 1.2345678
    y[:, 1:2] = 0
    return y


def within_poison(y, poison):
    """The same values in the middle of a larger tensor: what is read from beside them shows."""
    rows, features = y.shape
    larger = torch.full((rows + 2, features + 2), poison, dtype=y.dtype, device=y.device)
    larger[1:-1, 1:-1] = y
    return larger[1:-1, 1:-1]


def bits(values):
    """Bits of bfloat16 numbers; any NaN is the same."""
    return torch.where(values.isnan(), 0x7FC0, values.view(torch.int16))


def check_quantize(y, mean, *, kind, group=GROUP, seed=5):
    key = torch.tensor(seed, device=y.device)
    codes, steps, offsets = kernel.quantize(y, key, mean, kind=kind, group=group)
    expected = reference.quantize(y, key, mean, kind=kind, group=group)
    for got, wanted in zip((codes, steps, offsets), expected, strict=True):
        assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
    assert torch.equal(bits(steps), bits(expected[1]))
    assert torch.equal(bits(offsets), bits(expected[2]))
    # what is not finite has no codes, and leaves its neighbours' alone
    is_finite = steps.isfinite() & offsets.isfinite()
    of_group = is_finite[torch.arange(y.shape[0], device=y.device) // group]
    if is_finite.all():
        # what is left of a row's last byte as well
        assert torch.equal(codes, expected[0])
        return
    # what is left of a row's last byte is 0
    left = (1 << (y.shape[1] * reference.BITS[kind] % 8 or 8)) - 1
    assert (codes[:, -1] & ~left & 0xFF).eq(0).all()
    codes, wanted = (reference.unpacked(part, y.shape[1], kind) for part in (codes, expected[0]))
    assert torch.equal(codes[of_group], wanted[of_group])


@pytest.mark.parametrize(("kind", "dtype"), PAIRS, ids=str)
def test_codes_steps_and_offsets_are_the_reference_s(kind, dtype, device):
    check_quantize(uneven(37, 69).to(device, dtype), None, kind=kind)


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (1, 7), (17, 11), (5, 65)])
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_any_shape_centred(kind, rows, features, device):
    y = uneven(rows, features).to(device, torch.bfloat16)
    check_quantize(y, torch.randn(features).to(device), kind=kind, seed=-(1 << 62))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("kind", PACKED)
def test_nothing_to_round(kind, shape, device):
    check_quantize(torch.randn(shape, device=device), None, kind=kind)
    codes = reference.quantize(
        torch.randn(shape, device=device), torch.tensor(0, device=device), None, kind=kind, group=GROUP
    )
    got = kernel.dequantize(*codes, torch.tensor(0, device=device), kind=kind, group=GROUP, features=shape[1])
    assert got.shape == shape


# groups of fewer bits have more rows, and differ in nothing else
@pytest.mark.parametrize("kind", [kind if kind == "int8" else grid(kind) for kind in KINDS])
def test_the_groups_of_the_library(kind, device):
    group = 1024 // reference.BITS[kind]
    check_quantize(uneven(group + 3, 3).to(device), None, kind=kind, group=group)


@pytest.mark.parametrize("kind", PACKED)
def test_a_group_that_is_read_twice(kind, device, monkeypatch):
    monkeypatch.setattr(kernel, "_MOST_ROWS", 16)
    y = uneven(60, 9).to(device)
    y[30, 4], y[35, 5] = math.nan, math.inf
    check_quantize(y, None, kind=kind, group=37)


@pytest.mark.parametrize("kind", PACKED)
def test_any_strides_and_nothing_from_beside_them(kind, device):
    y, mean = uneven(19, 11).to(device), torch.randn(22, device=device)[::2]
    check_quantize(within_poison(y, math.nan), mean, kind=kind)
    check_quantize(within_poison(y.t().contiguous(), math.nan).t(), mean, kind=kind)
    check_quantize(torch.stack((y, y + math.nan), -1)[..., 0], None, kind=kind)
    check_quantize(y[:1].expand(19, 11), None, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_and_the_ends_of_the_range(kind, device):
    y = torch.randn(GROUP + 1, 20, device=device)
    y[3, 0], y[7, 1], y[8, 2] = math.nan, math.inf, -math.inf
    y[3, 3], y[4, 3] = math.inf, -math.inf
    y[3, 4], y[4, 4] = math.inf, math.nan
    y[:, 5:10] *= torch.tensor([1e38, 1e30, 1e-30, 1e-38, 1e-41], device=device)
    # next to the smallest and the largest numbers, and zeros with a sign
    y[:, 10], y[:, 11], y[:, 12], y[:, 13] = 1e-45, -1e-45, 3.4e38, -0.0
    y[1, 10], y[1, 12] = -1e-45, -3.4e38
    # steps that are too small for a quotient without rounding
    y[:, 14] = 1 + 2e-7 * torch.arange(GROUP + 1, device=device)
    check_quantize(y, None, kind=kind)
    check_quantize(y, torch.tensor([0.0] * 15 + [math.nan, math.inf, -math.inf, 3e38, 1e-40], device=device), kind=kind)


@pytest.mark.parametrize("beyond", [-1, 0])
def test_the_dither_decides_to_the_last_bit(beyond, device):
    """A step of 1 and an offset of 0: y in units of 2**-15, above the margin of 2**-12, and d add up to whole codes."""
    seed, columns = torch.tensor(11), torch.arange(40) % 8
    dither = reference._sum_of(*reference._dither(seed, 40, 40))
    y = (((columns + 1) << 15) - dither - 8 + beyond) / 2**15
    y[0], y[39] = 0, 255 - 2**-11
    codes, steps, _ = kernel.quantize(y.to(device), seed.to(device), None, kind="int8", group=40)
    assert torch.equal(steps.float().cpu(), torch.ones(1, 40))
    assert torch.equal(codes[1:39].cpu().long(), (columns + 1 + beyond).expand(38, 40))


@pytest.mark.parametrize(("kind", "dtype"), PAIRS, ids=str)
def test_what_the_codes_stand_for(kind, dtype, device):
    seed = torch.tensor(7, device=device)
    for rows, features in ((37, 9), (1, 1), (17, 131)):
        how = {"kind": kind, "group": GROUP, "features": features}
        codes, steps, offsets = reference.quantize(
            uneven(rows, features).to(device), seed, None, kind=kind, group=GROUP
        )
        expected = reference.dequantize(codes, steps, offsets, seed, **how)
        got = kernel.dequantize(codes, steps, offsets, seed, **how, dtype=dtype)
        assert got.dtype == dtype
        # a GPU may round once where the reference rounds twice
        size = expected.abs().amax(0) * 2.0**-22 + expected.abs() * torch.finfo(dtype).eps / 2
        assert ((got.double() - expected).abs() <= 1.01 * size + torch.finfo(dtype).tiny * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("kind", PACKED)
def test_codes_and_scales_of_any_strides(kind, device):
    seed, how = torch.tensor(7, device=device), {"kind": kind, "group": GROUP, "features": 11}
    parts = reference.quantize(uneven(19, 11).to(device), seed, None, kind=kind, group=GROUP)
    expected = kernel.dequantize(*parts, seed, **how)
    codes = parts[0]
    for strided in (within_poison(codes, 255), codes.t().contiguous().t(), torch.stack((codes, codes), -1)[..., 0]):
        assert torch.equal(kernel.dequantize(strided, *parts[1:], seed, **how), expected)
    steps, offsets = (part.t().contiguous().t() if part.dim() == 2 else part for part in parts[1:])
    assert torch.equal(kernel.dequantize(codes, steps, offsets, seed, **how), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind, device):
    y = torch.randn(GROUP + 1, 5, device=device)
    y[3, 0], y[4, 1], y[5, 2], y[:, 3] = math.nan, math.inf, -math.inf, 3e38
    y[2, 3] = -3e38
    seed, how = torch.tensor(7, device=device), {"kind": kind, "group": GROUP, "features": 5}
    parts = reference.quantize(y, seed, None, kind=kind, group=GROUP)
    got, expected = kernel.dequantize(*parts, seed, **how), reference.dequantize(*parts, seed, **how)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.allclose(got, expected, rtol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_elements(kind, device):
    for dtype in DTYPES:
        check_quantize(uneven(701, 257).to(device, dtype), torch.randn(257, device=device), kind=kind, group=128)
