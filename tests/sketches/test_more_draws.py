"""The randomised part of the contract once more, with other row counts and ratios, more draws, and other seeds."""

import pytest

from rmm_linear.sketches import SKETCHES, Centered, Hadamard
from rmm_linear.sketches.contract import SketchContract, draw_estimates, draw_products, structured_pair, z_bound

CASES = ((64, 0.1), (97, 0.9), (130, 0.3), (200, 0.05))


@pytest.mark.slow
@pytest.mark.montecarlo
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("name", sorted(SKETCHES))
@pytest.mark.parametrize(("rows", "ratio"), CASES)
def test_mean_and_variance(rows, ratio, name, center):
    """Two projections, the variance, and all entries of E[S S^T]: false-alarm rate 4e-6 a case, fixed seeds.

    Standard errors of the variance below 1 %, so that a deviation of 7 % is caught with a probability of 0.99.
    """
    sketch = SKETCHES[name](ratio=ratio)
    x, g = structured_pair(rows, 24, 20, seed=7)
    if center:
        sketch, x, g = Centered(sketch), x - x.mean(0), g - g.mean(0)
    draws = 8_000
    found = draw_estimates(sketch, x, g, draws=draws, seed=8)
    relative = found.squared_error / sketch.variance(x, g)
    error = relative.std().item() / draws**0.5
    assert error < 0.01
    assert abs(relative.mean().item() - 1) <= z_bound() * error
    for sample in (found.along, found.total):
        assert abs(sample.mean()) <= z_bound() * sample.std() / draws**0.5
    products = draw_products(sketch, x, draws=draws, seed=8)
    error = (products.spread / draws + 1e-24).sqrt()
    # Rare rows of an importance sampler: too few draws for a normal approximation of each entry.
    frequent = products.spread * 100 < draws
    assert ((products.deviation.abs() <= z_bound(rows * (rows + 1) // 2) * error) | ~frequent).all()
    assert frequent.double().mean() > 0.9


@pytest.mark.slow
@pytest.mark.montecarlo
def test_the_large_blocks_of_small_ratios():
    """Below a ratio of 1/32 the Hadamard sketch takes blocks of 128 rows and more: false-alarm rate 2e-6 a case."""
    for rows, ratio in ((200, 0.02), (300, 0.01), (129, 0.03)):
        x, g = structured_pair(rows, 24, 20, seed=7)
        sketch = Hadamard(ratio=ratio)
        relative = draw_estimates(sketch, x, g, draws=20_000, seed=8).squared_error / sketch.variance(x, g)
        error = relative.std().item() / 20_000**0.5
        assert error < 0.01, (rows, ratio)
        assert abs(relative.mean().item() - 1) <= z_bound() * error, (rows, ratio)
        products = draw_products(sketch, x, draws=20_000, seed=8)
        assert products.diagonal_error < 1e-12
        entries = (products.spread / 20_000 + 1e-24).sqrt()
        assert (products.deviation.abs() <= z_bound(rows * (rows + 1) // 2) * entries).all(), (rows, ratio)


@pytest.mark.slow
@pytest.mark.montecarlo
@pytest.mark.parametrize("center", [False, True])
def test_the_default_sketch_at_a_finer_error(center):
    """Ten times the draws: standard errors of 0.06 % of the variance, and 0.04 % of the gradient. Rate 1.2e-5."""

    class Finer(SketchContract):
        seed = 9
        unit_diagonal = True
        gradient_draws = 120_000
        layer_draws = 6_000

        def make(self, ratio):
            return Centered(Hadamard(ratio=ratio)) if center else Hadamard(ratio=ratio)

    passed = [getattr(Finer(), check)() for check in SketchContract.montecarlo]
    assert passed == [None] * 4
