"""What ops cost, in each unit."""

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import capture


def graph_of(costs, rows=64):
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    return capture(model, (torch.randint(0, 50, (rows,)),), costs=costs).graph


def test_each_unit_is_named_and_positive():
    for costs, unit in {"flops": "flops", "bytes": "bytes", "ms": "ms", "ops": "ops"}.items():
        graph = graph_of(costs)
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


def test_a_capture_leaves_a_profile_that_is_under_way_complete():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), torch.randn(2, 3, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        capture(model, (x,))
        model(x)
    assert "aten::conv2d" in {event.name for event in profile.events()}
