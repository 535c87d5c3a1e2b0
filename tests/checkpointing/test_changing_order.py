"""An order that changes takes what the simulator says, after every change, and goes back to what it was."""

import random
from dataclasses import replace

import pytest
from strategy_contract import large_graphs, tiny_graphs

from experiments.checkpointing.generators import chain
from rmm_linear.planning.changing_order import ChangingOrder
from rmm_linear.planning.simulate import bytes_of_order

GRAPHS = [graph for _, graph in (*tiny_graphs(), *large_graphs())]


def with_states(graph):
    """Let every second forward op have a random state."""
    ops = (replace(op, state_bytes=5 * (place % 2) * (not op.is_backward)) for place, op in enumerate(graph.ops))
    return replace(graph, ops=tuple(ops))


def can_run(graph, changing, op, key):
    """Whether what an op reads was computed before, and the forward pass has ended before a backward op."""
    is_ready = all(changing.last_run(graph.writer[index], key) is not None for index in graph.ops[op].reads)
    is_first = changing.last_run(op, key) is None
    return is_ready and not is_first and (not graph.ops[op].is_backward or key > changing.end)


@pytest.mark.parametrize("number", range(2 * len(GRAPHS)))
def test_bytes_are_those_of_the_simulator_after_every_change(number):
    graph = GRAPHS[number // 2] if number % 2 else with_states(GRAPHS[number // 2])
    draw, budget = random.Random(number), sum(graph.sizes) // 4
    changing = ChangingOrder(graph, range(len(graph.ops)), budget)
    marks = [(changing.mark(), changing.order())]
    for _ in range(60):
        kind, key = draw.random(), draw.choice(changing.keys)
        if kind < 0.6:
            (new,) = changing.keys_before(key, 1)
            ops = [op for op in range(len(graph.ops)) if can_run(graph, changing, op, new)]
            if ops:
                changing.put(draw.choice(ops), new)
        elif kind < 0.85 and (again := list(changing.repetitions())):
            changing.take(draw.choice(again))
        elif kind < 0.92:
            marks.append((changing.mark(), changing.order()))
        else:
            mark, order = marks[-1]
            changing.undo(mark)
            assert changing.order() == order
        during = bytes_of_order(graph, changing.order())
        assert changing.during[:-1] == during
        assert changing.excess == sum(max(0, size - budget) for size in changing.during)
        assert changing.cost == pytest.approx(sum(graph.ops[op].cost for op in changing.order()))


def test_a_computation_goes_with_those_that_only_it_needs():
    changing = ChangingOrder(chain([4] * 4), [0, 1, 0, 1, 2, 3], 100)
    changing.take(changing.keys[3])
    assert changing.order() == [0, 1, 2, 3]
