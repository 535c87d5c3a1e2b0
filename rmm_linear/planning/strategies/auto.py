"""The plan for a budget that users get: several orders of computation, each fitted to the budget by local search.

The search starts from the plain order, from orders in which the forward pass is computed again segment by segment, and,
where scipy is installed, from the tensors that a linear program would keep within these
(`rmm_linear.planning.relaxation`).
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.local_search import LocalSearch
from rmm_linear.planning.oracle import cheapest_order, leanest_order
from rmm_linear.planning.relaxation import least_extra_cost, relaxations
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.base import Strategy, checked_budget, refusal
from rmm_linear.planning.strategies.segments import crossing_storages, order_of_segments

# For so few ops and storages, all orders are looked at, in less than a second.
_FEW = 16
# The linear program is solved for these parts of the budget, and for so many segments.
_PARTS = (1, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Entries of all programs that are solved.
_MOST_ENTRIES = 1_000_000
# Places whose bytes the searches count anew: for each op, and in all.
_WORK, _MOST_WORK = 30_000, 40_000_000
# Searches end within this part of the step of the bound.
_ENOUGH = 0.001
# Orders of the least peaks that are made leaner where none could be fitted.
_MOST_LEAN = 2
# A lean order is made leaner by this part of its peak at a time, and at the end byte by byte, within a third of the
# work of a search: more work lowered the peaks of twelve steps by 0.1 % at most.
_STEP, _LEAN_WORK = 0.02, 3


class Auto(Strategy):
    """Local search from the plain order, from segments, and from a linear program's order.

    Its frontier is that of the segments alone, without a search.
    """

    name: ClassVar[str] = "auto"

    def orders(self, graph: Graph) -> Iterable[Sequence[int]]:
        return [_order_that_keeps(graph, kept) for kept in _crossing(graph)]

    def plan(self, graph: Graph, budget_bytes: int) -> Schedule:
        budget_bytes = checked_budget(budget_bytes)
        plain = tuple(range(len(graph.ops)))
        if peak_and_cost(graph, plain)[0] <= budget_bytes:
            return Schedule.from_order(graph, plain, strategy=self.name)
        if max(len(graph.ops), len(graph.storages)) <= _FEW and not graph.stateful:
            optimum = cheapest_order(graph, budget_bytes)
            if optimum is None:
                raise refusal(self.name, budget_bytes, leanest_order(graph).peak_bytes)
            return Schedule.from_order(graph, optimum.order, strategy=self.name)
        bound, starts = _starts(graph, budget_bytes)
        search = LocalSearch(graph, budget_bytes)
        peaks = {order: peak_and_cost(graph, order)[0] for order in dict.fromkeys((plain, *starts))}
        near = sorted(peaks, key=lambda order: abs(peaks[order] - budget_bytes))
        enough = graph.cost * (1 + _ENOUGH) + bound
        # an infinite bound proves that no order fits
        best = search.best_of(near, _most_work(graph), enough) if bound < math.inf else None
        if best is None:
            lean = sorted(peaks, key=peaks.__getitem__)[:_MOST_LEAN]
            # a budget that is proven to be too small is not searched for: one order tells the least
            lean = [plain, *lean] if bound < math.inf else lean[:1]
            found = [_leaner(graph, order) for order in dict.fromkeys(lean)]
            least_bytes, best = min((peak_and_cost(graph, order)[0], order) for order in found)
            if least_bytes > budget_bytes:
                raise refusal(self.name, budget_bytes, least_bytes)
            best = search.reduced(best)
        best = search.searched(best, _most_work(graph), enough)
        return Schedule.from_order(graph, best, strategy=self.name)


def _most_work(graph: Graph) -> int:
    return min(_WORK * len(graph.ops), _MOST_WORK)


def _leaner(graph: Graph, order: Sequence[int]) -> list[int]:
    """Lower the peak of an order, at any cost."""
    work, order = 0, list(order)
    peak = peak_and_cost(graph, order)[0]
    step = max(1, int(_STEP * peak))
    while step and work < _most_work(graph) // _LEAN_WORK:
        search = LocalSearch(graph, peak - step)
        leaner = search.fitted(order)
        work += search.work
        if leaner is None:
            step //= 4
        else:
            order, peak = leaner, peak_and_cost(graph, leaner)[0]
    return order


def _starts(graph: Graph, budget_bytes: int) -> tuple[float, list[tuple[int, ...]]]:
    """Return a bound of the extra cost, and orders to begin with.

    The forward ops are cut into segments, which are computed again one by one: storages that cross them are kept, and
    storages within them that the linear program would keep. Without a solver, or if it takes too long, no storage
    within is kept.
    """
    crossing = _crossing(graph)
    orders = [_order_that_keeps(graph, kept) for kept in crossing]
    with contextlib.suppress(ImportError, TimeoutError):
        programs, entries = relaxations(graph), 0
        bound = least_extra_cost(programs, budget_bytes)
        for place, kept in enumerate(crossing if bound < math.inf else ()):
            for program in programs[: 1 if place else 2]:
                for part in _PARTS:
                    entries += program.entries
                    found = program.solve(int(part * budget_bytes), kept) if entries < _MOST_ENTRIES else None
                    if found is None:
                        break
                    orders.append(_order_that_keeps(graph, found[1] | kept))
                    if peak_and_cost(graph, orders[-1])[0] <= budget_bytes:
                        break
        return bound, orders
    return 0.0, orders


def _crossing(graph: Graph) -> list[set[int]]:
    """Return the storages that cross segments of the forward ops, for several numbers of segments."""
    counts = [count for count in _SEGMENTS if count <= max(1, graph.forward_count // 2)]
    return [crossing_storages(graph, _segments(graph, count)) for count in counts]


def _order_that_keeps(graph: Graph, kept: set[int]) -> tuple[int, ...]:
    return tuple(order_of_segments(graph, [[op] for op in range(graph.forward_count)], kept))


def _segments(graph: Graph, count: int) -> list[list[int]]:
    """Forward ops, one after the other, in segments that write as many bytes each."""
    written = list(accumulate(graph.bytes_while_running[: graph.forward_count]))
    segments: list[list[int]] = [[] for _ in range(count)]
    for op, size in enumerate(written):
        segments[max(0, size * count - 1) // max(1, written[-1])].append(op)
    return segments
