"""What ops cost, in each unit."""

from collections import Counter

import pytest
import torch
from assert_unchanged import assert_unchanged
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear.checkpointing import capture, checkpoint_model
from rmm_linear.compiler import backend, costs, inductor_program, plans, rmm_linear


def graph_of(costs, rows=64):
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    return capture(model, (torch.randint(0, 50, (rows,)),), costs=costs).graph


def test_each_unit_is_named_and_positive_and_flops_and_bytes_are_those_of_the_ops():
    costs = {}
    for unit in ("flops", "bytes", "ms", "ops"):
        graph = graph_of(unit)
        assert graph.cost_unit == unit
        assert all(op.cost > 0 for op in graph.ops)
        costs[unit] = [(op.kind, op.cost) for op in graph.ops]
    products = [cost for kind, cost in costs["flops"] if kind == "aten.addmm"]
    assert products == [2 * 64 * 32 * 64, 2 * 64 * 64 * 8]
    # read and written
    assert ("aten.gelu", 2 * 64 * 64 * 4) in costs["bytes"]


def test_fused_attention_costs_its_matrix_products_where_torch_has_no_formula_for_its_kernel():
    scale, (query, key) = nn.Linear(1, 1, bias=False), (torch.randn(2, 4, length, 8) for length in (16, 24))

    def step(model, query, key):
        return nn.functional.scaled_dot_product_attention(query * model.weight, key, key).sum()

    graph = capture(scale, (query, key), step=step, costs="flops").graph
    product = 2.0 * 2 * 4 * 16 * 24 * 8
    assert [op.cost for op in graph.ops if "flash_attention_for_cpu" in op.kind] == [2 * product, 5 * product]


@pytest.mark.parametrize(("device", "grows"), [("cpu", False), ("cuda", True)])
def test_a_gpu_takes_longer_for_a_loop_that_computes_more_numbers_than_it_moves(device, grows):
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(60):
        nodes.append(graph.call_function(torch.ops.aten.mul.Scalar, (nodes[-1], 2.0)))
    with FakeTensorMode():
        for node in nodes:
            node.meta["val"] = torch.empty(1000, 1000, device=device)
    nodes = nodes[1:]
    short, long = (costs.cost_of(nodes[:length], "roofline") for length in (2, 60))
    # a million numbers in, a million out; 6 are computed in the time of a byte
    assert long - short == (10e6 - 8e6 if grows else 0)
    assert costs.cost_of(nodes, "bytes") == 8e6


def test_measured_times_grow_with_the_work_and_draw_nothing():
    small, large = (
        sum(op.cost for op in graph_of("ms", rows).ops if op.kind in ("aten.addmm", "aten.gelu"))
        for rows in (16, 40000)
    )
    assert large > 3 * small
    ids, embedding = torch.randint(0, 50, (30,)), nn.Sequential(nn.Embedding(50, 32), nn.Dropout(0.1))
    with assert_unchanged(embedding):
        capture(embedding, (ids,), costs="ms")


def test_a_loop_that_inductor_compiles_takes_the_time_of_its_bytes(monkeypatch):
    monkeypatch.setattr(costs, "_byte_ms", lambda _: 0.5)
    monkeypatch.setattr(costs, "_measured_ms", lambda *_: 7.0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 32)
    step = torch.compile(model, backend=rmm_linear, options={"budget": "100%", "costs": "ms"})
    monkeypatch.setattr(backend, "is_measurable", lambda _: False)
    monkeypatch.setattr(inductor_program, "compile_by_inductor", lambda module, *_, **__: lambda args: module(*args))
    with pytest.warns(UserWarning, match="the compiled step takes"):
        step(x).sum().backward()
    ops = plans(model)[0].graph.ops
    assert {op.cost for op in ops if op.kind in ("aten.addmm", "aten.mm")} == {7.0}
    (gelu,) = (op for op in ops if op.kind == "aten.gelu")
    # it reads 16 x 64 numbers, and writes as many
    assert gelu.cost == 0.5 * 2 * 16 * 64 * 4


def _planned_at(monkeypatch, measured, timed, budget="100%"):
    """Plan a step; its ops take the next of `timed` when they are timed anew, and the step the next of `measured`."""
    timed, measured = timed.copy(), measured.copy()
    monkeypatch.setattr(costs, "_measured_ms", lambda node, *_: timed[0].get(str(node.target), 1.0))
    monkeypatch.setattr(backend, "forget_times", lambda: timed.pop(0))
    monkeypatch.setattr(backend, "measured_ms", lambda *_: measured.pop(0))
    layers = [(nn.Linear(64, 64), each()) for each in (nn.GELU, nn.SiLU, nn.GELU, nn.SiLU)]
    model, x = nn.Sequential(*(layer for pair in layers for layer in pair), nn.Linear(64, 8)), torch.randn(512, 64)
    checkpoint_model(model, (x,), budget=budget, costs="ms")
    model(x).sum().backward()
    model(x).sum().backward()
    assert len(timed) == 1
    assert not measured
    return plans(model)[0]


def test_a_step_whose_time_was_mispredicted_is_planned_once_more(monkeypatch):
    # each op takes 1 ms
    ops = len(_planned_at(monkeypatch, [1.0], [{}, {}]).graph.ops)
    slow = dict.fromkeys(["aten.addmm.default", "aten.mm.default"], 10.0)
    # as predicted; ops that take as long when they are timed anew; slower ops in the same plan
    for measured, timed, is_slow in ((1.1 * ops, [{}], False), (2.0 * ops, [{}, {}], False), (60.0, [{}, slow], True)):
        plan = _planned_at(monkeypatch, [measured], timed)
        assert plan.measured_ms == measured
        assert (plan.planned.cost > ops) is is_slow


def test_of_two_plans_the_faster_runs(monkeypatch):
    times = [{"aten.gelu.default": 5.0}, {"aten.silu.default": 50.0}]
    # the first plan computes SiLU again, and the second one GELU
    for measured, kind in ((3.0, "aten.silu"), (1.0, "aten.gelu")):
        plan = _planned_at(monkeypatch, [2.0, measured], times, budget="80%")
        runs = Counter(plan.graph.ops[op].kind for op in plan.schedule.order)
        assert plan.measured_ms == min(2.0, measured)
        assert runs[kind] > 2


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


@pytest.mark.parametrize("body", ["cross entropy of probabilities", "layer norm under autocast"])
def test_an_op_that_fails_on_random_numbers_is_priced_by_its_bytes(body):
    model, x = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8), nn.Sigmoid()), torch.randn(16, 32)

    def step(model, x):
        return nn.functional.binary_cross_entropy(model(x).float(), torch.ones(16, 8))

    is_cast = "autocast" in body
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        graph = capture(model, (x,), step=None if is_cast else step, costs="ms").graph
    assert all(op.cost > 0 for op in graph.ops)


@pytest.mark.parametrize(
    ("function", "error"), [("costs._measured_ms", MemoryError), ("joint_graph.cost_of", torch.OutOfMemoryError)]
)
def test_a_capture_without_memory_raises_the_error_of_the_allocator(function, error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(f"rmm_linear.compiler.{function}", fail)
    with pytest.raises(error):
        graph_of("ms")


def test_the_backward_pass_of_an_lstm_is_not_timed(monkeypatch):
    timed = []
    monkeypatch.setattr(costs, "_measured_ms", lambda node, *_: timed.append(str(node.target)) or 1.0)
    model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(8, 12, 8)
    graph = capture(model, (x,), step=lambda model, x: model(x)[0].sum(), costs="ms").graph
    assert any(op.kind == "aten.mkldnn_rnn_layer_backward" and op.cost > 0 for op in graph.ops)
    assert "aten.mkldnn_rnn_layer.default" in timed
    assert "aten.mkldnn_rnn_layer_backward.default" not in timed


def test_collectives_are_priced_by_their_bytes(monkeypatch):
    """Other processes take no part in a run of the op."""
    monkeypatch.setattr(costs, "_byte_ms", lambda _: 0.5)
    monkeypatch.setattr(costs, "_measured_ms", lambda *_: pytest.fail("it runs"))
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, device="meta")
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    node.meta["val"] = torch.empty(8, device="meta")
    assert costs.cost_of([node], "ms") == 0.5 * 2 * 8 * 4


def test_a_capture_leaves_a_profile_that_is_under_way_complete():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), torch.randn(2, 3, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        capture(model, (x,))
        model(x)
    assert "aten::conv2d" in {event.name for event in profile.events()}
