"""`fit` without a compiler: whole modules are converted or checkpointed, and the fastest such means is found by trial.

    plan = fit(model, batch, budget="60%", noise=0.01, executor=None)

The means are the model as it is; its linear layers with inputs in 8 or 4 bits, or sketched (`convert_linears`); and
each of these with as few of its repeated blocks checkpointed (`torch.utils.checkpoint`) as the budget allows. The step
of the whole sample runs by each: peaks and times are measured, and the noise on parts of the sample.
"""

import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear.byte_sizes import unit_for
from rmm_linear.candidates import (
    LEAST_NOISE_OF_SKETCHES,
    Candidate,
    Loss,
    NotMeasurableError,
    arguments_of,
    choose,
    is_without_contents,
    loss_of,
    noise_on,
    parts_of,
    table,
)
from rmm_linear.compiler.costs import median_ms
from rmm_linear.config import RMMConfig
from rmm_linear.convert import convert_linears, revert_linears
from rmm_linear.errors import NothingToTrainError
from rmm_linear.layer import SketchedLayer
from rmm_linear.memory import profile
from rmm_linear.memory.peak import measure_peak_bytes
from rmm_linear.memory.unchanged import unchanged
from rmm_linear.planning.budget import Budget, refusal
from rmm_linear.variance.step_noise import StepNoise, gradient_of

# Options of converted layers.
_CODES: tuple[dict[str, Any], ...] = ({"ratio": 1.0, "storage": "int8"}, {"ratio": 1.0, "storage": "int4"})
_SKETCHES: tuple[dict[str, Any], ...] = ({"ratio": 0.5}, {"ratio": 0.25}, {"ratio": 0.1})
# Attributes of a module that checkpoints change. The flag and the function belong to transformers, whose own method
# would install hooks beside them.
_FLAG, _FUNCTION, _BLOCK = "gradient_checkpointing", "_gradient_checkpointing_func", "GradientCheckpointingLayer"
_CHANGED = ("forward", _FLAG, _FUNCTION)


@dataclass(frozen=True)
class ModuleFit:
    """The means that `fit` chose without a compiler, and the others that it tried.

    Attributes:
        model: The model.
        chosen: How its steps run.
        candidates: All means that ran, in the order of measured time.
        plain_bytes: Measured peak of the step as the model was given; None if memory did not suffice.
        plain_ms: Its measured time.
        budget_bytes: The budget; None if there is none.
        noise_limit: The limit.
        notes: Why means were left out.
    """

    model: nn.Module = field(repr=False)
    chosen: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    plain_bytes: int | None
    plain_ms: float
    budget_bytes: int | None
    noise_limit: float
    notes: tuple[str, ...]
    _means: "_Means" = field(repr=False)

    def remove(self) -> nn.Module:
        """Let the model run as it was given, with the classes and the flags of checkpoints that it had.

        Returns:
            The model.
        """
        self._means.remove()
        return self.model

    def __str__(self) -> str:
        unit = unit_for(self.chosen.least_bytes)
        budget = "no budget" if self.budget_bytes is None else f"budget {unit.of(self.budget_bytes)}"
        peak, time = unit.of(self.chosen.least_bytes), f"{self.chosen.time:.1f}"
        if self.plain_bytes is not None:
            peak, time = f"{unit.of(self.plain_bytes)} -> {peak}", f"{self.plain_ms:.1f} -> {time}"
        lines = [
            f"{self.chosen.name}: peak {peak} {unit.name}, {budget}; measured time {time} ms",
            "no compiler was used: whole modules are converted or checkpointed, and no bound of other ways is known",
        ]
        return "\n".join([*lines, *table(self.candidates, unit, "time, ms", 1), *self.notes])


def fit_modules(
    model: nn.Module, sample: Any, budget: Budget | None, limit: float, ways: Collection[str], loss_fn: Loss | None
) -> ModuleFit:
    """Install the fastest means within a budget and a noise limit; `rmm_linear.fit` has the arguments.

    Raises:
        InfeasibleBudgetError: If no means is within both.
        NothingToTrainError: If no parameter requires a gradient.
        ValueError: If the step can't be run.
    """
    if is_without_contents(model):
        raise ValueError("executor=None measures steps, and the weights are on the meta device: load the model")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NothingToTrainError
    # a conversion warns of layers that stay exact: once is enough
    with warnings.catch_warnings(), unchanged(model), torch.enable_grad():
        warnings.simplefilter("ignore")
        trials = _Trials(model, sample, budget, loss_fn)
        trials.run(ways, limit)
        chosen = choose(trials.candidates, limit, trials.noise_of, trials.budget_bytes, trials.refusal)
    trials.means.install(chosen.options)
    plain, candidates = (trials.plain_bytes, trials.plain_ms), tuple(trials.candidates)
    return ModuleFit(model, chosen, candidates, *plain, trials.budget_bytes, limit, tuple(trials.notes), trials.means)


class _Trials:
    """Runs the step of a sample by several means."""

    def __init__(self, model: nn.Module, sample: Any, budget: Budget | None, loss_fn: Loss | None) -> None:
        self.means = _Means(model)
        self.candidates: list[Candidate] = []
        # why some means are left out, each reason once
        self.notes: dict[str, None] = {}
        self._model, self._sample, self._budget, self._loss_fn = model, sample, budget, loss_fn
        self._device = next(model.parameters()).device
        self._peaks: dict[str, int | None] = {}
        self.plain_bytes = self._peak({})
        if self.plain_bytes is None and (budget is None or budget.is_relative):
            raise ValueError("the step runs out of memory as it is: pass a budget in bytes")
        self.plain_ms = math.inf if self.plain_bytes is None else self._time({})
        self.budget_bytes = None if budget is None else budget.in_bytes(self.plain_bytes or 0)

    def run(self, ways: Collection[str], limit: float) -> None:
        """Try all means; where the step fits as it is, the sketches alone, which may take less time."""
        is_tight = not self._fits({})
        if self.plain_bytes is not None:
            time = math.inf if is_tight else self.plain_ms
            self.candidates.append(Candidate(_name({}), {}, None, self.plain_bytes, time))
        codes = _CODES if is_tight and "code" in ways and limit > 0 else ()
        sketches = _SKETCHES if "sketch" in ways and limit >= LEAST_NOISE_OF_SKETCHES else ()
        if self.means.are_layers_converted and (codes or sketches):
            codes = sketches = ()
            self.notes["linear layers that are converted already stay as they are"] = None
        blocks = len(self.means.blocks) if is_tight and "recompute" in ways else 0
        for options in ({}, *codes, *sketches):
            self._add(options, blocks)
        if not self.candidates:
            raise ValueError(f"the step runs by no means: {'; '.join(self.notes)}")

    def _add(self, options: dict[str, Any], blocks: int) -> None:
        """Measure converted layers, with as few checkpointed blocks as the budget allows."""
        try:
            if blocks and not self._fits(options):
                # each checkpoint more takes the peak down
                count = 1 + bisect_left(range(1, blocks), True, key=lambda count: self._fits(_with(options, count)))
                if self._peak(_with(options, count)) is not None:
                    options = _with(options, count)
            peak_bytes = self._peak(options)
            if peak_bytes is not None and options:
                time = self._time(options) if self._fits(options) else math.inf
                self.candidates.append(Candidate(_name(options), options, None, peak_bytes, time))
        except ValueError as error:
            # there is no layer to convert
            self.notes[str(error)] = None

    def _fits(self, options: dict[str, Any]) -> bool:
        peak_bytes = self._peak(options)
        return peak_bytes is not None and (self.budget_bytes is None or peak_bytes <= self.budget_bytes)

    def _peak(self, options: dict[str, Any]) -> int | None:
        """Measure the peak of a step; None if the step can't be run."""
        name = _name(options)
        if name not in self._peaks:
            with self.means.installed(options):
                try:
                    self._peaks[name] = measure_peak_bytes(self._run, self._device)
                except RuntimeError as error:
                    # too little memory, or a block that can't run twice
                    if not options and not isinstance(error, torch.OutOfMemoryError):
                        raise
                    self._peaks[name] = None
                    self.notes[f"{name}: {str(error).partition(chr(10))[0]}"] = None
        return self._peaks[name]

    def _time(self, options: dict[str, Any]) -> float:
        with self.means.installed(options):
            return median_ms(self._run, [self._device])

    def _run(self) -> None:
        gradient_of(self._model, self._sample, partial(loss_of, loss_fn=self._loss_fn))

    def noise_of(self, candidate: Candidate) -> StepNoise:
        """Measure the noise of a candidate, without its checkpoints, which add none."""
        options, parts = _with(candidate.options, 0), parts_of(self._sample)
        if self._sketched(self._sample, options) != self._sketched(parts[0], options):
            raise NotMeasurableError(
                f"the noise can't be measured: in {len(parts)} parts of the sample some linear layers have too few rows"
                " to be sketched; pass a larger batch"
            )
        with self.means.installed(options):
            return noise_on(self._model, parts, self._loss_fn)

    def _sketched(self, batch: Any, options: dict[str, Any]) -> set[str]:
        """The linear layers whose inputs have the rows that a sketch needs."""
        args, kwargs = arguments_of(self._model, batch, self._loss_fn)
        config = RMMConfig(**options)
        return {call.layer for call in profile(self._model, *args, **kwargs).linears if config.sketches(call.rows)}

    def refusal(self, least_bytes: int) -> str:
        """Say that no means is within the budget."""
        assert self._budget is not None
        whole = "step takes as it is"
        text = refusal(self._budget, self.plain_bytes or 0, least_bytes, "fit", wanted="means", plain=whole)
        return "; ".join([text, *self.notes])


class _Means:
    """Converts a model's linear layers and checkpoints its blocks, and undoes both."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.blocks = _blocks(model)
        self.are_layers_converted = any(isinstance(module, SketchedLayer) for module in model.modules())
        self._is_converted = False
        self._before = [
            (module, {name: value for name, value in vars(module).items() if name in _CHANGED})
            for module in model.modules()
        ]

    def install(self, options: Mapping[str, Any]) -> None:
        """Convert layers by the configuration of the options, and checkpoint as many blocks as they say, the first."""
        if "ratio" in options:
            self._is_converted = True
            convert_linears(self._model, config=RMMConfig(**_with(options, 0)))
        for block in self.blocks[: options.get("checkpoints", 0)]:
            if hasattr(block, _FLAG):
                vars(block).update({_FLAG: True, _FUNCTION: partial(checkpoint, use_reentrant=False)})
            else:
                vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)

    def remove(self) -> None:
        """Give the model its layers and blocks back."""
        if self._is_converted:
            revert_linears(self._model)
            self._is_converted = False
        for module, attributes in self._before:
            for name in _CHANGED:
                vars(module).pop(name, None)
            vars(module).update(attributes)

    @contextmanager
    def installed(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Install means, and remove them at the end."""
        try:
            self.install(options)
            yield
        finally:
            self.remove()


def _with(options: Mapping[str, Any], checkpoints: int) -> dict[str, Any]:
    others = {name: value for name, value in options.items() if name != "checkpoints"}
    return {**others, "checkpoints": checkpoints} if checkpoints else others


def _name(options: Mapping[str, Any]) -> str:
    """Such as "ratio 0.5 + 4 checkpoints"."""
    parts = [options.get("storage") or f"ratio {options['ratio']:g}"] if "ratio" in options else []
    if count := options.get("checkpoints"):
        parts.append(f"{count} checkpoint{'s' if count > 1 else ''}")
    return " + ".join(parts) or "as it is"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that transformers would checkpoint if it was told to, or else the alike members of stacks.

    A block that averages over the batches that it sees, which would see each twice, is left out.
    """
    # stacks and parts of blocks may have a flag as well
    blocks = [each for each in model.modules() if any(kind.__name__ == _BLOCK for kind in type(each).__mro__)]
    blocks = blocks or list(dict.fromkeys(_members(model)))
    return [each for each in blocks if not any(getattr(part, "track_running_stats", False) for part in each.modules())]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    counts = Counter(type(child) for child in module.children())
    is_stack = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in module.children():
        if is_stack and counts[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        else:
            yield from _members(child)
