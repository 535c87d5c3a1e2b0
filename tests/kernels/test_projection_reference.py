"""The dense projections: which random bits an element of S has, and sums that do not depend on the slabs."""

import pytest
import torch

from rmm_linear_kernels.philox.reference import PROJECTION_STREAM, cell_counters, randint4x, randn4x
from rmm_linear_kernels.projection import reference

SEED = torch.tensor(-7_000_000_001)


def cell(row_group, column):
    """The counter of a cell: two of its words, and the third."""
    return torch.tensor([(row_group + column) % (1 << 32) + (PROJECTION_STREAM << 32)]), torch.tensor([row_group])


def whole(rows, rank, gaussian, dtype=torch.float32):
    return reference.projection_slab(SEED, first_row=0, rows=rows, rank=rank, gaussian=gaussian, dtype=dtype)


@pytest.mark.parametrize("rank", [1, 7, 64])
def test_an_element_s_bits_are_those_of_its_row_and_column(rank):
    """The layout is a promise: same version, same seed, same sketch."""
    signs, normals = whole(300, rank, False), whole(300, rank, True)
    assert signs.shape == normals.shape == (300, rank)
    for row in (0, 1, 2, 3, 4, 31, 32, 63, 96, 127, 128, 255, 256, 299):
        for column in {0, rank // 2, rank - 1}:
            word = int(randint4x(SEED, *cell(row // 128, column))[row % 128 // 32, 0])
            assert signs[row, column] == 1 - 2 * (word >> row % 32 & 1)
            assert normals[row, column] == randn4x(SEED, *cell(row // 4, column))[row % 4, 0]


@pytest.mark.parametrize("gaussian", [False, True])
def test_a_slab_is_a_part_of_the_whole(gaussian):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        entries = whole(700, 11, gaussian, dtype)
        assert entries.dtype == dtype
        for first, rows in ((0, 0), (0, 1), (128, 129), (256, 444), (640, 60)):
            slab = reference.projection_slab(SEED, first_row=first, rows=rows, rank=11, gaussian=gaussian, dtype=dtype)
            assert torch.equal(slab, entries[first : first + rows])


@pytest.fixture(params=["of a CPU", "of a GPU"])
def draws(request, monkeypatch):
    """Either draws, in slabs of 128 rows, and normals of 3 groups of rows at a time."""
    if request.param == "of a GPU":
        request.getfixturevalue("draws_of_a_gpu")
    for name, elements in (("_CPU_SLAB_ELEMENTS", 1), ("_SLAB_ELEMENTS", 1), ("_PIECE", 3 * 9)):
        monkeypatch.setattr(reference, name, elements)
    return request.param


@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize("gaussian", [False, True])
def test_one_of_several_seeds_is_like_that_seed_alone(gaussian):
    seeds = torch.tensor([[3, -4, 5], [6, 7, -(1 << 63)]])
    options = {"rows": 200, "rank": 5, "gaussian": gaussian, "dtype": torch.float32}
    together = reference.projection_dense(seeds, **options)
    assert together.shape == (2, 3, 200, 5)
    for seed, alone in zip(seeds.flatten(), together.flatten(0, 1), strict=True):
        assert torch.equal(reference.projection_dense(seed, **options), alone)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 1000])
def test_products_are_those_with_the_whole_of_s(rows, gaussian, draws):
    """In either order of the products."""
    options = {"gaussian": gaussian, "rank": 9, "dtype": torch.float64}
    entries = 0.3 * 3 * reference.projection_dense(SEED, rows=rows, **options)
    if draws == "of a GPU":
        torch.testing.assert_close(entries, 0.3 * whole(rows, 9, gaussian, torch.float64))
    stored = torch.randn(9, 13).double()
    for outputs in (1, 200):
        g, mean = torch.randn(rows, outputs).double(), torch.randn(outputs).double()
        for centre in (None, mean):
            expected = entries.t() @ (g if centre is None else g - centre)
            got = reference.random_projection(g, SEED, centre, scale=0.3, **options)
            torch.testing.assert_close(got, expected)
            got = reference.projected_grad_weight(g, SEED, stored, centre, gaussian=gaussian, scale=0.3)
            torch.testing.assert_close(got, expected.t() @ stored)


@pytest.mark.parametrize("gaussian", [False, True])
def test_rows_and_columns_of_any_number_have_entries_of_their_own(gaussian):
    """A counter of one index would come round again after 2**32 cells."""
    per_counter = 4 if gaussian else 128
    columns, starts = 300, [0, 1, 299, (1 << 16) - 1, 1 << 31, (1 << 32) - 1]
    parts = [
        reference.projection_slab(
            SEED, first_row=start * per_counter, rows=per_counter, rank=columns, gaussian=gaussian, dtype=torch.float64
        )
        for start in starts
    ]
    entries = torch.cat(parts, 1).t()
    entries = entries / entries.norm(dim=1, keepdim=True)
    # all 1800 columns of 4 or 128 numbers are different ones
    assert torch.unique(entries, dim=0).shape[0] == len(starts) * columns
    # and 1800 * 1799 / 2 pairs are as alike as independent ones are
    pairs = (entries @ entries.t()).tril(-1)
    count = entries.shape[0] * (entries.shape[0] - 1) / 2
    assert abs(float(pairs.square().sum()) / count * per_counter - 1) < 0.02
    assert abs(float(pairs.sum()) / count) * per_counter**0.5 < 5 * count**-0.5


def test_no_two_cells_have_one_counter():
    """Of neighbouring groups and columns, at the beginning and where the sum passes 2**32."""
    for first in (0, (1 << 32) - 40):
        offset, other = cell_counters(first, 40, 50, stream=PROJECTION_STREAM, device=torch.device("cpu"))
        assert offset.shape == other.shape == (2000,)
        assert torch.unique(torch.stack((offset, other)), dim=1).shape[1] == 2000
        assert torch.equal(offset >> 32, torch.full_like(offset, PROJECTION_STREAM))
