"""The best of all strategies that plan a real model in seconds."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rmm_linear.checkpointing.graph import Graph
from rmm_linear.checkpointing.strategies.base import Strategy, available_strategies, get_strategy, register


@register
class Auto(Strategy):
    """Proposes what every other strategy proposes."""

    name: ClassVar[str] = "auto"

    def orders(self, graph: Graph) -> Iterable[Sequence[int]]:
        """Propose the orders of all strategies that are fast enough for the graph.

        Args:
            graph: The graph.

        Yields:
            Orders of computation.
        """
        for name in available_strategies():
            if name != self.name:
                yield from get_strategy(name).orders(graph)
