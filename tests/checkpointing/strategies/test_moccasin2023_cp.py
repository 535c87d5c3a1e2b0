"""Moccasin's constraint program: as cheap as Checkmate's if ops may run often enough; its limits, hints and bounds."""

import math
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ortools")
pytest.importorskip("scipy")

from cheapest_of_stages import SMALL, plain_peak

from experiments.checkpointing.generators import chain, star, with_backward
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.constraint_solver import constraint_programs
from rmm_linear.planning.graph import Storage
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies import get_strategy, moccasin2023_cp
from rmm_linear.planning.strategies.jain2020_checkmate import Program as Checkmate
from rmm_linear.planning.strategies.moccasin2023_cp import Program

# a star of three arms takes half a minute
SMALLER = SMALL | {"star": with_backward(star(2))}


@pytest.mark.parametrize(
    "graph",
    [pytest.param(graph, marks=[pytest.mark.slow] * (name != "chain")) for name, graph in SMALLER.items()],
    ids=SMALLER,
)
def test_with_four_runs_an_op_it_finds_what_checkmate_finds(graph):
    plain = plain_peak(graph)
    for budget in sorted({plain * part // 10 for part in (6, 7, 8, 9)} | {plain}):
        found, expected = Program(graph, budget, runs=4).solve(), Checkmate(graph).solve(budget)
        # the solvers stop within a millionth of the best
        assert found.cost == pytest.approx(expected.cost, rel=1e-5)
        assert found.status == expected.status
        assert found.bound == pytest.approx(found.cost, rel=1e-4)
        assert found.bound <= found.cost


def test_fewer_runs_of_an_op_are_never_cheaper():
    graph = SMALL["chain"]
    costs = [[Program(graph, budget, runs=runs).solve().cost for budget in (10, 13, 16)] for runs in (2, 3)]
    assert all(two >= three for two, three in zip(*costs, strict=True))
    assert Program(with_backward(chain([4] * 5)), 20).solve().cost == math.inf


@pytest.mark.slow
def test_an_op_may_run_a_third_time_where_two_are_not_enough():
    sizes, costs = [7, 7, 3, 6, 9, 6, 2, 8, 9, 2], [3.0, 9.0, 7.0, 6.0, 8.0, 1.0, 8.0, 1.0, 5.0, 7.0]
    graph = with_backward(chain(sizes, costs))
    hint = get_strategy("auto").plan(graph, 39).order
    found = get_strategy("moccasin2023_cp").plan(graph, 39)
    assert peak_and_cost(graph, found.order)[1] <= 152.0 < peak_and_cost(graph, hint)[1]


def test_the_hint_is_what_a_solver_without_time_returns():
    graph = with_backward(chain([4] * 20))
    budget = plain_peak(graph) // 2
    hint = get_strategy("auto").plan(graph, budget).order
    found = Program(graph, budget).solve(hint, time_limit_s=1e-3)
    assert (found.order, found.status) == (hint, "stopped")
    assert found.bound <= found.cost


def test_all_programs_of_a_plan_share_its_time(monkeypatch):
    asked, solved = [], Program._solved

    def slowly(self, time_limit_s, deterministic_limit):
        asked.append(time_limit_s)
        now[0] += 7.0
        return solved(self, 1e-3, deterministic_limit)

    now = [0.0]
    monkeypatch.setattr(moccasin2023_cp, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Program, "_solved", slowly)
    strategy, graph = get_strategy("moccasin2023_cp"), with_backward(chain([4] * 20))
    monkeypatch.setattr(type(strategy), "time_limit_s", 10.0)
    strategy.plan(graph, plain_peak(graph) // 2)
    assert asked == [10.0, 3.0]


@pytest.fixture
def ctrl_c():
    """Ctrl-C is a KeyboardInterrupt, also in a background job, whose shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="signals, and where Linux tells of them")
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_search_and_python_keeps_its_signal(monkeypatch):
    strategy, graph = get_strategy("moccasin2023_cp"), with_backward(chain([4, 2, 7, 1, 3] * 8))
    monkeypatch.setattr(type(strategy), "deterministic_limit", None)
    budget = plain_peak(graph) * 6 // 10
    solver = constraint_programs("Moccasin").CpSolver
    solve = solver.solve

    def interrupted(*arguments):
        # before, in imports and while `auto` looks for the hint, Ctrl-C is an error as everywhere
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        return solve(*arguments)

    monkeypatch.setattr(solver, "solve", interrupted)
    began = time.monotonic()
    found = strategy.plan(graph, budget)
    assert 1.0 <= time.monotonic() - began < 30.0
    assert peak_and_cost(graph, found.order)[0] <= budget
    assert found.proof != "its program has no plan of less cost"
    # OR-tools' own handler would have left none: the next Ctrl-C would kill the process, with all that it has trained
    caught = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    assert int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1


def test_a_deterministic_limit_gives_the_same_plan_twice():
    graph = with_backward(chain([4, 2, 7, 1, 3] * 3))
    budget = plain_peak(graph) * 7 // 10
    found = [Program(graph, budget).solve(deterministic_limit=0.05, time_limit_s=100).order for _ in range(2)]
    assert found[0] == found[1] is not None


def test_a_large_graph_is_planned_in_parts(monkeypatch):
    monkeypatch.setattr(moccasin2023_cp, "_MOST_OPS", 20)
    monkeypatch.setattr(moccasin2023_cp, "_PARTS", 4)
    strategy, graph = get_strategy("moccasin2023_cp"), with_backward(chain([4, 2, 7, 1, 3] * 3))
    budget = plain_peak(graph) * 7 // 10
    by_auto = get_strategy("auto").plan(graph, budget)
    best = peak_and_cost(graph, by_auto.order)[1]

    def nothing(*_):
        raise InfeasibleBudgetError("", budget_bytes=budget, least_bytes=budget)

    monkeypatch.setattr(moccasin2023_cp, "Auto", lambda: SimpleNamespace(plan=nothing))
    found = strategy.plan(graph, budget)
    peak, cost = peak_and_cost(graph, found.order)
    assert peak <= budget
    assert graph.cost < best <= cost < 1.5 * graph.cost
    # the bound of the parts is none of the ops
    assert found.proof == ""
    # with a plan of auto the cheaper one is taken
    monkeypatch.setattr(moccasin2023_cp, "Auto", lambda: SimpleNamespace(plan=lambda *_: by_auto))
    assert strategy.plan(graph, budget).order == by_auto.order


def test_outputs_that_nothing_reads_take_memory_while_their_op_runs():
    """A batch norm writes new statistics each time that it runs, and no op reads the second statistics."""
    graph = with_backward(chain([4] * 6))
    ops, storages, results = list(graph.ops), list(graph.storages), list(graph.results)
    for number in range(1, 5):
        storages.append(Storage("statistics", 3))
        results.append(len(storages) - 1)
        ops[number] = replace(ops[number], writes=(*ops[number].writes, len(storages) - 1))
    graph = replace(graph, ops=tuple(ops), storages=tuple(storages), results=tuple(results))
    repeated = 0
    for budget in range(24, plain_peak(graph), 5):
        found = Program(graph, budget, runs=3).solve()
        expected = Checkmate(graph).solve(budget)
        assert found.cost == pytest.approx(expected.cost, rel=1e-5)
        if found.order is not None:
            assert peak_and_cost(graph, found.order)[0] <= budget
            repeated += any(found.order.count(number) > 1 for number in range(1, 5))
    assert repeated >= 2
