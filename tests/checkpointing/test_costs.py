"""What ops cost, in each unit."""

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import capture, checkpoint_model
from rmm_linear.compiler import backend, costs, plans, rmm_linear


def graph_of(costs, rows=64):
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    return capture(model, (torch.randint(0, 50, (rows,)),), costs=costs).graph


def test_each_unit_is_named_and_positive():
    for name, unit in {"flops": "flops", "bytes": "bytes", "ms": "ms", "ops": "ops"}.items():
        graph = graph_of(name)
        assert graph.cost_unit == unit
        assert all(op.cost > 0 for op in graph.ops)
    with pytest.raises(ValueError, match="costs='seconds' is unknown; choose one of roofline, flops"):
        graph_of("seconds")


def test_flops_are_those_of_the_products():
    first, second = (op.cost for op in graph_of("flops").ops if op.kind == "aten.addmm")
    assert (first, second) == (2 * 64 * 32 * 64, 2 * 64 * 64 * 8)


def test_bytes_are_those_read_and_written():
    (gelu,) = (op for op in graph_of("bytes").ops if op.kind == "aten.gelu")
    assert gelu.cost == 2 * 64 * 64 * 4


def test_measured_times_grow_with_the_work_and_draw_nothing():
    small, large = (
        sum(op.cost for op in graph_of("ms", rows).ops if op.kind in ("aten.addmm", "aten.gelu"))
        for rows in (16, 40000)
    )
    assert large > 3 * small
    ids, embedding = torch.randint(0, 50, (30,)), nn.Sequential(nn.Embedding(50, 32), nn.Dropout(0.1))
    state = torch.get_rng_state()
    capture(embedding, (ids,), costs="ms")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loop_that_inductor_compiles_takes_the_time_of_its_bytes(monkeypatch):
    monkeypatch.setattr(costs, "_byte_ms", lambda _: 0.5)
    monkeypatch.setattr(costs, "_measured_ms", lambda *_: 7.0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 32)
    step = torch.compile(model, backend=rmm_linear, options={"budget": "100%", "costs": "ms"})
    monkeypatch.setattr(backend, "is_measurable", lambda _: False)
    step(x).sum().backward()
    ops = plans(model)[0].graph.ops
    assert {op.cost for op in ops if op.kind in ("aten.addmm", "aten.mm")} == {7.0}
    (gelu,) = (op for op in ops if op.kind == "aten.gelu")
    # it reads 16 x 64 numbers, and writes as many
    assert gelu.cost == 0.5 * 2 * 16 * 64 * 4


def _planned_at(monkeypatch, measured, timed):
    """Plan a step; its ops take the next of `timed` when they are timed anew, and the step the next of `measured`."""
    timed, measured = timed.copy(), measured.copy()
    monkeypatch.setattr(costs, "_measured_ms", lambda *_: timed[0])
    monkeypatch.setattr(backend, "forget_times", lambda: timed.pop(0))
    monkeypatch.setattr(backend, "measured_ms", lambda *_: measured.pop(0))
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 32)
    checkpoint_model(model, (x,), budget="100%", costs="ms")
    model(x).sum().backward()
    model(x).sum().backward()
    assert len(timed) == 1
    assert not measured
    return plans(model)[0]


def test_a_step_whose_time_was_mispredicted_is_planned_once_more(monkeypatch):
    # each op takes 1 ms
    ops = len(_planned_at(monkeypatch, [1.0], [1.0, 1.0]).graph.ops)
    # as predicted; ops that take as long when timed anew; ops that take another time; a second plan that is slower
    for measured, timed, predicted in (
        ([1.1 * ops], [1.0], 1.0),
        ([2.0 * ops], [1.0, 1.0], 1.0),
        ([2.0 * ops, 1.9 * ops], [1.0, 2.0], 2.0),
        ([2.0 * ops, 2.1 * ops], [1.0, 2.0], 1.0),
    ):
        plan = _planned_at(monkeypatch, measured, timed)
        assert plan.planned.cost == predicted * ops
        assert plan.measured_ms == min(measured)


def test_a_step_is_timed_without_a_trace(monkeypatch):
    """Gradients, running statistics and random numbers are as without timing."""

    def trained(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 8))
        x = torch.randn(16, 32)
        checkpoint_model(model, (x,), budget="100%", **options)
        model(x).sum().backward()
        return plans(model)[0], [*model.buffers(), *(each.grad for each in model.parameters()), torch.get_rng_state()]

    plain, expected = trained()
    timed, found = trained(costs="ms")
    assert plain.measured_ms is None
    assert timed.measured_ms > 0
    assert all(map(torch.equal, found, expected))


def test_a_capture_leaves_a_profile_that_is_under_way_complete():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), torch.randn(2, 3, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        capture(model, (x,))
        model(x)
    assert "aten::conv2d" in {event.name for event in profile.events()}
