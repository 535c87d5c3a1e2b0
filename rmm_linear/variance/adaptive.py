"""AdaptiveRatios: each layer's ratio chosen, and chosen again, while the model trains.

Every layer is sampled in two of the first steps, a few layers a step, and `allocate_ratios` or `allocate_for_noise`
choose each layer's ratio from what was measured. Every so many steps the same is done again:

- above the noise target, ratios are raised by the fewest bytes that reach it again, and none is lowered;
- over the budget, it is allocated anew (after a target has raised ratios above it, once that leaves a margin);
- otherwise it is allocated anew where that takes off a tenth of the variance.

Runs repeat, and a run that goes on from `state_dict` does what it would have done. In data parallel training the first
rank decides for all.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rmm_linear import ops
from rmm_linear.config import RMMConfig
from rmm_linear.layer import SketchedLayer
from rmm_linear.variance.allocation import Allocation, NoiseProfile, allocate_for_noise, allocate_ratios
from rmm_linear.variance.probe import LayerSampler, _read_as
from rmm_linear.variance.profile import ProfileBuilder

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)
# Steps of a measurement in which each layer is sampled.
_SAMPLES = 2
# A new allocation replaces one that has at least so much more variance.
_WORTH_A_CHANGE = 1.1
# Batches differ in length: a budget is overdrawn when it is by more than this.
_OVERDRAWN = 1.02
# After a target has raised the ratios above the budget, they come back when that leaves the noise so far below it.
_MARGIN = 0.8
_log = logging.getLogger("rmm_linear")


@dataclass(frozen=True)
class RatioChange:
    """A change of one layer's ratio, after so many optimizer steps."""

    step: int
    layer: str
    before: float
    after: float

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return dict(vars(self))


class AdaptiveRatios(LayerSampler):
    """Chooses every sketched layer's ratio under a byte budget, a noise target, or both.

    Call `step()` after each optimizer step. The layers' other knobs stay as they are.

    Warning:
        With both, the target goes before the budget: where the budget cannot keep the noise below the target, the
        ratios that can are taken, and a warning is logged.

    Args:
        model: A model with sketched layers, in eager mode.
        budget: Bytes that the layers may keep in one forward pass of a batch like the measured ones; "auto" for the
            share of their inputs that they keep as they are configured; None for no budget.
        noise_target: Most that the sketches' variance may be of the minibatch's (`NoiseSummary.noise_ratio`); None for
            no target.
        ratios: Ratios to choose from; each layer's own is added.
        measure_steps: Steps of a measurement; each layer is sampled in two of them.
        recheck_steps: Steps from one measurement's beginning to the next one's.

    Attributes:
        allocation: The last allocation, or None before the first.
        budget_bytes: The budget, once it is known; "auto" follows the size of the measured batches. None without.
        changes: All changes made so far.

    Raises:
        ValueError: If the model is compiled or has no sketched layer, or a value is bad; from `step`, if the budget is
            below the least that the layers can keep.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: Literal["auto"] | float | None = "auto",
        noise_target: float | None = None,
        ratios: Sequence[float] = RATIOS,
        measure_steps: int = 16,
        recheck_steps: int = 500,
    ) -> None:
        self.check(budget, noise_target, measure_steps, recheck_steps)
        super().__init__(model)
        self._ratios = tuple(ratios)
        # bad ratios are found here, not in the middle of a training
        for ratio in self._ratios:
            RMMConfig(ratio=ratio)
        self._budget, self._noise_target = budget, noise_target
        self._measure_steps, self._recheck_steps = int(measure_steps), int(recheck_steps)
        self._builder = ProfileBuilder()
        self.allocation: Allocation | None = None
        self.budget_bytes = None if budget is None or isinstance(budget, str) else float(budget)
        # of an "auto" budget, in all that the layers could keep
        self._share: float | None = None
        self.changes: list[RatioChange] = []
        self._begin_step()

    @staticmethod
    def check(budget: object, noise_target: object, measure_steps: int, recheck_steps: int) -> None:
        """Raise a ValueError if a value is bad, before there is a model."""
        if budget is None and noise_target is None:
            raise ValueError("neither budget nor noise_target is given; pass bytes, 'auto', or a noise ratio, say 0.5")
        for name, value in (("budget", budget), ("noise_target", noise_target)):
            if value is None or (name == "budget" and value == "auto"):
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
                wanted = "bytes above 0, 'auto' or None" if name == "budget" else "a noise ratio above 0, or None"
                raise ValueError(f"{name}={value!r} is not a positive finite number; pass {wanted}")
        for name, value in (("recheck_steps", recheck_steps), ("measure_steps", measure_steps)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive int; pass a number of steps")
        if measure_steps > recheck_steps:
            raise ValueError(
                f"measure_steps={measure_steps} is more than recheck_steps={recheck_steps}; a measurement must end"
                " before the next one begins"
            )

    def step(self) -> list[RatioChange]:
        """End a training step; to be called after each optimizer step. Nothing happens after `close`.

        Raises:
            ValueError: If the budget is below the least that the layers can keep.
        """
        if self._is_closed:
            return []
        self._steps += 1
        made: list[RatioChange] = []
        if self._steps % self._recheck_steps == self._measure_steps % self._recheck_steps:
            made = self._decide()
            self._builder = ProfileBuilder()
        self._begin_step()
        return made

    def _due(self) -> Sequence[str]:
        turn = self._steps % self._recheck_steps
        # every layer once in each half of the measurement
        half = max(1, self._measure_steps // _SAMPLES)
        return self._spread(turn % half, half) if turn < self._measure_steps else ()

    def _measure(self, name: str, layer: SketchedLayer, x: Tensor, g: Tensor, index: Tensor | None) -> None:
        own = layer.rmm_config
        candidates = dict.fromkeys((own, *(own.replace(ratio=ratio) for ratio in self._ratios)))
        self._builder.add(name, x, g, tuple(candidates), index=index, group=self._probe.groups.get(name))

    def _decide(self) -> list[RatioChange]:
        """Have the first data-parallel rank decide, and do what it says."""
        error = allocation = None
        if ops.data_parallel_rank() == 0 and self._builder:
            try:
                allocation = self._decided(self._builder.build())
            except ValueError as refused:
                error = str(refused)
        decided: list[Any] = [error, allocation, self.budget_bytes, self._share]
        # every rank has to come here, whatever it has measured
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(decided, src=0)
        error, allocation, self.budget_bytes, self._share = decided
        if error is not None:
            raise ValueError(error)
        # nothing was measured: an overflow in every sampled step, say
        if allocation is None:
            return []
        self.allocation = allocation
        made = []
        for name, config in allocation.configs.items():
            layer = self._probe.layers[name]
            if layer.rmm_config != config:
                made.append(RatioChange(self._steps, name, layer.rmm_config.ratio, config.ratio))
                layer.rmm_config = config
        for each in made:
            _log.info("step %d: %s goes from ratio %g to %g", each.step, each.layer, each.before, each.after)
        self.changes += made
        return made

    def _decided(self, profile: NoiseProfile) -> Allocation:
        # in the model's order, whatever came first after a resumption
        place = {name: number for number, name in enumerate(self._layers)}
        profile = NoiseProfile(tuple(sorted(profile.layers, key=lambda layer: place[layer.name])))
        now = profile.allocation({layer.name: self._probe.layers[layer.name].rmm_config for layer in profile.layers})
        if self._budget == "auto":
            full = profile.most_bytes
            self._share = now.saved_bytes / full if self._share is None else self._share
            self.budget_bytes = self._share * full
        return self._first(profile) if self.allocation is None else self._again(profile, now)

    def _again(self, profile: NoiseProfile, now: Allocation) -> Allocation:
        target = self._noise_target
        if target is not None and now.noise_ratio > target:
            return self._quieter(_without_lower(profile, now), target)
        if self.budget_bytes is None:
            return now
        least = profile.least_bytes
        if least > self.budget_bytes:
            _log.warning(
                "step %d: the batches have grown, and the least that the layers can keep is %d bytes, above the budget"
                " of %.0f", self._steps, least, self.budget_bytes,
            )  # fmt: skip
        within = allocate_ratios(profile, max(least, self.budget_bytes))
        if now.saved_bytes > _OVERDRAWN * self.budget_bytes:
            return within if target is None or within.noise_ratio <= _MARGIN * target else now
        if target is not None and within.noise_ratio > target:
            return now
        return within if now.variance > _WORTH_A_CHANGE * within.variance else now

    def _first(self, profile: NoiseProfile) -> Allocation:
        target = self._noise_target
        if self.budget_bytes is not None:
            within = allocate_ratios(profile, self.budget_bytes)
            if target is None or within.noise_ratio <= target:
                return within
            _log.warning(
                "step %d: %.0f bytes leave a noise ratio of %.3g, above the target of %g; the target goes before",
                self._steps, self.budget_bytes, within.noise_ratio, target,
            )  # fmt: skip
        assert target is not None
        return self._quieter(profile, target)

    def _quieter(self, profile: NoiseProfile, target: float) -> Allocation:
        least = allocate_ratios(profile, math.inf)
        if least.noise_ratio > target:
            _log.warning(
                "step %d: the least noise ratio to be had is %.3g, above the target of %g; take a finer storage",
                self._steps, least.noise_ratio, target,
            )  # fmt: skip
            return least
        return allocate_for_noise(profile, target * math.fsum(layer.minibatch_variance for layer in profile.layers))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, between two steps."""
        layers = {} if self._is_closed else self._probe.layers
        return {
            "steps": self._steps,
            "budget_bytes": self.budget_bytes,
            "share": self._share,
            "configs": {name: layer.rmm_config.to_dict() for name, layer in layers.items()},
            "allocation": None if self.allocation is None else self.allocation.to_dict(),
            "measured": self._builder.state_dict(),
            "changes": [change.to_dict() for change in self.changes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the object was that returned this `state_dict`: the layers get its configurations.

        Raises:
            ValueError: If the state is something else, or has configurations of layers that this model lacks.
        """
        builder = ProfileBuilder()
        with _read_as(type(self)):
            configs = {name: RMMConfig.from_dict(config) for name, config in state["configs"].items()}
            allocation = None if state["allocation"] is None else Allocation.from_dict(state["allocation"])
            changes = [RatioChange(**change) for change in state["changes"]]
            steps, budget_bytes, share = int(state["steps"]), state["budget_bytes"], state["share"]
            builder.load_state_dict(state["measured"])
        for name in configs:
            self._check_layer(name, "configuration")
        self._steps, self.budget_bytes, self.allocation, self.changes = steps, budget_bytes, allocation, changes
        self._share, self._builder = share, builder
        for name, config in configs.items():
            self._probe.layers[name].rmm_config = config
        self._begin_step()


def _without_lower(profile: NoiseProfile, now: Allocation) -> NoiseProfile:
    """Leave to each layer the options that keep no fewer bytes than it keeps now."""
    layers = []
    for layer, kept in zip(profile.layers, now.layers, strict=True):
        options = tuple(option for option in layer.options if option.saved_bytes >= kept.option.saved_bytes)
        layers.append(replace(layer, options=options))
    return NoiseProfile(tuple(layers))
