"""The user's door: train a model within a byte budget.

    plan = checkpoint_model(model, batch, budget="60%")     # in place; train as always
    print(plan)

The forward pass of the model (or of a training step with its loss, `checkpoint_step`) is captured for the shapes of the
sample, a strategy plans it, and from then on the planned program runs in its place: same outputs, gradients and
buffers, bit for bit. Other shapes, other branches, and other values of what the step's Python code reads (modules,
attributes, the fields of objects, variables that it closes over, global ones), are captured and planned when they first
occur; what the code changes in Python is named, and refused if the step computes with it. In eval mode, under
`no_grad`, where nothing is trained, in what torch.compile compiles, and under torch.func and forward-mode
differentiation, the model runs as it was written.

Not the same to the last bit: on a CPU, what an op writes in place into a part of a tensor (nn.GRU's gates do) may be
rounded otherwise, since it lies in memory otherwise; several forward passes of a planned model in one backward pass may
add their gradients up in another order, and under autocast each of them casts the weights anew.

While one thread trains a model by plan, others may run it as it was written, but not while a new shape is captured: for
that time the model holds tensors without contents, as do global lists and dicts that hold its parameters. Captures wait
for each other. What other threads write meanwhile into a list, dict or object that the step changes as well is lost.
"""

import logging
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import forward_ad

from rmm_linear.checkpointing.autocasting import present_autocast
from rmm_linear.checkpointing.budget import Budget, refusal
from rmm_linear.checkpointing.capture import capture
from rmm_linear.checkpointing.code_read import Read
from rmm_linear.checkpointing.execute import OtherBranchError
from rmm_linear.checkpointing.graph import Graph
from rmm_linear.checkpointing.padded_batches import Buckets, check_padding_changes_no_loss
from rmm_linear.checkpointing.plan import CheckpointPlan
from rmm_linear.checkpointing.python_state import PythonState, hooks_inside
from rmm_linear.checkpointing.replaced_forward import (
    own_forward,
    refuse_inner_plans,
    refuse_twice,
    replace_forward,
    stands_in,
)
from rmm_linear.checkpointing.runner import Runner
from rmm_linear.checkpointing.schedule import Schedule
from rmm_linear.checkpointing.simulate import simulate
from rmm_linear.checkpointing.stored_plans import store_plan, stored_plan
from rmm_linear.checkpointing.strategies import get_strategy
from rmm_linear.checkpointing.tracing import Arguments
from rmm_linear.errors import CaptureError, InfeasibleBudgetError, ScheduleError

_logger = logging.getLogger(__name__)
# Planning in the middle of a training run that takes longer is told.
_LONG_S = 2.0
# A schedule that took longer to find is kept on disk.
_WORTH_STORING_S = 1.0
_FEW_SHAPES = 6
# Variants of a step (shapes, branches) from which on capturing each is probably not what the user wants.
_MANY_VARIANTS = 3
# Branches of one shape.
_MANY_BRANCHES = 8
# Those that were not used for longest are forgotten.
_MOST_VARIANTS = 32


@dataclass(frozen=True, eq=False)
class _Variant:
    """A planned step for one call and one state of Python."""

    key: Any
    read: Read
    state: PythonState
    runner: Runner
    plan: CheckpointPlan


class PlannedStep:
    """A training step that runs by plan; call it as the step is called.

    `checkpoint_step`, `checkpoint_model` and `apply_schedule` make them. A copy plans anew when it is called first.

    Args:
        model: The model that is trained.
        step: Called as `step(model, *args, **kwargs)`; None for the model itself.
        budget: See `checkpoint_step`; None with a schedule.
        strategy: See `checkpoint_step`.
        costs: See `checkpoint_step`.
        gradients: See `checkpoint_step`.
        pad_to: See `checkpoint_step`.
        pad_values: See `checkpoint_step`.
        schedule: A given schedule.

    Attributes:
        plans: The plans so far, one for each shape and branch that occurred.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Any] | None = None,
        *,
        budget: int | float | str | None = None,
        strategy: str = "auto",
        costs: str = "roofline",
        gradients: str = "kept",
        pad_to: int | Sequence[int] | None = None,
        pad_values: Mapping[str, float] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._model, self._step = model, step
        self._budget, self._strategy, self._schedule = budget, strategy, schedule
        self._capture_options: dict[str, Any] = {"costs": costs, "gradients": gradients}
        self._pad_options = {"pad_to": pad_to, "pad_values": pad_values}
        self._buckets = Buckets.of(pad_to, pad_values, model)
        if schedule is None:
            # what is wrong is told before anything is captured
            Budget.of(budget)
            get_strategy(strategy)
        # the one used last comes first
        self._variants: list[_Variant] = []
        # what the code of all captures so far may read
        self._read = Read()
        self._told: set[str] = set()
        self.plans: list[CheckpointPlan] = []

    def __reduce__(self) -> Any:
        options = {"budget": self._budget, "strategy": self._strategy, "schedule": self._schedule}
        arguments = self._model, self._step, {**options, **self._capture_options, **self._pad_options}
        return _remade_step, arguments, {"_buckets": self._buckets}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Args:
            *args: The step's arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What the step returns.

        Raises:
            CaptureError: If a shape or branch that is new can't be captured.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_transformed(self._model, (args, kwargs)):
            return self._as_written(args, kwargs)
        given = kwargs
        if self._buckets is not None:
            kwargs = self._buckets.padded(kwargs)
        arguments, tensors = Arguments.of(args, kwargs)
        state = PythonState(self._model, self._step, self._read)
        inputs = [*state.tensors, *tensors]
        if not any(tensor.requires_grad for tensor in inputs):
            return self._as_written(args, given)
        key = _key_of_call(arguments, inputs)
        variants = self._fitting(key, state)
        if not variants and not self._model.training:
            return self._as_written(args, given)
        states = _random_states(inputs) if any(each.runner.capture.looked_at for each in variants) else []
        for variant in variants:
            try:
                result = variant.runner(inputs)
            except OtherBranchError:
                _set_random_states(states)
                continue
            # the branch taken last is the likeliest next, and the variant used least recently goes first
            if variant is not self._variants[0]:
                self._variants.remove(variant)
                self._variants.insert(0, variant)
            return result
        try:
            return self._prepare(len(variants), args, kwargs).runner(inputs)
        except OtherBranchError:
            raise CaptureError(
                "Python looks at a number in a tensor that is drawn at random, or not the same twice: take the branch"
                " out of what is planned, or switch it off (LayerDrop)"
            ) from None

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CheckpointPlan:
        """Capture and plan the step for a sample, without running it.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The plan.
        """
        if self._buckets is not None:
            self._buckets = self._buckets.learned(kwargs)
            padded = self._buckets.padded(kwargs)
            check_padding_changes_no_loss(self._buckets, self._model, self._step or _whole_model, kwargs)
            kwargs = padded
        return self._prepare(0, args, kwargs, with_eager_peak=True).plan

    def _fitting(self, key: Any, state: PythonState) -> list["_Variant"]:
        """Variants of this call, and of this state of Python."""
        states = {id(self._read): state}
        found = []
        for variant in self._variants:
            if variant.key != key:
                continue
            # captures that read less are compared by what they read
            own = states.get(id(variant.read))
            if own is None:
                own = states[id(variant.read)] = PythonState(self._model, self._step, variant.read)
            if own.values == variant.state.values:
                found.append(variant)
        return found

    def _prepare(
        self, branches: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, with_eager_peak: bool = False
    ) -> "_Variant":
        if branches >= _MANY_BRANCHES:
            raise CaptureError(
                f"Python looks at a number in a tensor that was another one in each of {_MANY_BRANCHES} steps: take it"
                " (`.item()`, `float(...)`, a branch) out of what is planned"
            )
        refuse_inner_plans(self._model)
        began = time.monotonic()
        options = {**self._capture_options, "with_eager_peak": with_eager_peak}
        captured = capture(self._model, args, kwargs, step=self._step, **options)
        plan = replace(self._plan(captured.graph), eager_peak_bytes=captured.eager_peak_bytes)
        self._read = self._read.extended(captured.read)
        arguments, tensors = Arguments.of(args, kwargs)
        state = PythonState(self._model, self._step, self._read, named=True)
        key = _key_of_call(arguments, [*state.tensors, *tensors])
        # a tensor that the user puts another one in the place of is not kept alive
        state.forget_tensors()
        variant = _Variant(key, self._read, state, Runner(captured, plan.schedule), plan)
        self._tell(variant)
        seconds = time.monotonic() - began
        # a first plan was asked for, those that come in between are not expected
        is_slow = bool(self._variants) and seconds > _LONG_S
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:_FEW_SHAPES])
        _logger.log(
            logging.WARNING if is_slow else logging.INFO,
            "captured and planned a step for tensors of shapes %s in %.1f s",
            shapes,
            seconds,
        )
        self._variants.insert(0, variant)
        self.plans.append(plan)
        if len(self._variants) > _MOST_VARIANTS:
            forgotten = self._variants.pop().plan
            self.plans = [plan for plan in self.plans if plan is not forgotten]
        return variant

    def _tell(self, variant: "_Variant") -> None:
        """Warn of what is not followed, and of many variants."""
        texts = []
        hooks = hooks_inside(self._model, with_own=self._step is not _own_forward)
        if hooks:
            texts.append(
                f"{', '.join(hooks)} ran at the capture and won't again: what hooks compute with tensors is in the"
                " plan, what they do beside is lost (they record, they print). Take them off, or put them on the model"
                " that checkpoint_model was called on"
            )
        unfollowed = [name for name in variant.state.unfollowed if variant.read.names & {*re.findall(r"\w+", name)}]
        if variant.runner.capture.changed:
            texts.append(
                f"the step changes {', '.join(variant.runner.capture.changed)} each time it runs, and a planned step"
                " leaves it as it is: count outside of what is planned, or in a buffer (`self.count.add_(1)`)"
            )
        if unfollowed:
            texts.append(
                f"a planned step won't notice changes inside of {', '.join(sorted(set(unfollowed)))}, too large or too"
                " deep to be compared at every step: put others in their place, or make them tensors"
            )
        if len(self._variants) == _MANY_VARIANTS - 1:
            texts.append(
                f"a planned step is captured for {_MANY_VARIANTS} different shapes, plain arguments, branches or states"
                f" of the model by now, which takes seconds each time; {self._reason(variant)}"
            )
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, stacklevel=5)

    def _reason(self, variant: "_Variant") -> str:
        """Say what is new about a variant, and what to do."""
        last = self._variants[0]
        if variant.key != last.key:
            return "the last one has other arguments: pad batches to few lengths (pad_to=64), pass numbers as tensors"
        if variant.state.values != last.state.values:
            difference = variant.state.difference(last.state.values)
            return f"the last one differs in {difference}: keep in a buffer, or pass as a tensor, what changes"
        return "in the last one Python looked at another number in a tensor: use torch.where, or take it out"

    def _plan(self, graph: Graph) -> CheckpointPlan:
        if self._schedule is not None:
            return CheckpointPlan.of(graph, self._schedule)
        budget, plain_bytes = Budget.of(self._budget), simulate(graph, Schedule.plain(graph)).peak_bytes
        budget_bytes = budget.in_bytes(plain_bytes)
        schedule = stored_plan(graph, self._strategy, budget_bytes)
        if schedule is not None:
            return CheckpointPlan.of(graph, schedule, budget_bytes)
        began = time.monotonic()
        try:
            schedule = get_strategy(self._strategy).plan(graph, budget_bytes)
        except InfeasibleBudgetError as error:
            text = refusal(budget, plain_bytes, error.least_bytes, self._strategy)
            raise InfeasibleBudgetError(text, budget_bytes=budget_bytes, least_bytes=error.least_bytes) from None
        if time.monotonic() - began > _WORTH_STORING_S:
            store_plan(graph, self._strategy, budget_bytes, schedule)
        return CheckpointPlan.of(graph, schedule, budget_bytes)

    def _as_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with own_forward(self._model):
            return (self._step or _whole_model)(self._model, *args, **kwargs)


def _whole_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _own_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The step that stands in a forward's place: the model's own hooks run around it, and not in it again."""
    return model.forward(*args, **kwargs)


def is_planned(model: nn.Module) -> bool:
    """Tell whether a model, or a module in it, runs by a plan.

    Args:
        model: A model.

    Returns:
        Whether `checkpoint_model` was called on it.
    """
    return any(isinstance(stands_in(module), PlannedStep) for module in model.modules())


def _key_of_call(arguments: Arguments, inputs: Sequence[Tensor]) -> Any:
    """Tell calls apart that need a plan each."""
    autocast = present_autocast(tensor.device.type for tensor in inputs)
    # autocast keeps the casts of leaves alone, and those only if it is told to
    casts = (torch.is_autocast_cache_enabled(), *(tensor.is_leaf for tensor in inputs)) if autocast else ()
    cuda = torch.backends.cuda
    return (
        str(arguments.spec),
        repr(arguments.constants),
        tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs),
        autocast,
        casts,
        # which kernels a fused attention may take
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        torch.get_default_dtype(),
    )


def _is_transformed(model: nn.Module, arguments: Any) -> bool:
    """Tell whether torch.func or forward-mode differentiation looks on, which a planned program knows nothing of."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    tensors = [*model.parameters(), *(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _remade_step(model: nn.Module, step: Callable[..., Any] | None, options: dict[str, Any]) -> PlannedStep:
    return PlannedStep(model, step, **options)


def _random_states(inputs: Sequence[Tensor]) -> list[tuple[torch.device | None, Tensor]]:
    devices = {tensor.device for tensor in inputs if tensor.device.type not in ("cpu", "meta")}
    states: list[tuple[torch.device | None, Tensor]] = [(None, torch.get_rng_state())]
    return states + [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]


def _set_random_states(states: Sequence[tuple[torch.device | None, Tensor]]) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _arguments_of_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mapping is keyword arguments, a tuple or list positional ones, anything else the only argument."""
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
) -> PlannedStep:
    """Run a training step by a given schedule.

    Args:
        model: The model, in the mode in which it is trained.
        loss_fn: Called as `loss_fn(model, *args, **kwargs)`, returns the loss, or the loss among other things; None if
            the model itself returns it.
        sample: Arguments of the step: a mapping of keyword arguments, a tuple of positional ones, or a single one.
        schedule: A schedule for the captured step, for instance one that was saved as JSON.
        gradients: What it was planned for; see `checkpoint_step`.

    Returns:
        The step, to be called with batches of the sample's shapes: `loss = step(batch); loss.backward()`.

    Raises:
        ScheduleError: If the schedule was not made for this step, or is wrong; also later on, for another shape.
        CaptureError: If the step can't be captured.
        ValueError: As `checkpoint_step`.

    Example:
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
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule is a {type(schedule).__name__}; pass a Schedule (Schedule.from_json reads text)")
    args, kwargs = _arguments_of_sample(sample)
    planned = PlannedStep(model, loss_fn, schedule=schedule, gradients=gradients)
    planned.prepare(args, kwargs)
    return planned


def checkpoint_step(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    sample: Any,
    *,
    budget: int | float | str,
    strategy: str = "auto",
    costs: str = "roofline",
    gradients: str = "kept",
    pad_to: int | Sequence[int] | None = None,
    pad_values: Mapping[str, float] | None = None,
) -> PlannedStep:
    """Plan a training step, loss included, within a byte budget.

    Args:
        model: The model, in the mode in which it is trained; it stays as it is.
        loss_fn: Called as `loss_fn(model, *args, **kwargs)`, returns the loss, or the loss among other things; None if
            the model itself returns it.
        sample: Arguments of the step: a mapping of keyword arguments, a tuple of positional ones, or a single one.
        budget: The most that may be in memory at any time beside parameters, buffers and the batch: bytes, "8GiB", or
            "60%" (or 0.6) of what the captured step takes without a plan, each op run once and its results freed after
            their last use. Eager mode often takes more: see `CheckpointPlan.eager_peak_bytes`.
        strategy: One of `available_strategies()`.
        costs: How ops are priced: "roofline", "flops", "bytes", "ms" (measured here) or "ops".
        gradients: "kept" counts the gradients of parameters, each from where it is ready to the end, as its `.grad`.
            "freed" plans for steps that leave none behind: an optimizer takes each in the backward pass
            (`register_post_accumulate_grad_hook`), or it is added to one that was there before, as in all micro-batches
            but the first.
        pad_to: Pad batches to a multiple of this length, or to the next one of these lengths, so that few are planned:
            mappings of tensors (batch, length) with `input_ids` and `attention_mask`. The loss is the same up to
            rounding, which is tried on the sample; what else is returned is of the padded batch. What does not run by
            plan (eval, `no_grad`) is not padded.
        pad_values: What tensors by other names are padded with. Known are ids (`config.pad_token_id`, or else 0),
            masks, token types and positions (0), and labels (-100).

    Returns:
        The step; call it in the place of `loss_fn(model, ...)`. Its `plans` say what was planned.

    Raises:
        CaptureError: If the step can't be captured.
        InfeasibleBudgetError: If the strategy finds no schedule that fits; it names the least that was found.
        ValueError: If the budget, the strategy or `gradients` is unknown, a module in the model is checkpointed
            already, or one is a wrapper such as DistributedDataParallel; or `pad_to` can't pad the sample, or
            changes its loss.
    """
    options: dict[str, Any] = {"costs": costs, "gradients": gradients, "pad_to": pad_to, "pad_values": pad_values}
    planned = PlannedStep(model, loss_fn, budget=budget, strategy=strategy, **options)
    planned.prepare(*_arguments_of_sample(sample))
    return planned


def checkpoint_model(
    model: nn.Module,
    sample: Any,
    *,
    budget: int | float | str,
    strategy: str = "auto",
    costs: str = "roofline",
    gradients: str = "kept",
    pad_to: int | Sequence[int] | None = None,
    pad_values: Mapping[str, float] | None = None,
) -> CheckpointPlan:
    """Plan a model's forward and backward pass within a byte budget, in place.

    The model's `forward` is replaced until `remove_checkpointing(model)`. If it returns a loss (a scalar), as Hugging
    Face's models do when they are given labels, the loss belongs to the plan, and nothing else that the model returns
    can be differentiated. Otherwise all that it returns can, the loss comes after it, and the gradients that arrive at
    the model's outputs are outside of the budget.

    Args:
        model: The model, or a block of one, in the mode in which it is trained.
        sample: Arguments of the model: a mapping of keyword arguments, a tuple of positional ones, or a single one.
        budget: The most that may be in memory at any time beside parameters, buffers and the batch: bytes, "8GiB", or
            "60%" (or 0.6) of what the captured step takes without a plan, each op run once and its results freed after
            their last use. Eager mode often takes more: see `CheckpointPlan.eager_peak_bytes`.
        strategy: One of `available_strategies()`.
        costs: How ops are priced: "roofline", "flops", "bytes", "ms" (measured here) or "ops".
        gradients: "kept" counts the gradients of parameters, each from where it is ready to the end, as its `.grad`.
            "freed" plans for steps that leave none behind: an optimizer takes each in the backward pass
            (`register_post_accumulate_grad_hook`), or it is added to one that was there before, as in all micro-batches
            but the first.
        pad_to: Pad batches to a multiple of this length, or to the next one of these lengths, so that few are planned:
            mappings of tensors (batch, length) with `input_ids` and `attention_mask`. The loss is the same up to
            rounding, which is tried on the sample; what else is returned is of the padded batch. What does not run by
            plan (eval, `no_grad`) is not padded.
        pad_values: What tensors by other names are padded with. Known are ids (`config.pad_token_id`, or else 0),
            masks, token types and positions (0), and labels (-100).

    Returns:
        The plan for the sample's shapes; print it. Other shapes are planned when they first occur, for the same budget.

    Raises:
        CaptureError: If the model can't be captured; it stays as it is then, here and below.
        InfeasibleBudgetError: If the strategy finds no schedule that fits; it names the least that was found.
        ValueError: If the budget, the strategy or `gradients` is unknown, the model or a module in it is checkpointed
            already, or one is a wrapper such as DistributedDataParallel: plan what it wraps, before you wrap it; or
            `pad_to` can't pad the sample, or changes its loss.

    Example:
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
    refuse_twice(model)
    options: dict[str, Any] = {"costs": costs, "gradients": gradients, "pad_to": pad_to, "pad_values": pad_values}
    planned = PlannedStep(model, _own_forward, budget=budget, strategy=strategy, **options)
    plan = planned.prepare(*_arguments_of_sample(sample))
    replace_forward(model, planned)
    return plan
