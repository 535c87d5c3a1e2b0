"""The least cost of all orders that have the stages of Checkmate and POET: one op a stage."""

import heapq
import math
from dataclasses import replace

import pytest

from experiments.checkpointing.generators import chain, random_layers, star, u_shape, with_backward
from rmm_linear.planning.simulate import peak_and_cost

SMALL = {
    "chain": with_backward(chain([4, 2, 7, 1, 3], [3.0, 1.0, 4.0, 1.0, 5.0])),
    "U": with_backward(u_shape(2, size=8)),
    "star": with_backward(star(3)),
    **{f"random {seed}": with_backward(random_layers(5, seed=seed)) for seed in range(4)},
    "forward": random_layers(8, seed=6),
}


def of_one_run_each(graph):
    """The same graph, whose ops run once each."""
    return replace(graph, ops=tuple(replace(op, is_recomputable=False) for op in graph.ops))


def plain_peak(graph):
    return peak_and_cost(graph, range(len(graph.ops)))[0]


def assert_none_is_cheaper(program, graph, budgets):
    """A program finds the cheapest of all orders that have its stages, and it takes what it says."""
    for budget in budgets:
        found, best = program.solve(budget), cheapest_of_stages(graph, budget)
        assert found.status == ("infeasible" if best is None else "optimal")
        assert found.cost == pytest.approx(math.inf if best is None else best)
        assert found.bound == pytest.approx(found.cost, rel=1e-5)
        if found.order is not None:
            peak_bytes, cost = peak_and_cost(graph, found.order)
            assert peak_bytes <= budget
            assert cost == pytest.approx(found.cost)


def cheapest_of_stages(graph, budget):
    """Dijkstra over (stage, op, what is in memory, what has a page): loads, then earlier ops, then the own one."""
    sizes, ops = graph.sizes, graph.ops
    end = max((graph.writer[index] for index in graph.results), default=-1)
    stays = {*graph.outputs, *graph.results}
    waiting, best = [(0.0, 0, -1, 0, 0)], {(0, -1, 0, 0): 0.0}
    while waiting:
        cost, stage, op, live, paged = heapq.heappop(waiting)
        if stage == len(ops):
            return cost
        if cost > best[stage, op, live, paged]:
            continue
        held = sum(size for index, size in enumerate(sizes) if live >> index & 1)
        ways = []
        if op < 0:
            ways.append((cost, stage, 0, live, paged))
            # Checkmate pages nothing
            for index, size in enumerate(sizes if graph.page_cost is not None else ()):
                is_forward = not ops[graph.writer[index]].is_backward
                if is_forward and index not in stays and graph.writer[index] < stage and not live >> index & 1:
                    time = size * graph.page_cost * (1 if paged >> index & 1 else 2)
                    if held + size <= budget:
                        ways.append((cost + time, stage, op, live | 1 << index, paged | 1 << index))
        else:
            if op < stage:
                ways.append((cost, stage, op + 1, live, paged))
            is_possible = all(live >> index & 1 for index in ops[op].reads) and (op == stage or ops[op].is_recomputable)
            if is_possible and held + graph.bytes_while_running[op] <= budget:
                after = live | sum(1 << index for index in ops[op].writes)
                place = (stage, op + 1) if op < stage else (stage + 1, -1)
                ways.append((cost + ops[op].cost, *place, after, paged))
        for index in range(len(sizes)):
            may_go = index not in graph.outputs and (index not in graph.results or stage > end)
            if live >> index & 1 and may_go:
                ways.append((cost, stage, op, live & ~(1 << index), paged))
        for way in ways:
            if way[0] < best.get(way[1:], math.inf):
                best[way[1:]] = way[0]
                heapq.heappush(waiting, way)
    return None
