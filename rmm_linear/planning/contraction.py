"""A graph of parts of a graph: neighbouring ops that run together count as one, for planners of small graphs.

An order of parts becomes an order of ops when each part is spelled out. Its cost is the same, and its peak is at most
that of the parts: within a part everything is freed after its last use.
"""

from collections.abc import Sequence

from rmm_linear.planning.graph import Graph, Op

Parts = list[list[int]]


def divided(graph: Graph, count: int) -> Parts:
    """Divide the forward ops into about so many parts, and so the backward ops, where few bytes live on.

    Forward ops that run once alone are parts of their own, behind the part that they lie in.
    """
    parts: Parts = []
    for first, last in ((0, graph.forward_count), (graph.forward_count, len(graph.ops))):
        for ops in _ranges(graph, first, last, count):
            parts += [list(ops)] if first else _by_repetition(graph, ops)
    return parts


def _ranges(graph: Graph, first: int, last: int, count: int) -> list[range]:
    """Cut a stretch of ops at places where few bytes of its own live on."""
    alive = [0] * (last - first)
    for index, writer in enumerate(graph.writer):
        if first <= writer < last:
            for place in range(writer, max([writer, *(op for op in graph.readers[index] if op < last)])):
                alive[place - first] += graph.sizes[index]
    size, cuts = (last - first) / count, [first]
    for number in range(1, count):
        middle = first + size * number
        near = range(max(cuts[-1] + 1, round(middle - size / 3)), min(last, round(middle + size / 3) + 1))
        if near:
            cuts.append(min(near, key=lambda cut: alive[cut - first - 1]))
    return [range(start, end) for start, end in zip(cuts, [*cuts[1:], last], strict=True) if start < end]


def _by_repetition(graph: Graph, ops: Sequence[int]) -> Parts:
    """Divide forward ops into parts that may run again and parts that may not, alternately."""
    parts: Parts = [[], []]
    for number in ops:
        op = graph.ops[number]
        may_repeat = op.is_recomputable and graph.freed.isdisjoint(op.writes) and not set(graph.outputs) & {*op.writes}
        once = {index for other in parts[-1] for index in graph.ops[other].writes}
        is_drawn = op.is_random and any(graph.ops[other].is_random for other in parts[-1])
        if may_repeat and (is_drawn or once & {*op.reads}):
            parts += [[], []]
        parts[-2 if may_repeat else -1].append(number)
    return [part for part in parts if part]


def contracted(graph: Graph, parts: Parts) -> Graph:
    """Return the graph whose ops are the parts, in their order, and whose storages outlive a part."""
    part_of = {op: number for number, part in enumerate(parts) for op in part}
    stays = {*graph.outputs, *graph.results, *graph.gradients}
    shared = [
        index
        for index, writer in enumerate(graph.writer)
        if index in stays or any(part_of[op] != part_of[writer] for op in graph.readers[index])
    ]
    new = {index: number for number, index in enumerate(shared)}

    def renamed(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(new[index] for index in indices)

    ops = []
    for number, part in enumerate(parts):
        members = [graph.ops[op] for op in part]
        written = [index for op in members for index in op.writes]
        outlives = [index for index in written if index in new]
        ops.append(
            Op(
                name=str(number),
                cost=sum(op.cost for op in members),
                reads=renamed(sorted({index for op in members for index in op.reads} - {*written})),
                writes=renamed(outlives),
                temporary_bytes=_peak_of_part(graph, part, new) - sum(graph.sizes[index] for index in outlives),
                is_backward=members[0].is_backward,
                is_recomputable=all(op.is_recomputable for op in members),
                is_random=any(op.is_random for op in members),
                holds_back=renamed(sorted({index for op in members for index in op.holds_back})),
                state_bytes=sum(op.state_bytes for op in members),
            )
        )
    kinds = renamed(graph.outputs), renamed(graph.results), graph.cost_unit, renamed(graph.gradients)
    return Graph(tuple(ops), tuple(graph.storages[index] for index in shared), *kinds)


def _peak_of_part(graph: Graph, part: Sequence[int], outlives: dict[int, int]) -> int:
    """The most bytes of its own that a part has in memory, at least all that outlives it."""
    last_use = {index: op for op in part for index in (*graph.ops[op].reads, *graph.ops[op].writes)}
    held = peak = 0
    for op in part:
        peak = max(peak, held + graph.bytes_while_running[op])
        held += sum(graph.sizes[index] for index in graph.ops[op].writes)
        mine = {index for index in last_use if graph.writer[index] in part and index not in outlives}
        held -= sum(graph.sizes[index] for index in mine if last_use[index] == op)
    return max(peak, held)
