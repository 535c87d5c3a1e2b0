"""Keep what is dear per byte: an op that takes long for the few bytes that it writes is not computed twice.

Of no paper, and what practitioners do by hand (keep the convolutions and matrix products, recompute the rest). Storages
are ranked by the cost of their op over their size; those above a price are kept, all others are computed again when
the backward pass asks for them. With a high price that is a long detour, so that segments bound it: what crosses from
one segment to another is kept as well, whatever its price. All prices, and several numbers of segments, are proposed.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy, register
from rmm_linear.planning.strategies.chain_reversal import some_counts
from rmm_linear.planning.strategies.segments import crossing_storages, order_of_segments

_PRICES = 12
_PRICES_ALONE = 40
_LENGTHS = 8


@register
class CostPerByte(Strategy):
    """Storages above a price per byte are kept, with segments and without.

    Example:
        >>> from rmm_linear.planning.generators import chain, with_backward
        >>> cheap_and_dear = [1.0, 50.0] * 10
        >>> frontier = CostPerByte().frontier(with_backward(chain([8] * 20, cheap_and_dear)))
        >>> [(point.peak_bytes, point.cost) for point in frontier[:2]]
        [(176, 1020.0), (128, 1027.0)]
    """

    name: ClassVar[str] = "cost_per_byte"

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        """Propose prices alone, and prices with segments of equal count."""
        count = graph.forward_count
        if count == len(graph.ops):
            return
        price_of = {
            index: graph.ops[writer].cost / max(1, graph.storages[index].size_bytes)
            for index, writer in enumerate(graph.writer)
            if writer < count
        }
        prices = sorted(set(price_of.values()))
        for segments in ([[op] for op in range(count)], [list(range(count))]):
            for price in _some(prices, _PRICES_ALONE):
                yield order_of_segments(graph, segments, {i for i, own in price_of.items() if own > price})
        for length in some_counts(max(2, count // 2), all_up_to=_LENGTHS, number=_LENGTHS):
            segments = [list(range(first, min(first + length, count))) for first in range(0, count, length)]
            crossing = crossing_storages(graph, segments)
            for price in _some(prices, _PRICES):
                yield order_of_segments(graph, segments, crossing | {i for i, own in price_of.items() if own > price})


def _some(values: Sequence[float], most: int) -> list[float]:
    return list(values[:: max(1, -(-len(values) // most))])
