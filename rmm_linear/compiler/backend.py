"""The backend of torch.compile: each graph that Dynamo hands over is planned when it first runs with gradients.

    torch.compile(model, backend="rmm_linear", options={"budget": "60%"})

Dynamo follows the user's Python code, and follows it again where a guard fails. Here a graph is traced and planned
for each shape, layout, dtype and state of autocast of its arguments. A graph that can't be captured runs as Dynamo
wrote it, with a warning. Calls without gradients, and under torch.func, run as Dynamo wrote them as well.
"""

import itertools
import logging
import math
import re
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from rmm_linear.autocasting import autocast_as, present_autocast
from rmm_linear.compiler.costs import forget_times, page_cost
from rmm_linear.compiler.exact_program import Program, program_of
from rmm_linear.compiler.fake_memory import tensors_of
from rmm_linear.compiler.joint_graph import Capture, read_joint_graph
from rmm_linear.compiler.measuring import is_measurable, measured_ms
from rmm_linear.compiler.runner import Runner
from rmm_linear.compiler.torch_private import compile_lock, ends_at_a_break, frame_of, is_transformed
from rmm_linear.compiler.tracing import Checkpointing, eager_peak_of, inline_checkpoints
from rmm_linear.errors import CaptureError, InfeasibleBudgetError, NothingToTrainError, ScheduleError
from rmm_linear.planning.budget import Budget
from rmm_linear.planning.coding import Bits, sketch_ratio
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.planner import plan_graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import plain_peak_bytes
from rmm_linear.planning.strategies import get_strategy

_logger = logging.getLogger(__name__)
# Shapes of one graph that are kept; the shape that was not used for longest is planned anew when it comes back.
_MOST_VARIANTS = 32
# A predicted time that is off by more is no good prediction.
_APART = 0.15
# Plans of a step for equal tensors, until the user is told; torch.compile gives up after eight.
_MANY_VALUES = 7


@dataclass(frozen=True)
class Options:
    """How the graphs of one call of torch.compile are planned.

    Attributes:
        budget: The most that may be in memory at any time beside parameters, buffers and other arguments: bytes,
            "8GiB", or "60%" (or 0.6) of the peak of each captured graph without a plan. Bytes are shared by the graphs
            of a model that Dynamo breaks, in proportion to their peaks without a plan.
        strategy: One of `available_strategies()`.
        executor: "exact" runs op by op, with the bits of eager mode and, on a CPU, the simulated peak to the byte;
            "inductor" compiles the schedule by Inductor.
        costs: How ops are priced; see `rmm_linear.compiler.costs.cost_of`. With "ms", the first step is run some times
            more; if its measured time is off by more than 15 %, ops are timed again, and it is planned once more.
        gradients: "kept" counts each parameter's gradient from where it is ready to the end; "freed" for steps that
            leave none behind (an optimizer in the backward pass, later micro-batches).
        schedule: A schedule that is used in place of a planned schedule.
        loss_alone: Whether a scalar among a graph's results is taken for the loss, and the only result that is
            differentiated. If a gradient arrives at another one, later steps are planned for all of them.
        bits: 8 or 4 for a backward pass that reads codes of so many bits where it can (docs/codes.md names the biases);
            a dict for each kind of ops ("norm", "activation", "attention", "linear"); None for exact gradients. Without
            a budget, nothing is computed again.
        sketch: The share of rows, in (0, 1), of the sketches that weight gradients of linear layers are estimated from,
            without bias: of their inputs, kept in the inputs' place where nothing else needs them, and of the
            gradients. None for products of all rows.
        page_to: Where strategies that page may move tensors, in place of computing them again: a folder, or "host" for
            the host's memory. Paging waits: no op runs meanwhile. None for nowhere.
    """

    budget: int | float | str | None = None
    strategy: str = "auto"
    executor: str = "inductor"
    costs: str = "roofline"
    gradients: str = "kept"
    schedule: Schedule | None = None
    loss_alone: bool = True
    bits: Any = None
    sketch: float | None = None
    page_to: str | Path | None = None

    def __post_init__(self) -> None:
        Bits.of(self.bits)
        sketch_ratio(self.sketch)
        if self.executor not in ("exact", "inductor"):
            raise ValueError(f"executor={self.executor!r} is unknown; choose one of exact, inductor")
        if self.gradients not in ("kept", "freed"):
            raise ValueError(f'gradients={self.gradients!r} is neither "kept" nor "freed"')
        if self.page_to is not None:
            self._check_paging()
        if self.executor == "inductor" and self.gradients == "freed":
            raise ValueError(
                'gradients="freed" needs executor="exact": Inductor\'s backward graph returns all gradients at its end'
            )
        if self.budget is not None:
            Budget.of(self.budget)
        get_strategy(self.strategy)
        if not isinstance(self.schedule, Schedule | None):
            kind = type(self.schedule).__name__
            raise ScheduleError(f"schedule is a {kind}; pass a Schedule (Schedule.from_json reads text)")

    def _check_paging(self) -> None:
        given = f"page_to={self.page_to!r}"
        if not isinstance(self.page_to, (str, Path)) or not str(self.page_to):
            raise ValueError(f'{given} is neither "host" nor a folder')
        if self.executor == "inductor":
            raise ValueError(f'{given} needs executor="exact": steps that Inductor compiles page nothing')
        if self.schedule is None and (self.budget is None or not get_strategy(self.strategy).pages):
            raise ValueError(
                f'{given} needs a budget and a strategy that pages, such as "patil2022_poet":'
                f" strategy={self.strategy!r} pages nothing"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> "Options":
        """Read the options that the user passed to torch.compile.

        Raises:
            ValueError: If a name is unknown, a value is invalid, or there is neither a budget nor a schedule, `bits` or
                `sketch`.
        """
        if not isinstance(options, Mapping | None):
            raise ValueError(f'options are {options!r}; pass a dict, such as {{"budget": "60%"}}')
        given = dict(options or {})
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"option {name!r} is unknown; choose among {', '.join(known)}")
        named = ("budget", "schedule", "sketch")
        if all(given.get(name) is None for name in named) and Bits.of(given.get("bits")) == Bits():
            raise ValueError(
                'the option "budget" is missing: pass options={"budget": "60%"}, bytes such as "8GiB", {"bits": 8} or'
                ' {"sketch": 0.375}'
            )
        return cls(**given)


class Planned(BaseException):
    """Raised in place of running a graph, where only its plan was asked for."""


@dataclass(eq=False)
class Variant:
    """A graph, planned for one kind of arguments.

    Attributes:
        plan: The plan, with the measured peak once Inductor has compiled the step, and the time if ops were timed.
        runner: The step's runner; None until the first call.
    """

    capture: Capture
    plan: CheckpointPlan
    runner: Runner | None = None


class Group:
    """Graphs that are planned with the same options, and share a budget in bytes.

    These are the graphs of one call of torch.compile, or of all calls that are given the same dict of options.

    Attributes:
        capture_only: Whether graphs raise `Planned` where they would run.
        on_failure: Called with the error if a graph can't be captured; it may raise.
        is_compiled: Whether the executor "inductor" compiles steps. If not, each op runs once.
        loss_alone: As in `Options`, until a gradient arrives at another result.
        runs: How many planned forward passes ran.
        has_checked_codes: Whether a whole step was searched for tensors that bits code.
    """

    def __init__(self, options: Options, on_failure: Callable[[CaptureError], None] | None = None) -> None:
        self.options = options
        self.on_failure = on_failure or _warn
        self.capture_only = False
        self.is_compiled = True
        self.loss_alone = options.loss_alone
        self.graphs: weakref.WeakSet[PlannedGraph] = weakref.WeakSet()
        self.runs = 0
        self.has_checked_codes = False

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> "PlannedGraph":
        """Take a graph of Dynamo over. The example inputs are not used: it is captured when it first runs."""
        graph = PlannedGraph(module, self)
        self.graphs.add(graph)
        _all_graphs.add(graph)
        return graph

    def variants(self, frame: Any = None) -> "list[Variant]":
        """Return a variant for each graph so far, in the order of compilation, and kind of arguments.

        With a frame, these are the graphs of that frame alone.
        """
        graphs = sorted(self.graphs, key=lambda graph: graph.number)
        own = (graph for graph in graphs if frame is None or graph.frame == frame)
        return [variant for graph in own for variant in graph.variants.values()]

    def share_of(self, graph: "PlannedGraph", plain_bytes: int) -> Budget:
        """Return the budget of one graph: its share of a budget in bytes, if the model has several."""
        budget = Budget.of(self.options.budget)
        if budget.is_relative:
            return budget
        # a frame that is compiled again runs in the place of its older versions
        others = map(self.variants, {each.frame for each in self.graphs} - {graph.frame})
        peaks = [max(variant.plan.plain.peak_bytes for variant in variants) for variants in others if variants]
        if not peaks:
            return budget
        total = plain_bytes + sum(peaks)
        share = max(1, budget.in_bytes(plain_bytes) * plain_bytes // total)
        _logger.info(
            "the model has %d graphs: this one gets %d bytes of the budget, its part of the peaks without a plan",
            len(peaks) + 1,
            share,
        )
        return Budget.of(share)


_numbers = itertools.count()
_all_graphs: "weakref.WeakSet[PlannedGraph]" = weakref.WeakSet()
# By the identity of the options that torch.compile passes on: they, a copy that tells whether they changed, the group.
_groups: dict[int, tuple[Any, Any, Group]] = {}


def rmm_linear(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Plan a graph of Dynamo within a byte budget: the backend of torch.compile.

    Args:
        module: The graph.
        inputs: Example inputs.
        options: See `Options`; a mistake in them raises a ValueError when the graph first runs.

    Returns:
        A callable that runs in the graph's place.

    Examples:
        >>> import torch
        >>> from rmm_linear.compiler import rmm_linear
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> step = torch.compile(model, backend=rmm_linear, options={"budget": "100%", "executor": "exact"})
        >>> step(torch.randn(4, 8)).sum().backward()
    """
    key = id(options)
    if key not in _groups or _groups[key][1] != options:
        try:
            group = Group(Options.of(options))
            _groups[key] = options, dict(options or {}), group
        except ValueError as error:
            # Dynamo would wrap an error that is raised here into one of its own
            return _raising(error)
    return _groups[key][2].compile(module, inputs)


def plans(target: nn.Module | Callable[..., Any]) -> list[CheckpointPlan]:
    """List the plans that were made for a model or a function so far.

    Args:
        target: A model, a function that was passed to torch.compile, or the function that torch.compile returned.

    Returns:
        The plans, a graph and kind of arguments each, in the order of compilation.
    """
    graphs = sorted((graph for graph in _all_graphs if graph.belongs_to(target)), key=lambda graph: graph.number)
    return [variant.plan for graph in graphs for variant in graph.variants.values()]


class PlannedGraph:
    """One graph of Dynamo; call it as the graph is called.

    Attributes:
        variants: Plans by the kind of the arguments; the kind that was used last comes last.
        frame: Which frame of Python it is of, and which part of the frame, where DDP's buckets divide the frame.
        number: Graphs that were compiled later have higher numbers.
    """

    def __init__(self, module: fx.GraphModule, group: Group) -> None:
        self.has_checkpoints = inline_checkpoints(module) > 0
        self._module, self._group = module, group
        part = sum(graph._module.meta is module.meta for graph in group.graphs)
        self.frame, self.number = (frame_of(module), part), next(_numbers)
        self.variants: dict[Any, Variant] = {}
        # kinds of arguments that run as written
        self._unplanned: set[Any] = set()
        self._has_told_of_calls = self._has_told_of_values = self._has_run = self._has_parameter = False
        self._peers = 0
        # such ops count from the beginning of the memory, not of the tensor
        self._reads_memory = any("as_strided" in str(node.target) for node in module.graph.nodes)
        # a parameter of each model that ran: models of one class share their graphs
        self._parameters: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __call__(self, *arguments: Any) -> Any:
        """Run the forward pass by plan.

        Raises:
            Planned: If the group asked for the plan alone.
            NothingToTrainError: If it did, and nothing is differentiated.
        """
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if self._group.capture_only and not is_trained:
            raise NothingToTrainError
        if not is_trained or is_transformed(tensors):
            return self._module(*arguments)
        parameter = next((tensor for tensor in tensors if isinstance(tensor, nn.Parameter)), None)
        if parameter is not None:
            self._parameters[id(parameter)], self._has_parameter = parameter, True
        key = _key(arguments, tensors)
        if self._reads_memory:
            key = (*key, tuple(tensor.storage_offset() for tensor in tensors))
        self._forget_old_shares()
        variant = self.variants.get(key)
        if variant is None and key not in self._unplanned:
            # one thread traces at a time
            with compile_lock():
                self._tell_of_values(key)
                variant = self.variants.get(key) or self._prepare(arguments, tensors)
        if variant is None:
            self._unplanned.add(key)
            return Checkpointing(self._module).run(*arguments) if self.has_checkpoints else self._module(*arguments)
        self.variants.pop(key, None)
        self.variants[key] = variant
        while len(self.variants) > _MOST_VARIANTS:
            del self.variants[next(iter(self.variants))]
        if self._group.capture_only:
            raise Planned
        if variant.runner is None:
            with compile_lock():
                if variant.runner is None:
                    self._compile(variant, arguments, tensors)
        self._group.runs += 1
        self._tell_of_calls()
        self._tell_of_exact_tensors()
        assert variant.runner is not None
        return tuple(variant.runner(arguments))

    def belongs_to(self, target: Any) -> bool:
        """Tell whether the graph is of a model or function; see `plans`."""
        if isinstance(target, nn.Module):
            own = {id(parameter) for parameter in target.parameters()}
            # behind a graph break there may be no parameter
            graphs = [self] if self._has_parameter else self._group.graphs
            return any(id(parameter) in own for graph in graphs for parameter in graph._parameters.values())
        function = getattr(target, "_torchdynamo_orig_callable", target)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        place = code and (code.co_filename, code.co_name)
        traces = (node.stack_trace or "" for node in self._module.graph.nodes)
        frames = (re.search(r'File "([^"]+)", line \d+, in (\S+)', trace) for trace in traces)
        return any(frame and (frame[1], frame[2]) == place for frame in frames)

    def _tell_of_values(self, key: Any) -> None:
        """Warn where each value that the Python code reads takes a plan, or a graph, of its own."""
        own = set(self._parameters)
        peers = [each for each in self._group.graphs if each is self or not own.isdisjoint(each._parameters)]
        alike = sum(other[1:] == key[1:] for graph in peers for other in graph.variants)  # a key begins with numbers
        if alike >= _MANY_VALUES and not any(graph._has_told_of_values for graph in peers):
            self._has_told_of_values = True
            warnings.warn(
                "a value that the step reads changes from call to call, and each value is planned anew: pass a tensor"
                " in its place, or keep it in a buffer (TORCH_LOGS=recompiles names a value that is no argument)",
                stacklevel=2,
            )

    def _tell_of_calls(self) -> None:
        """Warn where a budget in bytes counts several times in a step."""
        if self._has_told_of_calls or self._is_budget_relative():
            return
        runners = [variant.runner for variant in self._group.variants(self.frame)]
        if not any(runner is not None and runner.awaits_backward for runner in runners):
            return
        self._has_told_of_calls = True
        warnings.warn(
            "a planned graph runs several times before its backward pass (blocks that share a graph, or several forward"
            " passes in one step): a budget in bytes is for each of its runs",
            stacklevel=2,
        )

    def _tell_of_exact_tensors(self) -> None:
        """Warn where bits code nothing: when a graph runs once more, for then all graphs of the step are planned."""
        if not self._has_run or self._group.has_checked_codes:
            self._has_run = True
            return
        self._group.has_checked_codes = True
        bits = Bits.of(self._group.options.bits)
        coded = {tensor.name for variant in self._group.variants() for tensor in variant.capture.coding.coded}
        missing = sorted((bits.only or frozenset()) - coded)
        if missing:
            warnings.warn(
                f'{len(missing)} of {len(bits.only or ())} tensors that "only" names are not coded, such as'
                f" {missing[0]!r}: they have too few rows, or are of another model, version, dtype or executor",
                stacklevel=2,
            )
        elif bits != Bits() and not coded:
            warnings.warn(
                "no tensor of the step is coded: codes are for tensors of the given kinds that only the backward pass"
                " keeps, with 128 rows or more in float32, bfloat16 or float16, and that no unknown op reads",
                stacklevel=2,
            )

    def _forget_old_shares(self) -> None:
        """Plan anew where a budget in bytes is shared with graphs that came later."""
        if self._is_budget_relative():
            return
        peers = len({graph.frame for graph in self._group.graphs if graph.variants or graph is self})
        if self._peers not in (0, peers):
            self.variants.clear()
        self._peers = peers

    def _is_budget_relative(self) -> bool:
        options = self._group.options
        return options.schedule is not None or options.budget is None or Budget.of(options.budget).is_relative

    def _take_all_gradients(self) -> None:
        """Plan later steps for gradients of all results."""
        if self._group.options.schedule is not None:
            raise RuntimeError(
                "a gradient arrived at a result beside the loss, and the given schedule is for the gradient of the loss"
                " alone: detach that result, or let the step return the whole loss"
            )
        old = [key for key, variant in self.variants.items() if variant.capture.takes_loss_alone]
        # another forward pass of this step may have planned already
        if not old:
            return
        warnings.warn(
            "a gradient arrived at a result beside the loss: this step runs its forward pass once more, by a plan for"
            " gradients of all results, and may take more than its budget; later steps run by that plan",
            stacklevel=2,
        )
        self._group.loss_alone = False
        for key in old:
            del self.variants[key]

    def _prepare(self, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> Variant | None:
        began = time.monotonic()
        options = self._group.options
        try:
            capture = read_joint_graph(
                self._module,
                arguments,
                costs=options.costs,
                gradients=options.gradients,
                loss_alone=self._group.loss_alone,
                for_inductor=options.executor == "inductor",
                bits=Bits.of(options.bits),
                sketch=sketch_ratio(options.sketch),
            )
        except NothingToTrainError:
            if self._group.capture_only:
                raise
            return None
        except CaptureError as error:
            self._group.on_failure(error)
            return None
        if not self._group.capture_only:
            capture = replace(capture, rewritten=None)
        elif self._group.is_compiled:
            eager_bytes = eager_peak_of(self._module, arguments, loss_alone=capture.takes_loss_alone)
            capture = replace(capture, eager_peak_bytes=eager_bytes)
        if options.page_to is not None:
            capture = with_page_cost(capture, options.page_to, options.costs)
        plan = self._plan(capture)
        plan = replace(plan, eager_peak_bytes=capture.eager_peak_bytes, coding=capture.coding)
        if self.has_checkpoints:
            warnings.warn(
                "the step checkpoints modules itself (torch.utils.checkpoint): the plan takes the checkpoints' place,"
                f" and the step's peak is {plan.peak_bytes} bytes",
                stacklevel=2,
            )
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors if not isinstance(t, nn.Parameter))
        _logger.info("planned a graph for arguments of shapes %s in %.1f s", shapes, time.monotonic() - began)
        return Variant(capture, plan)

    def _compile(self, variant: Variant, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        made = self._compiled(variant, tensors)
        if made.plan.measured_ms is not None and _are_apart(made.plan.measured_ms, made.plan.planned.cost):
            made = self._planned_again(made, arguments, tensors)
        variant.plan = made.plan
        # last: other threads run the step as soon as there is a runner
        variant.runner = made.runner

    def _planned_again(self, made: Variant, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> Variant:
        """Time ops anew; if they take another time, plan the step once more, and return the faster variant."""
        forget_times()
        plan = made.plan
        try:
            again = self._prepare(arguments, tensors)
        except InfeasibleBudgetError:
            again = None
        if again is None or not _are_apart(again.plan.planned.cost, plan.planned.cost):
            return made
        if again.plan.schedule.order == plan.schedule.order:
            return replace(made, plan=replace(plan, graph=again.plan.graph, planned=again.plan.planned))
        again.plan = replace(again.plan, eager_peak_bytes=plan.eager_peak_bytes)
        return min(self._compiled(again, tensors), made, key=lambda each: each.plan.measured_ms or math.inf)

    def _compiled(self, variant: Variant, tensors: Sequence[Tensor]) -> Variant:
        capture = variant.capture
        plan, program = self._program(capture, variant.plan, tensors)
        if self._group.options.costs == "ms" and is_measurable(capture):
            plan = replace(plan, measured_ms=measured_ms(capture, program, tensors))
            _logger.info("a step takes %.1f ms, and %.1f ms are predicted", plan.measured_ms, plan.planned.cost)
        return Variant(capture, plan, Runner(capture, program, self, self._take_all_gradients))

    def _program(
        self, capture: Capture, plan: CheckpointPlan, tensors: Sequence[Tensor]
    ) -> tuple[CheckpointPlan, Program]:
        options = self._group.options
        if options.executor == "exact":
            return plan, program_of(capture, plan.schedule, options.page_to)
        # imported here: Inductor takes seconds to import
        from rmm_linear.compiler.inductor_program import measured_plain, program_within, uncompiled_program

        if not self._group.is_compiled:
            return plan, uncompiled_program(capture)

        def replan(budget_bytes: int) -> CheckpointPlan:
            planned = plan_graph(capture.graph, Budget.of(budget_bytes), options.strategy)
            return replace(plan, schedule=planned.schedule, planned=planned.planned)

        # the casts of autocast are ops of the graph already
        with autocast_as((), {tensor.device.type for tensor in tensors}):
            if options.budget is None and options.schedule is None:
                return measured_plain(capture, plan, tensors)
            return program_within(capture, plan, tensors, replan)

    def _plan(self, capture: Capture) -> CheckpointPlan:
        graph, options = capture.graph, self._group.options
        if options.schedule is not None:
            return CheckpointPlan.of(graph, options.schedule)
        if options.budget is None:
            return CheckpointPlan.of(graph, Schedule.plain(graph))
        budget = self._group.share_of(self, plain_peak_bytes(graph))
        try:
            return plan_graph(graph, budget, options.strategy)
        except InfeasibleBudgetError as error:
            # gradients are most of a small batch's peak, which may be as high as that of an earlier batch
            earlier = self._group.variants(self.frame) if budget.is_relative else []
            allowed_bytes = max((variant.plan.budget_bytes for variant in earlier), default=0)
            if error.least_bytes <= allowed_bytes:
                return plan_graph(graph, Budget.of(allowed_bytes), options.strategy)
            # a frame that is compiled again, as for other shapes, has several
            is_one_of_several = len({graph.frame for graph in self._group.graphs}) > 1
            # the graphs that follow a break are not known yet; a first graph has all of a budget in bytes
            if not is_one_of_several and not (budget.is_relative and ends_at_a_break(self._module)):
                raise
            # small graphs have little to compute again
            warnings.warn(
                f"one of the model's graphs takes {error.least_bytes} bytes at the least, and"
                f" its part of budget={options.budget!r} is {error.budget_bytes}: it is planned for the least",
                stacklevel=2,
            )
            return plan_graph(graph, Budget.of(error.least_bytes), options.strategy)


def with_page_cost(capture: Capture, page_to: str | Path, costs: str) -> Capture:
    """Add the time of paging a byte to a captured graph; see `rmm_linear.compiler.costs.page_cost`."""
    device = next(tensor.device for node in capture.results for tensor in tensors_of(node))
    return replace(capture, graph=replace(capture.graph, page_cost=page_cost(page_to, device, costs)))


def _are_apart(time: float, other: float) -> bool:
    return abs(time / other - 1) > _APART


def _warn(error: CaptureError) -> None:
    warnings.warn(f"a graph runs as written, outside of the budget: {error}", stacklevel=2)


def _raising(error: ValueError) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


def _key(arguments: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """Tell apart arguments that need a plan each."""
    autocast = present_autocast({tensor.device.type for tensor in tensors})
    # autocast caches casts of leaves alone, and only if its cache is enabled
    casts = (torch.is_autocast_cache_enabled(), *(tensor.is_leaf for tensor in tensors)) if autocast else ()
    cuda = torch.backends.cuda
    memories: dict[int, int] = {}
    return (
        tuple(None if isinstance(argument, Tensor) else argument for argument in arguments),
        tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors),
        # which of them share memory
        tuple(memories.setdefault(t.untyped_storage()._cdata, place) for place, t in enumerate(tensors)),
        autocast,
        casts,
        # which kernels a fused attention may take
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
    )
