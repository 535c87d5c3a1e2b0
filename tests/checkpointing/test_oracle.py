"""The search over all orders, against writing them all down."""

import random

import pytest

from experiments.checkpointing.generators import chain, random_layers, star, with_backward
from rmm_linear.errors import ScheduleError
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.oracle import cheapest_order, leanest_order
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import peak_and_cost, simulate

GRAPHS = [
    with_backward(chain([3, 5, 2])),
    with_backward(chain([4, 4, 4, 4])),
    random_layers(5, seed=2),
    star(2, seed=4),
    with_backward(random_layers(3, seed=1)),
]


def every_order(graph, most):
    """All orders of at most so many computations that can run, the last of which completes the outputs."""
    waiting = [()]
    while waiting:
        order = waiting.pop()
        for op in range(len(graph.ops)):
            # an op that runs again right after itself does nothing
            if order and order[-1] == op:
                continue
            longer = (*order, op)
            computed = {graph.ops[o].writes[0] for o in longer}
            if not set(graph.ops[op].reads) <= computed:
                continue
            if graph.ops[op].is_backward and not set(graph.results) <= computed:
                continue
            if len(longer) < most:
                waiting.append(longer)
            if set(graph.outputs) <= computed:
                yield longer


@pytest.mark.parametrize("number", range(len(GRAPHS)))
def test_cheapest_order_equals_writing_all_orders_down(number):
    graph = GRAPHS[number]
    most = len(graph.ops) + 1 + (len(graph.ops) <= 6)
    taken = {}
    for order in every_order(graph, most):
        peak, cost = peak_and_cost(graph, order)
        taken[peak] = min(cost, taken.get(peak, cost))
    for budget in range(min(taken) - 1, max(taken) + 1):
        cheapest = min((cost for peak, cost in taken.items() if peak <= budget), default=None)
        found = cheapest_order(graph, budget)
        # longer orders than were written down may be feasible where these are not, and are cheaper never
        if cheapest is not None:
            assert found is not None
            assert found.cost <= cheapest
        if found is not None and len(found.order) <= most:
            assert found.cost == cheapest


def test_what_it_finds_runs_and_takes_what_it_says():
    draw = random.Random(3)
    for seed in range(12):
        graph = with_backward(random_layers(draw.randint(2, 6), seed=seed))
        leanest = leanest_order(graph)
        plain, _ = peak_and_cost(graph, range(len(graph.ops)))
        for budget in (leanest.peak_bytes, (leanest.peak_bytes + plain) // 2, plain):
            best = cheapest_order(graph, budget)
            taken = simulate(graph, Schedule.from_order(graph, best.order))
            assert (taken.peak_bytes, taken.cost) == (best.peak_bytes, best.cost)
            assert best.peak_bytes <= budget
        assert cheapest_order(graph, leanest.peak_bytes - 1) is None
        assert cheapest_order(graph, plain).cost == graph.cost


def effects(**flags):
    ops = [
        Op("a", 1.0, (), (0,), **flags),
        Op("b", 1.0, (0,), (1,), **flags),
        Op("c", 1.0, (1,), (2,)),
        Op("d", 1.0, (0, 2), (3,)),
    ]
    return Graph(tuple(ops), tuple(map(Storage, "abcd", (10, 4, 10, 1))), (3,))


def test_what_must_not_run_twice_runs_once():
    assert leanest_order(effects()).order.count(0) == 2
    kept = leanest_order(effects(is_recomputable=False))
    assert kept.order.count(0) == 1
    assert kept.peak_bytes > leanest_order(effects()).peak_bytes


def test_random_ops_draw_in_the_order_of_the_program_and_all_of_them():
    # the second op is read by nobody, and draws all the same; it would be leaner to draw it first
    ops = (Op("a", 1.0, (), (0,), is_random=True), Op("b", 1.0, (), (1,), is_random=True))
    graph = Graph(ops, (Storage("a", 4), Storage("b", 9)), (0,))
    found = leanest_order(graph)
    assert found.order == (0, 1)
    assert found.peak_bytes == 13
    simulate(graph, Schedule.from_order(graph, found.order))
    with pytest.raises(ScheduleError):
        simulate(graph, Schedule.from_order(graph, (1, 0)))


def test_large_graphs_are_refused():
    with pytest.raises(ValueError, match="26 storages"):
        cheapest_order(with_backward(chain([1] * 13)), 100)


def test_a_gradient_that_has_gone_does_not_come_back():
    """An op that writes a gradient may run again for its other result; the gradient's readers come before."""
    ops = (Op("loss", 1.0, (), (0,)), Op("gradients", 1.0, (0,), (1, 2), is_backward=True))
    ops += (Op("large", 1.0, (2,), (3,), temporary_bytes=9, is_backward=True),)
    ops += (Op("last", 1.0, (1, 3), (4,), is_backward=True),)
    graph = Graph(
        ops, tuple(Storage(str(i), size) for i, size in enumerate((1, 8, 1, 1, 1))), (4,), (0,), gradients=(1,)
    )
    # the gradient is there from its first computation to its last reader
    plain = peak_and_cost(graph, range(4))[0]
    assert leanest_order(graph).peak_bytes == plain
    assert cheapest_order(graph, plain - 1) is None
