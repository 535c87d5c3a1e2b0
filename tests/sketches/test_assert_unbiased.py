"""The bias test of layers, compiled and checkpointed ones included: what it catches, and what it lets pass."""

import pytest
import torch
from sketch_contract import FALSE_ALARM, assert_unbiased, z_bound

EXACT = torch.randn(12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def noisy(bias=0.0, dtype=torch.float64, noise=1.0):
    """Draws around (1 + bias) * EXACT with a noise as large as the gradient itself."""
    generator = torch.Generator().manual_seed(2)

    def draw_gradient():
        draw = torch.randn(EXACT.shape, generator=generator, dtype=torch.float64)
        return (EXACT * (1 + bias) + noise * draw).to(dtype)

    return draw_gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_unbiased_draws_pass(dtype):
    """False-alarm rate 3e-6 each."""
    rounding = 1e-3 if dtype == torch.bfloat16 else 1e-6
    assert_unbiased(noisy(dtype=dtype), EXACT, draws=6000, rounding=rounding)
    # without any noise
    assert_unbiased(lambda: EXACT.float(), EXACT, draws=10)


@pytest.mark.parametrize("bias", [0.02, -0.02, -1.0, 1.0])
def test_a_bias_is_caught(bias):
    """2 % are 12 standard errors of 3,500 draws: missed with a probability of 1e-12."""
    with pytest.raises(AssertionError, match="projected on the exact gradient"):
        assert_unbiased(noisy(bias), EXACT)


def test_a_bias_across_the_gradient_is_caught():
    """In all entries alike; and in a single one, which no projection sees."""
    draw = noisy()
    orthogonal = torch.ones_like(EXACT) - EXACT * (EXACT.sum() / EXACT.square().sum())
    with pytest.raises(AssertionError, match="summed over all entries"):
        assert_unbiased(lambda: draw() + 0.02 * orthogonal, EXACT)
    single = torch.zeros_like(EXACT)
    single[3, 4] = 0.15
    with pytest.raises(AssertionError, match="an entry of the mean gradient"):
        assert_unbiased(lambda: draw() + single, EXACT)


def test_too_few_draws_and_a_rounding_that_hides_the_bias_prove_nothing():
    with pytest.raises(ValueError, match="draws=100 give a standard error of .* make it"):
        assert_unbiased(noisy(), EXACT, draws=100)
    with pytest.raises(ValueError, match="rounding=0.01 may hide a bias of 1.0%"):
        assert_unbiased(noisy(0.02), EXACT, bias=0.01, rounding=0.01)


@pytest.mark.parametrize("different", [1, 2])
def test_one_draw_for_all_steps_is_caught_and_two_in_turn(different):
    draw, calls = noisy(noise=0.1), iter(range(10_000))
    drawn = [draw() for _ in range(different)]
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(lambda: drawn[next(calls) % different], EXACT)


def test_a_nan_is_caught():
    draw = noisy()
    with pytest.raises(AssertionError):
        assert_unbiased(lambda: draw() * (float("nan") if torch.rand(()) < 0.01 else 1), EXACT)


def test_bounds_are_bonferroni_s():
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    for comparisons in (1, 78, 5000):
        beyond = 2 * normal.cdf(torch.tensor(-z_bound(comparisons), dtype=torch.float64))
        assert abs(comparisons * beyond - FALSE_ALARM) < 1e-3 * FALSE_ALARM
    assert z_bound(1, 0.05) == pytest.approx(1.96, abs=0.001)
