"""Both objectives of Hong et al. 2025, against recursions, brute force, and the simulator."""

import itertools
import random

import pytest

from experiments.checkpointing.generators import chain, with_backward
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.hong2025_linear import fewest_kept_bytes, least_peak
from rmm_linear.planning.strategies.segments import order_of_segments, segments_of_cuts


def segment(sizes, i, j):
    return max(sum(sizes[i + 1 : layer + 1]) + sizes[layer] + sizes[layer - 1] for layer in range(i + 1, j + 1))


def peak_of(sizes, layers):
    """The largest sum at any time of the backward pass: checkpoints so far, and the segment that it goes through."""
    if len(sizes) == 1:
        return sizes[0]
    kept = list(itertools.accumulate(sizes[layer] for layer in layers))
    parts = [before + segment(sizes, i, j) for before, (i, j) in zip(kept, itertools.pairwise(layers), strict=False)]
    return max(*parts, kept[-1])


def chains(count, most, seed):
    draw = random.Random(seed)
    for _ in range(count):
        largest = draw.choice((1, 3, 20, 1000))
        yield [draw.randint(0, largest) for _ in range(draw.randint(1, most))]


def choices(inner):
    inner = list(inner)
    return (chosen for count in range(len(inner) + 1) for chosen in itertools.combinations(inner, count))


def test_least_peak_equals_brute_force_on_300_chains():
    for sizes in chains(300, 9, seed=1):
        last = len(sizes) - 1
        ends = (0,) if last == 0 else None
        best = min(peak_of(sizes, ends or (0, *chosen, last)) for chosen in choices(range(1, last)))
        assert peak_of(sizes, least_peak(sizes)) == best, sizes


def test_uniform_chains_take_a_layer_more_than_is_published():
    """The paper's 16, 30 and 59 have one gradient less in memory."""
    assert [peak_of([1] * n, least_peak([1] * n)) for n in (100, 400, 1600)] == [17, 31, 60]


def test_least_peak_is_what_the_simulator_measures():
    """On a chain that ends with a loss of no bytes, for what the model does not count is that a result stays."""
    for sizes in chains(200, 14, seed=2):
        sizes = [*sizes, 0]
        layers = least_peak(sizes)
        graph = with_backward(chain(sizes))
        cuts = [layer + 1 for layer in layers if layer + 1 < len(sizes)]
        order = order_of_segments(graph, segments_of_cuts(len(sizes), cuts))
        assert peak_and_cost(graph, order)[0] == peak_of(sizes, layers), sizes


def test_fewest_kept_bytes_equals_brute_force_with_prices_of_their_own():
    draw = random.Random(5)
    for sizes in chains(200, 8, seed=6):
        last, prices = len(sizes) - 1, [draw.randint(0, 9) for _ in sizes]
        for cap in {0, max(sizes), sum(sizes) // 2, sum(sizes)}:
            allowed = [
                layers
                for chosen in choices(range(last))
                for layers in [(*chosen, last)]
                if all(sum(sizes[i + 1 : j]) <= cap for i, j in itertools.pairwise([-1, *layers]))
            ]
            layers = fewest_kept_bytes(sizes, prices, cap)
            cost = {chosen: sum(prices[layer] for layer in chosen) for chosen in allowed}
            assert cost[layers] == min(cost.values())


def test_wrong_arguments_are_named():
    for wrong, message in (
        (lambda: least_peak([]), "no layers"),
        (lambda: least_peak([3, -1]), "at least 0"),
        (lambda: fewest_kept_bytes([1, 2], [1], 3), "as many of each"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
