"""Segments of about equal weight: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).

Of n layers in k segments, the ends of the segments are kept, and one segment at a time is computed again: n / k + k
layers, least at k = sqrt(n), for less than one more forward pass (section 4.1). For layers of unlike sizes the paper
walks along the ops and keeps one whenever the bytes since the last one exceed a cap (Algorithm 3), and searches for
the cap. Here both are tried on any graph, a segment being a run of consecutive forward ops: for every number of
segments, equal by count and by bytes, with the cuts also moved to where few bytes cross; and for a sweep of caps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.chain_reversal import balanced_cuts, crossing_bytes, some_counts, written_bytes
from rmm_linear.planning.strategies.segments import orders_of_cuts

_ALL_UP_TO = 64
_COUNTS = 28
_CAPS = 28


def greedy_cuts(weights: Sequence[int], prices: Sequence[int], cap: int) -> tuple[int, ...]:
    """Cut wherever a segment would exceed a cap of bytes, unless one op alone does: Algorithm 3 of the paper.

    `prices` are the prices of a cut before each op, and after the last. Each cut is at the cheapest place of the last
    half of the ops that fit, the last of equal places.
    """
    cuts: list[int] = []
    start, held = 0, 0
    position = 0
    while position < len(weights):
        if position > start and held + weights[position] > cap:
            half, back = 0, position
            while back - 1 > start and half + weights[back - 1] <= cap / 2:
                back -= 1
                half += weights[back]
            start = min(range(back, position + 1), key=lambda place: (prices[place], -place))
            cuts.append(start)
            held = sum(weights[start:position])
            continue
        held += weights[position]
        position += 1
    return tuple(cuts)


class ChenSqrt(Strategy):
    """Chen et al. 2016: about sqrt(n) segments, each computed again as one."""

    name: ClassVar[str] = "chen2016_sqrt"

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        return orders_of_cuts(graph, _cuts(graph))


def _cuts(graph: Graph) -> Iterator[tuple[int, ...]]:
    prices, sizes = crossing_bytes(graph), written_bytes(graph)
    counts = some_counts(graph.forward_count, all_up_to=_ALL_UP_TO, number=_COUNTS)
    # the paper's own number is always among them
    for parts in sorted({*counts, round(math.sqrt(graph.forward_count))}):
        for weights in ([1] * graph.forward_count, sizes):
            for slack in (0.0, 0.5):
                yield balanced_cuts(weights, prices, parts, slack=slack)
    for parts in some_counts(graph.forward_count, all_up_to=_CAPS, number=_CAPS):
        yield greedy_cuts(sizes, prices, max(1, sum(sizes) // parts))
        # Algorithm 3 as it is printed: cut where the cap is reached, at any price
        yield greedy_cuts(sizes, [0] * len(prices), max(1, sum(sizes) // parts))
