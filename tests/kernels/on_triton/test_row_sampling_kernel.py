"""The kernels that draw rows against their twins: the same rows, to the bit, and the same squared entries of S."""

import math
from functools import partial

import pytest
import torch

from rmm_linear_kernels.row_sampling import kernel, reference

pytestmark = pytest.mark.usefixtures("nan_poison")

# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
# around the draws of a program and the norms of a step
ROWS = (1, 3, 255, 257, *map(grid, (2, 256, 1000, 4097)))


def norms_of(rows: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, device=device, dtype=torch.float64).exp()


def of_reference(x, seed, norms, rank, *, winner_take_all):
    sample = reference.sample_rows_winner_take_all if winner_take_all else reference.sample_rows
    index, squared = sample(norms, seed, rank=rank)
    return index.to(torch.int32), squared.float()


def drawn(x, seed, norms, rank, *, winner_take_all):
    weights, ends, factor = kernel.sampling_weights(x, norms)
    order = size = None
    if winner_take_all:
        order, weights, ends, size = reference.winners(weights, rank=rank)
    return kernel.weighted_draws(x, seed, weights, ends, factor, order, size, rank=rank)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_uniform_draws_are_the_twin_s(rows, replacement, device):
    x = torch.randn(rows, 2, device=device)
    for number, ratio in ((3, 0.3), (-(2**63), 1.0)):
        seed = torch.tensor(number, device=device)
        rank = min(rows, max(1, round(ratio * rows)))
        options = {"rank": rank, "replacement": replacement}
        found, twin = (each.uniform_draws(x, seed, **options) for each in (kernel, reference))
        assert found.shape == (rank,)
        assert found.dtype == twin.dtype == torch.int64
        assert torch.equal(found, twin)


@pytest.mark.parametrize("rows", ROWS)
def test_weights_are_the_twin_s(rows, device):
    x, norms = torch.randn(rows, 2, device=device), norms_of(rows, device)
    # ties of the rounding, and rows far below the smallest weight
    norms[0], norms[-1] = 8.0, 1e-300
    norms[rows // 2] = 8.0 * (2**39 + 0.5) / 2**40
    # as large and as small as there are, and every other one of more
    for each in (norms, norms * 1e-310, (norms * 1e308).clamp(max=1e308), torch.stack((norms, norms), 1)[:, 0]):
        for found, twin in zip(kernel.sampling_weights(x, each), reference.sampling_weights(x, each), strict=True):
            assert found.dtype == twin.dtype
            assert torch.equal(found, twin)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
def test_weights_of_rows_that_are_zero_or_not_finite(value, device):
    x = torch.randn(300, 2, device=device)
    for norms in (norms_of(300, device), torch.zeros(300, device=device, dtype=torch.float64)):
        norms[7] = value
        for found, twin in zip(kernel.sampling_weights(x, norms), reference.sampling_weights(x, norms), strict=True):
            torch.testing.assert_close(found, twin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("winner_take_all", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_weighted_draws_are_the_twin_s(rows, winner_take_all, device):
    x, norms = torch.randn(rows, 2, device=device), norms_of(rows, device)
    few = norms.clone()
    # fewer than are kept: all of them, and the others have no weight
    few[1:] = 0
    for each, ratio in ((norms, 0.3), (norms, 1.0), (few, 0.5), (torch.zeros_like(norms), 0.4)):
        rank, seed = max(1, round(ratio * rows)), torch.tensor(rows - 5, device=device)
        options = {"winner_take_all": winner_take_all}
        found = drawn(x, seed, each, rank, **options)
        index, squared = of_reference(x, seed, each, rank, **options)
        assert [part.dtype for part in found] == [torch.int32, torch.float32]
        assert torch.equal(found[0], index)
        assert torch.equal(found[1], squared)


@pytest.mark.parametrize("winner_take_all", [False, True])
def test_a_row_that_is_not_finite_shows(winner_take_all, device):
    x, norms = torch.randn(300, 2, device=device), norms_of(300, device)
    norms[7] = math.nan
    _, squared = drawn(x, torch.tensor(3, device=device), norms, 90, winner_take_all=winner_take_all)
    assert squared.isnan().all()
