"""About the mean, out of 256 rows: which rows, and how far from the mean it can be."""

import pytest
import torch

from rmm_linear_kernels.sampled_mean.reference import GROUPS, SAMPLE, sampled_mean, sampled_rows


def growth(x):
    """What m in place of the mean adds to the centred energy, as a part of it."""
    mean = x.mean(0)
    added = x.shape[0] * (sampled_mean(x) - mean).square().sum()
    return float(added / (x - mean).square().sum())


def test_up_to_256_rows_it_is_the_mean():
    for rows in (0, 1, 37, SAMPLE):
        x = torch.randn(rows, 5)
        assert torch.equal(sampled_mean(x), x.sum(0) / max(1, rows))
    assert not torch.equal(sampled_mean(torch.randn(SAMPLE + 1, 5)), torch.zeros(5))


@pytest.mark.parametrize("length", [27, 90, 1000])
def test_rows_in_runs_are_read_where_they_lie(length):
    """The same rows as in order, and no copy of all."""
    x = torch.randn(5, length + 1, 7)[:, 1:]
    with torch.profiler.profile(profile_memory=True) as profile:
        found = sampled_mean(x)
    torch.testing.assert_close(found, sampled_mean(x.reshape(-1, 7)), rtol=1e-5, atol=1e-6)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert length < 1000 or largest < x.numel() * x.element_size()


@pytest.mark.parametrize("rows", [SAMPLE + 1, 300, 509, 4096, 65_537, (1 << 31) - 1])
def test_each_part_of_the_rows_has_one(rows):
    found = sampled_rows(rows)
    part = torch.arange(SAMPLE)
    assert ((found >= part * rows // SAMPLE) & (found <= (part + 1) * rows // SAMPLE)).all()
    # parts of less than two rows may share one
    assert (found.diff() >= (0 if rows < 2 * SAMPLE else 1)).all()
    assert found[0] >= 0
    assert found[-1] < rows


def test_first_tokens_are_met_no_more_often_than_others():
    """Whatever the length of a sequence, and however many there are: as often as rows drawn at random would."""
    for length in (2, 16, 63, 128, 512, 2048):
        for sequences in (3, 8, 64, 89, 100, 144, 233, 256, 377, 512, 610, 987):
            if (rows := length * sequences) > SAMPLE:
                met, expected = int((sampled_rows(rows) % length == 0).sum()), SAMPLE / length
                # 9 standard deviations of independent draws, or a handful where hardly any is expected
                assert met <= expected + 9 * expected**0.5 + 1, (length, sequences, met)
    # and the very first row never
    assert all(sampled_rows(rows)[0] > 0 for rows in (4096, 8192, 1 << 20))


def test_rows_alike_cost_less_than_a_hundredth():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 64, generator=generator, dtype=torch.float64)
    for shift in (0.0, 10.0):
        # 1.57 / 256 at most, give or take 18 %: three standard deviations of 64 columns
        assert growth(x + shift) < 1.2 * 1.57 / SAMPLE
    skewed = torch.nn.functional.gelu(x - 1)
    assert growth(skewed) < 0.01


@pytest.mark.parametrize("huge", [1, 2, 3])
def test_three_huge_rows_cost_no_more_than_rows_alike(huge):
    """Wherever they are: those that are met are in groups of their own, and the middle of the groups is elsewhere."""
    x = torch.randn(65_536, 16, dtype=torch.float64)
    energy = 65_536 * 16
    places = sampled_rows(65_536)
    for at in (places[10 : 10 + huge], torch.arange(huge)):
        for size in (1e3, 1e6):
            y = x.clone()
            y[at] += size
            # what is left is m next to the mean of the others, and the huge rows' share of the mean
            added = 65_536 * (sampled_mean(y) - x.mean(0)).square().sum()
            assert added < 0.1 * energy
            assert growth(y) < 0.1
            # the plain mean of the same rows: as much again as the huge rows' own energy
            plain = 65_536 * (y[places].mean(0) - y.mean(0)).square().sum() / (y - y.mean(0)).square().sum()
            assert len(at) == 0 or at[0] == 0 or plain > 0.9 * huge


def test_the_bound_for_any_rows():
    """The worst coincidence: four groups full of huge rows."""
    rows = 4096
    x = torch.zeros(rows, 3, dtype=torch.float64)
    x[sampled_rows(rows).view(-1, GROUPS)[:, :5].flatten()] = 1.0
    mean = x.mean(0)
    sampled = (x[sampled_rows(rows)] - mean).square().sum()
    added = rows * (sampled_mean(x) - mean).square().sum()
    assert 0.5 * rows / 128 * sampled < added <= rows / 128 * sampled
    for seed in range(20):
        torch.manual_seed(seed)
        y = torch.randn(rows, 3, dtype=torch.float64) ** 7
        mean = y.mean(0)
        sampled = (y[sampled_rows(rows)] - mean).square().sum()
        assert rows * (sampled_mean(y) - mean).square().sum() <= rows / 128 * sampled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_wide(dtype):
    x = torch.full((300, 2), 300.0, dtype=dtype)
    found = sampled_mean(x)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.tolist() == [300.0, 300.0]
