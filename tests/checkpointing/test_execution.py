"""What a schedule promises is what happens: bits and bytes, on real models."""

import copy
import gc
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from measured_peak import MeasuredPeak
from model_of import ModelOf, linears
from planned_models import (
    assert_equal,
    assert_same_gradients,
    assert_same_step,
    gradients,
    mean_square,
    planned,
    planned_and_plain,
)
from planned_models import planned_runs as runs
from tiny_transformers import tiny
from torch import nn

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.checkpointing import (
    Schedule,
    apply_schedule,
    available_strategies,
    capture,
    checkpoint_model,
    checkpoint_step,
    get_strategy,
    remove_checkpointing,
    simulate,
)
from rmm_linear.compiler.exact_program import program_of
from rmm_linear.compiler.runner import Runner
from rmm_linear.errors import DoubleBackwardError, InfeasibleBudgetError, ScheduleError
from rmm_linear.planning.strategies import jain2020_checkmate, moccasin2023_cp
from rmm_linear.planning.strategies.segments import order_of_segments


def net(drop=0.15):
    """Convolutions, buffers that are updated, dropout in a channel-wise and a plain form, resampling, a tied weight."""

    def run(it, x, y):
        h = it.drop(F.relu(it.norm(it.conv(x)), inplace=True))
        h = F.interpolate(it.drop2(F.gelu(it.conv2(h))), scale_factor=2, mode="bilinear").mean((2, 3))
        logits = it.tied(F.silu(it.head(h))) + it.head(h)
        first, _ = logits.split([3, 5], 1)
        return {"loss": F.cross_entropy(logits, y) + first.mean(), "logits": logits, "count": 3, "input": x}

    parts = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "conv2": nn.Conv2d(8, 8, 3)}
    model = ModelOf(run, drop=nn.Dropout(drop), drop2=nn.Dropout2d(drop), **parts, **linears("head tied", 8))
    model.tied.weight = model.head.weight
    return model


def assorted():
    """Writes into parts of tensors and into a buffer that it then reads, random drops of other shapes, odd layouts."""

    def run(it, ids):
        x = it.embed(ids)
        x = it.layer(x + it.attention(x, x, x, need_weights=False)[0])
        x = it.norm(it.conv(x.transpose(1, 2)))
        it.average.mul_(0.9).add_(x.detach().mean((0, 2)), alpha=0.1)
        x = it.act(F.hardshrink(x, 0.1)) + it.average[None, :, None]
        x = x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device) < 0.8)
        x[:, 0] = x[:, 0] * 2
        pooled = F.interpolate(F.max_pool1d(x, 2), scale_factor=2)
        loss = (pooled - x).abs().mean() + torch.topk(x, 3, dim=-1).values.mean() + F.alpha_dropout(x, 0.1, True).std()
        return {"loss": loss, "x": x, "again": x, "part": x[:, 1]}

    return ModelOf(
        run,
        embed=nn.Embedding(50, 16, padding_idx=0),
        attention=nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True),
        layer=nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        conv=nn.Conv1d(16, 16, 3, padding=1),
        norm=nn.GroupNorm(4, 16),
        act=nn.PReLU(),
        average=torch.zeros(16),
    )


def in_blocks(drop=0.1):
    def run(it, x):
        for block in it.blocks:
            x = x + it.drop(block(x))
        return x

    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    return ModelOf(run, blocks=nn.ModuleList(blocks), drop=nn.Dropout(drop))


def mean_squared_error(model, x, target):
    return (model(x) - target).square().mean()


def planned_blocks(budget, change=lambda model: None):
    model = in_blocks()
    change(model)
    step = checkpoint_step(model, mean_squared_error, (X, TARGET), budget=budget, strategy="chen2016_sqrt")
    return model, step


def sketched(make, **config):
    return lambda: convert_linears(make(), config=RMMConfig(min_rows=1, **config))


def attention():
    """Query, key and value of a norm, which share a sketch; what dropout draws comes after all of their seeds."""

    def run(it, x):
        y = it.norm(x)
        scores = F.dropout((it.q(y) @ it.k(y).mT / 4).softmax(-1), 0.2)
        return x + it.out(scores @ it.v(y))

    return ModelOf(run, norm=nn.LayerNorm(16), **linears("q k v out", 16))


def language_model(kind="RobertaForSequenceClassification", **changes):
    return tiny(kind, dropout=0.1, num_hidden_layers=1, **changes)


X, TARGET = torch.randn(12, 5, 16), torch.randn(12, 5, 16)
ON_X = mean_squared_error, (X, TARGET), {}
IDS = torch.randint(2, 50, (2, 20))
TEXT = {"input_ids": IDS, "labels": IDS, "use_cache": False}
ROBERTA = {"input_ids": IDS, "labels": IDS[:, 0] % 2, "attention_mask": (IDS > 9).long()}
IMAGES = torch.randn(4, 3, 8, 8), torch.randint(0, 8, (4,))

# model, step, arguments, keyword arguments
CASES = {
    "net": (net, None, IMAGES, {}),
    "assorted": (assorted, None, (torch.randint(0, 50, (4, 12)),), {}),
    "blocks": (in_blocks, *ON_X),
    "sketched": (sketched(in_blocks, ratio=0.3), *ON_X),
    "sketched in int4": (sketched(in_blocks, ratio=0.5, storage="int4"), *ON_X),
    "sketched attention": (sketched(attention, ratio=0.5), *ON_X),
    "gpt2": (lambda: language_model("GPT2LMHeadModel"), None, (), TEXT),
    "llama": (lambda: language_model("LlamaForCausalLM", num_key_value_heads=1), None, (), TEXT),
    "roberta": (language_model, None, (), ROBERTA),
}


def schedules(graph, case):
    # each schedule is one more compilation
    if case == "net":
        yield Schedule.plain(graph)
    count = graph.forward_count
    for length in (3,) if case == "net" else (11,):
        segments = [list(range(start, min(start + length, count))) for start in range(0, count, length)]
        yield Schedule.from_order(graph, order_of_segments(graph, segments))


def loss_of(value):
    return value if isinstance(value, torch.Tensor) else value["loss"]


def tensors_in(value):
    values = [value] if isinstance(value, torch.Tensor) else value.values()
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


# `make test` runs one of buffers and writes in place, and one of sketches and attention; tests/stacks plans models
grid = partial(pytest.param, marks=pytest.mark.grid)


@pytest.mark.parametrize(
    "case",
    [
        *("net", grid("assorted"), grid("blocks"), grid("sketched"), grid("sketched in int4"), "sketched attention"),
        *(grid("gpt2"), grid("llama"), grid("roberta")),
    ],
)
def test_bits_and_bytes_are_as_promised(case):
    make, step, args, kwargs = CASES[case]
    model = make().train()
    graph = capture(model, args, kwargs, step=step).graph
    peaks, one = [], torch.ones(())
    for schedule in schedules(graph, case):
        plain, by_plan = copy.deepcopy(model), copy.deepcopy(model)
        run = apply_schedule(by_plan, step, kwargs or args, schedule)
        peaks.append(simulate(graph, schedule).peak_bytes)
        # in a second micro-batch, gradients are added to those that are there
        for seed, peak_bytes in enumerate((peaks[-1], run.plans[0].with_gradients_freed().peak_bytes)):
            torch.manual_seed(seed)
            expected = plain(*args, **kwargs) if step is None else step(plain, *args, **kwargs)
            loss_of(expected).backward()
            after = torch.get_rng_state()
            torch.manual_seed(seed)
            found = None
            with MeasuredPeak() as measured:
                found = run(*args, **kwargs)
                loss_of(found).backward(one)
            assert torch.equal(torch.get_rng_state(), after)
            assert type(found) is type(expected)
            assert_equal(tensors_in(found), tensors_in(expected))
            assert_same_gradients(by_plan, plain)
            assert_equal(by_plan.buffers(), plain.buffers())
            assert measured.peak == peak_bytes
        assert run.planned_runs == 2
    assert min(peaks) < simulate(graph, Schedule.plain(graph)).peak_bytes


def runner_of(captured, schedule):
    """A step whose gradients arrive at its loss alone."""
    return Runner(captured, program_of(captured, schedule), again=pytest.fail, on_other_gradient=pytest.fail)


def peak_of(runner, captured, model, x):
    """The peak of a forward and a backward pass, whose gradients are the model's."""
    tensors, one = {**dict(model.named_parameters()), "[0]": x}, torch.ones(())
    model.zero_grad()
    torch.manual_seed(1)
    with MeasuredPeak() as measured:
        (loss,) = runner([tensors[name] for name in captured.names])
        loss.backward(one)
    return measured.peak


@pytest.fixture(scope="module")
def chain():
    torch.manual_seed(0)
    layers = [layer for width in (24, 8, 16) for layer in (nn.LazyLinear(width), nn.Tanh(), nn.Dropout(0.2))]
    model, x = nn.Sequential(*layers), torch.randn(64, 12)
    model(x)
    return model, x, capture(model, (x,), step=mean_square)


@pytest.mark.parametrize("strategy", available_strategies())
def test_what_every_strategy_proposes_runs_as_promised(strategy, monkeypatch, chain):
    # its best plan until then
    monkeypatch.setattr(jain2020_checkmate.Checkmate, "time_limit_s", 0.5)
    monkeypatch.setattr(moccasin2023_cp.Moccasin, "time_limit_s", 0.2)
    model, x, captured = chain
    reference = copy.deepcopy(model)
    reference.zero_grad()
    torch.manual_seed(1)
    reference(x).square().mean().backward()
    frontier = get_strategy(strategy).frontier(captured.graph)
    # an order alone lowers no chain's peak
    assert len(frontier) > (strategy != "steiner2022_olla")
    for proposal in frontier:
        runner = runner_of(captured, Schedule.from_order(captured.graph, proposal.order))
        assert peak_of(runner, captured, model, x) == proposal.peak_bytes
        assert_same_gradients(model, reference)


def test_memory_goes_with_the_loss_and_needs_no_collector():
    model, step = planned_blocks("80%")
    step(X, TARGET)
    gc.collect()
    gc.disable()
    try:
        with MeasuredPeak() as measured:
            loss = step(X, TARGET)
        assert measured.held > 10 * loss.nbytes
        del loss
        with MeasuredPeak() as measured:
            step(X, TARGET)
        assert measured.held == 0
    finally:
        gc.enable()
    assert step.planned_runs == 3


def test_inputs_get_gradients_and_every_output_can_be_differentiated_without_a_loss():
    model, reference = planned_and_plain(in_blocks(drop=0.0), X.clone().requires_grad_(), "90%")
    (plan,) = model._compiled_call_impl.plans
    assert plan.peak_bytes <= 0.9 * plan.plain.peak_bytes
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(mine).sin().sum().backward()
    reference(theirs).sin().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)
    assert_same_gradients(model, reference)
    assert runs(model) == 1


def test_frozen_parameters_get_none():
    model, step = planned_blocks("90%", lambda model: model.blocks[:1].requires_grad_(False))
    step(X, TARGET).backward()
    assert step.planned_runs == 1
    assert all(parameter.grad is None for parameter in model.blocks[:1].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[1:].parameters())
    model.requires_grad_(True)
    trained = simulate(graph := capture(model, (X, TARGET), step=mean_squared_error).graph, Schedule.plain(graph))
    assert step.plans[0].plain.peak_bytes < trained.peak_bytes


def test_eval_and_no_grad_run_as_written_and_removal_leaves_nothing():
    model = planned(in_blocks(), X, "90%")
    keys = model.state_dict().keys()
    with torch.no_grad():
        assert model(X).grad_fn is None
    model.eval()
    model(X).sum().backward()
    assert runs(model) == 0
    model.train()
    model(X)
    assert runs(model) == 1
    assert remove_checkpointing(model) is model
    assert model._compiled_call_impl is None
    assert model.state_dict().keys() == keys


def test_what_reads_a_buffer_before_its_update_is_not_computed_after_it():
    # a view of the buffer, as running normalisations do
    def running(it, x):
        h = torch.tanh(it.layers[0](x))
        h = torch.tanh(h - it.mean.view(1, -1))
        for layer in it.layers[1:]:
            h = torch.tanh(layer(h))
        it.mean.mul_(0.9).add_(1.0)
        return h.square().mean()

    model = ModelOf(running, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), mean=torch.zeros(16))
    with pytest.raises(InfeasibleBudgetError) as caught:
        checkpoint_model(model, X, budget=1)
    assert model._compiled_call_impl is None
    model, reference = planned_and_plain(model, X, caught.value.least_bytes, strategy="auto")
    for _ in range(3):
        assert_same_step(model, reference, X)
    assert runs(model) == 3


@pytest.mark.parametrize("check", ["cholesky", "solve", "assert"])
def test_checks_without_results_raise_as_in_eager_mode(check):
    def run(it, x):
        h = x + it.down(F.gelu(it.up(x)))
        square = h.T @ h
        if check == "assert":
            torch._assert_async(x.abs().sum() > 0, "x is zero")
        elif check == "solve":
            square = torch.linalg.solve(square, h.T @ x)
        else:
            square = torch.linalg.cholesky(square)
        return it.down(F.gelu(it.up(h @ square))).square().mean()

    x = torch.randn(160, 8)
    parts = {"up": nn.Linear(8, 32, bias=False), "down": nn.Linear(32, 8, bias=False)}
    model, reference = planned_and_plain(ModelOf(run, **parts), (x,), "80%", strategy="auto")
    assert_same_step(model, reference, x)
    for each in (model, reference):
        with pytest.raises(RuntimeError, match="linalg|x is zero"):
            each(torch.zeros_like(x))
    assert runs(model) == 2


def test_views_are_made_once_a_pass_and_go_with_their_storages():
    def loop_over_parts(it, x):
        hidden = x.new_zeros(4)
        for step in x:
            gate, new = it.cell(step + hidden).chunk(2)
            hidden = hidden + gate.sigmoid() * new.tanh()
        return hidden.square().sum()

    model, x = ModelOf(loop_over_parts, cell=nn.Linear(4, 8)), torch.randn(10, 4)
    captured = capture(model, (x,))
    count = captured.graph.forward_count
    segments = [list(range(first, min(first + count // 5, count))) for first in range(0, count, count // 5)]
    reference = copy.deepcopy(model)
    reference(x).backward()
    for order in (range(len(captured.graph.ops)), order_of_segments(captured.graph, segments)):
        schedule = Schedule.from_order(captured.graph, order)
        runner, calls = runner_of(captured, schedule), Counter()
        for name, value in list(runner.program.forward.__globals__.items()):
            if isinstance(value, torch._ops.OpOverload):
                runner.program.forward.__globals__[name] = counting(value, calls)
        assert peak_of(runner, captured, model, x) == simulate(captured.graph, schedule).peak_bytes
        assert_same_gradients(model, reference)
        # 10 parts in one call, forward and, where the order recomputes, backward
        assert calls[torch.ops.aten.unbind.int] <= 2
        assert calls[torch.ops.aten.split.Tensor] <= 2 * 10


def counting(op, calls):
    def call(*args, **kwargs):
        calls[op] += 1
        return op(*args, **kwargs)

    return call


def test_results_keep_what_they_are_and_unused_ones_send_nothing_back():
    def several(it, x):
        h = torch.tanh(it.a(x))
        return h, torch.fft.fft(h), torch.tanh(it.b(x)), h.detach(), h.argmax(-1)

    model, reference = planned_and_plain(ModelOf(several, **linears("a b", 16)), X)
    for each in (model, reference):
        h, spectrum, _, target, index = each(X)
        assert [tensor.requires_grad for tensor in (h, spectrum, target, index)] == [True, True, False, False]
        ((h.transpose(1, 2) - target.transpose(1, 2)).square().sum() + spectrum.abs().mean()).backward()
    assert_same_gradients(model, reference)
    assert runs(model) == 1


def test_changed_models_are_planned_anew():
    model = planned(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 8)), X)
    model(X)
    assert len(model._compiled_call_impl.plans) == 1
    model[1].p = 0.0
    assert torch.equal(model(X), copy.deepcopy(model)(X))
    model[2] = nn.Linear(16, 4)
    assert model(X).shape == (12, 5, 4)
    model[0].register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(model(X)[0, 0], model[2].bias)
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))
    model(X).sum().backward()
    assert model[2].weight.grad is not None
    convert_linears(model, config=RMMConfig(ratio=0.5, min_rows=1))
    model(X)
    assert any(op.kind.startswith("rmm_linear.") for plan in model._compiled_call_impl.plans for op in plan.graph.ops)
    assert runs(model) == 6
    model.requires_grad_(False)
    with pytest.warns(UserWarning, match="nothing in it is trained"):
        assert not model(X).requires_grad
    assert runs(model) == 6


def test_tensors_that_a_step_closes_over_are_read_and_trained():
    model, weights, trained = nn.Linear(16, 16), torch.rand(16), nn.Parameter(torch.rand(16))
    step = checkpoint_step(model, lambda m, x: (m(x) * weights * trained).sum(), X, budget="100%", strategy="auto")
    step(X).backward()
    found, trained.grad, expected = trained.grad, None, (model(X) * weights * trained).sum()
    expected.backward()
    assert torch.equal(found, trained.grad)
    assert torch.equal(step(X), expected)
    assert step.planned_runs == 2


def test_what_a_step_assigns_is_there_after_it():
    # a buffer, a number and an attribute
    def assigns(it, x):
        it.n, it.calls = it.n + 1, it.calls + 1
        it.aux = it.layer(x).square().mean()
        return it.aux * 2 / it.n

    model = ModelOf(assigns, layer=nn.Linear(16, 4), n=torch.zeros(()))
    model.calls = 0
    model, reference = planned_and_plain(model, X)
    assert (model.n, model.calls, hasattr(model, "aux")) == (0, 0, False)
    for _ in range(3):
        assert_same_step(model, reference, X)
        assert torch.equal(model.aux.detach(), reference.aux.detach())
    assert (model.n, model.calls) == (reference.n, reference.calls) == (3, 3)
    assert runs(model) == 3


@pytest.mark.parametrize("case", ["net", grid("roberta")])
def test_a_gradient_at_a_result_beside_the_loss_is_that_of_eager_mode(case):
    make, _, args, kwargs = CASES[case]
    model, reference = planned_and_plain(make(), kwargs or args)

    def step(model, seed):
        torch.manual_seed(seed)
        out = model(*args, **kwargs)
        (out["loss"] + out["logits"].square().sum()).backward()

    # the gradient of the loss alone was planned: the first time, the forward pass runs once more
    for seed in range(3):
        step(reference, seed)
        if seed:
            step(model, seed)
        else:
            with pytest.warns(UserWarning, match="a gradient arrived at a result beside the loss"):
                step(model, seed)
        assert_same_gradients(model, reference)
    assert runs(model) == 4
    # RoBERTa's first step sets `config.problem_type`, and Dynamo compiles the model again
    assert len(model._compiled_call_impl.plans) == (1 if case == "net" else 2)
    # that of the loss alone is right as well
    for each in (model, reference):
        torch.manual_seed(4)
        each(*args, **kwargs)["loss"].backward()
    assert_same_gradients(model, reference)


def test_a_scalar_that_trains_fewer_parameters_than_all_results_is_not_taken_for_the_loss():
    # the loss, of both results, is computed outside, and the scalar trains the encoder alone
    def autoencoder(it, x):
        code = it.encoder(x)
        return it.decoder(code), code.square().mean()

    decoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
    model, reference = planned_and_plain(ModelOf(autoencoder, encoder=nn.Linear(16, 8), decoder=decoder), X)
    (plan,) = model._compiled_call_impl.plans
    assert plan.plain.peak_bytes <= plan.eager_peak_bytes
    assert_same_step(model, reference, X, loss=lambda found: F.mse_loss(found[0], X) + found[1])
    assert runs(model) == 1


def test_a_given_schedule_is_for_the_gradient_of_the_loss_alone():
    model = net()
    graph = capture(model, IMAGES).graph
    run = apply_schedule(model, None, IMAGES, Schedule.plain(graph))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the given schedule is for the gradient of the loss alone"):
            run(*IMAGES)["logits"].sum().backward()
        run(*IMAGES)["loss"].backward()


def test_passes_that_wait_together_are_planned_for_all_gradients_once():
    model, reference = planned_and_plain(net(drop=0.0), IMAGES)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sum(model(*IMAGES)["logits"].square().sum() for _ in range(3)).backward()
    sum(reference(*IMAGES)["logits"].square().sum() for _ in range(3)).backward()
    assert sum("beside the loss" in str(each.message) for each in told) == 1
    torch.testing.assert_close(gradients(model), gradients(reference))


def test_second_backward_passes_and_second_derivatives_are_refused():
    model, step = planned_blocks("90%")
    loss = step(X, TARGET)
    with pytest.raises(DoubleBackwardError, match="create_graph=True asks"):
        torch.autograd.grad(loss, model.blocks[0][1].weight, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran already"):
        loss.backward()


def test_a_workspace_that_is_not_told_is_warned_of():
    with pytest.warns(UserWarning, match="keeps a workspace whose size torch does not tell"):
        capture(nn.LSTM(8, 8), (torch.randn(4, 2, 8),))


def test_wrong_schedules_and_second_calls_are_named():
    model = nn.Linear(16, 16)
    other = capture(model, (X[:2],)).graph
    with pytest.raises(ScheduleError, match="made for graph"):
        apply_schedule(model, None, X, Schedule.plain(other))
    with pytest.raises(ValueError, match="checkpointed already"):
        planned(planned(model, X), X)


class WithGetattr(nn.Module):
    """Dynamo reads such a module's children from its dicts; models of diffusers are such modules."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.ones(8))

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x.sum()


@pytest.mark.parametrize("outer", ["", "inner."])
def test_blocks_of_a_module_with_a_getattr_have_their_names(outer):
    model = ModelOf(lambda it, x: it.inner(x), inner=WithGetattr()) if outer else WithGetattr()
    plan = checkpoint_model(model, torch.randn(4, 8), budget="100%", strategy="chen2016_sqrt")
    assert {f"{outer}blocks.0", f"{outer}blocks.1"} <= set(plan.by_block())
    assert not any("_modules" in name for name in plan.by_block())
    assert f"{outer}scale" in model._compiled_call_impl.group.variants()[-1].capture.names


def test_a_plan_prints_what_it_keeps_by_block():
    plan = checkpoint_model(in_blocks(), X, budget="70%", strategy="chen2016_sqrt")
    text = str(plan)
    assert "budget" in text
    assert "blocks.2" in text
    blocks = plan.by_block()
    assert sum(block.plain_bytes for block in blocks.values()) == plan.plain.forward_bytes
    kept = sum(block.kept_bytes for block in blocks.values())
    assert kept == plan.planned.forward_bytes < plan.plain.forward_bytes
    extra = sum(block.extra_cost for block in blocks.values())
    assert extra == pytest.approx(plan.planned.extra_cost)
