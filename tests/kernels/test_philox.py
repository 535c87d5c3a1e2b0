"""Philox in plain torch: published vectors, the paper's words, and the signs, subsets and normals made of them.

`on_triton/test_philox_kernel.py` holds the kernels' words against these.
"""

from itertools import combinations
from math import comb

import pytest
import torch
from sketch_contract import FALSE_ALARM, z_bound

from rmm_linear_kernels.philox import reference as philox

SEEDS = (0, 1, -1, 42, 0x299F31D0A4093822, -(1 << 63), (1 << 63) - 1, 1 << 32, 0xFFFFFFFF, -(1 << 32))


def seeds(*values):
    return torch.tensor(values, dtype=torch.int64)


def many_seeds(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)


def philox_by_the_paper(counter, key):
    """Philox 4x32-10 as Salmon et al. 2011 write it, one word at a time in Python's own integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_yardstick_gives_all_published_vectors(counter, key, expected):
    assert philox_by_the_paper(counter, key) == expected


def test_words_equal_the_paper_s_for_many_seeds_and_counters():
    offsets = many_seeds(50, seed=1)
    words = philox.randint4x(seeds(*SEEDS), offsets)
    assert words.shape == (4, len(SEEDS), 50)
    for row, seed in enumerate(SEEDS):
        for column, offset in enumerate(offsets.tolist()):
            key, counter = seed % (1 << 64), offset % (1 << 64)
            expected = philox_by_the_paper((counter % (1 << 32), counter >> 32, 0, 0), (key % (1 << 32), key >> 32))
            assert tuple(words[:, row, column].tolist()) == expected


def test_a_long_request_begins_like_a_short_one():
    seed = seeds(3, 4)
    for count in (0, 1, 3, 4, 5, 127, 128, 129, 40_001):
        assert torch.equal(
            philox.random_words(seed, count, stream=1), philox.random_words(seed, 40_004, stream=1)[:, :count]
        )
        assert torch.equal(
            philox.random_signs(seed, count, dtype=torch.float64),
            philox.random_signs(seed, 40_004, dtype=torch.float64)[:, :count],
        )


def test_many_seeds_at_once_equal_one_at_a_time():
    together = philox.random_words(seeds(*SEEDS).view(2, 5), 30, stream=2).flatten(0, 1)
    assert together.shape == (len(SEEDS), 30)
    for seed, words in zip(SEEDS, together, strict=True):
        assert torch.equal(philox.random_words(torch.tensor(seed), 30, stream=2), words)


def test_signs_are_the_bits_of_the_words():
    words = philox.random_words(seeds(11)[0], 4, stream=philox.SIGN_STREAM).tolist()
    expected = [1 - 2 * (words[i // 32] >> i % 32 & 1) for i in range(128)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        signs = philox.random_signs(seeds(11)[0], 128, dtype=dtype)
        assert signs.dtype == dtype
        assert signs.tolist() == expected


def test_signs_and_keys_are_those_of_their_streams():
    for signs, keys in ((0, 0), (1, 1), (37, 64), (128, 4), (129, 5), (1000, 56)):
        got_signs, got_keys = philox.signs_and_keys(seeds(*SEEDS), signs, keys, dtype=torch.float32)
        assert torch.equal(got_signs, philox.random_signs(seeds(*SEEDS), signs, dtype=torch.float32))
        assert torch.equal(got_keys, philox.random_words(seeds(*SEEDS), keys, stream=philox.CHOICE_STREAM))


def test_streams_and_seeds_share_no_words():
    """Of 120,000 words of 32 bits about 1.7 pairs are equal by chance: more than 20 have a probability below 1e-14."""
    words = [philox.random_words(seeds(*range(10)), 4000, stream=stream) for stream in (0, 1, 2)]
    flat = torch.stack(words).flatten()
    assert flat.numel() - flat.unique().numel() <= 20
    assert len({philox.SIGN_STREAM, philox.CHOICE_STREAM, philox.PROJECTION_STREAM}) == 3


@pytest.mark.montecarlo
def test_normals_have_the_moments_of_normals():
    """Moments 1 to 4, and the lag-1 correlation within and across a Box-Muller pair: false-alarm rate 6e-6.

    The folding of triton's uniforms, and its lower bound of 1e-7, move no moment by as much as 1e-5.
    """
    # the four normals of a counter, one after the other
    normals = philox.randn4x(many_seeds(1000), torch.arange(250)).movedim(0, -1).flatten(1).double()
    count = normals.numel()
    # the mean of the k-th power, and its variance, of a standard normal
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        z = (normals.pow(power).mean() - mean) / (variance / count) ** 0.5
        assert abs(z) <= z_bound(), power
    for first in (0, 1):
        products = normals[:, first:-1:2] * normals[:, first + 1 :: 2]
        assert abs(products.sum()) <= z_bound() * products.numel() ** 0.5


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum().item()


def chi_square_bound(freedom):
    """Wilson and Hilferty's quantile, at FALSE_ALARM; within 1 % for 10 degrees of freedom and more."""
    z = z_bound(1, 2 * FALSE_ALARM)
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.montecarlo
@pytest.mark.parametrize(("population", "chosen"), [(4, 1), (5, 2), (6, 3), (7, 6), (4, 4)])
def test_every_subset_is_equally_likely(population, chosen):
    """Chi-square over all subsets, and over all orders for the full set: false-alarm rate 1e-6, fixed seeds."""
    draws = 60_000
    items = philox.choose_without_replacement(many_seeds(draws), population, chosen)
    assert items.shape == (draws, chosen)
    if chosen == population:
        assert torch.equal(items.sort(-1).values, torch.arange(population).expand(draws, -1))
        code = (items * population ** torch.arange(chosen)).sum(-1)
        counts = code.unique(return_counts=True)[1].double()
        assert counts.numel() == 24
    else:
        code = (1 << items).sum(-1)
        wanted = [sum(1 << item for item in subset) for subset in combinations(range(population), chosen)]
        counts = torch.stack([(code == subset).sum() for subset in wanted]).double()
        assert counts.sum() == draws
        assert counts.numel() == comb(population, chosen)
    assert chi_square(counts, draws / counts.numel()) <= chi_square_bound(counts.numel() - 1)


def test_equal_keys_are_told_apart_by_their_position():
    keys = torch.tensor([[3, 1, 3, 1], [5, 5, 5, 5]])
    assert philox.smallest_keys(keys, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


@pytest.mark.montecarlo
def test_fractions_are_uniform_multiples_of_two_to_the_minus_53():
    """Chi-square over 64 intervals of the fraction, and of its low bits: false-alarm rate 2e-6, fixed seeds."""
    fractions = philox.random_fractions(many_seeds(1000), 200).flatten()
    scaled = fractions * 2.0**53
    assert torch.equal(scaled, scaled.round())
    assert fractions.min() >= 0
    assert fractions.max() < 1
    for part in (fractions, (fractions * 2.0**40) % 1):
        counts = torch.bincount((part * 64).long(), minlength=64).double()
        assert chi_square(counts, fractions.numel() / 64) <= chi_square_bound(63)
