"""Random numbers of a CPU."""

import pytest
import torch

from rmm_linear import ops, use_kernels
from rmm_linear.sketches import SKETCHES, LowBit
from rmm_linear_kernels import random
from rmm_linear_kernels.hadamard import reference as hadamard


def words(seed, stream):
    return torch.empty(64, dtype=torch.int64).random_(generator=random.generator_of(seed, stream))


def test_a_stream_is_a_function_of_its_seed_and_number():
    assert torch.equal(words(3, 0), words(3, 0))
    tried = [0, 1, -1, 1 << 31, 1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1]
    drawn = [words(seed, stream) for seed in tried for stream in (0, 1, 2, 3, 1 << 32)]
    assert torch.unique(torch.stack(drawn), dim=0).shape[0] == len(drawn)


def test_streams_of_data_parallel_ranks_are_no_other_ranks_streams():
    ranks = [(5 + rank * ops._RANK_STRIDE + (1 << 63)) % (1 << 64) - (1 << 63) for rank in range(8)]
    drawn = [words(seed, stream) for seed in ranks for stream in range(8)]
    assert torch.unique(torch.stack(drawn), dim=0).shape[0] == len(drawn)


@pytest.mark.parametrize("sketch", [*(kind(ratio=0.4) for kind in SKETCHES.values()), LowBit(None, "int4")], ids=str)
def test_the_default_generator_and_device_are_left_alone(sketch):
    """And a forward and a backward pass have one S, whatever is chosen for either."""
    x, seed = torch.randn(200, 8), torch.tensor(5)
    state = torch.get_rng_state()
    with torch.device("meta"):
        saved = sketch.compress(x, seed)
    assert {tensor.device.type for tensor in saved.tensors} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), state)
    with use_kernels("torch"):
        assert all(map(torch.equal, sketch.compress(x, seed).tensors, saved.tensors))


def test_a_matrix_that_is_made_in_inference_mode_serves_training():
    hadamard._matrix.cache_clear()
    x, seed, options = torch.randn(64, 8), torch.tensor(5), {"blocks": 1, "kept": 32, "scale": 1.0}
    with torch.inference_mode():
        found = hadamard.hadamard_sketch(x, seed, None, **options, dtype=torch.float32)
    assert not hadamard._matrix(64, torch.float32).is_inference()
    assert torch.equal(hadamard.hadamard_sketch(x, seed, None, **options, dtype=torch.float32), found)


@pytest.mark.parametrize("order", [2, 4, 8, 16, 32, 64])
def test_runs_of_hadamard_rows_have_the_second_moments_of_uniform_subsets(order):
    powers = hadamard._powers(order, torch.float64)
    assert powers.shape == (2 * (order - 1), order)
    assert torch.equal(powers[: order - 1], powers[order - 1 :])
    for kept in range(1, order):
        runs = torch.stack([powers[first : first + kept] for first in range(order - 1)])
        # distinct rows of H, and each pair of entries of S S^T as large as its variance says: all exact in integers
        assert torch.equal(runs @ runs.mT, order * torch.eye(kept, dtype=torch.float64).expand(order - 1, -1, -1))
        squares = (runs.mT @ runs).square().sum(0)
        expected = torch.full((order, order), float(kept * (order - kept)), dtype=torch.float64)
        expected.fill_diagonal_(float(kept * kept * (order - 1)))
        assert torch.equal(squares, expected)


def test_the_first_row_of_a_run_is_uniform_and_the_seed_s_own():
    """A generator's seed has it, in bits from which the generator does not draw."""
    numbers = [random.generator_of(seed, 0).initial_seed() >> 32 for seed in range(6300)]
    counts = torch.bincount(torch.tensor([(number * 63) >> 32 for number in numbers]), minlength=63)
    assert counts.shape == (63,)
    # chi squared with 62 degrees of freedom: beyond 125 once in 300,000
    assert ((counts - 100).square() / 100).sum() < 125
    assert random.generator_of(5, 0).initial_seed() >> 32 == numbers[5]
