"""The weight gradient in plain torch: dtypes, the scale of the product, and the way of a GPU."""

import pytest
import torch

from rmm_linear_kernels.low_bit.reference import dequantize, quantize
from rmm_linear_kernels.sketched_grad_weight import reference
from rmm_linear_kernels.sketched_grad_weight.reference import sketched_grad_weight, sketched_grad_weight_low_bit

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
# float64 to half: what one rounding of the result leaves
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def case(dtype, device="cpu"):
    g, x = torch.randn(40, 7).to(device, dtype), torch.randn(40, 5).to(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sums, mean = torch.randn(3, 7, dtype=wide, device=device), torch.randn(5, dtype=wide, device=device)
    truth = 8 * g.double().t() @ x.double() + torch.outer(sums.double().sum(0), mean.double())
    return (g, x, sums, mean), truth


@pytest.mark.parametrize("result", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_rounded_once(dtype, result, device):
    arguments, truth = case(dtype, device)
    got, bias = sketched_grad_weight(*arguments, scale=8.0, dtype=result, bias_dtype=dtype)
    assert got.dtype == (result or dtype)
    torch.testing.assert_close(bias, arguments[2].double().sum(0).to(dtype))
    coarsest = max(PRECISION[got.dtype], 1e-6 if dtype != torch.float64 else 0)
    assert (got - truth).abs().max() <= 1.01 * coarsest * truth.abs().max()


def test_the_scale_and_the_dtype_may_be_left_out():
    (g, x, sums, mean), _ = case(torch.float32)
    total = sums.sum(0)
    for rest, expected in (
        ((None, None), g.t() @ x),
        ((sums, mean), (g.t() @ x).addr_(total, mean)),
        ((sums, None), g.t() @ x),
    ):
        got, nothing = sketched_grad_weight(g, x, *rest)
        assert torch.equal(got, expected)
        assert nothing.shape == (0,)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_way_of_a_gpu_where_sketch_and_result_have_one_dtype(dtype):
    (g, x, sums, mean), truth = case(dtype)
    outer, bias = reference.outer_product_of_sums(sums, mean, dtype=dtype, bias_dtype=torch.float32)
    torch.testing.assert_close(bias, sums.sum(0))
    got = reference.with_half_precision_product(outer, g, x.float(), 8.0)
    # the mean's part is rounded before the product joins it
    assert (got - truth).abs().max() <= 3 * PRECISION[dtype] * truth.abs().max()
    assert got.dtype == dtype
    got = reference.with_half_precision_product(None, g, x, 8.0)
    assert (got - 8 * g.double().t() @ x.double()).abs().max() <= 3 * PRECISION[dtype] * truth.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("result", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_way_of_a_gpu(dtype, result):
    arguments, truth = case(dtype, "cuda")
    got, bias = sketched_grad_weight(*arguments, scale=8.0, dtype=result, bias_dtype=dtype)
    assert got.dtype == result
    torch.testing.assert_close(bias, arguments[2].sum(0).to(dtype))
    assert (got - truth).abs().max() <= 3 * PRECISION[result] * truth.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int3", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_bits_are_dequantized_and_multiplied(kind, dtype):
    (g, x, sums, mean), _ = case(dtype)
    seed, how = torch.tensor(1), {"kind": kind, "group": 16}
    parts = quantize(x, seed, None, **how)
    values = dequantize(*parts, seed, **how, features=5)
    options = {"scale": 2.0, "dtype": torch.float32, "bias_dtype": dtype}
    found = sketched_grad_weight_low_bit(g, *parts, seed, sums, mean, **how, **options)
    for one, other in zip(found, sketched_grad_weight(g, values, sums, mean, **options), strict=True):
        assert torch.equal(one, other)
    assert sketched_grad_weight_low_bit(g, *parts, seed, None, None, **how)[0].dtype == dtype
