"""Plans on disk: found again for the same graph, strategy and budget, and never trusted."""

import dataclasses
import logging
from unittest import mock

import pytest
import torch
from planned_models import mean_square
from strategy_contract import large_graphs
from torch import nn

from rmm_linear.checkpointing import Schedule, capture, checkpoint_model, get_strategy, simulate
from rmm_linear.compiler import backend
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning import planner, stored_plans
from rmm_linear.planning.budget import Budget
from rmm_linear.planning.planner import plan_graph
from rmm_linear.planning.stored_plans import store_plan, stored_plan
from rmm_linear.planning.strategies.auto import Auto

X = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))


def layers(count=4):
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 1))


def stored(graph, strategy, budget_bytes):
    return stored_plan(graph, strategy, budget_bytes)[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RMM_LINEAR_PLANS", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture(scope="module")
def graph():
    return capture(layers(), (X,), step=mean_square).graph


def test_a_plan_is_found_again(folder, graph, monkeypatch):
    schedule = get_strategy("chen2016_sqrt").plan(graph, 10**9)
    store_plan(graph, "chen2016_sqrt", 10**9, schedule)
    assert stored(graph, "chen2016_sqrt", 10**9) == schedule
    assert stored(graph, "auto", 10**9) is None
    assert stored_plan(graph, "chen2016_sqrt", 10**9) == (schedule, True)
    assert stored_plan(graph, "chen2016_sqrt", 10**8) == (schedule, False)
    assert stored(graph, "chen2016_sqrt", 10) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    monkeypatch.setenv("RMM_LINEAR_PLANS", "off")
    assert stored(graph, "chen2016_sqrt", 10**9) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"version": 1}', b"[" * 100_000])
def test_what_is_no_schedule_is_as_if_it_were_not_there(folder, graph, content):
    schedule = Schedule.plain(graph)
    store_plan(graph, "none", 10**9, schedule)
    (path,) = folder.iterdir()
    path.write_bytes(content)
    assert stored(graph, "none", 10**9) is None
    store_plan(graph, "none", 10**9, schedule)
    assert stored(graph, "none", 10**9) == schedule


def test_a_schedule_of_another_graph_or_beyond_the_budget_is_not_taken(folder, graph):
    plain = Schedule.plain(graph)
    store_plan(graph, "none", 10**9, plain)
    (path,) = folder.iterdir()
    other = capture(layers(2), (X,), step=mean_square).graph
    path.write_text(Schedule.plain(other).to_json())
    assert stored(graph, "none", 10**9) is None
    path.write_text(Schedule(plain.steps[:-3], plain.graph).to_json())
    assert stored(graph, "none", 10**9) is None
    budget_bytes = simulate(graph, plain).peak_bytes - 1
    store_plan(graph, "none", budget_bytes, plain)
    assert stored(graph, "none", budget_bytes) is None


@pytest.mark.parametrize("name", ["file/plans", "x" * 300])
def test_a_folder_that_cannot_be_used_breaks_nothing(tmp_path, graph, monkeypatch, name):
    (tmp_path / "file").write_text("")
    # no file system takes a name of 300 characters: a look at it fails, as in a folder of another user
    monkeypatch.setenv("RMM_LINEAR_PLANS", str(tmp_path / name))
    store_plan(graph, "none", 10**9, Schedule.plain(graph))
    assert stored(graph, "none", 10**9) is None


def test_the_plans_read_last_stay(folder, graph, monkeypatch):
    monkeypatch.setattr(stored_plans, "_MOST_FILES", 2)
    schedule = Schedule.plain(graph)
    for strategy in ("a", "b"):
        store_plan(graph, strategy, 10**9, schedule)
    for place, path in enumerate(sorted(folder.iterdir())):
        # as if they were written long ago
        stored_plans.os.utime(path, (place, place))
    assert stored(graph, "a", 10**9) == schedule
    store_plan(graph, "c", 10**9, schedule)
    assert [stored(graph, strategy, 10**9) is not None for strategy in "abc"] == [True, False, True]


def test_a_proof_is_told_for_its_own_budget_alone(folder, graph):
    plain = Schedule.plain(graph)
    budget = simulate(graph, plain).peak_bytes
    proofs = {size: dataclasses.replace(plain, proof=f"proved for {size}") for size in (budget, 2 * budget)}
    store_plan(graph, "auto", budget, proofs[budget])
    assert stored_plan(graph, "auto", 2 * budget) == (plain, False)
    with mock.patch.object(Auto, "plan", return_value=proofs[2 * budget]):
        assert plan_graph(graph, Budget.of(2 * budget), "auto").schedule == proofs[2 * budget]
    for size, schedule in proofs.items():
        assert stored_plan(graph, "auto", size) == (schedule, True)


def test_no_plan_is_dearer_than_one_for_a_smaller_budget(folder, monkeypatch):
    graph = dict(large_graphs())["random layers of 36"]
    plain = simulate(graph, Schedule.plain(graph)).peak_bytes
    cheap = plan_graph(graph, Budget.of(plain * 9 // 10), "auto")
    assert 0 < cheap.overhead < 0.2
    # a strategy that plans badly for a larger budget, or says that there is no plan
    dear = Schedule.from_order(graph, [op for op in range(len(graph.ops)) for _ in range(2)], strategy="auto")
    refused = InfeasibleBudgetError("refused", budget_bytes=1, least_bytes=2)
    for planned in ({"return_value": dear}, {"side_effect": refused}):
        with mock.patch.object(Auto, "plan", **planned):
            assert plan_graph(graph, Budget.of(plain * 19 // 20), "auto").schedule == cheap.schedule
    with mock.patch.object(Auto, "plan", side_effect=refused), pytest.raises(InfeasibleBudgetError):
        plan_graph(graph, Budget.of(plain // 2), "auto")


def test_a_model_is_planned_once_for_two_processes(folder, monkeypatch):
    first = checkpoint_model(layers(), X, budget="100%", strategy="chen2016_sqrt")
    monkeypatch.setattr(planner, "get_strategy", lambda name: None)
    assert checkpoint_model(layers(), X, budget="100%", strategy="chen2016_sqrt").schedule == first.schedule


def test_each_plan_is_told_in_the_log(caplog):
    model = layers()
    with caplog.at_level(logging.INFO, backend.__name__):
        checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
        model(X[:5])
        model(X[:5])
    told = [record.getMessage() for record in caplog.records if record.name == backend.__name__]
    starts = [f"planned a graph for arguments of shapes ({rows}, 16) in " for rows in (12, 5)]
    assert [text[: len(start)] for text, start in zip(told, starts, strict=True)] == starts


def test_the_variant_that_was_not_used_for_longest_is_forgotten(monkeypatch):
    monkeypatch.setattr(backend, "_MOST_VARIANTS", 2)
    # one graph for all lengths
    model = torch.compile(
        layers(1), backend=backend.rmm_linear, options={"budget": "100%", "executor": "exact"}, dynamic=True
    )
    for rows in (12, 5, 12):
        model(X[:rows].clone())
    second, first = backend.plans(model)
    model(X[:7].clone())
    kept = backend.plans(model)
    assert kept[0] is first
    assert second not in kept
    assert len(kept) == 2
