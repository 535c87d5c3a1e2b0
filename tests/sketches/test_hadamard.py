"""The Hadamard sketch's matrices, its geometry, and what it promises about the rows that it keeps."""

import math

import pytest
import torch
from sketch_contract import draw_estimates, draw_products, structured_pair, z_bound

from rmm_linear.sketches import Hadamard
from rmm_linear_kernels.hadamard.reference import (
    POLYNOMIALS,
    columns_of_words,
    hadamard_dense,
    hadamard_entries,
    hadamard_order,
)

ORDERS = sorted({hadamard_order(rows) for rows in range(1, 65)} | {128, 256, 512})


def matrix(order):
    return hadamard_entries(torch.arange(order), order=order, width=order, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_hadamard(order):
    entries = matrix(order)
    assert set(entries.unique().tolist()) <= {1.0, -1.0}
    assert torch.equal(entries @ entries.t(), order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", ORDERS)
def test_some_entries_are_those_of_the_whole_matrix(order):
    generator = torch.Generator().manual_seed(order)
    columns = torch.randint(order, (2, 3), generator=generator)
    for width in {1, max(1, order - 1), order}:
        for dtype in (torch.float32, torch.float64):
            got = hadamard_entries(columns, order=order, width=width, dtype=dtype)
            assert got.dtype == dtype
            assert torch.equal(got.double(), matrix(order)[columns][..., :width])


def test_orders_leave_little_room():
    for rows in range(1, 1025):
        order = hadamard_order(rows)
        assert order >= rows
        if rows <= 64:
            assert order < rows + 4 or (order == 56 and rows > 48)
        else:
            assert order < 2 * rows
            assert order & (order - 1) == 0


@pytest.mark.parametrize(
    ("ratio", "rows", "geometry"),
    [
        (0.5, 4096, (64, 32)),
        (0.25, 8192, (128, 16)),
        # 0.1 of 64 is 6 of 64
        (0.1, 4096, (64, 6)),
        (1.0, 4096, (64, 64)),
        # decimals are meant exactly, although 0.3 * 64 * 10 in floats is slightly less than 192
        (0.3, 640, (10, 19)),
        (0.7, 10, (1, 7)),
        (0.5, 0, (0, 1)),
        (0.01, 1, (1, 1)),
        (0.5, 63, (1, 31)),
        (0.5, 65, (2, 16)),
        # of 64 rows at least one combination has to be kept, whatever the ratio says: blocks of small ratios are larger
        (1 / 32, 1 << 20, (1 << 14, 2)),
        (0.03, 1 << 20, (1 << 13, 3)),
        (0.01, 1 << 20, (1 << 12, 2)),
        (0.001, 1 << 20, (1 << 9, 2)),
    ],
)
def test_geometry(ratio, rows, geometry):
    assert Hadamard(ratio=ratio).geometry(rows) == geometry
    assert Hadamard(ratio=ratio).rank(rows) == math.prod(geometry)


def test_columns_are_shared_by_blocks_and_signs_are_not():
    blocks, kept = Hadamard(ratio=0.5).geometry(128)
    dense = hadamard_dense(torch.tensor([5]), rows=128, blocks=blocks, kept=kept, dtype=torch.float64)[0]
    first, second = dense[0::2, :kept], dense[1::2, kept:]
    signs = (first * second).sign()
    # one sign a row between the two blocks, the same in all of its columns
    assert torch.equal(signs, signs[:, :1].expand_as(signs))
    assert 10 < (signs[:, 0] < 0).sum() < 54
    torch.testing.assert_close(first.abs(), torch.full_like(first, kept**-0.5))


def remainder(polynomial, divisor):
    """Of polynomials over GF(2), each the bits of a number."""
    while polynomial.bit_length() >= divisor.bit_length():
        polynomial ^= divisor << (polynomial.bit_length() - divisor.bit_length())
    return polynomial


def test_the_fields_are_fields():
    """No polynomial of at most half the degree divides theirs."""
    for degree, polynomial in enumerate(POLYNOMIALS[2:], start=2):
        assert polynomial.bit_length() == degree + 1
        assert all(remainder(polynomial, divisor) for divisor in range(2, 1 << degree // 2 + 1)), degree
    # ratios have denominators of at most a million, so that no block is longer than 2**21
    assert len(POLYNOMIALS) > 21


@pytest.mark.parametrize("order", [2, 4, 8, 32, 64, 128, pytest.param(256, marks=pytest.mark.grid)])
def test_each_pair_of_columns_is_equally_likely(order):
    """Over all factors a, one word each: the differences of any two columns are all numbers but 0, once each."""
    # the first word that makes the factor a: (word * (order - 1)) >> 32 = a - 1
    words = torch.tensor([-(-((factor - 1) << 32) // (order - 1)) for factor in range(1, order)]).unsqueeze(1)
    columns = columns_of_words(words, order=order, kept=order)
    everything = torch.arange(order)
    assert torch.equal(columns.sort(-1).values, everything.expand(order - 1, order))
    difference = columns.unsqueeze(2) ^ columns.unsqueeze(1)  # (factors, order, order)
    off_diagonal = difference[:, ~torch.eye(order, dtype=torch.bool)]
    assert torch.equal(off_diagonal.sort(0).values, everything[1:].unsqueeze(1).expand_as(off_diagonal))


def test_no_half_of_the_columns_is_a_subgroup():
    """Where they are one, each row is paired with a single other one: right on average, and all of it in few pairs."""
    for order in (8, 16, 32, 64, 128):
        columns = set(columns_of_words(torch.tensor([[5]]), order=order, kept=order // 2)[0].tolist())
        assert any(one ^ other not in columns for one in columns for other in columns)


@pytest.mark.slow
@pytest.mark.montecarlo
@pytest.mark.parametrize(("rows", "ratio"), [(200, 0.02), (300, 0.01), (129, 0.03)])
def test_the_large_blocks_of_small_ratios_have_the_mean_and_variance_they_say(rows, ratio):
    """Below a ratio of 1/32 blocks have 128 rows and more: false-alarm rate 2e-6 a case."""
    x, g = structured_pair(rows, 24, 20, seed=7)
    sketch = Hadamard(ratio=ratio)
    relative = draw_estimates(sketch, x, g, draws=20_000, seed=8).squared_error / sketch.variance(x, g)
    error = relative.std().item() / 20_000**0.5
    assert error < 0.01
    assert abs(relative.mean().item() - 1) <= z_bound() * error
    products = draw_products(sketch, x, draws=20_000, seed=8)
    assert products.deviation.diagonal().abs().max() < 1e-12
    entries = (products.spread / 20_000 + 1e-24).sqrt()
    assert (products.deviation.abs() <= z_bound(rows * (rows + 1) // 2) * entries).all()
