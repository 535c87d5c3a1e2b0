"""The plan for a budget that users get: several orders of computation, each fitted to the budget by local search.

The search starts from the plain order and, where scipy is installed, from what a linear program would keep
(`rmm_linear.planning.relaxation`). Where the result is far from the program's bound, it starts from the proposals of
four published strategies as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.local_search import LocalSearch
from rmm_linear.planning.relaxation import Relaxation, least_extra_cost, relaxations
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.base import Proposal, Strategy, checked_budget, get_strategy, register
from rmm_linear.planning.strategies.kusumoto2019_lower_sets import Kusumoto2019Approximate, order_of_plan
from rmm_linear.planning.strategies.nested_lower_sets import NestedLowerSets
from rmm_linear.planning.strategies.segments import order_of_segments

# The published strategies take more than a few seconds for graphs of more ops.
_MOST_OPS = 1500
# The linear program is solved for these parts of the budget; the orders whose peaks are nearest to it are fitted.
_PARTS = (1, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
_MOST_STARTS = 3
# Computations that the last search simulates: for each op, and in all.
_WORK, _MOST_WORK = 2000, 3_000_000
# Parts of the step that a plan costs more than the bound: above the first, the published strategies are asked; within
# the second, the search ends.
_FAR, _ENOUGH = 0.02, 0.001
# A lean order is made leaner by this part of its peak at a time.
_STEP = 0.02


@register
class Auto(Strategy):
    """Local search from the plain order, a linear program's, and those of four published strategies.

    Its frontier is that of the four: `kusumoto2019_approximate`, `nested_lower_sets`, `cost_per_byte`,
    `gruslys2016_bptt`, without a search. Over 535 pairs of a model and a budget each of these, left out, costs .17 to
    1.6 % of extra time on average. All others together cost .07 % on average and 8.3 % at worst, and no budget is met
    by them alone.
    """

    name: ClassVar[str] = "auto"

    def orders(self, graph: Graph) -> Iterable[Sequence[int]]:
        """Propose the orders of the four strategies."""
        # both strategies of lower sets begin with the same chains, which are sought once
        approximate = Kusumoto2019Approximate()
        plans = list(approximate.plans_of_program(graph)), list(approximate.plans_of_chen(graph))
        for segments, keep_last in (*plans[0], *plans[1]):
            yield order_of_plan(graph, segments, keep_last)
        yield from NestedLowerSets().orders_of_plans(graph, *plans)
        yield from get_strategy("cost_per_byte").orders(graph)
        yield from get_strategy("gruslys2016_bptt").orders(graph)

    def plan(self, graph: Graph, budget_bytes: int) -> Schedule:
        """Return the cheapest schedule that the search finds."""
        budget_bytes = checked_budget(budget_bytes)
        plain = range(len(graph.ops))
        if peak_and_cost(graph, plain)[0] <= budget_bytes:
            return Schedule.from_order(graph, plain, strategy=self.name)
        search = LocalSearch(graph, budget_bytes)
        bound, relaxed = _relaxed(graph, budget_bytes)
        best = search.best_of([*relaxed, plain])
        frontier: Sequence[Proposal] = ()
        is_far = best is None or search.cost(best) > graph.cost * (1 + _FAR) + bound
        if is_far and len(graph.ops) <= _MOST_OPS:
            frontier = self.frontier(graph)
            near = sorted(frontier, key=lambda proposal: abs(proposal.peak_bytes - budget_bytes))[:_MOST_STARTS]
            within = [proposal for proposal in frontier if proposal.peak_bytes <= budget_bytes]
            cheapest = sorted(within, key=lambda proposal: proposal.cost)[:1]
            orders = [proposal.order for proposal in (*near, *cheapest)]
            best = search.best_of(orders if best is None else [best, *orders])
        if best is None:
            leanest = self._leanest(graph, frontier or self.frontier(graph))
            least_bytes = peak_and_cost(graph, leanest)[0]
            if least_bytes > budget_bytes:
                raise InfeasibleBudgetError(
                    f"{self.name} found no schedule within {budget_bytes} bytes; the least that was found takes"
                    f" {least_bytes} bytes",
                    budget_bytes=budget_bytes,
                    least_bytes=least_bytes,
                )
            best = search.reduced(leanest)
        enough = graph.cost * (1 + _ENOUGH) + bound
        best = search.searched(best, min(_WORK * len(graph.ops), _MOST_WORK), enough)
        return Schedule.from_order(graph, best, strategy=self.name)

    @staticmethod
    def _leanest(graph: Graph, frontier: Sequence[Proposal]) -> Sequence[int]:
        """The order of the least peak that is found, whatever the budget is."""
        starts = (range(len(graph.ops)), min(frontier, key=lambda proposal: proposal.peak_bytes).order)
        found = (_leaner(graph, order) for order in starts)
        return min(found, key=lambda order: peak_and_cost(graph, order)[0])


def _leaner(graph: Graph, order: Sequence[int]) -> Sequence[int]:
    work, part = 0, _STEP
    while work < _MOST_WORK:
        peak = peak_and_cost(graph, order)[0]
        search = LocalSearch(graph, peak - max(1, int(part * peak)))
        leaner = search.fitted(order)
        work += search.work
        if leaner is None and not part:
            break
        # at the end, byte by byte
        order, part = (order, 0.0) if leaner is None else (leaner, part)
    return order


def _relaxed(graph: Graph, budget_bytes: int) -> tuple[float, list[list[int]]]:
    """A bound of the extra cost, and orders that keep what the linear program keeps; 0 and none without scipy."""
    try:
        programs = relaxations(graph)
    except ImportError:
        return 0.0, []
    return least_extra_cost(programs, budget_bytes), sorted(
        _orders_of(graph, programs[:2], budget_bytes),
        key=lambda order: abs(peak_and_cost(graph, order)[0] - budget_bytes),
    )[:_MOST_STARTS]


def _orders_of(graph: Graph, programs: Sequence[Relaxation], budget_bytes: int) -> Iterator[list[int]]:
    single = [[op] for op in range(graph.forward_count)]
    for program in programs:
        for part in _PARTS:
            solved = program.solve(int(part * budget_bytes))
            if solved is None:
                break
            yield order_of_segments(graph, single, solved[1])
