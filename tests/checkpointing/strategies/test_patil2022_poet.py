"""POET against all orders that have its stages and loads; energy, and tensors that are never paged."""

from dataclasses import replace

import pytest

pytest.importorskip("scipy")

from cheapest_of_stages import assert_none_is_cheaper, of_one_run_each, plain_peak
from strategy_contract import large_graphs

from experiments.checkpointing.generators import chain, random_layers, star, u_shape, with_backward
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.schedule import validate
from rmm_linear.planning.simulate import peak_and_cost, simulate
from rmm_linear.planning.strategies import get_strategy
from rmm_linear.planning.strategies.jain2020_checkmate import Program
from rmm_linear.planning.strategies.patil2022_poet import PagingProgram

_CHAIN = with_backward(chain([4, 2, 7, 1], [3.0, 1.0, 4.0, 1.0]))
_SMALL = {
    "chain": replace(_CHAIN, page_cost=0.3),
    "chain, paging is dear": replace(_CHAIN, page_cost=3.0),
    "chain, nothing runs twice": replace(of_one_run_each(_CHAIN), page_cost=0.3),
    "U": replace(with_backward(u_shape(2, size=2)), page_cost=0.1),
    "star": replace(with_backward(star(2)), page_cost=0.2),
    "random": replace(with_backward(random_layers(4, seed=2)), page_cost=0.05),
}


@pytest.mark.parametrize("graph", _SMALL.values(), ids=_SMALL)
def test_no_order_of_its_stages_and_loads_is_cheaper(graph):
    plain = plain_peak(graph)
    assert_none_is_cheaper(PagingProgram(graph), graph, range(plain // 2, plain + 1, 2))


_SIX = with_backward(chain([5, 1, 8, 3, 2, 6], [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]))
_SIX_PEAK = plain_peak(_SIX)


def test_paging_meets_budgets_that_computing_again_does_not():
    graph = replace(of_one_run_each(_SIX), page_cost=0.01)
    with pytest.raises(InfeasibleBudgetError):
        get_strategy("jain2020_checkmate").plan(graph, _SIX_PEAK * 9 // 10)
    schedule = get_strategy("patil2022_poet").plan(graph, _SIX_PEAK * 9 // 10)
    taken = simulate(graph, schedule)
    assert taken.peak_bytes <= _SIX_PEAK * 9 // 10
    paged = schedule.loads(graph)
    assert len(set(paged)) == len(paged) > 0
    assert taken.extra_cost == pytest.approx(sum(2 * 0.01 * graph.sizes[index] for index in paged))


def test_energy_decides_between_paging_and_computing_again():
    graph, budget = replace(_SIX, page_cost=0.3), _SIX_PEAK * 9 // 10
    cheap, dear = (PagingProgram(graph, page_weight=weight).solve(budget) for weight in (0.1, 100.0))
    paged = [[number - len(graph.ops) for number in found.order if number >= len(graph.ops)] for found in (cheap, dear)]
    assert paged[0]
    assert not paged[1]
    # energy is counted in the power of ops
    assert dear.cost == pytest.approx(Program(_SIX).solve(budget).cost)
    of_ops = sum(graph.ops[number].cost for number in cheap.order if number < len(graph.ops))
    of_pages = sum(graph.sizes[index] for index in (*paged[0], *set(paged[0])))
    assert cheap.cost == pytest.approx(of_ops + 0.1 * 0.3 * of_pages)


def test_large_graphs_are_rounded_within_the_budget():
    graph = replace(dict(large_graphs())["chain of 53"], page_cost=0.001)
    plain = plain_peak(graph)
    _, orders = PagingProgram(graph).relaxed(plain // 2, 20.0)
    fitting = [order for order in orders if peak_and_cost(graph, order)[0] <= plain // 2]
    assert any(max(order) >= len(graph.ops) for order in fitting)


def test_results_outputs_and_gradients_are_never_paged():
    graph = replace(with_backward(chain([5, 1, 8, 3])), page_cost=1e-6)
    loads = {index for variables in PagingProgram(graph)._loaded for index in variables}
    assert loads
    assert loads.isdisjoint({*graph.results, *graph.outputs, *graph.gradients})
    for proposal in get_strategy("patil2022_poet").frontier(graph):
        schedule = get_strategy("patil2022_poet").plan(graph, proposal.peak_bytes)
        validate(graph, schedule)


def test_without_a_cost_of_paging_its_plans_are_those_of_checkmate():
    graph = with_backward(chain([4, 2, 7, 1, 3]))
    budget = plain_peak(graph) * 9 // 10
    assert get_strategy("patil2022_poet").plan(graph, budget).order == (
        get_strategy("jain2020_checkmate").plan(graph, budget).order
    )
