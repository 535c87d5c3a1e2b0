"""The best of all strategies that plan a real model in seconds."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy, get_strategy, register
from rmm_linear.planning.strategies.kusumoto2019_lower_sets import (
    Kusumoto2019Approximate,
    NodeGraph,
    all_lower_sets,
    order_of_plan,
)
from rmm_linear.planning.strategies.nested_lower_sets import NestedLowerSets

# Their time grows with the number of ops and no faster: they are asked about every graph.
_CHEAP = ("chen2016_sqrt", "cost_per_byte", "griewank2000_revolve", "gruslys2016_bptt", "hong2025_linear")
# Asked about every graph as well; both begin with the same chains, which are sought once.
_OF_LOWER_SETS = ("kusumoto2019_approximate", "nested_lower_sets")
_EXACT = "kusumoto2019_exact"


@register
class Auto(Strategy):
    """Proposes all that the strategies propose which it asks: about ten seconds for 500 forward ops."""

    name: ClassVar[str] = "auto"

    def orders(self, graph: Graph) -> Iterable[Sequence[int]]:
        """Propose the orders of the strategies that are asked."""
        approximate = Kusumoto2019Approximate()
        plans = list(approximate.plans_of_program(graph)), list(approximate.plans_of_chen(graph))
        for segments, keep_last in (*plans[0], *plans[1]):
            yield order_of_plan(graph, segments, keep_last)
        yield from NestedLowerSets().orders_of_plans(graph, *plans)
        for name in asked(graph):
            if name not in _OF_LOWER_SETS:
                yield from get_strategy(name).orders(graph)


def asked(graph: Graph) -> tuple[str, ...]:
    """Say which strategies `auto` asks about a graph.

    Returns:
        Their names. The exact program is left out where there are many lower sets, which would take minutes, and where
        there are no others than the approximate one looks at.
    """
    return (*_CHEAP, *_OF_LOWER_SETS, *((_EXACT,) if _exact_is_worth_asking(graph) else ()))


def _exact_is_worth_asking(graph: Graph) -> bool:
    if graph.forward_count == 0:
        return False
    nodes = NodeGraph.of_forward(graph)
    try:
        exact = all_lower_sets(nodes, most=Kusumoto2019Approximate.most)
    except ValueError:
        return False
    return len(exact) > len(Kusumoto2019Approximate().family(nodes))
