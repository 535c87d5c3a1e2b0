"""The dynamic program over lower sets against brute force, and its proposals against segments under the simulator."""

import itertools
import random
import time

import numpy as np
import pytest

from experiments.checkpointing.generators import chain, of_edges, random_layers, star, with_backward
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.schedule import Schedule, validate
from rmm_linear.planning.strategies import get_strategy
from rmm_linear.planning.strategies.kusumoto2019_lower_sets import (
    LowerSetProgram,
    NodeGraph,
    all_lower_sets,
    ancestor_closures,
)


def small_graphs(count):
    shapes = itertools.cycle([(3, 2), (4, 3), (5, 3), (6, 2), (6, 4), (5, 1)])
    return [
        NodeGraph.of_forward(random_layers(nodes, seed=seed, width=width))
        for seed, (nodes, width) in zip(range(count), shapes, strict=False)
    ]


def model_of(nodes, blocks):
    """Overhead and peak by the paper's model, eqs. 1 and 2, as they stand."""
    assert sorted(itertools.chain(*blocks)) == list(range(len(nodes.costs)))
    lower = set()
    kept = set()
    overhead, peak = 0.0, 0
    for block in blocks:
        lower |= set(block)
        assert all(u in lower for node in block for u in nodes.predecessors[node])
        boundary = {u for u, v in nodes.edges if u in lower and v not in lower}
        following = {v for u, v in nodes.edges if u in lower and v not in lower}
        beside = {u for u, v in nodes.edges if v in following and u not in lower}
        parts = (kept, block, block, following, beside)
        peak = max(peak, sum(nodes.sizes[node] for part in parts for node in part))
        overhead += sum(nodes.costs[node] for node in block if node not in boundary)
        kept |= boundary
    return overhead, peak


def brute_force(nodes):
    """(overhead, peak) of each chain of lower sets."""
    everything = set(range(len(nodes.costs)))
    lower_sets = [
        set(some)
        for size in range(len(everything) + 1)
        for some in itertools.combinations(sorted(everything), size)
        if not any(u not in some and v in some for u, v in nodes.edges)
    ]

    def chains(lower, blocks):
        if lower == everything:
            yield blocks
        for larger in lower_sets:
            if lower < larger:
                yield from chains(larger, (*blocks, tuple(larger - lower)))

    return [model_of(nodes, blocks) for blocks in chains(set(), ())]


def test_dp_equals_brute_force_on_random_graphs():
    for nodes in small_graphs(228):
        chains = brute_force(nodes)
        program = LowerSetProgram(nodes, all_lower_sets(nodes))
        assert program.least_cap == min(peak for _, peak in chains)
        for cap in sorted({peak for _, peak in chains})[::3]:
            overheads = [overhead for overhead, peak in chains if peak <= cap]
            plans = [model_of(nodes, blocks) for blocks in program.centric_plans(cap)]
            assert plans[0][0] == min(overheads)
            assert plans[-1][0] == max(overheads)
            assert max(peak for _, peak in plans) <= cap
        assert program.centric_plans(program.least_cap - 1) == ()


def test_plans_of_fractional_costs_keep_their_caps():
    """Costs with no common divisor share levels of the table."""
    draw = random.Random(3)
    graph = of_edges([draw.uniform(0.1, 9.0) for _ in range(60)], [4] * 60, [(i, i + 1) for i in range(59)])
    nodes = NodeGraph.of_forward(graph)
    program = LowerSetProgram(nodes, ancestor_closures(nodes))
    for cap in np.linspace(program.least_cap, program.largest_cap, 7).astype(int).tolist():
        plans = program.centric_plans(cap)
        assert plans
        assert all(model_of(nodes, blocks)[1] <= cap for blocks in plans)


def test_approximate_is_never_better_than_exact():
    worse = 0
    for nodes in small_graphs(228):
        exact = LowerSetProgram(nodes, all_lower_sets(nodes))
        approximate = LowerSetProgram(nodes, ancestor_closures(nodes))
        assert approximate.least_cap >= exact.least_cap
        for cap in np.linspace(approximate.least_cap, exact.largest_cap, 4).astype(int).tolist():
            some, every = (
                [model_of(nodes, blocks) for blocks in program.centric_plans(cap)] for program in (approximate, exact)
            )
            assert some[0][0] >= every[0][0]
            assert some[-1][0] <= every[-1][0]
            assert max(peak for _, peak in some) <= cap
        worse += approximate.least_cap > exact.least_cap
    # a test of a family that happens to be all lower sets would say nothing
    assert worse > 20


def test_too_many_lower_sets_are_refused():
    with pytest.raises(ValueError, match=r"more than 1500 lower sets.*kusumoto2019_approximate"):
        get_strategy("kusumoto2019_exact").frontier(with_backward(star(12)))
    assert get_strategy("kusumoto2019_approximate").frontier(with_backward(star(12)))


def test_random_ops_keep_their_order_where_lower_sets_would_swap_them():
    """Two branches that draw, interleaved: the ancestors of one draw alone would leave the other's behind."""
    ops = [
        Op("x", 1.0, (), (0,)),
        Op("draw a", 1.0, (0,), (1,), is_random=True),
        Op("draw b", 1.0, (0,), (2,), is_random=True),
        Op("b", 1.0, (2,), (3,)),
        Op("draw c", 1.0, (1,), (4,), is_random=True),
        Op("loss", 1.0, (3, 4), (5,)),
        Op("backward", 1.0, (1, 2, 3, 4, 5), (6,), is_backward=True),
        Op("backward of x", 1.0, (0, 6), (7,), is_backward=True),
    ]
    graph = Graph(tuple(ops), tuple(Storage(str(i), 8) for i in range(8)), (5, 7), (5,))
    assert NodeGraph.of_forward(graph).order_edges == ((1, 2), (1, 5), (2, 4), (2, 5), (4, 5))
    for name in ("kusumoto2019_exact", "kusumoto2019_approximate"):
        for order in get_strategy(name).orders(graph):
            validate(graph, Schedule.from_order(graph, order))


def test_ops_that_only_the_next_one_reads_are_one_node():
    ops = [
        Op("a", 2.0, (), (0, 1)),
        Op("b", 3.0, (0, 1), (2,)),
        Op("c", 5.0, (2,), (3,), is_recomputable=False),
        Op("d", 7.0, (3,), (4, 5)),
        Op("loss", 1.0, (4,), (6,)),
        Op("backward", 1.0, (2, 5, 6), (7,), is_backward=True),
    ]
    sizes = (100, 200, 16, 32, 64, 128, 4, 8)
    graph = Graph(tuple(ops), tuple(Storage(str(i), size) for i, size in enumerate(sizes)), (6, 7), (6,))
    nodes = NodeGraph.of_forward(graph)
    # c must not run twice, and d has a storage that the backward pass reads: neither joins the op after it
    assert nodes.ops == ((0, 1), (2,), (3,), (4,))
    assert nodes.edges == ((0, 1), (1, 2), (2, 3))
    assert nodes.costs == (5.0, 0.0, 7.0, 1.0)
    assert nodes.sizes == (16, 32, 192, 4)
    for order in get_strategy("kusumoto2019_exact").orders(graph):
        validate(graph, Schedule.from_order(graph, order))


@pytest.mark.slow
def test_frontier_of_600_nodes_takes_at_most_ten_seconds():
    for graph in (with_backward(chain([10] * 600)), with_backward(random_layers(600, seed=0))):
        begin = time.process_time()
        get_strategy("kusumoto2019_approximate").frontier(graph)
        assert time.process_time() - begin < 10
