"""The dense projections' kernel against its reference."""

from functools import partial

import pytest
import torch
from operands import DTYPES, LAYOUTS, assert_as_good, grid, operands

from rmm_linear_kernels.projection import kernel, reference

assert_is_as_good_as_the_reference = partial(
    assert_as_good, kernel.random_projection, reference.random_projection, scale=0.1
)


@pytest.mark.parametrize(
    ("rows", "rank", "seed"), [(1, 1, 0), (67, 3, -1), (33, 130, -(1 << 63)), grid(140, 5, 7_000_000_000)]
)
def test_entries_are_the_reference_s(rows, rank, seed, device, nan_poison):
    """The sketch of the identity is S^T: the signs bit for bit, the normals up to rounding."""
    identity, key = torch.eye(rows, device=device), torch.tensor(seed, device=device)
    for gaussian in (False, True):
        arguments = {"rank": rank, "gaussian": gaussian, "scale": 1.0, "dtype": torch.float32}
        found = kernel.random_projection(identity, key, None, **arguments)
        expected = reference.random_projection(identity, key, None, **arguments)
        if gaussian:
            assert (found - expected).abs().max() <= 3e-6
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("gaussian", [False, True])
def test_half_precision_multiplies_the_same_normals(gaussian, device, nan_poison):
    """Half types hold 1 exactly: their sketch of the identity is that of float32, normals to 2**-17 of their size."""
    key = torch.tensor(3, device=device)
    arguments = {"rank": 9, "gaussian": gaussian, "scale": 1.0, "dtype": torch.float32}
    expected = reference.random_projection(torch.eye(70, device=device), key, None, **arguments)
    for dtype in (torch.bfloat16, torch.float16):
        found = kernel.random_projection(torch.eye(70, device=device, dtype=dtype), key, None, **arguments)
        error = (found - expected).abs()
        assert (error <= expected.abs() * 2.0**-17 * gaussian + 3e-6 * gaussian).all()


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize(
    ("rows", "rank", "features"), [(1, 2, 5), (2, 1, 1), (131, 67, 37), grid(128, 64, 129), grid(70, 7, 257)]
)
def test_sketch_is_the_reference_s(rows, rank, features, gaussian, device, nan_poison):
    x, mean = operands(rows, features, torch.float32, device)
    seed = torch.tensor(11, device=device)
    for centre in (None, mean):
        assert_is_as_good_as_the_reference(x, seed, centre, rank=rank, gaussian=gaussian, dtype=torch.float32)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, gaussian, device, nan_poison):
    x, mean = operands(70, 19, dtype, device)
    seed = torch.tensor(-5, device=device)
    for centre, out in ((None, dtype), (mean, torch.float32), (mean.to(dtype), torch.bfloat16)):
        assert_is_as_good_as_the_reference(x, seed, centre, rank=13, gaussian=gaussian, dtype=out)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("rows", [67, grid(193)])
def test_split_rows_add_up(rows, gaussian, device, nan_poison, monkeypatch):
    monkeypatch.setattr(kernel, "_LEAST_ROWS", 64)
    x, mean = operands(rows, 9, torch.bfloat16, device)
    assert (kernel._splits(rows, 1)[0] > 1) == (rows >= 128)
    seed = torch.tensor(3, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        assert_is_as_good_as_the_reference(x, seed, mean, rank=5, gaussian=gaussian, dtype=dtype)


def test_splits_cover_the_rows():
    for rows in (0, 1, 511, 512, 1023, 1024, 4096, 4097, 32_768, 100_003):
        for tiles in (0, 1, 24, 64, 65, 5000):
            splits, rows_of_split = kernel._splits(rows, tiles)
            assert splits * rows_of_split >= rows
            assert (splits - 1) * rows_of_split < max(1, rows)
            assert rows_of_split % 64 == 0
            assert splits == 1 or (splits * tiles <= 128 and rows_of_split >= 512)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("layout", ["transposed", *map(grid, [*LAYOUTS][1:])])
def test_any_strides(layout, gaussian, device, nan_poison):
    x = LAYOUTS[layout](70, 21, device=device)
    mean = torch.randn(21, 2, device=device)[:, 1]
    seed = torch.tensor(3, device=device)
    arguments = {"rank": 5, "gaussian": gaussian, "scale": 1.0, "dtype": torch.float32}
    found = kernel.random_projection(x, seed, mean, **arguments)
    assert torch.equal(found, kernel.random_projection(x.contiguous(), seed, mean.contiguous(), **arguments))
    torch.testing.assert_close(found, reference.random_projection(x, seed, mean, **arguments), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("spread", [1e-30, 1e30])
def test_values_of_every_size(spread, gaussian, device):
    x, mean = operands(67, 5, torch.float32, device, spread)
    seed = torch.tensor(3, device=device)
    assert_is_as_good_as_the_reference(x, seed, mean, rank=9, gaussian=gaussian, dtype=torch.float32)


def test_same_seed_is_bitwise_equal_and_another_is_not(device):
    x, _ = operands(40, 5, torch.float32, device)
    for gaussian in (False, True):
        arguments = {"rank": 9, "gaussian": gaussian, "scale": 1.0, "dtype": torch.float32}
        first, again, other = (
            kernel.random_projection(x, torch.tensor(seed, device=device), None, **arguments) for seed in (4, 4, 5)
        )
        assert torch.equal(first, again)
        assert (first != other).any()


@pytest.mark.parametrize("gaussian", [False, True])
def test_nothing_comes_of_nothing(gaussian, device, nan_poison):
    seed = torch.tensor(3, device=device)
    for rows, rank, features in ((0, 4, 5), (70, 0, 5), (70, 4, 0), (0, 0, 0)):
        arguments = {"rank": rank, "gaussian": gaussian, "scale": 1.0, "dtype": torch.float32}
        x = torch.empty(rows, features, device=device)
        for mean in (None, torch.ones(features, device=device)):
            found = kernel.random_projection(x, seed, mean, **arguments)
            assert torch.equal(found, reference.random_projection(x, seed, mean, **arguments))


@pytest.mark.slow
@pytest.mark.parametrize("gaussian", [False, True])
def test_elements_beyond_two_to_the_31(gaussian, device):
    """Each of three rows begins 2**30 elements after the one before it."""
    memory = torch.empty((1 << 31) + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 40), (1 << 30, 1))
    x.copy_(torch.randn(3, 40))
    seed = torch.tensor(3, device=device)
    for y in (x, x.t()):
        arguments = {"rank": 5, "gaussian": gaussian, "scale": 1.0, "dtype": torch.float32}
        found = kernel.random_projection(y, seed, None, **arguments)
        assert torch.equal(found, kernel.random_projection(y.contiguous(), seed, None, **arguments))
