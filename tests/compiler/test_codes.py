"""Codes: unbiased, with the variance of their closed form, and with a dither that is independent of its neighbours."""

import pytest
import torch

from rmm_linear.compiler.rewrites.codes import (
    Layout,
    curved,
    decode,
    decode_with_tail,
    dither,
    draw_keys,
    encode,
    encode_with_tail,
    error_variance,
    straight,
)

SEEDS = [torch.tensor(seed) for seed in (0, 1, -1, 2**40, 7_777_777_777_777)]
KEYS = [draw_keys(seed, 4) for seed in SEEDS]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [0, 1, 3, 128, 200])
def test_a_reading_has_the_tensor_as_its_mean_and_the_variance_of_the_closed_form(rows, bits):
    torch.manual_seed(0)
    layout = Layout.of(rows, 9)
    # of a transposed matrix, whose code lies transposed too
    x = torch.randn(9, rows).T * torch.logspace(-2, 2, 9)
    total, squares, draws = torch.zeros(rows, 9), torch.zeros(rows, 9), 600
    for _ in range(draws):
        key = draw_keys(torch.randint(-(2**62), 2**62, ()), 4)[3]
        code, steps = encode(x, key, layout, bits=bits)
        error = decode(code, steps, key, layout, bits=bits) - x
        total, squares = total + error, squares + error**2
    variance = error_variance(steps, layout)
    assert code.nbytes + steps.nbytes == layout.code_bytes(bits)
    # 1,800 elements: one of them is beyond 5.6 deviations once in 30,000 runs
    assert ((total / draws).abs() <= 5.6 * (variance / draws).sqrt()).all()
    if rows >= 128:
        assert (squares / draws / variance).mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("bits", "cube"),
    [(4, 0.06), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 0.0), (8, 0.0), (8, 0.06)))],
)
def test_outliers_above_the_tail_make_no_steps_larger_and_have_the_right_mean(bits, cube):
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    x[3, 0], x[7, 0], x[200, 1], x[5, 2] = 20.0, 9.0, -30.0, 5.001
    layout, draws, total, products, squares = Layout.of(256, 4), 3000, 0, 0, 0
    for _ in range(draws):
        key = draw_keys(torch.randint(-(2**62), 2**62, ()), 4)[3]
        code, steps, most = encode_with_tail(x, key, layout, bits=bits, tail=5.0, cube=cube)
        within, excess = decode_with_tail(code, steps, most, key, layout, bits=bits)
        total = total + within + excess
        error = within - curved(x.clamp(-5, 5), cube)
        products, squares = products + error * (excess - (x - 5).clamp_min(0)), squares + error**2
    assert steps.max() < (0.78 if bits == 4 else 0.04)
    assert (squares / draws / error_variance(steps, layout)).mean() == pytest.approx(1, abs=0.01)
    # one draw makes both errors, which have opposite signs: 9 has an excess of 4, read as 15 or 0
    step = float(steps[0, 0, 0])
    deviation = 5 * (step**2 / 12 * 4 * 11 / draws) ** 0.5
    assert products[7, 0] / draws == pytest.approx(-step * 15 * (4 / 15) * (11 / 15) / 2, abs=deviation)
    error = (total / draws - curved(x.clamp(-5, 5), cube) - (x - 5).clamp_min(0)).abs()
    assert error[7, 0] < 5.6 * (4 * 11 / draws) ** 0.5
    error[7, 0] = 0
    assert (error <= 5.6 * (steps.max() ** 2 / 12 / draws) ** 0.5).all()


def test_a_cube_is_solved_for_numbers_up_to_the_largest_tail():
    x = torch.logspace(-30, 1.18, 1000)
    for cube in (0.0, 0.06):
        torch.testing.assert_close(straight(curved(torch.cat([x, -x]), cube), cube), torch.cat([x, -x]))


def test_what_is_not_finite_stays_so():
    x = torch.randn(128, 3)
    x[5, 0], x[9, 1], x[7, 1] = torch.nan, torch.inf, -torch.inf
    layout = Layout.of(128, 3)
    code, steps = encode(x, KEYS[1][0], layout, bits=8)
    read = decode(code, steps, KEYS[1][0], layout, bits=8)
    coded = encode_with_tail(x, KEYS[1][0], layout, bits=8, tail=5.0)
    within, _ = decode_with_tail(*coded, KEYS[1][0], layout, bits=8)
    for found in (read, within):
        assert not found[:, :2].isfinite().any()
        assert found[:, 2].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_steps_are_as_small_as_the_range_allows_and_its_ends_are_read_within_half_a_step(bits):
    x = torch.full((256, 4), 3.0)
    x[::2] *= -1
    x[:, 1], x[:, 2] = 0.0, x[:, 0] * 1e-6
    layout = Layout.of(256, 4)
    for keys in KEYS:
        code, steps = encode(x, keys[0], layout, bits=bits)
        torch.testing.assert_close(steps[0, 0, [0, 2]], torch.tensor([6.0, 6e-6]) / (2**bits - 1))
        error = (decode(code, steps, keys[0], layout, bits=bits) - x).abs()
        assert (error <= 0.5001 * layout.in_rows(steps)).all()
        assert error[:, 1].max() < 1e-30


def test_the_dither_is_uniform_and_independent_of_neighbours_columns_keys_and_seeds():
    rows, columns = 4096, 64
    drawn = {(s, place): dither((rows, columns), KEYS[s][place]) for s in range(5) for place in range(4)}
    count = rows * columns
    for u in drawn.values():
        assert -0.5 < u.min() < u.max() < 0.5
        # the mean of n uniform numbers deviates by 0.289 / sqrt(n), their second moment by 0.075 / sqrt(n)
        assert abs(u.mean()) < 5 * 0.289 / count**0.5
        assert abs((u**2).mean() - 1 / 12) < 5 * 0.0745 / count**0.5
        cells = torch.histc(u, 256, -0.5, 0.5)
        assert ((cells - count / 256) ** 2 / (count / 256)).sum() < 255 + 6 * (2 * 255) ** 0.5
        for shifted in (u[1:], u[:, 1:]):
            other = u[: shifted.shape[0], : shifted.shape[1]]
            assert abs((other * shifted).mean()) < 5 / 12 / shifted.numel() ** 0.5
    keys = list(drawn)
    for place, first in enumerate(keys):
        for second in keys[place + 1 :]:
            assert abs((drawn[first] * drawn[second]).mean()) < 5 / 12 / count**0.5, (first, second)


def test_the_dither_of_rows_that_lie_far_apart_is_independent():
    # without a mixing of each number with the key, a few distances of rows had correlations of .004 in each key
    rows, columns, lags = 2048, 4096, torch.arange(1, 301)
    spectrum = torch.fft.rfft(dither((rows, columns), KEYS[3][1]), n=2 * rows, dim=0).abs().square().sum(1)
    products = torch.fft.irfft(spectrum.double(), n=2 * rows)[lags]
    deviations = products * 12 / ((rows - lags) * columns) ** 0.5
    assert deviations.abs().max() < 6
    assert deviations.square().mean() < 1.5


def test_inductor_computes_the_bits_of_eager_mode():
    # in rows of no multiple of a vector; C++ must not see a signed overflow
    layout, seed = Layout.of(3, 7), SEEDS[4]
    key = KEYS[4][1]
    x = torch.randn(3, 7)
    code, steps = encode(x, key, layout, bits=4)

    def both(x, code, steps, key, seed):
        read = decode(code, steps, key, layout, bits=4)
        with_tail = encode_with_tail(x, key, layout, bits=4, tail=1.0)
        return *encode(x, key, layout, bits=4), read, *with_tail, draw_keys(seed, 5)

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, dynamic=False)
    for ours, theirs in zip(compiled(x, code, steps, key, seed), both(x, code, steps, key, seed), strict=True):
        assert ours.equal(theirs)


def test_the_dithers_of_two_keys_have_no_more_numbers_in_common_than_chance_has():
    size = 1 << 20
    # seeds that have the upper half of their bits in common
    keys = [(0, 0), (0, 1), (217, 0), (12345, 0), (1242938714, 0)]
    streams = [(2**24 * dither((size,), draw_keys(torch.tensor(seed), 2)[place])).round() for seed, place in keys]
    ordered = [stream.sort().values for stream in streams]
    for place, first in enumerate(streams):
        for second in ordered[place + 1 :]:
            least = torch.searchsorted(second, first[:4096]).clamp(max=size - 1)
            shared = (second[least] == first[:4096]).double().mean()
            # of 2^24 values, 2^20 numbers hit 6 %
            assert 0.04 < shared < 0.08
