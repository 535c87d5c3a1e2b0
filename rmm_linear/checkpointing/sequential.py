"""The light route: segments of a `nn.Sequential`, run by `torch.utils.checkpoint`.

Nothing is traced into a program here: the modules run as they are written, with any shapes, hooks and branches, and
torch's own checkpointing runs a segment's forward pass again. The price is that cuts lie between modules, and that a
segment is computed again as a whole. The peak is a forecast: it follows from a capture, and a module's in-place writes
or conversions may make a difference (the tests hold it to 10 %).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear.checkpointing.planned import capture, refuse_planned
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.budget import Budget, refusal
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.chain_reversal import balanced_cuts, segments_of_cuts
from rmm_linear.planning.strategies.hong2025_linear import fewest_kept_bytes
from rmm_linear.planning.strategies.segments import crossing_storages, order_of_segments

STRATEGIES = ("chen2016_sqrt", "hong2025_linear")
_CAPS = 32


@dataclass(frozen=True)
class SegmentPlan:
    """Which modules of a sequence are computed again together.

    Attributes:
        segments: The first and one past the last module of each segment.
        checkpointed: How many segments, from the first one on, are computed again; the others keep what they need.
        peak_bytes: Forecast of the peak, parameters, buffers and the input not counted.
        plain_peak_bytes: The same without checkpointing.
        overhead: Extra time over the plain pass's.
    """

    segments: tuple[tuple[int, int], ...]
    checkpointed: int
    peak_bytes: int
    plain_peak_bytes: int
    overhead: float


def checkpoint_sequential(
    model: nn.Sequential, sample: Any, *, budget: int | float | str, strategy: str = "auto", costs: str = "roofline"
) -> SegmentPlan:
    """Cut a sequence of modules into segments and checkpoint as many as a budget asks for, in place.

    In training mode, `model(x)` then runs its segments under `torch.utils.checkpoint(use_reentrant=False)`; random
    states are kept, so that dropout draws the same again. `remove_checkpointing(model)` gives the forward back.

    Args:
        model: Modules that are called one after the other.
        sample: Their input: a tensor of the shape that is trained with.
        budget: The most that may be in memory at any time beside parameters, buffers and the input: bytes, "8GiB", or
            "60%" (or 0.6) of what the captured model takes without a plan.
        strategy: "chen2016_sqrt" (segments of equal count or bytes), "hong2025_linear" (fewest bytes kept, under a cap
            on each segment's), or "auto" (both).
        costs: How ops are priced; see `rmm_linear.compiler.costs.cost_of`.

    Returns:
        What was planned.

    Raises:
        CaptureError: If the model can't be captured.
        InfeasibleBudgetError: If the strategy finds no segments that fit; it names the least that was found.
        ValueError: If the model is no nn.Sequential, it or a module in it is checkpointed already, or it updates
            buffers in its forward pass (batch norm), which a segment that runs again would do twice; or the budget or
            strategy is unknown.

    Example:
        >>> import torch
        >>> from rmm_linear.checkpointing import checkpoint_sequential
        >>> layers = [layer for _ in range(16) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        >>> model = torch.nn.Sequential(*layers)
        >>> plan = checkpoint_sequential(model, torch.randn(1024, 64), budget="60%")
        >>> plan.peak_bytes <= 0.6 * plan.plain_peak_bytes
        True
        >>> model(torch.randn(1000, 64)).sum().backward()
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"a {type(model).__name__} is no nn.Sequential, whose modules run one after the other; use checkpoint_model"
        )
    refuse_planned(model)
    if "forward" in vars(model) or type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"the {type(model).__name__} has a forward of its own, which may be more than its modules one after the"
            " other; use checkpoint_model"
        )
    if strategy not in (*STRATEGIES, "auto"):
        raise ValueError(f"strategy={strategy!r} cuts no sequences; choose one of {', '.join(STRATEGIES)}, auto")
    asked = Budget.of(budget)
    captured = capture(model, (sample,), costs=costs)
    if captured.updates:
        updated = ", ".join(captured.names[place] for place, _ in captured.updates)
        raise ValueError(
            f"the forward pass writes into {updated}, and would do so twice where a segment runs again; use"
            " checkpoint_model, which updates buffers once"
        )
    graph = captured.graph
    plain_peak, plain_cost = peak_and_cost(graph, range(len(graph.ops)))
    budget_bytes = asked.in_bytes(plain_peak)
    groups = _ops_of_modules(graph, list(model._modules))
    plans = [SegmentPlan(((0, len(model)),), 0, plain_peak, plain_peak, 0.0)]
    for cuts in dict.fromkeys(_cuts(graph, groups, strategy)):
        modules = segments_of_cuts(len(groups), cuts)
        segments = [[op for module in run for op in groups[module]] for run in modules]
        crossing = crossing_storages(graph, segments)
        for count in range(1, len(segments) + 1):
            kept = {index for segment in segments[count:] for op in segment for index in graph.ops[op].writes}
            peak, cost = peak_and_cost(graph, order_of_segments(graph, segments, crossing | kept))
            edges = tuple((run.start, run.stop) for run in modules)
            plans.append(SegmentPlan(edges, count, peak, plain_peak, cost / plain_cost - 1))
    fitting = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(plan.peak_bytes for plan in plans)
        raise InfeasibleBudgetError(
            f"{refusal(asked, plain_peak, least, strategy)}; checkpoint_model plans op by op, and reaches less",
            budget_bytes=budget_bytes,
            least_bytes=least,
        )
    best = min(fitting, key=lambda plan: (plan.overhead, plan.peak_bytes))
    model.__dict__["forward"] = SegmentedForward(model, best)
    return best


class SegmentedForward:
    """What runs in a sequence's place.

    Args:
        model: The sequence.
        plan: Its segments.
    """

    # `remove_checkpointing` looks for it
    is_checkpointed_sequence = True

    def __init__(self, model: nn.Sequential, plan: SegmentPlan) -> None:
        self._model, self.plan = model, plan
        self._modes = _modes_of_buffers(model)

    def __call__(self, x: Any) -> Any:
        """Run the modules, segment by segment.

        Raises:
            ValueError: If the model is no longer what was planned: it has more modules or fewer, or a module with
                buffers, which it may update when it trains, is in another mode.
        """
        planned = self.plan.segments[-1][1]
        if len(self._model) != planned:
            raise ValueError(
                f"the sequence has {len(self._model)} modules, and had {planned} when it was planned; plan again:"
                " remove_checkpointing(model), then checkpoint_sequential"
            )
        if self._model.training and torch.is_grad_enabled() and _modes_of_buffers(self._model) != self._modes:
            raise ValueError(
                "modules with buffers were in another mode (train, eval) when the sequence was planned, and may update"
                " them now; plan again in the mode in which it is trained: remove_checkpointing(model), then"
                " checkpoint_sequential"
            )
        for number, (first, end) in enumerate(self.plan.segments):
            modules = list(self._model)[first:end]
            if self._model.training and torch.is_grad_enabled() and number < self.plan.checkpointed:
                x = checkpoint(_run, modules, x, use_reentrant=False)
            else:
                x = _run(modules, x)
        return x


def _modes_of_buffers(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules() if any(True for _ in module.buffers(recurse=False)))


def _run(modules: list[nn.Module], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def _ops_of_modules(graph: Graph, names: list[str]) -> list[list[int]]:
    """The forward ops of each module; what belongs to none goes with the one before."""
    places: Mapping[str, int] = {name: place for place, name in enumerate(names)}
    groups: list[list[int]] = [[] for _ in names]
    present = 0
    for position, op in enumerate(graph.ops[: graph.forward_count]):
        present = max(present, places.get(op.block.split(".")[0], present))
        groups[present].append(position)
    return groups


def _cuts(graph: Graph, groups: list[list[int]], strategy: str) -> Iterator[tuple[int, ...]]:
    count = len(groups)
    owner = {op: place for place, group in enumerate(groups) for op in group}
    # what a module writes for the backward pass, and what a cut after it keeps
    sizes, prices = [0] * count, [0] * (count + 1)
    for index, storage in enumerate(graph.storages):
        writer = owner.get(graph.writer[index])
        readers = graph.readers[index]
        if writer is None or not readers:
            continue
        if readers[-1] >= graph.forward_count:
            sizes[writer] += storage.size_bytes
        last = max((owner[reader] for reader in readers if reader in owner), default=writer)
        for cut in range(writer + 1, last + 1):
            prices[cut] += storage.size_bytes
    if strategy != "hong2025_linear":
        for parts in range(1, count + 1):
            yield balanced_cuts([1.0] * count, prices, parts, slack=0.0)
            yield balanced_cuts(sizes, prices, parts, slack=0.5)
    if strategy != "chen2016_sqrt":
        for share in range(1, _CAPS + 1):
            kept = fewest_kept_bytes(sizes, prices[1:], sum(sizes) * share // _CAPS).layers
            yield tuple(layer + 1 for layer in kept if layer + 1 < count)
