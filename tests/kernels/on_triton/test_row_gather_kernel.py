"""The kernels of row sampling against their plain-torch twins."""

from functools import partial

import pytest
import torch

from rmm_linear_kernels.row_gather import kernel, reference
from rmm_linear_kernels.row_sampling.reference import sample_rows, sample_rows_winner_take_all

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
# one element, primes, several tiles of rows and of features
SHAPES = [(1, 1), (3, 700), (17, 37), grid(67, 512), grid(41, 1027)]


def operands(rows, features, dtype, device, spread=1.0):
    """An input inside a frame of NaN, so that reading beyond its edge shows, and a mean."""
    frame = torch.full((rows + 8, features + 24), torch.nan, dtype=dtype, device=device)
    x = frame[4:-4, 8:-16]
    x.copy_(torch.randn(rows, features) * spread)
    return x, torch.randn(features, device=device) * spread


def layouts(rows, features, device):
    yield torch.randn(features, rows, device=device).t()
    yield torch.randn(rows, 2 * features, device=device)[:, ::2]
    yield torch.randn(3 * rows, features, device=device)[::3]
    yield torch.randn(1, features, device=device).expand(rows, features)
    yield torch.randn(rows, 1, device=device).expand(rows, features)


def framed(values):
    """The same vector, every other element of a larger one that is otherwise not to be used."""
    odd = -7 if not values.dtype.is_floating_point else torch.nan
    frame = torch.full((2 * len(values) + 1,), odd, dtype=values.dtype, device=values.device)
    frame[1::2] = values
    return frame[1::2]


def assert_gathers_like_the_twin(x, index, mean, scales, *, scale, dtype):
    found = kernel.gather_rows(x, index, mean, scales, scale=scale, dtype=dtype)
    twin = reference.gather_rows(x, index, mean, scales, scale=scale, dtype=dtype)
    assert found.is_contiguous()
    assert (found.dtype, found.shape) == (twin.dtype, twin.shape)
    if dtype == torch.bfloat16 and x.device.type == "cpu":
        # Triton's interpreter cuts bfloat16 off instead of rounding it
        assert ((found.float() - twin.float()).abs() <= 2.0**-7 * twin.float().abs()).all()
    else:
        # the same operations in the same order
        assert torch.equal(found, twin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "features"), SHAPES)
def test_rows_are_the_twin_s(rows, features, dtype, device, nan_poison):
    x, mean = operands(rows, features, dtype, device)
    for rank, out, integer in ((rows, dtype, torch.int32), (2 * rows + 1, torch.float32, torch.int64)):
        index = torch.randint(rows, (rank,), device=device, dtype=integer)
        index[-1] = rows - 1
        scales = torch.rand(rank, device=device)
        for centre in (None, mean):
            assert_gathers_like_the_twin(x, index, centre, None, scale=1.0, dtype=out)
            assert_gathers_like_the_twin(x, index, centre, scales, scale=0.3, dtype=out)


def test_vectors_of_any_stride_and_dtype(device, nan_poison):
    x, mean = operands(19, 70, torch.float32, device)
    index, scales = torch.randint(19, (11,), device=device), torch.rand(11, device=device)
    expected = reference.gather_rows(x, index, mean, scales, scale=2.0, dtype=torch.float32)
    for integer in (torch.int8, torch.int16, torch.int32, torch.int64):
        vectors = (framed(index.to(integer)), framed(mean), framed(scales))
        assert torch.equal(kernel.gather_rows(x, *vectors, scale=2.0, dtype=torch.float32), expected)


def test_inputs_of_any_stride(device, nan_poison):
    index, mean, scales = torch.randint(41, (29,), device=device), torch.randn(70, device=device), torch.rand(29)
    for x in layouts(41, 70, device):
        assert_gathers_like_the_twin(x, index, mean, scales.to(device), scale=0.3, dtype=torch.float32)
        torch.testing.assert_close(kernel.row_norms(x, mean), reference.row_norms(x, mean), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "features"), SHAPES)
def test_norms_are_the_twin_s(rows, features, dtype, device, nan_poison):
    x, mean = operands(rows, features, dtype, device)
    for centre in (None, mean, framed(mean), mean.to(dtype)):
        found, twin = kernel.row_norms(x, centre), reference.row_norms(x, centre)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, twin, rtol=1e-14, atol=0)


def test_norms_of_values_of_every_size(device):
    """The squares of 1e-40 and 1e38 are beyond float32."""
    for spread in (1e-40, 1e-30, 1.0, 1e30, 1e37):
        x, mean = operands(13, 67, torch.float32, device, spread)
        for centre in (None, mean):
            torch.testing.assert_close(kernel.row_norms(x, centre), reference.row_norms(x, centre), rtol=1e-14, atol=0)


def test_norms_of_rows_that_are_zero_or_not_finite(device, nan_poison):
    x = torch.randn(7, 19, device=device)
    x[1], x[2, 3], x[4, 5], x[6, 0] = 0, torch.nan, torch.inf, -torch.inf
    found, twin = kernel.row_norms(x, None), reference.row_norms(x, None)
    torch.testing.assert_close(found, twin, rtol=1e-14, atol=0, equal_nan=True)
    assert found[1] == 0


def test_draws_follow_the_kernel_s_norms(device):
    """The integer weights are rounded to 2**-40: norms that differ by rounding give the same rows."""
    x, mean = operands(67, 37, torch.bfloat16, device)
    seed = torch.tensor(3, device=device)
    for centre in (None, mean):
        for sample in (sample_rows, sample_rows_winner_take_all):
            index, squared = sample(kernel.row_norms(x, centre), seed, rank=20)
            expected_index, expected_squared = sample(reference.row_norms(x, centre), seed, rank=20)
            assert torch.equal(index, expected_index)
            torch.testing.assert_close(squared, expected_squared, rtol=1e-11, atol=0)


def test_nothing_comes_of_nothing(device, nan_poison):
    for rows, rank, features in ((0, 0, 5), (7, 0, 5), (7, 3, 0)):
        x = torch.ones(rows, features, device=device)
        index = torch.zeros(rank, dtype=torch.int32, device=device)
        for mean in (None, torch.ones(features, device=device)):
            found = kernel.gather_rows(x, index, mean, None, scale=1.0, dtype=torch.bfloat16)
            assert (found.shape, found.dtype) == ((rank, features), torch.bfloat16)
            assert torch.equal(kernel.row_norms(x, mean), reference.row_norms(x, mean))


@pytest.mark.slow
def test_elements_beyond_two_to_the_31(device):
    """Each of three rows begins 2**30 elements after the one before it."""
    memory = torch.empty((1 << 31) + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 40), (1 << 30, 1))
    x.copy_(torch.randn(3, 40))
    for y in (x, x.t()):
        index = torch.arange(y.shape[0], dtype=torch.int32, device=device).flip(0)
        assert_gathers_like_the_twin(y, index, None, None, scale=1.0, dtype=torch.float32)
        torch.testing.assert_close(
            kernel.row_norms(y, None), reference.row_norms(y.contiguous(), None), rtol=1e-14, atol=0
        )
