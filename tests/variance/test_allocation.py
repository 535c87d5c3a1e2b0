"""Allocation of sketches to layers: against all combinations, the closed form, and what must hold of any optimum."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from rmm_linear import RMMConfig
from rmm_linear.variance.allocation import Allocation, LayerProfile, NoiseProfile, Option, allocate_ratios

EXACT = RMMConfig(ratio=1.0)


def profile_of(*layers, gradients=None):
    """Layers of (bytes, variance), their configurations ratios of 1/100 and more."""
    gradients = gradients or [1.0] * len(layers)
    return NoiseProfile(
        tuple(
            LayerProfile(
                name=f"layers.{index}",
                gradient_squared=gradient,
                minibatch_variance=2.0,
                options=tuple(
                    Option(RMMConfig(ratio=(place + 1) / 100), saved, variance)
                    for place, (saved, variance) in enumerate(layer)
                ),
            )
            for index, (layer, gradient) in enumerate(zip(layers, gradients, strict=True))
        )
    )


def random_profile(draw, kind):
    if kind == "shared":
        return shared_profile(draw)

    def option():
        if kind == "ties":
            return draw.randint(0, 5), float(draw.randint(0, 5))
        if kind == "tenths":
            # sums that are equal in decimals and not in binary
            return draw.randint(0, 9), draw.randint(0, 9) / 10
        return draw.randint(0, 10**6), draw.choice([0.0, draw.random(), 10 ** draw.uniform(-12, 3)])

    layers = [[option() for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(3, 5))]
    return profile_of(*layers, gradients=[10 ** draw.uniform(-3, 3) for _ in layers])


def combinations(profile, *, relative):
    """Bytes and costs of every combination, shape (combinations, 2); the layers of a group have one option."""
    members = {}
    for layer in profile.layers:
        members.setdefault(layer.group or layer.name, []).append(layer)
    options = []
    for layers in members.values():
        scales = [layer.gradient_squared if relative else 1 for layer in layers]
        alike = zip(*(layer.options for layer in layers), strict=True)
        options.append([
            (one[0].saved_bytes, sum(o.variance / scale for o, scale in zip(one, scales, strict=True))) for one in alike
        ])  # fmt: skip
    return np.array([np.sum(choice, axis=0) for choice in itertools.product(*options)])


def cost_of(found, *, relative):
    return math.fsum(layer.option.variance / (layer.gradient_squared if relative else 1) for layer in found.layers)


def realistic_profile(layers, options, *, seed, kinds=4):
    """Variances c (1 / ratio - 1) and a rounding term, c over three decades; `kinds` of shapes of 1e5 to 1e7 bytes."""
    draw = random.Random(seed)
    shapes = [round(10 ** draw.uniform(5, 7)) for _ in range(kinds)]
    ratios = [(index + 1) / options for index in range(options)]

    def layer():
        whole, c = draw.choice(shapes), 10 ** draw.uniform(0, 3)
        return [(round(whole * r) + 8, c * (1 / r - 1) + c * 1e-4 * draw.random()) for r in ratios]

    return profile_of(*(layer() for _ in range(layers)))


def grouped(profile, groups):
    return NoiseProfile(tuple(replace(layer, group=group) for layer, group in zip(profile.layers, groups, strict=True)))


def shared_profile(draw):
    """Two layers of a group, whose options take the same bytes, and two others."""
    sizes = [draw.randint(1, 1000) for _ in range(4)]
    layers = [[(size, draw.random()) for size in sizes] for _ in range(2)]
    layers += [[(draw.randint(1, 1000), draw.random()) for _ in range(4)] for _ in range(2)]
    profile = profile_of(*layers, gradients=[10 ** draw.uniform(-1, 1) for _ in layers])
    return grouped(profile, ["layers.0", "layers.0", None, None])


@pytest.mark.parametrize("objective", ["total", "relative"])
@pytest.mark.parametrize("kind", ["ties", "tenths", "spread", "shared"])
def test_no_combination_within_the_bound_is_better_by_more_than_the_gap(kind, objective):
    draw, relative, exact = random.Random(f"{kind} {objective}"), objective == "relative", 0
    for _ in range(80):
        profile = random_profile(draw, kind)
        every = combinations(profile, relative=relative)
        low, high = every[:, 0].min(), every[:, 0].max()
        for bound in (low, high, draw.uniform(low, high), float(draw.choice(every[:, 0].tolist()))):
            found = allocate_ratios(profile, bound, objective=objective)
            cost, best = cost_of(found, relative=relative), every[every[:, 0] <= bound, 1].min()
            assert found.saved_bytes <= bound
            assert kind != "shared" or found.configs["layers.0"] == found.configs["layers.1"]
            assert 0 <= found.gap <= 1
            assert cost * (1 - found.gap) <= best * (1 + 1e-11)
            exact += cost == pytest.approx(best, rel=1e-11, abs=0)
        assert (profile.least_bytes, profile.most_bytes) == (low, high)
    # the steepest edges first are most often the best choice
    assert exact > 200


def test_a_concave_frontier_is_told_by_its_gap():
    # the hull has the ends alone: walking it leaves 9 of 10 bytes unused
    layer = [(0, 10.0), (5, 9.0), (10, 0.0)]
    found = allocate_ratios(profile_of(layer, layer, [(0, 1.0)]), 9)
    # the linear relaxation takes 9 tenths of one edge
    assert (found.saved_bytes, found.variance, found.gap) == (0, 21.0, pytest.approx(9 / 21))


def test_more_bytes_never_mean_more_variance():
    profile = realistic_profile(20, 12, seed=1)
    least, most = (end(o.saved_bytes for o in profile.layers[0].options) * 20 for end in (min, max))
    low = sum(min(o.saved_bytes for o in layer.options) for layer in profile.layers)
    found = [allocate_ratios(profile, budget) for budget in np.linspace(low, max(low, 2 * most, least), 60)]
    assert all(more.variance <= less.variance for less, more in itertools.pairwise(found))


def test_a_boundless_budget_takes_the_least_variance_and_of_those_the_fewest_bytes():
    profile = profile_of([(9, 1.0), (7, 1.0), (8, 1.0), (1, 2.0)], [(3, 0.0), (5, 0.0)], [(4, 2.5)])
    for budget in (math.inf, 10**400, 20, np.float32(16)):
        found = allocate_ratios(profile, budget)
        assert (found.saved_bytes, found.variance) == (14, 3.5)
        assert found.gap == 0


def test_the_relative_objective_weighs_layers_by_their_gradients():
    # the second layer's variance is the greater one, and the lesser part of its gradient
    profile = profile_of([(1, 1.0), (2, 0.0)], [(1, 10.0), (2, 0.0)], gradients=[1.0, 100.0])
    assert [layer.option.variance for layer in allocate_ratios(profile, 3).layers] == [1.0, 0.0]
    relative = allocate_ratios(profile, 3, objective="relative")
    assert [layer.option.variance for layer in relative.layers] == [0.0, 10.0]
    dead = profile_of([(1, 0.0), (2, 0.0)], gradients=[0.0])
    assert allocate_ratios(dead, 3, objective="relative").saved_bytes == 1
    with pytest.raises(ValueError, match='gradient_squared is 0 and a variance is not: layers.0; .*objective="total"'):
        allocate_ratios(profile_of([(1, 1.0)], gradients=[0.0]), 3, objective="relative")


def test_totals_are_sums_over_the_layers():
    found = profile_of([(3, 1.0)], [(4, 0.5)], gradients=[10.0, 20.0]).uniform(RMMConfig(ratio=0.01))
    assert (found.saved_bytes, found.variance) == (7, 1.5)
    assert found.relative_variance == pytest.approx(1.5 / 30)
    assert found.noise_ratio == pytest.approx(1.5 / 4)
    told = "2 layers keep 7 bytes; variance 0.05 of the squared gradient, 0.375 of the minibatch's variance"
    assert str(found).endswith(told)
    assert hash(found) == hash(Allocation(found.layers))
    assert str(replace(found, gap=0.0123)).endswith("minibatch's variance; no other choice saves more than 1.23%")


def test_allocations_of_given_configurations():
    profile = profile_of([(3, 1.0), (5, 0.5)], [(4, 2.0), (6, 1.0)])
    configs = {"layers.1": RMMConfig(ratio=0.01), "layers.0": RMMConfig(ratio=0.02)}
    found = profile.allocation(configs)
    assert found.configs == configs
    assert (found.saved_bytes, found.variance) == (9, 2.5)
    with pytest.raises(ValueError, match="no such options of layers.1; pass for every layer"):
        profile.allocation({"layers.0": RMMConfig(ratio=0.01)})
    with pytest.raises(ValueError, match="no such options of layers.0; layers.1"):
        profile.uniform(EXACT)


def test_bounds_that_are_no_numbers_or_below_the_least_possible_are_refused():
    profile = profile_of([(3, 1.0), (9, 0.5)], [(4, 2.0), (8, 0.25)])
    assert allocate_ratios(profile, 7).saved_bytes == 7
    with pytest.raises(ValueError, match="budget_bytes=6.9 is below the least possible, 7 bytes"):
        allocate_ratios(profile, 6.9)
    for value in (math.nan, -1, True, "10", None):
        with pytest.raises(ValueError, match=r"budget_bytes=.* is not a number of at least 0; pass an int or a float"):
            allocate_ratios(profile, value)
    with pytest.raises(ValueError, match="objective='most' is unknown; choose one of total, relative"):
        allocate_ratios(profile, 100, objective="most")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": ()}, "layer 'a' has no options; give it at least one"),
        ({"options": (Option(EXACT, 3, 0.0), Option(EXACT, 4, 0.0))}, "layer 'a' has two options of one configuration"),
        ({"gradient_squared": math.inf}, "layer 'a' has an amount of inf; .* finite"),
        ({"minibatch_variance": math.inf}, "layer 'a' has an amount of inf"),
        ({"options": (Option(EXACT, 3, math.nan),)}, "layer 'a' has an amount of nan"),
        ({"options": (Option(EXACT, -3, 0.0),)}, "layer 'a' has an amount of -3"),
    ],
    ids=str,
)
def test_bad_layers_are_named(change, message):
    values = {"name": "a", "gradient_squared": 1.0, "minibatch_variance": 1.0, "options": (Option(EXACT, 3, 0.0),)}
    layer = LayerProfile(**values)
    for layers, wrong in (((), "the profile has no layers"), ((layer, layer), "layers that occur twice: a")):
        with pytest.raises(ValueError, match=wrong):
            NoiseProfile(layers)
    with pytest.raises(ValueError, match=message):
        LayerProfile(**{**values, **change})


def test_hundreds_of_layers_leave_little_of_the_budget():
    profile = realistic_profile(200, 40, seed=6)
    budget = 0.3 * sum(layer.options[-1].saved_bytes for layer in profile.layers)
    found = allocate_ratios(profile, budget)
    assert found.gap < 0.005
    assert 0.99 * budget < found.saved_bytes <= budget


def test_members_that_are_configured_differently_keep_a_sketch_each():
    profile = grouped(profile_of([(10, 1.0), (20, 0.5)], [(10, 1.0), (20, 0.5)]), ["layers.0", "layers.0"])
    low, high = (option.config for option in profile.layers[0].options)
    assert profile.uniform(low).saved_bytes == 10
    assert profile.allocation({"layers.0": low, "layers.1": high}).saved_bytes == 30
    # whose options differ, or who do not share, choose for themselves
    other = profile_of([(10, 1.0), (20, 0.5)], [(10, 1.0), (21, 0.5)])
    assert grouped(other, ["layers.0", "layers.0"]).least_bytes == 20
    alone = [
        replace(layer, options=tuple(replace(o, config=o.config.replace(share_sketch=False)) for o in layer.options))
        for layer in profile.layers
    ]
    assert NoiseProfile(tuple(alone)).least_bytes == 20
    assert NoiseProfile(tuple(alone)).uniform(low.replace(share_sketch=False)).saved_bytes == 20
