"""The weight gradient of the Triton kernels against float64, next to the plain-torch twin."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rmm_linear_kernels.low_bit import reference as low_bit
from rmm_linear_kernels.sketched_grad_weight import kernel, reference

pytestmark = pytest.mark.usefixtures("nan_poison")

HALVES = (torch.bfloat16, torch.float16)
# rank, out, in
# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
SHAPES = ((1, 1, 1), (65, 67, 130), (7, 200, 3), (64, 64, 64), (130, 1, 71))


def within_nan(values: Tensor) -> Tensor:
    """The same values in the middle of NaNs: what is read from beside them shows."""
    rows, columns = values.shape
    larger = torch.full((rows + 2, columns + 2), math.nan, dtype=values.dtype, device=values.device)
    larger[1:-1, 1:-1] = values
    return larger[1:-1, 1:-1]


def exact(g: Tensor, x: Tensor, sums: Tensor | None, mean: Tensor | None, scale: float) -> Tensor:
    product = scale * g.double().t() @ x.double()
    return product if sums is None or mean is None else product + torch.outer(sums.double().sum(0), mean.double())


def check(got: Tensor, twin: Tensor, truth: Tensor) -> None:
    assert (got.shape, got.dtype, got.device) == (twin.shape, twin.dtype, twin.device)
    bound = 2 * (twin.double() - truth).abs().max() + 1e-5 * truth.abs().max()
    assert (got.double() - truth).abs().max() <= bound


def sketches(
    rank: int, out: int, features: int, dtype: torch.dtype, device: torch.device, parts: int = 3
) -> tuple[Tensor, ...]:
    return (
        torch.randn(rank, out).to(device, dtype),
        torch.randn(rank, features).to(device, dtype),
        rank * torch.randn(parts, out, device=device),
        torch.randn(features, device=device),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_any_shape(shape, dtype, device):
    g, x, sums, mean = sketches(*shape, dtype, device)
    for result in {dtype, torch.float32}:
        for rest in ((None, None), (sums, mean), (sums, None)):
            how = {"scale": 4.0, "dtype": result}
            got, nothing = kernel.sketched_grad_weight(g, x, *rest, **how)
            check(got, reference.sketched_grad_weight(g, x, *rest, **how)[0], exact(g, x, *rest, 4.0))
            assert nothing.shape == (0,)
    assert kernel.sketched_grad_weight(g, x, None, None)[0].dtype == dtype


@pytest.mark.parametrize("parts", [1, 9, grid(7), grid(8), grid(70)])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_of_g_out_of_its_parts(parts, bias_dtype, device):
    # columns beyond a tile in either direction, whose programs must not write it again
    g, x, sums, mean = sketches(33, 70, 150, torch.bfloat16, device, parts=parts)
    sums = within_nan(sums / 33)
    expected = sums.double().sum(0)
    for of_mean in (None, mean):
        got, bias = kernel.sketched_grad_weight(g, x, sums, of_mean, dtype=torch.float32, bias_dtype=bias_dtype)
        outer, other = kernel.outer_product_of_sums(sums, of_mean, dtype=torch.bfloat16, bias_dtype=bias_dtype)
        twin = reference.outer_product_of_sums(sums, of_mean, dtype=torch.bfloat16, bias_dtype=bias_dtype)
        assert (got - exact(g, x, sums, of_mean, 1.0)).abs().max() <= 1e-5 * got.abs().max()
        for found in (bias, other, twin[1]):
            assert (found.shape, found.dtype) == ((70,), bias_dtype)
            # rounded once, from a sum in float32
            torch.testing.assert_close(found, expected.to(bias_dtype), atol=1e-5, rtol=torch.finfo(bias_dtype).eps)
        if of_mean is None:
            assert outer is None
            assert twin[0] is None
        else:
            truth = torch.outer(expected, mean.double())
            assert outer.dtype == torch.bfloat16
            assert (outer.double() - truth).abs().max() <= 2**-8 * truth.abs().max()
            torch.testing.assert_close(outer, twin[0], rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_any_strides_and_nothing_from_beside_them(dtype, device):
    g, x, sums, mean = sketches(70, 66, 35, dtype, device)
    expected, _ = kernel.sketched_grad_weight(g, x, sums, mean)
    sums, mean = (torch.stack((part, part + math.nan), -1)[..., 0] for part in (sums, mean))
    for other_g, other_x in (
        (within_nan(g), within_nan(x)),
        (within_nan(g.t().contiguous()).t(), within_nan(x.t().contiguous()).t()),
        (torch.stack((g, g + math.nan), -1)[..., 0], x),
    ):
        assert torch.equal(kernel.sketched_grad_weight(other_g, other_x, sums, mean)[0], expected)
    outers = [kernel.outer_product_of_sums(part, mean, dtype=dtype, bias_dtype=dtype) for part in (sums, sums.clone())]
    assert torch.equal(outers[0][0], outers[1][0])
    one, _ = kernel.sketched_grad_weight(g[:1].expand(70, 66), x, sums, mean, dtype=torch.float32)
    truth = exact(g[:1].expand(70, 66), x, sums, mean, 1.0)
    assert (one - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("many_tiles", [1, grid(4), grid(1000)])
def test_every_tile_and_the_order_of_the_tiles(many_tiles, device, monkeypatch):
    monkeypatch.setattr(kernel, "_MANY_TILES", many_tiles)
    monkeypatch.setattr(kernel, "_GROUPED", 2)
    g, x, sums, mean = sketches(70, 336, 272, torch.bfloat16, device)
    got, bias = kernel.sketched_grad_weight(g, x, sums, mean, dtype=torch.float32, bias_dtype=torch.float32)
    truth = exact(g, x, sums, mean, 1.0)
    torch.testing.assert_close(bias, sums.sum(0))
    assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()
    codes = low_bit.quantize(x.float(), torch.tensor(1, device=device), None, kind="int4", group=64)
    how = {"kind": "int4", "group": 64, "dtype": torch.float32}
    how["bias_dtype"] = torch.float32
    got, bias = kernel.sketched_grad_weight_low_bit(g, *codes, torch.tensor(1, device=device), sums, mean, **how)
    twin, expected = reference.sketched_grad_weight_low_bit(
        g, *codes, torch.tensor(1, device=device), sums, mean, **how
    )
    torch.testing.assert_close(bias, expected)
    assert (got - twin).abs().max() <= 4e-3 * truth.abs().max()


def test_large_results_get_large_tiles_where_they_fit():
    def sides(dtype: torch.dtype, size: int, shared_bytes: int) -> tuple[int, int]:
        tile = kernel._tile_of(dtype, size, size, shared_bytes)
        return tile.height, tile.width

    for dtype in HALVES:
        assert sides(dtype, 4096, 227 << 10) == sides(dtype, 4096, 163 << 10) == (128, 256)
        assert sides(dtype, 4096, 99 << 10) == sides(dtype, 1536, 227 << 10) == (128, 128)
        assert sides(dtype, 768, 227 << 10) == (64, 64)
    assert sides(torch.float32, 4096, 227 << 10) == (64, 64)
    for group, size, height in ((128, 4096, 256), (48, 4096, 64), (128, 4095, 64), (128, 768, 64)):
        assert kernel._low_bit_tile_of(size, size, group, 227 << 10).height == height


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_nothing_to_multiply(shape, device):
    g, x, sums, mean = sketches(*shape, torch.bfloat16, device)
    options = {"dtype": torch.float32, "bias_dtype": torch.float32}
    found = kernel.sketched_grad_weight(g, x, sums + 1, mean, **options)
    expected = reference.sketched_grad_weight(g, x, sums + 1, mean, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    outer, bias = kernel.outer_product_of_sums(sums + 1, mean, **options)
    assert (outer.shape, bias.shape) == ((shape[1], shape[2]), (shape[1],))
    torch.testing.assert_close(bias, (sums + 1).sum(0))
    seed, how = torch.tensor(0, device=device), {"kind": "int8", "group": 16}
    codes = low_bit.quantize(x, seed, None, **how)
    got = kernel.sketched_grad_weight_low_bit(g, *codes, seed, sums, mean, **how)[0]
    torch.testing.assert_close(got, reference.sketched_grad_weight_low_bit(g, *codes, seed, sums, mean, **how)[0])


def test_a_float16_product_beyond_its_range_is_scaled_before_it_is_rounded(device):
    g, x = torch.full((4, 3), 200.0, device=device).half(), torch.full((4, 5), 200.0, device=device).half()
    got, _ = kernel.sketched_grad_weight(g, x, None, None, scale=2.0**-4)
    assert torch.equal(got, torch.full((3, 5), 10000.0, dtype=torch.float16, device=device))


@pytest.mark.parametrize("kind", list(low_bit.BITS))
@pytest.mark.parametrize("dtype", [HALVES[0], grid(HALVES[1])], ids=str)
def test_low_bits_are_those_that_are_dequantized_to_the_same_dtype(kind, dtype, device):
    seed = torch.tensor(-9, device=device)
    # a group that blocks of the product divide, one that they divide into 16 rows, one that they don't divide
    for shape, group in (((70, 67, 71), 64), ((33, 5, 9), 48), ((70, 66, 30), 20)):
        g, _, sums, mean = sketches(*shape, dtype, device)
        x = torch.randn(shape[0], shape[2], device=device) * 2 + torch.randn(shape[2], device=device)
        parts = low_bit.quantize(x, seed, None, kind=kind, group=group)
        how = {"kind": kind, "group": group}
        values = low_bit.dequantize(*parts, seed, **how, features=shape[2])
        truth = exact(g, values, sums, mean, 2.0)
        got, twin = (
            module.sketched_grad_weight_low_bit(g, *parts, seed, sums, mean, **how, scale=2.0, dtype=torch.float32)[0]
            for module in (kernel, reference)
        )
        check(twin, twin, truth)
        assert got.dtype == torch.float32
        rounded, _ = reference.sketched_grad_weight(g, values.to(dtype), sums, mean, scale=2.0, dtype=torch.float32)
        if kernel.supports(kind) and group % 16 == 0:
            assert (got - rounded).abs().max() <= 2e-6 * truth.abs().max()
        check(got, rounded, truth)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_low_bits_of_any_strides_uncentred(kind, device):
    seed, how = torch.tensor(3, device=device), {"kind": kind, "group": 16}
    g, x, *_ = sketches(37, 20, 19, torch.bfloat16, device)
    codes, steps, offsets = low_bit.quantize(x, seed, None, **how)
    expected, _ = kernel.sketched_grad_weight_low_bit(g, codes, steps, offsets, seed, None, None, **how)
    assert expected.dtype == torch.bfloat16
    larger = torch.full((39, codes.shape[1] + 2), 255, dtype=torch.uint8, device=device)
    larger[1:-1, 1:-1] = codes
    steps, offsets = steps.t().contiguous().t(), offsets.t().contiguous().t()
    for other in (larger[1:-1, 1:-1], codes.t().contiguous().t()):
        got, _ = kernel.sketched_grad_weight_low_bit(within_nan(g), other, steps, offsets, seed, None, None, **how)
        assert torch.equal(got, expected)


def test_what_is_not_finite_shows_in_its_column(device):
    seed, how = torch.tensor(3, device=device), {"kind": "int8", "group": 16}
    g, x, *_ = sketches(20, 3, 5, torch.bfloat16, device)
    x[17, 2] = math.nan
    got, _ = kernel.sketched_grad_weight_low_bit(g, *low_bit.quantize(x, seed, None, **how), seed, None, None, **how)
    assert torch.equal(got.isfinite(), torch.tensor([True, True, False, True, True], device=device).expand(3, 5))
