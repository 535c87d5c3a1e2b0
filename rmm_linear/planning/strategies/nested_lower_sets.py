"""Recomputation in two levels: segments inside of segments that are computed again. An extension, and of no paper.

A chain of lower sets (`kusumoto2019_lower_sets`) keeps its boundaries all the way through the forward pass. Here only
every so many of them stay. When the backward pass comes to such a coarse segment, its forward ops run a second time and
leave its inner boundaries behind; then each of its fine segments runs a third time, from the last. With n fine
segments, about 2 sqrt(n) boundaries are in memory at once instead of n, for one more forward pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy, register
from rmm_linear.planning.strategies.kusumoto2019_lower_sets import Kusumoto2019Approximate
from rmm_linear.planning.strategies.segments import crossing_storages


def order_of_nested_segments(graph: Graph, segments: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the order of computations in which coarse segments are recomputed, and then fine ones within.

    Args:
        graph: The graph.
        segments: For each coarse segment, its fine ones: indices of forward ops, an order in which they can run. The
            last fine one is not computed again.

    Raises:
        ValueError: If a forward op is in no segment, or in two.
    """
    coarse = [list(chain.from_iterable(fine)) for fine in segments]
    forward = list(chain.from_iterable(coarse))
    if sorted(forward) != list(range(graph.forward_count)):
        raise ValueError("the segments do not hold each forward op once")
    place = {op: number for number, op in enumerate(forward)}
    fine = [segment for group in segments for segment in group]
    coarse_of = {op: number for number, ops in enumerate(coarse) for op in ops}
    fine_of = {op: number for number, ops in enumerate(fine) for op in ops}
    backward = range(graph.forward_count, len(graph.ops))
    wanted = {index for op in backward for index in graph.ops[op].reads}

    there = crossing_storages(graph, coarse)
    inner = crossing_storages(graph, fine) - there
    # the backward pass begins where the forward pass ends: what it reads of the last fine segment is there already
    there |= {index for op in fine[-1] for index in graph.ops[op].writes}
    order = list(forward)

    def bring_back(targets: Iterable[int]) -> None:
        """Compute some storages from what is there, and nothing that they do not need."""
        again: set[int] = set()
        waiting = list(targets)
        while waiting:
            index = waiting.pop()
            op = graph.writer[index]
            if index not in there and op not in again:
                again.add(op)
                waiting.extend(graph.ops[op].reads)
        order.extend(sorted(again, key=place.__getitem__))
        there.update(targets)

    opened: set[int] = set()
    for op in backward:
        for index in graph.ops[op].reads:
            writer = graph.writer[index]
            if index in there or graph.ops[writer].is_backward:
                continue
            group = coarse_of[writer]
            if group not in opened:
                opened.add(group)
                bring_back({i for o in coarse[group] for i in graph.ops[o].writes if i in inner})
            if index not in there:
                ops = fine[fine_of[writer]]
                bring_back({i for o in ops for i in graph.ops[o].writes if i in wanted and i not in there})
        order.append(op)
    return order


@register
class NestedLowerSets(Strategy):
    """Every so many lower sets of the chains that `kusumoto2019_approximate` proposes make the coarse segments.

    Chains of its program and those of Chen et al. 2016 are nested, some of either kind: neither is better everywhere.
    """

    name: ClassVar[str] = "nested_lower_sets"
    # chains of either kind that are nested, from few segments to many
    chains: ClassVar[int] = 12

    def orders(self, graph: Graph) -> Iterator[list[int]]:
        """Propose two-level recomputation for several numbers of fine segments in a coarse one."""
        approximate = Kusumoto2019Approximate()
        yield from self.orders_of_plans(graph, approximate.plans_of_program(graph), approximate.plans_of_chen(graph))

    def orders_of_plans(self, graph: Graph, *plans: Iterable[tuple[list[list[int]], bool]]) -> Iterator[list[int]]:
        """Propose two-level recomputation of the segments of given plans.

        Args:
            graph: A graph, with backward ops or without.
            *plans: Some plans of each kind, as `Kusumoto2019Approximate.plans` yields them.
        """
        for kind in plans:
            for segments in self._some(segments for segments, _ in kind):
                for each in sorted({round(2 ** (half / 2)) for half in range(2, 16)}):
                    if each < len(segments):
                        groups = [segments[first : first + each] for first in range(0, len(segments), each)]
                        yield order_of_nested_segments(graph, groups)

    def _some(self, chains: Iterable[list[list[int]]]) -> Iterator[list[list[int]]]:
        found = sorted(chains, key=len)
        step = max(1, len(found) / self.chains)
        for number in range(min(self.chains, len(found))):
            # from the end, so that the finest is among them
            yield found[len(found) - 1 - int(number * step)]
