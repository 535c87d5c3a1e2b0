"""The dense projections: which random bits an element of S has, and sums that do not depend on the slabs."""

import pytest
import torch

from rmm_linear_kernels.philox.reference import PROJECTION_STREAM, randint4x, randn4x
from rmm_linear_kernels.random_projection import reference

SEED = torch.tensor(-7_000_000_001)


def words(row_group, column, rank):
    return randint4x(SEED, torch.tensor([row_group * rank + column + (PROJECTION_STREAM << 32)]))[:, 0]


def whole(rows, rank, gaussian, dtype=torch.float32):
    return reference.projection_slab(SEED, first_row=0, rows=rows, rank=rank, gaussian=gaussian, dtype=dtype)


@pytest.mark.parametrize("rank", [1, 7, 64])
def test_an_element_s_bits_are_those_of_its_row_and_column(rank):
    """The layout is a promise: same version, same seed, same sketch."""
    signs, normals = whole(300, rank, False), whole(300, rank, True)
    assert signs.shape == normals.shape == (300, rank)
    for row in (0, 1, 2, 3, 4, 31, 32, 63, 96, 127, 128, 255, 256, 299):
        for column in {0, rank // 2, rank - 1}:
            word = int(words(row // 128, column, rank)[row % 128 // 32])
            assert signs[row, column] == 1 - 2 * (word >> row % 32 & 1)
            counter = torch.tensor([row // 4 * rank + column + (PROJECTION_STREAM << 32)])
            assert normals[row, column] == randn4x(SEED, counter)[row % 4, 0]


@pytest.mark.parametrize("gaussian", [False, True])
def test_a_slab_is_a_part_of_the_whole(gaussian):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        entries = whole(700, 11, gaussian, dtype)
        assert entries.dtype == dtype
        for first, rows in ((0, 0), (0, 1), (128, 129), (256, 444), (640, 60)):
            slab = reference.projection_slab(SEED, first_row=first, rows=rows, rank=11, gaussian=gaussian, dtype=dtype)
            assert torch.equal(slab, entries[first : first + rows])


@pytest.mark.parametrize("gaussian", [False, True])
def test_one_of_several_seeds_is_like_that_seed_alone(gaussian):
    seeds = torch.tensor([[3, -4, 5], [6, 7, -(1 << 63)]])
    together = reference.projection_slab(seeds, first_row=128, rows=70, rank=5, gaussian=gaussian, dtype=torch.float32)
    assert together.shape == (2, 3, 70, 5)
    for seed, slab in zip(seeds.flatten(), together.flatten(0, 1), strict=True):
        alone = reference.projection_slab(seed, first_row=128, rows=70, rank=5, gaussian=gaussian, dtype=torch.float32)
        assert torch.equal(slab, alone)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 1000])
def test_the_product_is_that_with_the_whole_of_s(rows, gaussian, monkeypatch):
    # slabs of 128 rows, and normals of 3 groups of rows at a time
    monkeypatch.setattr(reference, "_SLAB_ELEMENTS", 1)
    monkeypatch.setattr(reference, "_PIECE", 3 * 9)
    x, mean = torch.randn(rows, 13).double(), torch.randn(13).double()
    entries = whole(rows, 9, gaussian, torch.float64)
    for centre in (None, mean):
        got = reference.random_projection(x, SEED, centre, rank=9, gaussian=gaussian, scale=0.3, dtype=torch.float64)
        expected = 0.3 * entries.t() @ (x if centre is None else x - centre)
        torch.testing.assert_close(got, expected)


def test_more_entries_than_random_bits_are_refused():
    """Beyond 2**32 counters the stream's neighbour would begin."""
    for gaussian, rows in ((True, 4), (False, 128)):
        reference.check_size(rows=rows << 16, rank=1 << 16, gaussian=gaussian)
        with pytest.raises(ValueError, match="lower the ratio"):
            reference.check_size(rows=(rows << 16) + 1, rank=1 << 16, gaussian=gaussian)
        x = torch.empty(1, 1).expand((rows << 16) + 1, 1)
        with pytest.raises(ValueError, match="hadamard"):
            reference.random_projection(x, SEED, None, rank=1 << 16, gaussian=gaussian, scale=1.0, dtype=torch.float32)
