"""Choose sketches for all layers: the least variance within a budget of bytes.

Gradients of different layers are sketched with independent seeds, so that their variances add, and so do their bytes.
Choosing one option for every layer is a multiple-choice knapsack problem.

Each layer starts at its lightest option and walks along the edges of the lower convex hull of its (bytes, variance): of
all layers' edges the steepest first, which gains most a byte (Sinha and Zoltners 1979). An edge that does not fit is
skipped, and with it the layer's further edges. The linear relaxation walks the same way and ends with the fraction of
the first such edge that fits: a lower bound for every choice. An `Allocation` states its gap to this bound, which is
less than the gain of one edge.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Literal, get_args

from rmm_linear.config import RMMConfig
from rmm_linear.convert import describe
from rmm_linear.names import listed
from rmm_linear.tables import aligned
from rmm_linear.variance.gradient_noise import _ratio

Objective = Literal["total", "relative"]


@dataclass(frozen=True)
class Option:
    """A configuration that a layer may have, with its bytes and its variance.

    Attributes:
        config: The configuration.
        saved_bytes: All bytes that a forward pass keeps of the layer's input at the profiled rows.
        variance: E||estimate - g^T x||^2, mean over the profiled batches.
    """

    config: RMMConfig
    saved_bytes: int
    variance: float


@dataclass(frozen=True)
class LayerProfile:
    """A layer's options, with the squared gradient and the minibatch's variance for comparison.

    Attributes:
        name: The layer's name as `rmm_linear.summary` prints it, without the prefixes of wrappers.
        gradient_squared: C = ||g^T x||^2, mean over the profiled batches.
        minibatch_variance: The variance of g^T x over minibatches, mean over the profiled batches; nan if unknown.
        options: At least one, with different configurations.
        group: Name of the first of the layers that are called with the same tensor (query, key and value), and so keep
            one sketch if their configurations are equal. None for a layer that does not share its input.
    """

    name: str
    gradient_squared: float
    minibatch_variance: float
    options: tuple[Option, ...]
    group: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        if not self.options:
            raise ValueError(f"layer {self.name!r} has no options; give it at least one, such as the exact layer's")
        if len({option.config for option in self.options}) < len(self.options):
            raise ValueError(f"layer {self.name!r} has two options of one configuration; leave one option out")
        amounts = [self.gradient_squared]
        amounts += [amount for option in self.options for amount in (option.variance, option.saved_bytes)]
        if not math.isnan(self.minibatch_variance):
            amounts.append(self.minibatch_variance)
        if wrong := [amount for amount in amounts if not 0 <= amount < math.inf]:
            raise ValueError(
                f"layer {self.name!r} has an amount of {wrong[0]!r}; squared gradients, variances and bytes are finite"
                " and at least 0 (pass 0 for a value that is below 0 by rounding alone)"
            )

    @property
    def option(self) -> Option:
        """The only option of an allocated layer."""
        (option,) = self.options
        return option


@dataclass(frozen=True)
class NoiseProfile:
    """The bytes and the variance of every option of every layer: the input of `allocate_ratios`.

    Attributes:
        layers: At least one layer, with different names.
    """

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("the profile has no layers; there is nothing to allocate")
        names = [layer.name for layer in self.layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"layers that occur twice: {listed(twice)}; profile every layer once")

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that the layers can keep together."""
        return sum(min(option.saved_bytes for option in unit[0].options) for unit in _units(self))

    @property
    def most_bytes(self) -> int:
        """The most bytes that the layers can keep together."""
        return sum(max(option.saved_bytes for option in unit[0].options) for unit in _units(self))

    def uniform(self, config: RMMConfig) -> "Allocation":
        """Return the allocation that gives every layer the same configuration, one of its options.

        Raises:
            ValueError: If a layer has no such option.
        """
        return self.allocation({layer.name: config for layer in self.layers})

    def allocation(self, configs: Mapping[str, RMMConfig]) -> "Allocation":
        """Return the allocation that gives each layer, by name, one of its options.

        Raises:
            ValueError: If a layer has no such option, or names are missing or unknown.
        """
        known = {layer.name: {option.config: option for option in layer.options} for layer in self.layers}
        wrong = sorted(name for name in {*known, *configs} if configs.get(name) not in known.get(name, ()))
        if wrong:
            raise ValueError(f"no such options of {listed(wrong)}; pass for every layer a profiled configuration")
        chosen = (replace(layer, options=(known[layer.name][configs[layer.name]],)) for layer in self.layers)
        return Allocation(tuple(chosen))


@dataclass(frozen=True)
class Allocation:
    """One option for every layer; `print` it for a table.

    Attributes:
        layers: The layers, in the profile's order, each with the chosen `option`.
        gap: Upper bound of the share of the objective that any choice could save which gives layers of a group with the
            same options one option, in a result of `allocate_ratios`; None in other allocations.
    """

    layers: tuple[LayerProfile, ...]
    gap: float | None = None

    @property
    def configs(self) -> dict[str, RMMConfig]:
        """The configurations by the layers' names, as `convert_linears(overrides=...)` takes them."""
        return {layer.name: layer.option.config for layer in self.layers}

    @property
    def saved_bytes(self) -> int:
        """Sum of the layers' bytes, counted once for layers of a group with equal configurations."""
        kept: dict[object, int] = {}
        for number, layer in enumerate(self.layers):
            shares = layer.group is not None and layer.option.config.share_sketch
            key = (layer.group, layer.option.config) if shares else number
            kept[key] = max(kept.get(key, 0), int(layer.option.saved_bytes))
        return sum(kept.values())

    @property
    def variance(self) -> float:
        """Sum of the layers' variances, which is the variance of the whole gradient."""
        return math.fsum(layer.option.variance for layer in self.layers)

    @property
    def relative_variance(self) -> float:
        """The variance over the squared gradient, both summed over the layers."""
        return _ratio(self.variance, math.fsum(layer.gradient_squared for layer in self.layers))

    @property
    def noise_ratio(self) -> float:
        """The variance over the minibatch's, both summed over the layers; nan if a minibatch's variance is unknown."""
        return _ratio(self.variance, math.fsum(layer.minibatch_variance for layer in self.layers))

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("layer", "config", "bytes", "relative variance")]
        for layer in self.layers:
            config = layer.option.config
            relative = _ratio(layer.option.variance, layer.gradient_squared)
            kind = "exact" if config.is_exact else describe(config)
            table.append((layer.name or "(the model)", kind, str(layer.option.saved_bytes), f"{relative:.3g}"))
        lines = aligned(table)
        lines.append(
            f"{len(self.layers)} layers keep {self.saved_bytes} bytes; variance {self.relative_variance:.3g} of the"
            f" squared gradient, {self.noise_ratio:.3g} of the minibatch's variance"
            + ("" if self.gap is None else f"; no other choice saves more than {self.gap:.2%}")
        )
        return "\n".join(lines)


def allocate_ratios(profile: NoiseProfile, budget_bytes: int | float, *, objective: Objective = "total") -> Allocation:
    """Choose an option for every layer: the least variance within a budget of bytes, up to the allocation's `gap`.

    The gap is small for many layers with closely spaced options: 0.03 % for 48 layers of 40 ratios. More bytes never
    mean more variance. Layers of a group with the same options get the same option, whose bytes count once.

    Examples:
        >>> from rmm_linear import RMMConfig
        >>> from rmm_linear.variance.allocation import LayerProfile, NoiseProfile, Option, allocate_ratios
        >>> def layer(name, coefficient):
        ...     ratios = (0.2, 0.5, 0.8)
        ...     options = (Option(RMMConfig(ratio=r), round(1000 * r), coefficient * (1 / r - 1)) for r in ratios)
        ...     return LayerProfile(name, 10.0, 5.0, tuple(options))
        >>> profile = NoiseProfile((layer("query", 1.0), layer("output", 20.0)))
        >>> uniform = profile.uniform(RMMConfig(ratio=0.5))
        >>> best = allocate_ratios(profile, uniform.saved_bytes)
        >>> {name: config.ratio for name, config in best.configs.items()}
        {'query': 0.2, 'output': 0.8}
        >>> best.saved_bytes, uniform.saved_bytes, best.variance, uniform.variance
        (1000, 1000, 9.0, 21.0)

    Args:
        profile: The layers and their options.
        budget_bytes: Bytes that the layers may keep together; may be infinite.
        objective: "total" for the least sum of variances, the noise of the whole gradient; "relative" for the least
            sum of each layer's variance over its own squared gradient.

    Raises:
        ValueError: If the budget is no number or below the least possible, the objective is unknown, or the objective
            is "relative" and a layer with zero gradient has a variance.
    """
    units = _units(profile)
    costs = _costs(profile, objective, units)
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, Real) or not budget_bytes >= 0:
        raise ValueError(f"budget_bytes={budget_bytes!r} is not a number of at least 0; pass an int or a float")
    least = profile.least_bytes
    if budget_bytes < least:
        raise ValueError(
            f"budget_bytes={budget_bytes} is below the least possible, {least} bytes with the smallest option of every"
            " layer; pass at least that, or profile smaller options"
        )
    weights = [[option.saved_bytes for option in unit[0].options] for unit in units]
    choice, gap = _solve(weights, costs, math.floor(min(budget_bytes, profile.most_bytes)))
    chosen = zip(units, choice, strict=True)
    configs = {layer.name: layer.options[index].config for unit, index in chosen for layer in unit}
    return replace(profile.allocation(configs), gap=gap)


def _units(profile: NoiseProfile) -> list[list[LayerProfile]]:
    """Group the layers that get one option: layers of a sharing group with equal options; other layers alone."""
    found: dict[object, list[LayerProfile]] = {}
    for layer in profile.layers:
        shares = layer.group is not None and all(option.config.share_sketch for option in layer.options)
        options = tuple((option.config, option.saved_bytes) for option in layer.options)
        found.setdefault((layer.group, options) if shares else layer.name, []).append(layer)
    return list(found.values())


def _costs(profile: NoiseProfile, objective: Objective, units: Sequence[Sequence[LayerProfile]]) -> list[list[float]]:
    """The objective of each unit's options, summed over its layers."""
    if objective not in get_args(Objective):
        raise ValueError(f"objective={objective!r} is unknown; choose one of {', '.join(get_args(Objective))}")
    values = {
        layer.name: [
            option.variance if objective == "total" else _ratio(option.variance, layer.gradient_squared)
            for option in layer.options
        ]
        for layer in profile.layers
    }
    without = [name for name, each in values.items() if math.inf in each]
    if without:
        raise ValueError(
            f"gradient_squared is 0 and a variance is not: {listed(without)}; leave these layers out, or pass"
            ' objective="total"'
        )
    return [[math.fsum(each) for each in zip(*(values[layer.name] for layer in unit), strict=True)] for unit in units]


def _solve(
    weights: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], capacity: float
) -> tuple[list[int], float]:
    """Choose one option a layer by the method in the module's docstring; return the options and the gap."""
    hulls = [_lower_hull(w, c) for w, c in zip(weights, costs, strict=True)]
    edges = []
    for layer, hull in enumerate(hulls):
        gain = math.inf
        for place, (left, right) in enumerate(pairwise(hull)):
            less, more = costs[layer][left] - costs[layer][right], weights[layer][right] - weights[layer][left]
            # gains fall along a convex hull; rounding must not sort an edge before its predecessor
            gain = min(gain, less / more)
            edges.append((-gain, layer, place, more))
    places = [0] * len(hulls)

    def cost() -> float:
        return math.fsum(costs[layer][hull[places[layer]]] for layer, hull in enumerate(hulls))

    spent, bound = math.fsum(w[hull[0]] for w, hull in zip(weights, hulls, strict=True)), None
    for negative_gain, layer, place, more in sorted(edges):
        # an edge can be walked only if its predecessor was
        if places[layer] == place and spent + more <= capacity:
            places[layer] += 1
            spent += more
        elif bound is None:
            bound = cost() + negative_gain * (capacity - spent)
    found = cost()
    # if all edges fit, the choice is optimal
    gap = 0.0 if bound is None or found == 0 else max(0.0, 1 - bound / found)
    return [hull[place] for hull, place in zip(hulls, places, strict=True)], gap


def _lower_hull(w: Sequence[int], c: Sequence[float]) -> list[int]:
    """Options on the lower convex hull, by increasing weight and decreasing cost."""
    hull: list[int] = []
    least = math.inf
    for i in sorted(range(len(w)), key=lambda i: (w[i], c[i])):
        if c[i] >= least:
            # an earlier option has at most this weight and this cost
            continue
        least = c[i]
        while len(hull) > 1:
            j, k = hull[-2:]
            if (c[k] - c[j]) * (w[i] - w[k]) < (c[i] - c[k]) * (w[k] - w[j]):
                break
            hull.pop()
        hull.append(i)
    return hull
