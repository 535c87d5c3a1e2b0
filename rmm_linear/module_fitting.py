"""`fit` without a compiler: whole modules are converted or checkpointed, and the fastest such means is found by trial.

    plan = fit(model, batch, budget="60%", noise=0.01, executor=None)

The means are the unchanged model; its linear layers with inputs in 8 or 4 bits, or sketched (`convert_linears`); and
each of these with as few of its repeated blocks checkpointed (`torch.utils.checkpoint`) as the budget allows. The step
of the whole sample runs by each: peaks and times are measured, and the noise on parts of the sample.
"""

import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear.byte_sizes import readable, unit_for
from rmm_linear.candidates import (
    LEAST_NOISE_OF_SKETCHES,
    Candidate,
    Loss,
    NotMeasurableError,
    T,
    at_call,
    choose,
    loss_of,
    noise_on,
    parts_of,
    table,
)
from rmm_linear.compiler.costs import median_ms
from rmm_linear.config import RMMConfig
from rmm_linear.convert import convert_linears, revert_linears
from rmm_linear.errors import NothingToTrainError, first_line
from rmm_linear.layer import SketchedLayer
from rmm_linear.memory import profile
from rmm_linear.memory.peak import measure_peak_bytes
from rmm_linear.memory.unchanged import buffers_of, changed_buffers, unchanged
from rmm_linear.planning.budget import Budget
from rmm_linear.variance.step_noise import StepNoise, gradient_of

# Options of converted layers.
_CODES: tuple[dict[str, Any], ...] = ({"ratio": 1.0, "storage": "int8"}, {"ratio": 1.0, "storage": "int4"})
_SKETCHES: tuple[dict[str, Any], ...] = ({"ratio": 0.5}, {"ratio": 0.25}, {"ratio": 0.1})
# Attributes by which transformers checkpoints a block; `gradient_checkpointing_enable` would install hooks as well.
_FLAG, _FUNCTION, _BLOCK = "gradient_checkpointing", "_gradient_checkpointing_func", "GradientCheckpointingLayer"
# Measured times differ by some percent from run to run: noise has to buy more.
_LEAST_GAIN = 1.05
# An attribute of a fitted model, and of its copies.
_FITTED = "_rmm_linear_is_fitted"


@dataclass(frozen=True)
class ModuleFit:
    """The means that `fit` chose without a compiler, and the others that it tried.

    Attributes:
        model: The model.
        chosen: How its steps run.
        candidates: All means that ran: first those within the budget, in the order of measured time, to which noise
            adds 5 %.
        plain_bytes: Measured peak of the step as the model was given; None if memory did not suffice.
        plain_ms: Its measured time; infinite if memory did not suffice.
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
        """Undo the changes that `fit` made, and return the model; later changes by others stay."""
        self._means.remove()
        return self.model

    def __str__(self) -> str:
        unit = unit_for(max(self.chosen.least_bytes, self.plain_bytes or 0))
        budget = "no budget" if self.budget_bytes is None else f"budget {readable(self.budget_bytes)}"
        peak, time = unit.of(self.chosen.least_bytes), f"{self.chosen.time:.1f}"
        if self.plain_bytes is not None and self.plain_ms < math.inf:
            peak, time = f"{unit.of(self.plain_bytes)} -> {peak}", f"{self.plain_ms:.1f} -> {time}"
        lines = [
            f"{self.chosen.name}: peak {peak} {unit.name}, {budget}; measured time {time} ms",
            "no compiler was used: whole modules are converted or checkpointed, and no bound of other ways is known",
        ]
        return "\n".join([*lines, *table(self.candidates, unit, "time, ms", 1), *self.notes])


def fit_modules(
    model: nn.Module, sample: Any, budget: Budget | None, limit: float, ways: set[str], loss_fn: Loss | None
) -> ModuleFit:
    """Install the fastest means within a budget and a noise limit; `rmm_linear.fit` has the arguments.

    Raises:
        InfeasibleBudgetError: If no means is within both.
        NothingToTrainError: If no parameter requires a gradient.
        ValueError: If the step can't be run, or the model is fitted already.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        raise ValueError(
            "executor=None measures steps on one device, a CPU or a CUDA GPU, and the parameters are on"
            f" {', '.join(sorted(map(str, devices)))}: load the model onto one"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NothingToTrainError
    if _FITTED in vars(model):
        raise ValueError(
            "the model is fitted already, or a copy of a fitted model: call remove() of the result of that fit before"
            " the model is fitted or copied, or make the model anew and load its state_dict"
        )
    # a conversion warns of layers that stay exact: once is enough
    with warnings.catch_warnings(), unchanged(model), torch.enable_grad():
        warnings.simplefilter("ignore")
        trials = _Trials(model, sample, budget, limit, ways, loss_fn)
        candidates = trials.candidates
        chosen = choose(candidates, limit, trials.noise_of, trials.budget_bytes, trials.refusal, _LEAST_GAIN)
    trials.means.install(chosen.options, chosen.checkpoints)
    sizes = trials.plain_bytes, trials.plain_ms, trials.budget_bytes
    return ModuleFit(model, chosen, tuple(candidates), *sizes, limit, tuple(trials.notes), trials.means)


class _Trials:
    """Runs the step of a sample by all means; where the unchanged step fits, by sketches alone, which may be faster."""

    def __init__(
        self, model: nn.Module, sample: Any, budget: Budget | None, limit: float, ways: set[str], loss_fn: Loss | None
    ) -> None:
        self.means = _Means(model)
        self.candidates: list[Candidate] = []
        # why some means are left out, each reason once
        self.notes: dict[str, None] = {}
        self._model, self._sample, self._budget, self._limit, self._loss_fn = model, sample, budget, limit, loss_fn
        self._device = next(model.parameters()).device
        self._peaks: dict[str, int | None] = {}
        self.plain_bytes = self._peak({})
        self.budget_bytes = None if budget is None else budget.in_bytes(self.plain_bytes or 0)
        self._add({})
        if not self.candidates and (budget is None or budget.is_relative):
            raise ValueError("the unchanged step runs out of memory: pass a budget in bytes")
        self.plain_ms = self.candidates[0].time if self.candidates else math.inf
        is_tight = not self._fits({})
        codes = _CODES if is_tight and "code" in ways and limit > 0 else ()
        sketches = _SKETCHES if "sketch" in ways and limit >= LEAST_NOISE_OF_SKETCHES else ()
        if any(isinstance(module, SketchedLayer) for module in model.modules()):
            codes = sketches = ()
            self.notes["linear layers that are converted already stay so, and their noise is not counted"] = None
        if is_tight and "recompute" in ways:
            self._find_blocks()
        for options in ({}, *filter(self._converts, (*codes, *sketches))):
            count = self._checkpoints(options)
            if options or count:
                self._add(options, count)
        if not self.candidates:
            raise ValueError(f"the step runs by no means: {'; '.join(self.notes)}")

    def _find_blocks(self) -> None:
        """Leave out the blocks that change their buffers in a forward pass, which checkpoints run twice."""
        blocks = _blocks(self._model)
        states = [buffers_of(block) for block in blocks]
        # without a graph where memory does not suffice for it
        for has_graph in (True, False):
            try:
                with torch.set_grad_enabled(has_graph):
                    loss_of(self._model, self._sample, self._loss_fn)
                break
            except torch.OutOfMemoryError:
                continue
        else:
            return
        self.means.blocks = [
            block for block, state in zip(blocks, states, strict=True) if not changed_buffers(block, state)
        ]
        if count := len(blocks) - len(self.means.blocks):
            self.notes[f"{count} blocks are not checkpointed: they change their buffers, and would do so twice"] = None

    def _converts(self, options: Mapping[str, Any]) -> bool:
        try:
            with self.means.installed(options):
                return True
        except ValueError as error:
            # there is no layer to convert
            self.notes[str(error)] = None
            return False

    def _checkpoints(self, options: Mapping[str, Any]) -> int:
        """Return how many blocks have to be checkpointed, all if the budget allows no number, 0 if the step fails."""
        if not self.means.blocks or self._fits(options):
            return 0
        # each checkpoint more takes the peak down
        numbers = range(1, len(self.means.blocks))
        count = 1 + bisect_left(numbers, True, key=lambda count: self._fits(options, count))
        return 0 if self._peak(options, count) is None else count

    def _add(self, options: Mapping[str, Any], checkpoints: int = 0) -> None:
        peak_bytes = self._peak(options, checkpoints)
        time = None if peak_bytes is None else self._time(options, checkpoints)
        if peak_bytes is not None and time is not None:
            name, fits = _name(options, checkpoints), self._fits(options, checkpoints)
            self.candidates.append(Candidate(name, options, None, peak_bytes, time, checkpoints=checkpoints, fits=fits))

    def _fits(self, options: Mapping[str, Any], checkpoints: int = 0) -> bool:
        peak_bytes = self._peak(options, checkpoints)
        return peak_bytes is not None and (self.budget_bytes is None or peak_bytes <= self.budget_bytes)

    def _peak(self, options: Mapping[str, Any], checkpoints: int = 0) -> int | None:
        name = _name(options, checkpoints)
        if name not in self._peaks:
            measure = partial(measure_peak_bytes, self._run, self._device)
            self._peaks[name] = self._tried(measure, options, checkpoints)
        return self._peaks[name]

    def _time(self, options: Mapping[str, Any], checkpoints: int) -> float | None:
        return self._tried(partial(median_ms, self._run, [self._device]), options, checkpoints)

    def _tried(self, measure: Callable[[], T], options: Mapping[str, Any], checkpoints: int) -> T | None:
        try:
            with self.means.installed(options, checkpoints):
                return measure()
        except RuntimeError as error:
            # too little memory, or a block that can't run twice
            if not options and not checkpoints and not isinstance(error, torch.OutOfMemoryError):
                raise
            self.notes[f"{_name(options, checkpoints)}: {first_line(error)}"] = None
            return None

    def _run(self) -> None:
        gradient_of(self._model, self._sample, partial(loss_of, loss_fn=self._loss_fn))

    def noise_of(self, candidate: Candidate) -> StepNoise:
        """Measure the noise of a candidate, without its checkpoints, which add none."""
        parts = parts_of(self._sample)
        try:
            with self.means.installed(candidate.options, candidate.checkpoints):
                sketched = [self._sketched(batch, candidate) for batch in (self._sample, parts[0])]
            if sketched[0] == sketched[1]:
                with self.means.installed(candidate.options):
                    return noise_on(self._model, parts, self._loss_fn, self._limit)
        except torch.OutOfMemoryError as error:
            raise NotMeasurableError(f"the noise can't be measured: {first_line(error)}") from None
        raise NotMeasurableError(
            f"the noise can't be measured: in {len(parts)} parts of the sample some linear layers have too few rows to"
            " be sketched; pass a larger batch"
        )

    def _sketched(self, batch: Any, candidate: Candidate) -> set[str]:
        """The linear layers whose inputs have the rows that a sketch needs."""
        config = RMMConfig(**candidate.options)
        found = at_call(self._model, batch, self._loss_fn, lambda args, kwargs: profile(self._model, *args, **kwargs))
        return {call.layer for call in found.linears if config.sketches(call.rows)}

    def refusal(self, least_bytes: int) -> str:
        """Say that no means is within the budget."""
        assert self._budget is not None
        least = self._budget.that_holds(least_bytes, self.plain_bytes or 0)
        asked = f"{self._budget} = {readable(self._budget.in_bytes(self.plain_bytes or 0))}"
        text = f"fit found no means within {asked}; the least that was found takes {least}"
        whole = [] if self.plain_bytes is None else [f"the unchanged step takes {readable(self.plain_bytes)}"]
        return "; ".join([f"{text} = {readable(least_bytes)}", *whole, *self.notes])


class _Means:
    """Converts a model's linear layers and checkpoints the first of some blocks, and undoes both."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.blocks: list[nn.Module] = []
        self._is_converted = False
        # for each block that is checkpointed, the attributes that it was given, and that it had in their place
        self._installed: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []

    def install(self, options: Mapping[str, Any], checkpoints: int = 0) -> None:
        """Convert layers by the configuration of the options, and checkpoint so many blocks."""
        if options or checkpoints:
            vars(self._model)[_FITTED] = True
        if options:
            self._is_converted = True
            convert_linears(self._model, config=RMMConfig(**options))
        for block in self.blocks[:checkpoints]:
            given: dict[str, Any] = {"forward": partial(_checkpointed, block.forward)}
            if hasattr(block, _FLAG):
                given = {_FLAG: True, _FUNCTION: _checkpointed}
            self._installed.append((block, given, {name: vars(block)[name] for name in given if name in vars(block)}))
            vars(block).update(given)

    def remove(self) -> None:
        """Give the model its layers and blocks back, but for blocks that others have changed since."""
        if self._is_converted or self._installed:
            vars(self._model).pop(_FITTED, None)
        if self._is_converted:
            revert_linears(self._model)
            self._is_converted = False
        for block, given, before in self._installed:
            if all(vars(block).get(name) is value for name, value in given.items()):
                for name in given:
                    del vars(block)[name]
                vars(block).update(before)
        self._installed = []

    @contextmanager
    def installed(self, options: Mapping[str, Any], checkpoints: int = 0) -> Iterator[None]:
        """Install means, and remove them at the end."""
        try:
            self.install(options, checkpoints)
            yield
        finally:
            self.remove()


def _checkpointed(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # `checkpoint` has keywords of its own; of positional tensors alone it keeps random states and sees changes in place
    count, names = len(args), tuple(kwargs)

    def run(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)


def _name(options: Mapping[str, Any], checkpoints: int) -> str:
    """Such as "ratio 0.5 + 4 checkpoints"."""
    parts = [options.get("storage") or f"ratio {options['ratio']:g}"] if options else []
    if checkpoints:
        parts.append(f"{checkpoints} checkpoint{'s' if checkpoints > 1 else ''}")
    return " + ".join(parts) or "unchanged"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that transformers would checkpoint if it was told to, or else the alike members of stacks.

    A block that holds others is left out. Stacks, and parts of blocks, may have the flag of blocks as well.
    """
    blocks = {each for each in model.modules() if any(kind.__name__ == _BLOCK for kind in type(each).__mro__)}
    blocks = blocks or {member for each in model.modules() for member in _members(each)}
    return [each for each in model.modules() if blocks.intersection(each.modules()) == {each}]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    counts = Counter(type(child) for child in module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for child in module.children():
            if counts[type(child)] > 1 and any(True for _ in child.children()):
                yield child
