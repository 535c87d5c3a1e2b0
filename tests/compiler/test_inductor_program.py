"""The executor "inductor": gradients of eager mode to rounding, within the budget as the profiler measures it."""

import itertools
import sys

import pytest
import torch
from model_of import ModelOf
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.loop_body import LoopBodyBlock
from torch._inductor.utils import fresh_cache

from rmm_linear import convert_linears
from rmm_linear.byte_sizes import unit_for
from rmm_linear.checkpointing.planned import PlannedStep
from rmm_linear.compiler import inductor_program, plans
from rmm_linear.compiler.backend import Options, rmm_linear
from rmm_linear.errors import MissingCompilerError
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.schedule import Schedule
from tests.checkpointing.measured_peak import MeasuredPeak

ROWS, WIDTH = 256, 32


def mlp(blocks=2, p=0.0):
    def block():
        linears = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        return ModelOf(lambda it, x: x + it.body(x), body=nn.Sequential(nn.LayerNorm(WIDTH), *linears, nn.Dropout(p)))

    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(WIDTH, 1))


def planned(model, budget):
    return torch.compile(model, backend=rmm_linear, options={"budget": budget, "executor": "inductor"})


def gradients(model, step, x, seed=3):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = step(x).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture(scope="module")
def x():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("blocks", "budgets"), [(1, ("95%",)), pytest.param(4, ("100%", "85%", "70%", "60%"), marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_eager_mode_and_the_measured_peak_is_within_the_budget(x, blocks, budgets):
    expected = gradients(eager := mlp(blocks), eager, x)
    peaks = []
    for budget in budgets:
        model = mlp(blocks)
        step = planned(model, budget)
        torch.testing.assert_close(gradients(model, step, x), expected, rtol=1e-4, atol=1e-7)
        (plan,) = plans(model)
        model.zero_grad()
        with MeasuredPeak() as measured:
            step(x).square().mean().backward()
        # the caller's own ops after the model: square, mean and their gradients
        outside = 4 * (3 * ROWS + 4)
        assert plan.measured_peak_bytes <= plan.budget_bytes
        assert plan.measured_peak_bytes <= measured.peak <= plan.measured_peak_bytes + outside
        told = unit_for(plan.plain.peak_bytes).of(plan.measured_peak_bytes)
        assert f"measured peak of the compiled step {told}" in str(plan)
        peaks.append(plan.measured_peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
def test_dropout_draws_the_numbers_of_torch_compile_once(x):
    expected = gradients(compiled := mlp(4, p=0.5), torch.compile(compiled), x)
    model = mlp(4, p=0.5)
    torch.testing.assert_close(gradients(model, planned(model, "70%"), x), expected, rtol=1e-4, atol=1e-7)
    order = plans(model)[0].schedule.order
    assert len(order) > len(set(order)), "no op is computed twice: the test shows nothing"


# op by op, Inductor's ops take what they would not if they were fused
@pytest.mark.filterwarnings("ignore:the compiled step takes")
def test_no_random_op_is_in_a_backward_graph(x, uncompiled_graphs):
    model = convert_linears(mlp(p=0.5), ratio=0.5)
    planned(model, "80%")(x).square().mean().backward()
    drawn = {False: 0, True: 0}
    for graph, is_backward in uncompiled_graphs:
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        drawn[is_backward] = sum("inductor_seeds" in name or "draw_seed" in name for name in names)
    # one vector of seeds for dropout, and a seed for each of five sketches
    assert drawn == {False: 1 + 5, True: 0}


@pytest.mark.slow
@pytest.mark.montecarlo
def test_sketched_gradients_are_unbiased_for_each_parameter(x):
    """Slope of the mean gradient on the exact one, of 400 draws: |z| < 4.5 for 18 parameters, false alarm 1e-4."""
    exact = gradients(eager := mlp(4), eager, x)[1:]
    model = convert_linears(mlp(4), ratio=0.5)
    step = planned(model, "75%")
    draws = [gradients(model, step, x, seed=seed)[1:] for seed in range(400)]
    assert not torch.equal(draws[0][2], draws[1][2]), "the model is not sketched: the test shows nothing"
    for place, expected in enumerate(exact):
        slopes = torch.stack([(draw[place] * expected).sum() / expected.square().sum() for draw in draws])
        error = slopes.std() / len(slopes) ** 0.5
        assert abs(slopes.mean() - 1) <= 4.5 * error + 1e-5


@pytest.mark.filterwarnings("ignore:the compiled step takes")
def test_what_autocast_leaves_in_float32_is_computed_in_float32(uncompiled_graphs):
    """On a CPU, attention with dropout multiplies in float32, whatever autocast makes of its inputs."""
    attention = ModelOf(lambda it, x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = planned(nn.Sequential(nn.Linear(WIDTH, WIDTH), attention), "100%")(torch.randn(4, 64, WIDTH)).sum()
    loss.backward()
    products = (each.find_nodes(op="call_function", target=torch.ops.aten.bmm.default) for each, _ in uncompiled_graphs)
    assert {node.meta["val"].dtype for nodes in products for node in nodes} == {torch.float32}


def uncompiled(model):
    step = PlannedStep(model._call_impl, model, Options(budget="100%"))
    step.group.is_compiled = False
    return step


def test_ops_for_inductor_run_one_by_one_with_the_same_gradients(x, monkeypatch):
    monkeypatch.setattr(inductor_program, "compile_by_inductor", None)
    model = mlp()
    found, expected = gradients(model, uncompiled(model), x), gradients(model, model, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_mask_of_dropout_is_the_same_in_both_passes_where_nothing_is_compiled():
    model, x = nn.Dropout(0.3), torch.randn(ROWS, WIDTH, requires_grad=True)
    step = uncompiled(model)
    y = step(x)
    y.sum().backward()
    assert 0.25 < (x.grad == 0).double().mean() < 0.35
    torch.testing.assert_close(x.grad * x, y)
    assert not torch.equal(step(x) == 0, y == 0)


@pytest.mark.slow
def test_buffers_are_updated_once(x):
    def network():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    expected = gradients(eager := network(), eager, x)
    model = network()
    torch.testing.assert_close(gradients(model, planned(model, "80%"), x), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_an_op_whose_result_is_read_twice_is_written_once_in_a_loop(monkeypatch):
    sizes, begin = [], LoopBodyBlock.__init__

    def count(self, *args):
        begin(self, *args)
        sizes.append(len(self.graph.nodes))

    monkeypatch.setattr(LoopBodyBlock, "__init__", count)

    def step(x):
        for _ in range(8):
            x = x * (x + 0.5)
        return x.sum()

    x = torch.full((64,), 0.1, requires_grad=True)
    with config.patch(fx_graph_cache=False):
        planned(step, "100%")(x).backward()
    torch.testing.assert_close(x.grad, torch.func.grad(step)(x.detach()))
    # with a copy for each read there were 2^8 nodes and more
    assert max(sizes) < 100


def test_a_missing_compiler_is_told_with_what_to_do(x, monkeypatch):
    from torch._inductor import exc

    def none(*_, **__):
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", none)
    with pytest.raises(MissingCompilerError, match='executor="exact"'):
        planned(nn.Linear(WIDTH, 1), "100%")(x)


@pytest.fixture
def tries(monkeypatch):
    """Of each compiled program its order, its limit, and whether fused loops were expected."""
    found, compile_program = [], inductor_program.compiled_program

    def compiled_program(capture, schedule, limit_bytes, *, expects_fusion=True):
        found.append((schedule.order, limit_bytes, expects_fusion))
        return compile_program(capture, schedule, limit_bytes, expects_fusion=expects_fusion)

    monkeypatch.setattr(inductor_program, "compiled_program", compiled_program)
    return found


@pytest.mark.usefixtures("uncompiled_graphs")
def test_a_peak_above_the_budget_is_planned_again_for_less_and_then_told(x, monkeypatch, tries):
    monkeypatch.setattr(inductor_program, "measured_peak_bytes", lambda capture, *_: budget + excess)
    model, budget, excess = mlp(), 3 * 2**18, 2**16
    with pytest.warns(UserWarning, match="its budget is"):
        planned(model, budget)(x)
    (plan,) = plans(model)
    orders, targets, expects_fusion = zip(*tries, strict=True)
    # the same plan is compiled a second time, with all storages counted
    assert orders[0] == orders[1]
    assert targets[:2] == (budget, budget)
    assert expects_fusion == (True, False, False, False)
    assert all(after <= before - excess for before, after in itertools.pairwise(targets[1:]))
    assert plan.measured_peak_bytes > plan.budget_bytes == budget


def shared():
    """Layers that add one bias: Inductor computes its gradient in one loop, which reads a tensor of each layer."""

    def run(it, x):
        for layer in it.layers:
            x = torch.sin(layer(x).view(-1, ROWS, WIDTH) + it.bias).view(-1, WIDTH)
        return x

    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return ModelOf(run, layers=layers, bias=nn.Parameter(torch.zeros(ROWS, WIDTH)))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_peak_far_above_the_plans_is_lowered_without_a_budget(request, monkeypatch, tries, is_compiled):
    measured, measure = [], inductor_program.measured_peak_bytes
    if not is_compiled:
        request.getfixturevalue("uncompiled_graphs")
        peaks = [2**10, 2**30]

        def measure(*_):
            return peaks.pop()

    monkeypatch.setattr(
        inductor_program, "measured_peak_bytes", lambda *args: measured.append(measure(*args)) or measured[-1]
    )
    model, x = shared(), torch.randn(8 * ROWS, WIDTH)
    gradients(model, torch.compile(model, backend=rmm_linear, options={"bits": {"norm": 8}}), x)
    (plan,) = plans(model)
    free, in_windows = measured
    assert [limit for _, limit, _ in tries] == [sys.maxsize, plan.peak_bytes]
    assert free > 1.5 * plan.peak_bytes
    assert in_windows <= 1.05 * plan.peak_bytes
    assert plan.measured_peak_bytes == in_windows


@pytest.mark.slow
def test_a_budget_is_kept_where_loops_are_not_fused(tries):
    # Inductor does not fuse a reduction of columns with the loops over rows around it
    def over_rows_and_columns(it, x):
        h = it.linear(x)
        for _ in range(3):
            h = torch.sin(h)
            h = torch.cos(h - h.mean(0, keepdim=True))
            h = h / (1 + h.square().mean(1, keepdim=True))
        return x + h

    blocks = (ModelOf(over_rows_and_columns, linear=nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    gradients(model, planned(model, "70%"), torch.randn(4 * ROWS, WIDTH))
    (plan,) = plans(model)
    # the same plan is compiled a second time
    order = plan.schedule.order
    assert [(each, expects_fusion) for each, _, expects_fusion in tries] == [(order, True), (order, False)]
    assert plan.measured_peak_bytes <= plan.budget_bytes


def chain_of(count, *, is_backward=False, **roles):
    """Each op reads what the one before it writes, and writes 10 bytes."""
    reads = [(), *((place,) for place in range(count - 1))]
    ops = (Op(str(place), 1.0, reads[place], (place,), is_backward=is_backward) for place in range(count))
    return Graph(tuple(ops), tuple(Storage(str(place), 10) for place in range(count)), outputs=(count - 1,), **roles)


def test_windows_hold_all_that_their_ops_write_and_loops_do_not_pass_on():
    graph = chain_of(5)

    def windows(limit_bytes, cut, loops):
        are_loops = [place in loops for place in range(5)]
        return inductor_program.windows_of(
            graph, Schedule.plain(graph), cut, limit_bytes, are_loops, expects_fusion=True
        )

    # three storages fit; the forward pass ends there; the third is in memory when the second window begins
    assert windows(30, 3, ()) == [1, 1, 1, 2, 2]
    assert windows(20, 3, ()) == [1, 1, 2, 3, 4]
    # two loops that share a storage stay together, and other ops do not
    assert windows(30, 5, ()) == [1, 1, 1, 2, 2]
    assert windows(20, 5, (2, 3)) == [1, 1, 2, 2, 3]
    # what loops pass on to each other is written nowhere: the result of the last one alone is
    assert windows(10, 5, range(5)) == [1] * 5
    assert windows(20, 5, (0, 1, 2, 4)) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("is_backward", [False, True])
def test_what_a_graph_returns_is_written_whatever_reads_it(is_backward):
    cut = 0 if is_backward else 3
    # a gradient is freed once it is handed over, and new contents of a buffer at the end of the forward pass
    role = "gradients" if is_backward else "results"
    for returned, expected in (((), [1, 1, 1]), ((1,), [1, 1, 2])):
        graph = chain_of(3, is_backward=is_backward, **{role: returned})
        found = inductor_program.windows_of(graph, Schedule.plain(graph), cut, 10, [True] * 3, expects_fusion=True)
        assert found == expected


def test_loops_that_read_two_computations_of_a_storage_share_nothing():
    ops = Op("0", 1.0, (), (0,)), Op("1", 1.0, (0,), (1,)), Op("2", 1.0, (0,), (2,)), Op("3", 1.0, (2,), (3,))
    graph = Graph(ops, tuple(Storage(str(size), size) for size in (100, 1, 30, 1)), outputs=(1, 3))
    schedule = Schedule.from_order(graph, [0, 1, 0, 2, 3])
    windows = inductor_program.windows_of(graph, schedule, 5, 231, [False, True, True, True], expects_fusion=False)
    assert windows[3] == windows[4]


@pytest.mark.slow
def test_a_graph_that_was_compiled_before_comes_from_inductors_cache_and_other_windows_do_not():
    model, x = mlp(3), torch.randn(ROWS, WIDTH)

    def hits_of(budget):
        torch._dynamo.reset()
        counters["inductor"].clear()
        step = planned(model, budget)
        found = gradients(model, step, x)
        return counters["inductor"]["fxgraph_cache_hit"], found

    with fresh_cache():
        assert hits_of("100%")[0] == 0
        hits, _ = hits_of("75%")
        assert hits < 2
        hits, found = hits_of("75%")
        assert hits >= 2
    torch.testing.assert_close(found, gradients(model, model, x))


@pytest.mark.slow
def test_a_gradient_that_arrives_beside_the_loss_has_the_dropout_of_its_result():
    model, scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def step(x):
        y = nn.functional.dropout(x * scale, 0.5)
        return model(y).mean(), y

    run = torch.compile(step, backend=rmm_linear, options={"budget": "100%"})
    for number in range(2):
        scale.grad = None
        torch.manual_seed(number)
        _, y = run(torch.ones(64, 8))
        if number:
            y.sum().backward()
        else:
            with pytest.warns(UserWarning, match="a gradient arrived at a result beside the loss"):
                y.sum().backward()
        assert scale.grad == y.sum()


@pytest.mark.slow
def test_views_of_a_result_show_its_elements_where_inductor_lays_it_out_otherwise():
    def outputs(it, x):
        h = it.norm(x.transpose(1, 2))
        return h, h.transpose(1, 2)

    model, x = ModelOf(outputs, norm=nn.BatchNorm1d(8)), torch.randn(4, 15, 8)
    step = torch.compile(model, backend="rmm_linear", options={"budget": "100%"})
    for ours, theirs in zip(step(x), model(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def joined(split):
    """Inductor's `cat` copies a tensor beside empty ones, such as a cache of keys in its first step, as it lies."""
    return torch.cat([torch.empty(0), split], -2)


@pytest.mark.parametrize(
    "read",
    [
        lambda y: joined(y.view(4, 4, 3, 8).transpose(1, 2)).as_strided((8, 4, 2), (8, 2, 1), 8),
        lambda y: joined(y.view(4, 4, 3, 8).transpose(1, 2)).view(4, 3, 32),
        lambda y: torch.view_as_complex(joined(y.view(4, 8, 3, 4).permute(0, 2, 3, 1)).view(4, 3, 4, 4, 2)).abs(),
    ],
    ids=["as_strided", "view", "complex"],
)
def test_an_op_that_describes_memory_reads_the_layout_of_the_trace(read):
    def step(x, weight):
        return (read(x @ weight).tanh() * numbers).sum()

    torch.manual_seed(0)
    x, weight = torch.randn(16, 24), torch.randn(24, 24, requires_grad=True)
    numbers = torch.randn(read(torch.empty(16, 24)).shape)
    torch._dynamo.reset()
    losses = [torch.compile(step, backend="eager")(x, weight), planned(step, "100%")(x, weight)]
    expected, got = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(got, expected)
