"""OLLA's orders against all orders without recomputation, and its addresses in a real arena of bytes."""

import pytest
from cheapest_of_stages import of_one_run_each

pytest.importorskip("ortools")

from experiments.checkpointing.arenas import arena_for, lifetimes
from experiments.checkpointing.generators import of_edges, random_layers, star, u_shape, with_backward
from rmm_linear.planning.oracle import leanest_order
from rmm_linear.planning.schedule import Schedule, validate
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies import get_strategy
from rmm_linear.planning.strategies.steiner2022_olla import least_peak_order


def residual_chain(blocks, *, size=64):
    """A training graph: each third node of a chain also reads the one three before."""
    count = 3 * blocks + 1
    edges = [(node, node + 1) for node in range(count - 1)] + [(3 * block, 3 * block + 3) for block in range(blocks)]
    return with_backward(of_edges([[1.0, 4.0, 4.0][node % 3] for node in range(count)], [size] * count, edges))


@pytest.mark.parametrize("seed", range(6))
def test_no_order_without_recomputation_has_a_lower_peak(seed):
    graph = random_layers(11, seed=seed, width=4) if seed < 3 else with_backward(random_layers(5, seed=seed))
    order, bound = least_peak_order(graph)
    assert bound == peak_and_cost(graph, order)[0]
    validate(graph, Schedule.from_order(graph, order))
    assert sorted(order) == list(range(len(graph.ops)))
    assert peak_and_cost(graph, order)[0] == leanest_order(of_one_run_each(graph)).peak_bytes


def _run_in(arena, alive, graph, order):
    """Write each storage's own bytes into an arena, and find them at each read as they were."""
    memory = bytearray(arena.size_bytes)
    starting, address_of, content = {}, {}, {}
    for each, address in zip(alive, arena.addresses, strict=True):
        starting.setdefault(each.first, []).append((each, address))
    for place, op in enumerate(order):
        for index in graph.ops[op].reads:
            if graph.sizes[index]:
                each, address = address_of[index]
                assert each.first < place < each.end
                assert bytes(memory[address : address + each.size_bytes]) == content[index]
        for each, address in starting.get(place, ()):
            written = bytes([(7 * place + 11 * each.name) % 251 + 1]) * each.size_bytes
            memory[address : address + each.size_bytes] = written
            address_of[each.name], content[each.name] = (each, address), written


@pytest.mark.parametrize(
    ("graph", "most"),
    [
        (residual_chain(6), 1.01),
        (with_backward(u_shape(4)), 1.01),
        (with_backward(star(6)), 1.01),
        pytest.param(random_layers(40, seed=1), 1.03, marks=pytest.mark.slow),
    ],
    ids=["residual", "U", "star", "layers"],
)
def test_an_arena_holds_every_storage_whole_until_its_last_read(graph, most):
    orders = [range(len(graph.ops)), least_peak_order(graph, time_limit_s=2)[0]]
    peak = peak_and_cost(graph, orders[0])[0]
    # a schedule that computes twice has storages with several lifetimes
    orders.append(get_strategy("chen2016_sqrt").frontier(graph)[-1].order)
    for order in orders:
        alive = lifetimes(graph, order)
        arena = arena_for(alive)
        _run_in(arena, alive, graph, order)
        assert arena.size_bytes <= most * peak
        assert arena.size_bytes >= peak_and_cost(graph, order)[0]


def test_a_plan_tells_the_least_peak_that_was_proven():
    graph = random_layers(12, seed=4)
    plan = get_strategy("steiner2022_olla").plan(graph, 60)
    assert plan.proof == "no order that computes nothing twice has a peak below 57 bytes"
