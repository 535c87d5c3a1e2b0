"""Recomputation by segments, on which most published planners decide, for graphs of real training steps.

The forward ops are cut into segments, one after the other. Storages that a later segment reads stay in memory until
the backward pass; all other storages of a segment go after their last use, and are computed again, the segment as one,
when the first backward op asks for a part of it. Only storages that backward ops read are computed again.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rmm_linear.planning.graph import Graph


def crossing_storages(graph: Graph, segments: Sequence[Sequence[int]]) -> set[int]:
    """Return storages that a forward op of another segment reads, outputs, and storages that must not be recomputed."""
    segment_of = {op: number for number, segment in enumerate(segments) for op in segment}
    kept = set(graph.outputs)
    for position, op in enumerate(graph.ops[: graph.forward_count]):
        # backward ops are in no segment
        own = segment_of.get(position)
        for index in op.writes:
            if not op.is_recomputable or any(segment_of.get(reader, own) != own for reader in graph.readers[index]):
                kept.add(index)
    return kept


def order_of_segments(graph: Graph, segments: Sequence[Sequence[int]], kept: Iterable[int] | None = None) -> list[int]:
    """Return the order of computations in which each segment is recomputed as one, when it is first needed.

    The segments have indices of forward ops, each once, in an order in which they can run. The storages `kept` stay
    until the backward pass, `crossing_storages` if None. Outputs, and storages that must not be computed twice, always
    stay.
    """
    order = [op for segment in segments for op in segment]
    place = {op: number for number, op in enumerate(order)}
    there = crossing_storages(graph, [order]).union(crossing_storages(graph, segments) if kept is None else kept)
    segment_of = {op: number for number, segment in enumerate(segments) for op in segment}
    backward = range(graph.forward_count, len(graph.ops))
    # forward storages that the backward pass reads: a segment brings back these, and their operands
    wanted = {index for op in backward for index in graph.ops[op].reads}

    def wanted_of(number: int) -> list[int]:
        return [index for op in segments[number] for index in graph.ops[op].writes if index in wanted]

    for op in backward:
        opened = {
            segment_of[graph.writer[index]]
            for index in graph.ops[op].reads
            if index not in there and not graph.ops[graph.writer[index]].is_backward
        }
        again: set[int] = set()
        waiting = [index for number in opened for index in wanted_of(number)]
        while waiting:
            index = waiting.pop()
            writer = graph.writer[index]
            if index in there or writer in again:
                continue
            again.add(writer)
            waiting += graph.ops[writer].reads
            # a storage of another segment that did not stay brings all of that segment back
            if segment_of[writer] not in opened:
                opened.add(segment_of[writer])
                waiting += wanted_of(segment_of[writer])
        order += sorted(again, key=place.__getitem__)
        there.update(index for number in again for index in graph.ops[number].writes)
        order.append(op)
    return order


def orders_of_segments(graph: Graph, segments: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the order in which the last segment is kept, and the one in which it is computed again as well."""
    crossing = crossing_storages(graph, segments)
    # the backward pass begins with the last segment: where it takes no detour, nothing is gained by dropping it
    yield order_of_segments(graph, segments, crossing.union(*(graph.ops[op].writes for op in segments[-1])))
    yield order_of_segments(graph, segments, crossing)


def segments_of_cuts(count: int, cuts: Sequence[int]) -> list[range]:
    """Return the runs of ops between cuts."""
    edges = [0, *cuts, count]
    return [range(low, high) for low, high in pairwise(edges) if low < high]


def orders_of_cuts(graph: Graph, cuts: Iterable[tuple[int, ...]]) -> Iterator[list[int]]:
    """Yield the orders for segments between the places of each cut; none for a graph of one pass alone."""
    if 0 < graph.forward_count < len(graph.ops):
        for places in dict.fromkeys(cuts):
            yield from orders_of_segments(graph, segments_of_cuts(graph.forward_count, places))
