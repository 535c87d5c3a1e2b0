"""Random bits made inside a kernel are those of the plain-torch twin, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from rmm_linear_kernels.philox import kernel, reference

SEEDS = (0, 1, -1, 7_000_000_000, -(1 << 63), (1 << 63) - 1)
COUNT = 512


@triton.jit
def _sign_kernel(SEED, INDEX, OUT, COUNT: tl.constexpr, STREAM: tl.constexpr):
    place = tl.arange(0, COUNT)
    bits = kernel.sign_bit(tl.load(SEED), tl.load(INDEX + place), STREAM)
    tl.store(OUT + place, 1 - 2 * bits.to(tl.int32))


@triton.jit
def _half_kernel(SEED, INDEX, OUT, COUNT: tl.constexpr, STREAM: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(OUT + place, kernel.random_half(tl.load(SEED), tl.load(INDEX + place), STREAM).to(tl.int32))


@triton.jit
def _word_kernel(SEED, INDEX, OUT, COUNT: tl.constexpr, STREAM: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(OUT + place, kernel.random_word(tl.load(SEED), tl.load(INDEX + place), STREAM).to(tl.int64))


@triton.jit
def _normals_kernel(SEED, COUNTER, OUT, COUNT: tl.constexpr, STREAM: tl.constexpr):
    place = tl.arange(0, COUNT)
    first, second, third, fourth = kernel.normals_of_counter(tl.load(SEED), tl.load(COUNTER + place), STREAM)
    tl.store(OUT + place, first)
    tl.store(OUT + COUNT + place, second)
    tl.store(OUT + 2 * COUNT + place, third)
    tl.store(OUT + 3 * COUNT + place, fourth)


def run(function, seed, index, stream, dtype, device):
    out = torch.full((COUNT,), -7, dtype=dtype, device=device)
    seed_tensor = torch.tensor(seed, device=device)
    function[(1,)](seed_tensor, index.to(device, torch.int32), out, COUNT=COUNT, STREAM=stream)
    return out.cpu()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 12_345, (1 << 30) - COUNT])
def test_words_signs_and_halves_are_the_twin_s(seed, first, device):
    index = torch.arange(COUNT) + first
    seeds = torch.tensor(seed)
    for stream in (reference.SIGN_STREAM, reference.CHOICE_STREAM, reference.ROUNDING_STREAM):
        words = reference.random_words(seeds, COUNT + 4, stream=stream, first_counter=first // 4)
        expected = words[first % 4 :][:COUNT]
        assert torch.equal(run(_word_kernel, seed, index, stream, torch.int64, device), expected)
        halves = reference.random_halves(seeds, first, COUNT, stream=stream)
        assert torch.equal(run(_half_kernel, seed, index, stream, torch.int32, device).long(), halves)
        signs = reference.random_signs(
            seeds, COUNT + 128, dtype=torch.int32, stream=stream, first_counter=first // 128
        )[first % 128 :][:COUNT]
        assert torch.equal(run(_sign_kernel, seed, index, stream, torch.int32, device), signs)


@pytest.mark.parametrize("seed", SEEDS)
def test_normals_are_the_twin_s_up_to_rounding(seed, device):
    """The angle of a float32 in [0, 2 pi) is off by 2.4e-7, and the radius is at most 5.7."""
    for first in (0, (1 << 32) - COUNT):
        counter = torch.arange(first, first + COUNT)
        out = torch.full((4, COUNT), torch.nan, device=device)
        as_int32 = counter.to(torch.int32).to(device)
        _normals_kernel[(1,)](
            torch.tensor(seed, device=device), as_int32, out, COUNT=COUNT, STREAM=reference.PROJECTION_STREAM
        )
        expected = reference.randn4x(torch.tensor(seed), counter + (reference.PROJECTION_STREAM << 32))
        assert (out.cpu() - expected).abs().max() <= 3e-6
