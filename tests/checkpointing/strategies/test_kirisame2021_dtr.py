"""DTR: evicted neighbourhoods, the budget, and the paper's bound for chains."""

import random

import pytest
from strategy_contract import large_graphs

from experiments.checkpointing.generators import chain, of_edges, random_layers, with_backward
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import simulate
from rmm_linear.planning.strategies.kirisame2021_dtr import (
    ExactNeighbourhood,
    Neighbourhood,
    OnlineRun,
    UnionFind,
    budgets_to_try,
)


def test_the_neighbourhood_reaches_through_what_is_evicted_and_no_further():
    graph = chain([1] * 7, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    for kind in (ExactNeighbourhood, UnionFind):
        near = kind(graph)
        for index in (1, 2, 4):
            near.evict(index)
        assert [near.cost(index) for index in (0, 3, 5, 6)] == [2 + 4, 2 + 4 + 16, 16, 0]


def test_a_union_find_counts_siblings_and_forgets_that_a_component_falls_apart():
    graph = of_edges([1.0, 2.0, 4.0, 8.0], [1] * 4, [(0, 1), (0, 2), (2, 3)])
    near, exact = UnionFind(graph), ExactNeighbourhood(graph)
    for index in (0, 1, 2):
        near.evict(index)
        exact.evict(index)
    assert (exact.cost(3), near.cost(3)) == (1 + 4, 1 + 2 + 4)
    near.restore(0)
    exact.restore(0)
    assert (exact.cost(3), near.cost(3)) == (4, 2 + 4)


@pytest.mark.parametrize("seed", range(3))
def test_remembered_costs_of_neighbourhoods_are_those_computed_anew(seed):
    graph, draw = with_backward(random_layers(12, seed=seed)), random.Random(seed)
    remembering, evicted = ExactNeighbourhood(graph), set()
    for _ in range(60):
        index = draw.randrange(len(graph.storages))
        if index in evicted:
            remembering.restore(index)
        else:
            remembering.evict(index)
        evicted ^= {index}
        anew = ExactNeighbourhood(graph)
        for other in evicted:
            anew.evict(other)
        for other in set(range(len(graph.storages))) - evicted:
            assert remembering.cost(other) == anew.cost(other)


@pytest.mark.parametrize("kind", [ExactNeighbourhood, UnionFind, Neighbourhood])
def test_a_run_that_ends_kept_its_budget(kind):
    ended = 0
    for _, graph in large_graphs():
        for budget in list(budgets_to_try(graph))[::4]:
            run = OnlineRun(graph, budget, kind(graph))
            if run.run():
                ended += 1
                assert simulate(graph, Schedule.from_order(graph, run.order)).peak_bytes <= budget
    assert ended >= 12


@pytest.mark.parametrize("count", [16, 64, 256])
def test_chains_of_root_n_storages_take_time_in_proportion_to_n(count):
    # theorem 3.1 of the paper, for h with the neighbourhood, up to its constants
    graph = with_backward(chain([1] * count))
    run = OnlineRun(graph, 4 * int(count**0.5) + 2, ExactNeighbourhood(graph))
    assert run.run()
    assert len(run.order) <= 2 * len(graph.ops)
