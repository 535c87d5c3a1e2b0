"""Recomputation by segments: what most published planners decide on, brought to real training graphs.

The forward ops are cut into segments, one after the other. What a later segment reads stays in memory until the
backward pass; all else of a segment goes after its last use, and is computed again, the segment as one, when the first
backward op asks for a part of it. Only what backward ops will really read is computed again.
"""

from collections.abc import Iterable, Sequence

from rmm_linear.planning.graph import Graph


def crossing_storages(graph: Graph, segments: Sequence[Sequence[int]]) -> set[int]:
    """Return the storages that a forward op of another segment reads, outputs, and what must not be computed twice."""
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

    The segments have indices of forward ops, in an order in which they can run. The storages `kept` stay until the
    backward pass, `crossing_storages` if None. Outputs, and what must not be computed twice, stay in any case.

    Raises:
        ValueError: If a forward op is in no segment, or in two.
    """
    forward = [op for segment in segments for op in segment]
    if sorted(forward) != list(range(graph.forward_count)):
        raise ValueError("the segments do not hold each forward op once")
    always = crossing_storages(graph, [forward])
    there = always | set(crossing_storages(graph, segments) if kept is None else kept)
    segment_of = {op: number for number, segment in enumerate(segments) for op in segment}
    order = list(forward)
    backward = range(graph.forward_count, len(graph.ops))
    # forward storages that the backward pass reads: a segment brings back these, and what they need
    wanted = {index for op in backward for index in graph.ops[op].reads}

    place = {op: number for number, op in enumerate(forward)}

    def recompute(numbers: Iterable[int]) -> None:
        again: set[int] = set()
        opened: set[int] = set()
        waiting: list[int] = []

        def open_segment(number: int) -> None:
            opened.add(number)
            waiting.extend(index for op in segments[number] for index in graph.ops[op].writes if index in wanted)

        for number in numbers:
            open_segment(number)
        while waiting:
            index = waiting.pop()
            op = graph.writer[index]
            if index in there or op in again:
                continue
            again.add(op)
            waiting.extend(graph.ops[op].reads)
            # what a segment needs of another one that did not stay brings all of that one back
            if segment_of[op] not in opened:
                open_segment(segment_of[op])
        order.extend(sorted(again, key=place.__getitem__))
        for op in again:
            there.update(graph.ops[op].writes)

    for op in backward:
        missing = {
            segment_of[graph.writer[index]]
            for index in graph.ops[op].reads
            if index not in there and not graph.ops[graph.writer[index]].is_backward
        }
        if missing:
            recompute(missing)
        order.append(op)
    return order
