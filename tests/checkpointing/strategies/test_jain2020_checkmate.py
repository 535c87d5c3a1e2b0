"""Checkmate's program against all orders that have its stages; its rounding, limits and bounds."""

import math
import os
import signal
import sys
import threading
from dataclasses import replace

import pytest

pytest.importorskip("scipy")

from cheapest_of_stages import SMALL, assert_none_is_cheaper, plain_peak
from strategy_contract import large_graphs, tiny_graphs

from experiments.checkpointing.generators import chain, random_layers, with_backward
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import peak_and_cost, simulate
from rmm_linear.planning.strategies import get_strategy
from rmm_linear.planning.strategies.jain2020_checkmate import Program, Solution, _stages


@pytest.mark.parametrize("graph", SMALL.values(), ids=SMALL)
def test_no_order_of_its_stages_is_cheaper(graph):
    plain = plain_peak(graph)
    assert_none_is_cheaper(Program(graph), graph, range(plain // 2, plain + 1, 2))


def test_plans_that_exceed_by_random_states_are_sought_again():
    plain = with_backward(chain([100] * 6))
    ops = tuple(replace(op, is_random=not op.is_backward, state_bytes=3 * (not op.is_backward)) for op in plain.ops)
    graph = replace(plain, ops=ops)
    assert simulate(graph, Schedule.from_order(graph, Program(plain).solve(600).order)).peak_bytes > 600
    assert simulate(graph, Schedule.from_order(graph, Program(graph).solve(600).order)).peak_bytes <= 600


def test_a_solver_that_is_stopped_returns_a_plan_and_a_bound():
    graph = dict(large_graphs())["chain of 53"]
    budget = plain_peak(graph) // 2
    one, other = (Program(graph).solve(budget, node_limit=1) for _ in range(2))
    assert one == other
    assert peak_and_cost(graph, one.order)[0] <= budget
    assert graph.cost < one.bound <= one.cost


@pytest.mark.parametrize("name", ["jain2020_checkmate", "patil2022_poet", "moccasin2023_cp"])
def test_a_plan_says_what_its_solver_proved(name):
    if name == "moccasin2023_cp":
        pytest.importorskip("ortools")
    graph = with_backward(chain([4] * 6))
    budget = plain_peak(graph) * 8 // 10
    schedule = Schedule.from_json(get_strategy(name).plan(graph, budget).to_json())
    assert schedule.proof == "its program has no plan of less cost"
    assert f"\n{name}: {schedule.proof}\n" in str(CheckpointPlan.of(graph, schedule, budget))


def test_a_stopped_solver_proves_its_bound():
    text = "its program has no plan that costs less than 12.5 % more than the plain step"
    assert Solution(cost=10.0, order=(0,), bound=9.0, status="stopped").proof(plain_cost=8.0) == text
    # nothing is said where nothing is proven
    assert Solution(cost=10.0, order=(0,), bound=0.0, status="stopped").proof(plain_cost=8.0) == ""
    assert Solution(cost=math.inf, order=None, bound=9.0, status="stopped").proof(plain_cost=8.0) == ""
    assert get_strategy("auto").plan(SMALL["chain"], 24).proof == ""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_returns_the_rounded_plan_and_the_relaxed_bound(monkeypatch):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("Python interrupts the main thread alone")
    graph = with_backward(chain([100] * 20))
    budget = int(0.4 * plain_peak(graph))
    program = Program(graph)
    solved, interrupt = program._solved, threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def slowly(*args, is_integral, **options):
        if is_integral:
            interrupt.start()
            threading.Event().wait(3)
        return solved(*args, is_integral=is_integral, **options)

    monkeypatch.setattr(program, "_solved", slowly)
    found = program.solve(budget, time_limit_s=0.5)
    assert found.status == "stopped"
    assert peak_and_cost(graph, found.order)[0] <= budget
    assert graph.cost < found.bound <= found.cost


def test_rounding_is_never_better_than_the_program_and_mostly_near():
    graph = dict(tiny_graphs())["chain of 6"]
    program = Program(graph)
    gaps = []
    for proposal in get_strategy("jain2020_rounding").frontier(graph):
        best = program.solve(proposal.peak_bytes).cost
        assert best <= proposal.cost * (1 + 1e-9)
        gaps.append(proposal.cost / best - 1)
    assert len(gaps) >= 3
    assert sorted(gaps)[len(gaps) // 2] <= 0.05


def test_large_graphs_have_one_stage_for_the_forward_pass():
    graph = dict(large_graphs())["uniform chain of 60"]
    stages = _stages(graph)
    assert stages[0] == range(60)
    assert len(stages) == 13
    assert [op for stage in stages for op in stage] == list(range(120))


def test_too_large_a_graph_is_refused():
    with pytest.raises(ValueError, match="3000 ops"):
        Program(with_backward(chain([1] * 1500)))


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(200))
def test_no_order_of_its_stages_is_cheaper_on_random_graphs(seed):
    graph = random_layers(4 + seed % 2, seed=seed, density=0.2 + 0.1 * (seed % 5))
    graph = with_backward(graph) if seed % 4 else graph
    plain = plain_peak(graph)
    budgets = (plain - 1, plain * 9 // 10, plain * 8 // 10, plain * 7 // 10)
    assert_none_is_cheaper(Program(graph), graph, budgets)
