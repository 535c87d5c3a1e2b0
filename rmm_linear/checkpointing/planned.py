"""Train a model within a byte budget: plans by torch.compile, run op by op with the bits of eager mode.

    plan = checkpoint_model(model, batch, budget="60%")     # in place; train as always
    print(plan)

torch.compile's front end, Dynamo, traces the Python code, and traces it anew when a guarded value changes. The model
runs as written in eval mode, under `no_grad`, and inside of torch.func. A copy of a planned model (`copy.deepcopy`,
`pickle`) runs as written: `nn.Module` keeps no compiled call in copies.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rmm_linear.compiler.backend import Group, Options, Planned, Variant
from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.compiler.torch_private import (
    OptimizedModule,
    compiled,
    dynamo_options,
    failures_of_dynamo,
    hindrance,
    is_own_error,
    is_recompile_limit,
    is_transforming,
    reason_of,
    reasons_of_breaks,
)
from rmm_linear.compiler.tracing import hint_for
from rmm_linear.errors import CaptureError, InfeasibleBudgetError, NothingToTrainError, ScheduleError
from rmm_linear.planning.budget import Budget
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.schedule import Schedule

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_MOST_CHARACTERS = 2000
_FAILURES = failures_of_dynamo()
_CHECK = "Check first that the step runs as written with these arguments. "
_HINT = (
    "Take that line out of the step, or checkpoint the blocks without it one by one (`checkpoint_model(block, ...)`)"
)


class PlannedStep:
    """A function, or a module's call, that runs by plan in training mode; call it as the function is called.

    `checkpoint_step`, `checkpoint_model` and `apply_schedule` make them.

    Args:
        function: The function of a step.
        model: The model; only steps in its training mode run by plan.
        options: The options of the plan.
        fullgraph: Whether the first call must be one graph. If a later call is not, or if the module was sharded
            (`fully_shard`), each graph is planned by itself.

    Attributes:
        reason: Why the first step that did not run by plan, or not as a whole, did not; None if all steps did.
    """

    def __init__(
        self, function: Callable[..., Any], model: nn.Module, options: Options, *, fullgraph: bool = True
    ) -> None:
        self._function, self._model = function, model
        # Dynamo's cache in `_compiled` refers to the group, and the garbage collector does not see this reference
        step = weakref.proxy(self)
        self.group = Group(options, on_failure=lambda error: step._on_failure(error))
        self._compiled, self._is_whole = compiled(function, self.group.compile, fullgraph=fullgraph), fullgraph
        self.reason: str | None = None
        self._told: set[str] = set()

    __reduce__ = Capture.__reduce__

    @property
    def plans(self) -> list[CheckpointPlan]:
        """The plans so far, one for each graph and kind of arguments."""
        return [variant.plan for variant in self.group.variants()]

    def forget(self) -> None:
        """Drop the plans; later calls make new plans."""
        for graph in self.group.graphs:
            graph.variants.clear()

    @property
    def planned_runs(self) -> int:
        """The number of forward passes that ran by plan."""
        return self.group.runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, by plan if gradients are on and the model is in training mode."""
        is_trained = self._model.training and torch.is_grad_enabled()
        # `is_compiling` is true in all threads while one thread compiles
        if not is_trained or torch.compiler.is_dynamo_compiling() or is_transforming():
            return self._function(*args, **kwargs)
        if (reason := hindrance(self._model)) is not None:
            self._warn(reason)
            return self._function(*args, **kwargs)
        runs, reasons = self.group.runs, reasons_of_breaks() if self.reason is None else {}
        try:
            with dynamo_options():
                result = self._compiled(*args, **kwargs)
        except InfeasibleBudgetError:
            if not self.plans and self._model._compiled_call_impl is self:
                # otherwise the model could not be planned with another budget
                del self._model._compiled_call_impl
            raise
        except _FAILURES as error:
            if not self._is_whole or is_recompile_limit(error):
                self._warn(reason_of(error))
                return self._function(*args, **kwargs)
            # a bad batch makes the function raise here as well: the caller sees that exception, and the plan stays
            result = self._function(*args, **kwargs) if (is_own := is_own_error(error)) else None
            if not _is_sharded(self._model):
                self._warn(reason_of(error), "is no longer one graph, and its parts are planned one by one")
            self._compiled, self._is_whole = compiled(self._function, self.group.compile, fullgraph=False), False
            self.forget()
            return result if is_own else self(*args, **kwargs)
        if self.group.runs == runs and self.reason is None:
            new = [reason for reason, count in reasons_of_breaks().items() if count != reasons.get(reason)]
            self._warn("; ".join(new) or "torch.compile skipped it, or nothing in it is trained")
        return result

    def capture(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Capture, CheckpointPlan]:
        """Capture and plan the function for a sample, without running it.

        Raises:
            CaptureError: If the function can't be captured as one graph; the error names the line and a remedy.
            InfeasibleBudgetError: If no schedule fits.
            NothingToTrainError: If no returned tensor requires a gradient.
        """
        if (reason := hindrance(self._model)) is not None:
            raise CaptureError(f"the step can't be captured now: {reason}")
        self.group.capture_only = True
        try:
            with torch.enable_grad(), dynamo_options():
                self._compiled(*args, **kwargs)
        except Planned:
            variant = self.group.variants()[-1]
            return variant.capture, variant.plan
        except _FAILURES as error:
            raise CaptureError(
                f"the step is not one graph for torch.compile: {_shortened(reason_of(error))}\n"
                f"{_CHECK if is_own_error(error) else ''}{hint_for(str(error), _HINT)}"
            ) from error
        finally:
            self.group.capture_only = False
        raise NothingToTrainError

    def take(self, options: Options, capture: Capture, plan: CheckpointPlan) -> Variant:
        """Run from now on by a plan, made with these options, for the step that `capture` captured last."""
        self.group.options = options
        variant = self.group.variants()[-1]
        variant.capture, variant.plan, variant.runner = replace(capture, rewritten=None), plan, None
        return variant

    def _on_failure(self, error: CaptureError) -> None:
        if self.group.capture_only:
            raise error
        self._warn(str(error))

    def _warn(self, reason: str, what: str = "ran as written, outside of the budget") -> None:
        self.reason = self.reason or reason
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"a step of {type(self._model).__name__} {what}: {_shortened(reason)}", stacklevel=3)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    step: Callable[..., Any] | None = None,
    costs: str = "roofline",
    gradients: str = "kept",
) -> Capture:
    """Capture a training step as a graph, without running it.

    Args:
        model: Any module, in the mode in which it will be trained. A module on the meta device is captured as if it
            were on the CPU: planning a large model takes no memory.
        args: Sample positional arguments, with the shapes, dtypes and devices of the training.
        kwargs: Sample keyword arguments.
        step: Called as `step(model, *args, **kwargs)`; the model itself if None.
        costs: The measure of an op's cost; see `rmm_linear.compiler.costs.cost_of`.
        gradients: See `checkpoint_step`.

    Returns:
        The capture.

    Raises:
        CaptureError: If the step can't be captured as one graph; the error names the line and a remedy.
        ValueError: If no tensor that the step returns requires a gradient, or `gradients` is unknown.
    """
    options = Options(executor="exact", costs=costs, gradients=gradients)
    return _step_of(model, step, options).capture(args, kwargs or {})[0]


def is_planned(model: nn.Module) -> bool:
    """Tell whether `checkpoint_model` was called on a model or one of its submodules."""
    return any(isinstance(module._compiled_call_impl, PlannedStep) for module in model.modules())


def remove_checkpointing(model: nn.Module) -> nn.Module:
    """Undo `checkpoint_model` for a model and all of its submodules; return the model."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, PlannedStep):
            del module._compiled_call_impl
    return model


def refuse_planned(model: nn.Module) -> None:
    """Refuse an object that is no module, and a model that runs by a plan, or is compiled, already.

    Raises:
        ValueError: If the model or a submodule is such, or is a wrapper for training on several devices.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, and plans are for an nn.Module and its parameters")
    for name, module in model.named_modules():
        subject = f"the module {name!r} ({type(module).__name__})" if name else "the model"
        if isinstance(module, _WRAPPERS):
            kind = type(module).__name__
            raise ValueError(
                f"{subject} is a {kind}, whose hooks and communication belong to no plan: plan the module that it wraps"
                f" before you wrap it, as in checkpoint_model(model.module, ...); model = {kind}(model.module)"
            )
        if _is_sharded(module):
            raise ValueError(
                f"{subject} is sharded, and the hooks that gather its parameters belong to no plan: plan the blocks"
                " before you shard them, as in checkpoint_model(block, ...); fully_shard(block)"
            )
        if isinstance(module._compiled_call_impl, PlannedStep):
            raise ValueError(f"{subject} is checkpointed already: call remove_checkpointing(model) or plan.remove()")
        if module._compiled_call_impl is not None or isinstance(module, OptimizedModule):
            raise ValueError(f"{subject} is compiled already: plan the model without torch.compile")


def _is_sharded(module: nn.Module) -> bool:
    # torch.distributed may not be available
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _step_of(model: nn.Module, step: Callable[..., Any] | None, options: Options) -> PlannedStep:
    if step is None:
        return PlannedStep(model._call_impl, model, options)

    def run(*args: Any, **kwargs: Any) -> Any:
        return step(model, *args, **kwargs)

    return PlannedStep(run, model, options)


def _planned(
    model: nn.Module, step: Callable[..., Any] | None, sample: Any, options: Options
) -> tuple[PlannedStep, CheckpointPlan]:
    refuse_planned(model)
    if not model.training:
        raise ValueError("the model is in eval mode, in which it runs as written: call model.train() first")
    if options.schedule is None:
        Budget.of(options.budget)
    planned = _step_of(model, step, options)
    return planned, planned.capture(*arguments_of_sample(sample))[1]


def arguments_of_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample's positional arguments (from a tuple or list) and keyword arguments (from a mapping)."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample), {}) if isinstance(sample, (tuple, list)) else ((sample,), {})


def apply_schedule(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    sample: Any,
    schedule: Schedule,
    *,
    gradients: str = "kept",
    page_to: str | Path | None = None,
) -> PlannedStep:
    """Run a training step by a given schedule for the captured step, for instance a schedule saved as JSON.

    `checkpoint_step` describes the other arguments. `gradients` and `page_to` must be those of the schedule's plan.

    Returns:
        The step, to be called with batches of the sample's shapes: `loss = step(batch); loss.backward()`.

    Raises:
        ScheduleError: If the schedule is invalid or not of this step; also in a later call with another shape.
        CaptureError: If the step can't be captured.
        ValueError: As `checkpoint_step`, eval mode included.

    Examples:
        >>> import torch
        >>> from rmm_linear.checkpointing import Schedule, apply_schedule, capture
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        >>> def loss_fn(model, x):
        ...     return model(x).square().mean()
        >>> x = torch.randn(8, 4)
        >>> graph = capture(model, (x,), step=loss_fn).graph
        >>> step = apply_schedule(model, loss_fn, x, Schedule.plain(graph))
        >>> step(x).backward()
    """
    if schedule is None:
        raise ScheduleError("schedule is None: pass a Schedule")
    options = Options(schedule=schedule, executor="exact", gradients=gradients, page_to=page_to)
    return _planned(model, loss_fn, sample, options)[0]


def checkpoint_step(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    sample: Any,
    *,
    budget: int | float | str,
    strategy: str = "auto",
    costs: str = "roofline",
    gradients: str = "kept",
    page_to: str | Path | None = None,
) -> PlannedStep:
    """Plan a training step, loss included, within a byte budget.

    Args:
        model: The model, in the mode in which it is trained; the model itself is not changed.
        loss_fn: Called as `loss_fn(model, *args, **kwargs)`, returns the loss, or the loss among other values; None if
            the model itself returns the loss.
        sample: Arguments of the step: a mapping of keyword arguments, a tuple of positional arguments, or one argument.
        budget: The most bytes in memory at any time beside parameters, buffers and the batch: bytes, "8GiB", or
            "60%" (or 0.6) of the captured step's peak without a plan, each op run once and its results freed after
            their last use. Eager mode often takes more: see `CheckpointPlan.eager_peak_bytes`.
        strategy: One of `available_strategies()`.
        costs: The measure of an op's cost: "roofline", "flops", "bytes", "ms" (measured here) or "ops".
        gradients: "kept" counts each parameter's gradient from its computation to the end of the step, as its `.grad`.
            "freed" plans for steps that add no gradients to memory: an optimizer frees each in the backward pass
            (`register_post_accumulate_grad_hook`), or each is added to an existing `.grad`, as in all micro-batches but
            the first.
        page_to: A folder, or "host" for the host's memory, to which the strategy "patil2022_poet" may page tensors;
            None for no paging.

    Returns:
        The step; call it in the place of `loss_fn(model, ...)`. Its `plans` are the plans so far.

    Raises:
        CaptureError: If the step can't be captured.
        InfeasibleBudgetError: If the strategy finds no schedule that fits; the error names the least peak found.
        ValueError: If the budget, the strategy or `gradients` is unknown, the model is in eval mode, or a submodule is
            checkpointed or compiled already, or wrapped as by DistributedDataParallel.
    """
    options = Options(budget, strategy, "exact", costs, gradients, page_to=page_to)
    return _planned(model, loss_fn, sample, options)[0]


def checkpoint_model(
    model: nn.Module,
    sample: Any,
    *,
    budget: int | float | str,
    strategy: str = "auto",
    costs: str = "roofline",
    gradients: str = "kept",
    page_to: str | Path | None = None,
) -> CheckpointPlan:
    """Plan a model's forward and backward pass within a byte budget, in place.

    The model's call is compiled, as by `model.compile`, until `remove_checkpointing(model)`. The model may compute the
    loss, as Hugging Face's models do with labels. If the loss is computed outside, the budget leaves out the gradients
    of the model's outputs.

    Args:
        model: The model, or a block of a model, in the mode in which it is trained.
        sample: Arguments of the model: a mapping of keyword arguments, a tuple of positional arguments, or one
            argument.
        budget: See `checkpoint_step`.
        strategy: One of `available_strategies()`.
        costs: The measure of an op's cost: "roofline", "flops", "bytes", "ms" (measured here) or "ops".
        gradients: "kept" or "freed"; see `checkpoint_step`.
        page_to: See `checkpoint_step`.

    Returns:
        The plan for the sample's shapes; print it. Other shapes are planned when they first occur, for the same budget.

    Raises:
        CaptureError: If the model can't be captured as one graph; no error here changes the model.
        InfeasibleBudgetError: If the strategy finds no schedule that fits; the error names the least peak found.
        ValueError: If the budget, the strategy or `gradients` is unknown, the model is in eval mode, or the model or a
            submodule is checkpointed or compiled already, or wrapped as by DistributedDataParallel or fully_shard: plan
            the model before wrapping.

    Examples:
        >>> import torch
        >>> from rmm_linear.checkpointing import checkpoint_model
        >>> layers = [layer for _ in range(16) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        >>> model = torch.nn.Sequential(*layers)
        >>> x = torch.randn(1024, 64)
        >>> plan = checkpoint_model(model, x, budget="60%")
        >>> plan.peak_bytes <= 0.6 * plan.plain.peak_bytes
        True
        >>> model(x).square().mean().backward()
    """
    options = Options(budget, strategy, "exact", costs, gradients, page_to=page_to)
    planned, plan = _planned(model, None, sample, options)
    model._compiled_call_impl = planned
    return plan
