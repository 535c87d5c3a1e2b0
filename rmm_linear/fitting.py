"""One call for a model that does not fit: the fastest step within a byte budget and a noise limit.

    plan = fit(model, batch, budget="8GiB", noise=0.01)     # in place; train as always
    print(plan)
    plan = fit(model, batch, noise=0.5)                     # without a budget: noise buys time

The step is captured exact, and with codes of its tensors in 8 and 4 bits (`rmm_linear.compiler.rewrites`), until one of
these fits the budget without recomputation. Each is planned within the budget: tensors that are not kept are computed
again (`rmm_linear.planning`). Where much noise is allowed, so are weight gradients from sketches, which take less time.
`fit` takes the step of the least predicted time whose noise, measured on the sample, is within the limit.
"""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

from torch import nn

from rmm_linear.byte_sizes import readable, unit_for
from rmm_linear.candidates import (
    LEAST_NOISE_OF_SKETCHES,
    Candidate,
    Loss,
    NotMeasurableError,
    at_call,
    checked_noise,
    choose,
    is_without_contents,
    noise_on,
    parts_of,
    plain_batch,
    table,
)
from rmm_linear.checkpointing.planned import PlannedStep, refuse_planned, remove_checkpointing
from rmm_linear.compiler.backend import Options, Variant, with_page_cost
from rmm_linear.compiler.costs import unit_of
from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.compiler.partial_coding import PartialCoding
from rmm_linear.errors import CaptureError, InfeasibleBudgetError
from rmm_linear.module_fitting import ModuleFit, fit_modules
from rmm_linear.paging import pager_for
from rmm_linear.planning.budget import Budget, refusal
from rmm_linear.planning.coding import Bits, sketch_ratio
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.planner import plan_graph
from rmm_linear.planning.relaxation import least_extra_cost, relaxations
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import plain_peak_bytes
from rmm_linear.planning.timeline import draw
from rmm_linear.variance.step_noise import StepNoise

ALLOWED = ("recompute", "code", "sketch")
_PAGE, _PAGER, _MOST_OPS_OF_PAGER = "page", "patil2022_poet", 500
# Bits of codes, and options of the backend, that are tried, by the name that they have in reports.
_CODES: Mapping[str, Any] = MappingProxyType(
    {
        "8 bits": 8,
        "activations 4, rest 8": {"norm": 8, "activation": 4, "attention": 8, "linear": 8},
        "4 bits": 4,
    }
)
_SKETCHES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"sketches": {"sketch": 0.375}, "8 bits, sketches": {"bits": 8, "sketch": 0.375}}
)
# Parts of the budget for which tensors are chosen that are coded, until a plan takes hardly longer than the bound.
_PARTS_OF_BUDGET, _HARDLY = (0.95, 0.85, 0.7), 0.003
_MIB = 2**20


@dataclass(frozen=True)
class Fit:
    """The step that `fit` chose, and the other candidates.

    Attributes:
        model: The model.
        step: The callable that runs the model's training steps.
        chosen: How its steps run.
        candidates: All that was tried, in the order of predicted time.
        plain: The exact step without a budget.
        budget_bytes: The budget; None if there is none.
        noise_limit: The limit.
        executor: See `fit`.
        bounds: For each kind of codes that was tried, a bound of the time of mixtures with recomputation.
        least_time: A lower bound, by the prices of ops and codes, of the time of all mixtures of recomputation and of
            the codes that were tried, within the budget, over the time of the exact step without a budget; None if no
            codes were tried, or without scipy.
    """

    model: nn.Module = field(repr=False)
    step: PlannedStep = field(repr=False)
    chosen: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    plain: CheckpointPlan = field(repr=False)
    budget_bytes: int | None
    noise_limit: float
    executor: str
    bounds: Mapping[str, PartialCoding] = field(repr=False)
    least_time: float | None
    _variant: Variant = field(repr=False)

    @property
    def plain_bytes(self) -> int:
        """Peak of the exact step without a budget."""
        return self.plain.peak_bytes

    @property
    def plan(self) -> CheckpointPlan:
        """The plan of kept, coded and recomputed tensors: the compiled step's, once the sample's shapes ran."""
        return self._variant.plan

    @property
    def options(self) -> dict[str, Any]:
        """Options for the same codes and budget: `torch.compile(model, backend="rmm_linear", options=...)`.

        They name tensors of the trace: a run elsewhere needs the same versions, and the same autocast.
        """
        budget = "100%" if self.budget_bytes is None and not self.chosen.options else self.budget_bytes
        costs = self.step.group.options.costs
        return {"budget": budget, "executor": self.executor, "costs": costs, **self.chosen.options}

    def to_json(self) -> str:
        """Return the options as JSON, for a run elsewhere; see `options`."""
        return json.dumps(self.options)

    def figure(self, path: str | Path) -> None:
        """Draw the bytes in memory over the step, and the peaks and times of all candidates.

        The file's suffix says the format.

        Raises:
            ImportError: If matplotlib is missing.
        """
        steps = [("unchanged", self.plain), (self.chosen.name, self.plan)]
        timelines = [(title, plan.graph, plan.schedule) for title, plan in steps]
        draw(path, timelines, self.budget_bytes, self._draw_trade_off)

    def _draw_trade_off(self, axes: Any) -> None:
        cost, most = self.plain.graph.cost, self.plain_bytes
        sizes = [most * percent // 100 for percent in range(5, 101)]
        bounds: dict[str, Callable[[int], float]] = {name: bound.least_cost for name, bound in self.bounds.items()}
        with contextlib.suppress(ImportError, TimeoutError):
            programs = relaxations(self.plain.graph)
            bounds["exact"] = lambda size: cost + least_extra_cost(programs, size)
        for name, bound in bounds.items():
            try:
                times = [bound(size) / cost for size in sizes]
            except TimeoutError:
                continue
            axes.plot([size / _MIB for size in sizes], times, linewidth=1, label=f"bound, {name}")
        for each in self.candidates:
            if each.plan is not None:
                (point,) = axes.plot(each.plan.peak_bytes / _MIB, each.time, "o", label=each.name)
                point.set_fillstyle("full" if each is self.chosen else "none")
        axes.plot(most / _MIB, 1, "o", color="black", label="unchanged")
        if self.budget_bytes is not None:
            axes.axvline(self.budget_bytes / _MIB, color="crimson", linewidth=0.9, linestyle="--")
        axes.set_xlabel("peak, MiB")
        axes.set_ylabel("predicted time, of the plain step's")
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)

    def card(self) -> str:
        """Describe the training steps for a model card, in Markdown, with the noise that was measured before them."""
        ratio = self.chosen.noise_ratio
        # the plan's own plain step has the codes
        card = replace(self.plan, plain=self.plain.plain).card()
        if not ratio:
            return card
        noise = f"{ratio:.2g} of the variance over minibatches" if math.isfinite(ratio) else "not measured"
        return f"{card}\n- variance that estimates add to a gradient: {noise}"

    def measure(self, batch: Any, loss_fn: Loss | None = None) -> StepNoise:
        """Measure the noise of the step with the weights that the model has now; the arguments are as for `fit`.

        It takes a capture, and as long as two steps op by op. Gradients are of parts of the batch: `noise_ratio` is the
        same for any size.

        Raises:
            ValueError: If it can't be measured with the batch, or the model is in eval mode.
        """
        if not self.model.training:
            raise ValueError("the model is in eval mode, in which its gradients are exact: call model.train() first")
        compiled = {module: module._compiled_call_impl for module in self.model.modules()}
        remove_checkpointing(self.model)
        try:
            return _measured(self.model, plain_batch(batch), self.chosen, loss_fn, self.executor, limit=0.0)
        finally:
            for module, call in compiled.items():
                if call is not None:
                    module._compiled_call_impl = call

    def remove(self) -> nn.Module:
        """Let the model run as it was written, and return it."""
        return remove_checkpointing(self.model)

    def __str__(self) -> str:
        return "\n".join([*self._lines(), "", str(self.plan)])

    def _lines(self) -> Iterator[str]:
        unit = unit_for(self.plain_bytes)
        budget = "no budget" if self.budget_bytes is None else f"budget {readable(self.budget_bytes)}"
        yield (
            f"{self.chosen.name}: peak {unit.of(self.plain_bytes)} -> {unit.of(self.plan.peak_bytes)} {unit.name},"
            f" {budget}; predicted time {self.chosen.time:.3f} of the exact step's"
        )
        # with sketches, a step may take less
        has_bound = self.least_time is not None and math.isfinite(self.least_time)
        if has_bound and "sketch" not in self.chosen.options:
            yield (
                f"no mixture of recomputation and these codes is predicted to take less than {self.least_time:.3f}, by"
                " the price of a code of each kind"
            )
        yield from table(self.candidates, unit)


@overload
def fit(
    model: nn.Module,
    sample: Any,
    budget: int | float | str | None = None,
    noise: float = 0.01,
    *,
    loss_fn: Loss | None = None,
    allow: Collection[str] = ALLOWED,
    executor: str = "inductor",
    page_to: str | Path | None = None,
    costs: str = "roofline",
) -> Fit: ...


@overload
def fit(
    model: nn.Module,
    sample: Any,
    budget: int | float | str | None = None,
    noise: float = 0.01,
    *,
    loss_fn: Loss | None = None,
    allow: Collection[str] = ALLOWED,
    executor: None,
) -> ModuleFit: ...


def fit(
    model: nn.Module,
    sample: Any,
    budget: int | float | str | None = None,
    noise: float = 0.01,
    *,
    loss_fn: Loss | None = None,
    allow: Collection[str] = ALLOWED,
    executor: str | None = "inductor",
    page_to: str | Path | None = None,
    costs: str = "roofline",
) -> Fit | ModuleFit:
    """Plan a model's training steps within a byte budget and a noise limit, in place.

    With an executor, nothing of the model's full step runs. Where noise has to be measured, parts of the sample run, a
    quarter of it at most, which takes four gradients of all parameters. The model's buffers and gradients and torch's
    random states are afterwards as they were; Python's own random state, and the gradients of other parameters that
    `loss_fn` uses, are not. The first training step compiles the plan. The plan and its budget are of the model's call
    alone: a loss that `loss_fn` computes beside it comes on top. Gradients are exact where neither codes nor sketches
    are needed, and unbiased otherwise; docs/codes.md names the biases and their sizes. Batches of other shapes are
    planned for the same number of bytes when they first come; their noise is not measured.

    Args:
        model: The model, in the mode in which it is trained. With an executor, it may be on the meta device: it is
            planned as if it were on the CPU, and for the least time: its noise is not measured.
        sample: A batch: the second argument of `loss_fn`; without `loss_fn`, a mapping of keyword arguments, a tuple of
            positional arguments, or a single argument.
        budget: The most that may be in memory at any time beside parameters, buffers and the batch: bytes, "8GiB", or
            "60%" (or 0.6) of the exact captured step's peak without a plan. None for no limit.
        noise: Most that the variance of a gradient over the draws of codes and sketches may be of its variance over
            minibatches of the sample's size, and dropout; 0 for exact gradients. Parts of the sample are minibatches:
            its first dimension counts examples.
        loss_fn: Called as `loss_fn(model, batch)` with the sample and parts of it, returns the loss; None if the model
            returns it, as a tensor or as `.loss`. With an executor, the loss is needed only where noise is measured.
        allow: The allowed means: "recompute", "code" and "sketch". Batches of other shapes, and steps that Inductor
            compiles to a higher peak than planned, are recomputed in part where they would not fit otherwise. And
            "page", by the executor "exact" alone: tensors of steps of up to 500 ops may be moved to `page_to` and
            loaded again, where that takes less time than other plans.
        executor: "inductor" compiles the step; "exact" runs it op by op. With None there is no compiler: steps run on
            the sample with linear layers converted, repeated blocks checkpointed, or both, and the fastest such means
            is installed, whose measured peak and noise are within the limits. "60%" is then a share of the unchanged
            step's measured peak, loss included. Batches of other shapes have no plan. All parameters have to be on
            one device, a CPU or a CUDA GPU.
        page_to: A folder, or "host" for the host's memory, where "page" is allowed.
        costs: How ops are priced, if there is an executor: by a "roofline", or in "ms", for which ops run on random
            numbers and are timed. The plan then tells the step's time, predicted and, after the first step, measured;
            if the two are more than 15 % apart, ops are timed again, and the step is planned once more.

    Returns:
        The chosen step; print it. `remove()` undoes it.

    Raises:
        InfeasibleBudgetError: If no plan fits, or none of the plans that fit is exact or measured to be within the
            noise limit; it names the least budget that was found. The step of a later batch of another shape, which has
            no plan within the bytes, raises it as well.
        CaptureError: If the model can't be captured as one graph; it stays as it is then.
        ValueError: If an argument is invalid, or the model is in eval mode, planned or compiled already, or without a
            parameter that is trained.
        ImportError: If "page" is allowed, and scipy is missing.

    Examples:
        >>> import torch
        >>> from rmm_linear import fit
        >>> layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        >>> model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
        >>> x = torch.randn(2048, 64)
        >>> plan = fit(model, x, budget="50%", loss_fn=lambda model, x: model(x).square().mean(), executor="exact")
        >>> plan.plan.peak_bytes <= plan.plain_bytes / 2
        True
        >>> model(x).square().mean().backward()
    """
    unit_of(costs)
    limit, ways = checked_noise(noise), _checked_ways(allow, executor, page_to, budget)
    asked = None if budget is None else Budget.of(budget)
    refuse_planned(model)
    if not callable(loss_fn) and loss_fn is not None:
        raise ValueError(f"loss_fn={loss_fn!r} can't be called: pass a function of the model and a batch, or None")
    if page_to is not None:
        try:
            import scipy.optimize  # noqa: F401
        except ImportError as error:
            raise ImportError('allow: "page" needs scipy: pip install rmm-linear[plan]') from error
        Options(budget, _PAGER, "exact", page_to=page_to)
        for device in {parameter.device for parameter in model.parameters()}:
            pager_for(page_to, device).close()
    if not model.training:
        raise ValueError("the model is in eval mode, and its training steps are planned: call model.train() first")
    sample = plain_batch(sample)
    if executor is None:
        return fit_modules(model, sample, asked, limit, ways, loss_fn)
    step = PlannedStep(model._call_impl, model, Options(executor=executor, costs=costs))
    exact, plain = at_call(model, sample, loss_fn, step.capture)
    budget_bytes = None if asked is None else asked.in_bytes(plain.peak_bytes)
    trials = _Trials(exact, budget_bytes, costs, is_replanned="recompute" in ways)
    trials.add("exact", {}, exact)
    if page_to is not None:
        trials.add_pages(page_to)
    if "code" in ways and limit > 0:
        trials.add_codes()
    if "sketch" in ways and limit >= LEAST_NOISE_OF_SKETCHES:
        for name, options in _SKETCHES.items():
            if "code" in ways or "bits" not in options:
                trials.add(name, options)
    # without contents nothing can be measured: any noise will do
    most = math.inf if is_without_contents(model) else limit
    chosen = choose(
        trials.candidates,
        most,
        lambda each: _measured(model, sample, each, loss_fn, executor, limit),
        budget_bytes,
        lambda least_bytes: refusal(asked, plain.peak_bytes, least_bytes, "fit"),  # type: ignore[arg-type]
    )
    assert chosen.plan is not None
    # also without recomputation: batches of other shapes must fit as well
    taken = replace(step.group.options, budget=budget_bytes, **chosen.options)
    variant = step.take(taken, trials.captures[json.dumps(chosen.options)], chosen.plan)
    model._compiled_call_impl = step
    found = chosen, tuple(trials.candidates), plain, budget_bytes, limit, executor, trials.bounds, trials.least_time
    return Fit(model, step, *found, variant)


class _Trials:
    """Ways to run a captured step within a budget, with ops that run twice if `is_replanned`; see `Fit`.

    The capture of each candidate is kept by its options.
    """

    def __init__(self, exact: Capture, budget_bytes: int | None, costs: str, *, is_replanned: bool) -> None:
        self._exact, self._budget_bytes, self._costs = exact, budget_bytes, costs
        self._replanned_bytes = budget_bytes if is_replanned else None
        self.candidates: list[Candidate] = []
        self.captures: dict[str, Capture] = {}
        self.bounds: dict[str, PartialCoding] = {}
        self.least_time: float | None = None

    def add(self, name: str, options: Mapping[str, Any], capture: Capture | None = None) -> None:
        """Plan the step with options of the backend."""
        self.captures[json.dumps(options)] = capture = capture or self._rewritten(options)
        self.candidates.append(self._planned(name, options, capture))

    def add_pages(self, page_to: str | Path) -> None:
        """Plan the exact step with pages in place of some second computations."""
        count = len(self._exact.graph.ops)
        if self._budget_bytes is None or plain_peak_bytes(self._exact.graph) <= self._budget_bytes:
            return
        if count > _MOST_OPS_OF_PAGER:
            warnings.warn(
                f"no plan pages: {_PAGER}, which plans pages, would take minutes for the step's {count} ops (up to"
                f" {_MOST_OPS_OF_PAGER} are tried)",
                stacklevel=3,
            )
            return
        paged = with_page_cost(self._exact, page_to, self._costs)
        self.add("exact, paged", {"strategy": _PAGER, "page_to": str(page_to)}, paged)

    def add_codes(self) -> None:
        """Plan the step with codes of fewer and fewer bits, until all codes together fit without recomputation."""
        if self._budget_bytes is None or plain_peak_bytes(self._exact.graph) <= self._budget_bytes:
            # codes would add noise alone
            return
        tried: set[frozenset[tuple[str, int]]] = set()
        costs: dict[tuple[str, int], float] = {}
        for name, given in _CODES.items():
            coded = self._rewritten({"bits": given})
            if not coded.coding.coded:
                return
            if coded.coding.names in tried:
                # where 4 bits would be biased, there are 8
                continue
            tried.add(coded.coding.names)
            if self._replanned_bytes is not None:
                with contextlib.suppress(ImportError, TimeoutError):
                    self._add_partly_coded(name, PartialCoding(self._exact, coded, Bits.of(given), costs))
            fits = plain_peak_bytes(coded.graph) <= self._budget_bytes
            if fits or coded.graph.cost < self._best_cost():
                self.add(name, {"bits": given}, coded)
            if fits:
                return

    def _add_partly_coded(self, name: str, program: PartialCoding) -> None:
        """Plan the step with codes of the tensors alone that are worth it beside recomputation."""
        assert self._replanned_bytes is not None
        least_cost = program.least_cost(self._replanned_bytes)
        self.bounds[name] = program
        self.least_time = min(self.least_time or math.inf, least_cost / self._exact.graph.cost)
        # the program looks at a few moments of the step, and not at all that ops take while they run
        enough = (1 + _HARDLY) * least_cost
        for part in _PARTS_OF_BUDGET:
            budget_bytes = int(part * self._replanned_bytes)
            if self._best_cost() <= max(enough, program.least_cost(budget_bytes)):
                return
            bits = program.choose(budget_bytes)
            if bits is not None and bits.only and json.dumps({"bits": bits.as_given()}) not in self.captures:
                count = len(bits.only)
                self.add(f"{name}, {count} tensor{'s' if count > 1 else ''}", {"bits": bits.as_given()})

    def _rewritten(self, options: Mapping[str, Any]) -> Capture:
        assert self._exact.rewritten is not None
        return self._exact.rewritten(Bits.of(options.get("bits")), sketch_ratio(options.get("sketch")))

    def _best_cost(self) -> float:
        return min(each.time for each in self.candidates) * self._exact.graph.cost

    def _planned(self, name: str, options: Mapping[str, Any], capture: Capture) -> Candidate:
        graph = capture.graph
        try:
            if self._replanned_bytes is None:
                plan = CheckpointPlan.of(graph, Schedule.plain(graph), self._budget_bytes)
            else:
                plan = plan_graph(graph, Budget.of(self._replanned_bytes), options.get("strategy", "auto"))
        except InfeasibleBudgetError as error:
            return Candidate(name, options, None, error.least_bytes, fits=False)
        if self._budget_bytes is not None and plan.peak_bytes > self._budget_bytes:
            return Candidate(name, options, None, plan.peak_bytes, fits=False)
        plan = replace(plan, coding=capture.coding, eager_peak_bytes=self._exact.eager_peak_bytes)
        return Candidate(name, options, plan, plan.peak_bytes, plan.planned.cost / self._exact.graph.cost)


def _checked_ways(
    allow: Collection[str], executor: str | None, page_to: str | Path | None, budget: int | float | str | None
) -> set[str]:
    known = (*ALLOWED, _PAGE)
    if not isinstance(allow, Collection):
        raise ValueError(f"allow={allow!r} is no collection of names; choose among {', '.join(known)}, or pass ()")
    ways = {allow} if isinstance(allow, str) else set(allow)
    for each in ways:
        if each not in known:
            raise ValueError(f"allow: {each!r} is unknown; choose among {', '.join(known)}")
    if _PAGE not in ways:
        if page_to is not None:
            raise ValueError(f'page_to={page_to!r} is for pages: add "page" to allow, or leave page_to out')
    elif page_to is None:
        raise ValueError('allow: "page" needs a place for pages: pass page_to="host", or a folder')
    elif executor != "exact":
        raise ValueError(
            f'allow: "page" needs executor="exact", which alone moves pages, and executor={executor!r} was given'
        )
    elif budget is None:
        raise ValueError('allow: "page" needs a budget: without one nothing has to be paged')
    elif "recompute" not in ways:
        raise ValueError('allow: "page" needs "recompute": plans that page compute again as well')
    return ways


def _measured(
    model: nn.Module, sample: Any, candidate: Candidate, loss_fn: Loss | None, executor: str, limit: float
) -> StepNoise:
    """Measure a candidate's noise on parts of the sample, op by op; see `noise_on` for the limit."""
    if is_without_contents(model):
        raise NotMeasurableError("the noise can't be measured: the weights are on the meta device, without contents")
    parts = parts_of(sample)
    assert candidate.plan is not None
    whole = candidate.plan.coding.names
    noisy = {name: value for name, value in candidate.options.items() if name in ("bits", "sketch")}
    step = PlannedStep(model._call_impl, model, Options(executor=executor, **noisy))
    step.group.is_compiled = False
    try:
        _, plan = at_call(model, parts[0], loss_fn, step.capture)
        if plan.coding.names != whole:
            raise NotMeasurableError(
                f"the noise can't be measured: {len(whole)} tensors of the sample are coded or sketched, and"
                f" {len(plan.coding.names & whole)} of these in its {len(parts)} parts, which may have too few rows;"
                " pass a larger batch"
            )
        model._compiled_call_impl = step
        return noise_on(model, parts, loss_fn, limit)
    except CaptureError as error:
        raise NotMeasurableError(f"the noise can't be measured: parts of the sample are refused: {error}") from None
    finally:
        remove_checkpointing(model)
        step.forget()
