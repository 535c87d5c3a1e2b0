"""The best order of computations there is, found by looking at all of them: for tiny graphs, to judge planners by.

The rest of a schedule depends on the storages in memory alone: so orders are paths between sets
of live storages, and the cheapest one within a budget is a shortest path (Dijkstra). There are up to 2^s sets for s
storages; graphs of 6 to 8 forward ops with their backward ops take milliseconds to seconds.

Any op may run whenever its operands are in memory. The search frees as `Schedule.from_order` does, that is, whenever
it likes, but never an output, and a gradient only when no op is left that holds it back.
"""

import heapq
from collections.abc import Sequence

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.simulate import Proposal, peak_and_cost

_MOST_STORAGES = 24


def cheapest_order(graph: Graph, budget_bytes: int) -> Proposal | None:
    """Return the cheapest of all orders that fit a budget, the one of the least peak among these; None if none fits.

    Raises:
        ValueError: If the graph has more than 24 storages.
    """
    return _search(graph, budget_bytes, [op.cost for op in graph.ops])


def leanest_order(graph: Graph) -> Proposal:
    """Return an order of the least peak, at any cost.

    Raises:
        ValueError: If the graph has more than 24 storages.
    """
    leanest = _search(graph, sum(graph.bytes_while_running), [0.0] * len(graph.ops))
    assert leanest is not None, "the plain program is an order"
    return leanest


def _search(graph: Graph, budget_bytes: int, costs: Sequence[float]) -> Proposal | None:
    """Dijkstra from nothing in memory to all outputs in memory; distances are (cost, peak)."""
    if len(graph.storages) > _MOST_STORAGES:
        raise ValueError(
            f"the graph has {len(graph.storages)} storages, and all orders are looked at up to {_MOST_STORAGES} only"
        )
    sizes, during = graph.sizes, graph.bytes_while_running
    reads = [_mask(op.reads) for op in graph.ops]
    writes = [_mask(op.writes) for op in graph.ops]
    outputs, results, freed = map(_mask, (graph.outputs, graph.results, tuple(graph.freed)))
    # ops whose first run matters beside their results: a bit each, above the bits of the storages
    has_effect = [op.is_random or not op.is_recomputable for op in graph.ops]
    special = [place for place, op in enumerate(graph.ops) if has_effect[place] or graph.freed & {*op.writes}]
    flag = {position: 1 << (len(sizes) + place) for place, position in enumerate(special)}
    draws = [position for position in special if graph.ops[position].is_random]
    later_random = {position: sum(flag[other] for other in draws if other > position) for position in draws}
    # the bit that says that all results were there: the forward pass is over
    over = 1 << (len(sizes) + len(special)) if results else 0
    # gradients that have to be in memory still, once they are computed: the bit of the op that writes them, their own
    held_back = [
        [(flag[graph.writer[index]], 1 << index) for index in op.holds_back if index in graph.freed] for op in graph.ops
    ]
    goal = outputs | sum(flag.values())

    def may_run(position: int, state: int) -> bool:
        op = graph.ops[position]
        if state & reads[position] != reads[position] or (op.is_backward and state & over != over):
            return False
        if any(state & computed and not state & gradient for computed, gradient in held_back[position]):
            return False
        if position not in flag:
            return True
        if state & flag[position]:
            return op.is_recomputable
        is_late = has_effect[position] and not op.is_backward and state & over and graph.forward_count < len(graph.ops)
        return not state & later_random.get(position, 0) and not is_late

    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    came_from: dict[int, tuple[int, int]] = {}
    waiting = [(0.0, 0, 0)]
    while waiting:
        cost, peak, state = heapq.heappop(waiting)
        if (cost, peak) > best[state]:
            continue
        if state & goal == goal:
            order = []
            while state:
                state, position = came_from[state]
                order += [position] if position >= 0 else []
            order.reverse()
            return Proposal(*peak_and_cost(graph, order), tuple(order))
        held = sum(size for index, size in enumerate(sizes) if state >> index & 1)
        steps = [
            (position, state | writes[position] | flag.get(position, 0), held + during[position])
            for position in range(len(graph.ops))
            if may_run(position, state)
        ]
        may_go = state & ~(outputs if state & over == over else outputs | results)
        steps += [(-1, state & ~(1 << index), 0) for index in range(len(sizes)) if may_go >> index & 1]
        for position, following, bytes_there in steps:
            if bytes_there > budget_bytes:
                continue
            # a gradient that has gone stays away, and results may go once all of them were there
            following &= state | ~freed if state & flag.get(position, 0) else -1
            following |= over if following & results == results else 0
            found = cost + (costs[position] if position >= 0 else 0.0), max(peak, bytes_there)
            if found < best.get(following, (float("inf"), 0)):
                best[following] = found
                came_from[following] = (state, position)
                heapq.heappush(waiting, (*found, following))
    return None


def _mask(indices: tuple[int, ...]) -> int:
    return sum(1 << index for index in set(indices))
