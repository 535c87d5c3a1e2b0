"""The best of the strategies that plan a real model in seconds."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rmm_linear.checkpointing.graph import Graph
from rmm_linear.checkpointing.strategies.base import Strategy, get_strategy, register

# What the others propose on real models is no better than these, or an exact search takes too long.
_ASKED = ("chen2016_sqrt", "cost_per_byte", "hong2025_linear", "kusumoto2019_approximate", "nested_lower_sets")


@register
class Auto(Strategy):
    """Proposes what several strategies propose: about ten seconds for 500 forward ops."""

    name: ClassVar[str] = "auto"

    def orders(self, graph: Graph) -> Iterable[Sequence[int]]:
        """Propose the orders of the strategies that are asked.

        Args:
            graph: The graph.

        Yields:
            Orders of computation.
        """
        for name in _ASKED:
            yield from get_strategy(name).orders(graph)
