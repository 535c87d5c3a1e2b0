"""What a schedule promises is what happens: bits and bytes, on real models."""

import copy
import gc
import pickle
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from measured_peak import MeasuredPeak
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
from rmm_linear.compiler.runner import Runner
from rmm_linear.planning.strategies.segments import order_of_segments
from rmm_linear.errors import CaptureError, DoubleBackwardError, InfeasibleBudgetError, ScheduleError


class Net(nn.Module):
    """Convolutions, buffers that are updated, dropout in a channel-wise and a plain form, resampling, a tied weight."""

    def __init__(self, drop=0.15):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.drop, self.drop2 = nn.Conv2d(8, 8, 3), nn.Dropout(drop), nn.Dropout2d(drop)
        self.head, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.head.weight

    def forward(self, x, y):
        h = self.drop(F.relu(self.norm(self.conv(x)), inplace=True))
        h = F.interpolate(self.drop2(F.gelu(self.conv2(h))), scale_factor=2, mode="bilinear").mean((2, 3))
        logits = self.tied(F.silu(self.head(h))) + self.head(h)
        first, _ = logits.split([3, 5], 1)
        return {"loss": F.cross_entropy(logits, y) + first.mean(), "logits": logits, "count": 3, "input": x}


class Assorted(nn.Module):
    """Writes into parts of tensors and into a buffer that it then reads, random drops of other shapes, odd layouts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.conv, self.norm, self.act = nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.PReLU()
        self.register_buffer("average", torch.zeros(16))

    def forward(self, ids):
        x = self.embed(ids)
        x = self.layer(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.norm(self.conv(x.transpose(1, 2)))
        self.average.mul_(0.9).add_(x.detach().mean((0, 2)), alpha=0.1)
        x = self.act(F.hardshrink(x, 0.1)) + self.average[None, :, None]
        x = x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device) < 0.8)
        x[:, 0] = x[:, 0] * 2
        pooled = F.interpolate(F.max_pool1d(x, 2), scale_factor=2)
        loss = (pooled - x).abs().mean() + torch.topk(x, 3, dim=-1).values.mean() + F.alpha_dropout(x, 0.1, True).std()
        return {"loss": loss, "x": x, "again": x, "part": x[:, 1]}


class Blocks(nn.Module):
    def __init__(self, width=16, depth=6, drop=0.1):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x


def mean_square(model, x, target):
    return (model(x) - target).square().mean()


def converted():
    return convert_linears(Blocks(), config=RMMConfig(ratio=0.3, min_rows=1))


def stored_in_int4():
    return convert_linears(Blocks(), config=RMMConfig(ratio=0.5, min_rows=1, storage="int4"))


def language_model(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=1)
        )
    return transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**small, intermediate_size=64, max_position_embeddings=40)
    )


X, TARGET = torch.randn(12, 5, 16), torch.randn(12, 5, 16)
IDS = torch.randint(2, 50, (2, 20))
IMAGES = torch.randn(4, 3, 8, 8), torch.randint(0, 8, (4,))

# model, step, arguments, keyword arguments
CASES = {
    "net": (Net, None, IMAGES, {}),
    "assorted": (Assorted, None, (torch.randint(0, 50, (4, 12)),), {}),
    "blocks": (Blocks, mean_square, (X, TARGET), {}),
    "sketched": (converted, mean_square, (X, TARGET), {}),
    "sketched in int4": (stored_in_int4, mean_square, (X, TARGET), {}),
    "gpt2": (lambda: language_model("gpt2"), None, (), {"input_ids": IDS, "labels": IDS, "use_cache": False}),
    "llama": (lambda: language_model("llama"), None, (), {"input_ids": IDS, "labels": IDS, "use_cache": False}),
    "roberta": (
        lambda: language_model("roberta"),
        None,
        (),
        {"input_ids": IDS, "labels": torch.tensor([0, 1]), "attention_mask": (IDS > 9).long()},
    ),
}


def segments_of(graph, length):
    count = graph.forward_count
    return [list(range(start, min(start + length, count))) for start in range(0, count, length)]


def schedules(graph):
    yield Schedule.plain(graph)
    for length in (3, 17):
        yield Schedule.from_order(graph, order_of_segments(graph, segments_of(graph, length)))


def loss_of(value):
    return value if isinstance(value, torch.Tensor) else value["loss"]


def tensors_in(value):
    values = [value] if isinstance(value, torch.Tensor) else value.values()
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("case", CASES)
def test_bits_and_bytes_are_as_promised(case, monkeypatch):
    make, step, args, kwargs = CASES[case]
    torch.manual_seed(0)
    model = make().train()
    captured = capture(model, args, kwargs, step=step)
    graph = captured.graph
    # copies of one model are captured once: that takes most of the time
    monkeypatch.setattr("rmm_linear.checkpointing.planned.capture", lambda *args, **options: captured)
    peaks = []
    for schedule in schedules(graph):
        plain, planned = copy.deepcopy(model), copy.deepcopy(model)
        run = apply_schedule(planned, step, kwargs or args, schedule)
        one = torch.ones(())
        torch.manual_seed(1)
        expected = plain(*args, **kwargs) if step is None else step(plain, *args, **kwargs)
        loss_of(expected).backward()
        after = torch.get_rng_state()
        torch.manual_seed(1)
        with MeasuredPeak(list(planned.parameters()), list(planned.buffers()), args, kwargs, one) as measured:
            found = run(*args, **kwargs)
            loss_of(found).backward(one)
        assert torch.equal(torch.get_rng_state(), after)
        assert type(found) is type(expected)
        for ours, theirs in zip(tensors_in(found), tensors_in(expected), strict=True):
            assert torch.equal(ours, theirs)
        for (name, theirs), ours in zip(plain.named_parameters(), planned.parameters(), strict=True):
            assert (theirs.grad is None) == (ours.grad is None), name
            assert theirs.grad is None or torch.equal(theirs.grad, ours.grad), name
        for (name, theirs), ours in zip(plain.named_buffers(), planned.buffers(), strict=True):
            assert torch.equal(theirs, ours), name
        peaks.append(simulate(graph, schedule).peak_bytes)
        assert measured.peak == peaks[-1]
        # a second micro-batch: its gradients are added to those that are there
        there = [parameter.grad for parameter in planned.parameters() if parameter.grad is not None]
        torch.manual_seed(2)
        loss_of(plain(*args, **kwargs) if step is None else step(plain, *args, **kwargs)).backward()
        torch.manual_seed(2)
        with MeasuredPeak(list(planned.parameters()), list(planned.buffers()), there, args, kwargs, one) as measured:
            found = run(*args, **kwargs)
            loss_of(found).backward(one)
        for (name, theirs), ours in zip(plain.named_parameters(), planned.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(theirs.grad, ours.grad), name
        assert measured.peak == run.plans[0].with_gradients_freed().peak_bytes
    assert min(peaks[1:]) < peaks[0]


@pytest.mark.parametrize("strategy", available_strategies())
def test_what_every_strategy_proposes_runs_as_promised(strategy):
    torch.manual_seed(0)
    layers = [layer for width in (24, 8, 16, 4) for layer in (nn.LazyLinear(width), nn.Tanh(), nn.Dropout(0.2))]
    model, x, one = nn.Sequential(*layers), torch.randn(64, 12), torch.ones(())
    model(x)
    captured = capture(model, (x,), step=lambda model, x: model(x).square().mean())
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    reference(x).square().mean().backward()
    frontier = get_strategy(strategy).frontier(captured.graph)
    assert len(frontier) > 1
    for proposal in frontier:
        runner = Runner(captured, Schedule.from_order(captured.graph, proposal.order))
        model.zero_grad()
        torch.manual_seed(1)
        with MeasuredPeak(list(model.parameters()), x, one) as measured:
            runner([*model.parameters(), x]).backward(one)
        assert measured.peak == proposal.peak_bytes
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_gradients_add_up_and_memory_goes_with_the_loss():
    model = Blocks()
    reference = copy.deepcopy(model)
    step = checkpoint_step(model, mean_square, (X, TARGET), budget="80%", strategy="chen2016_sqrt")
    for _ in range(2):
        torch.manual_seed(3)
        step(X, TARGET).backward()
        torch.manual_seed(3)
        mean_square(reference, X, TARGET).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with MeasuredPeak(list(model.parameters()), X, TARGET) as measured:
        loss = step(X, TARGET)
        held = measured.now
        assert held > 10 * loss.nbytes
        dead = weakref.ref(loss)
        del loss
        measured.look()
    assert dead() is None
    assert measured.now == 0


def test_a_leak_needs_no_collector():
    model = Blocks()
    step = checkpoint_step(model, None, X, budget="100%", strategy="chen2016_sqrt")
    gc.collect()
    gc.disable()
    try:
        with MeasuredPeak(list(model.parameters()), X) as measured:
            step(X)
            measured.look()
            assert measured.now == 0
    finally:
        gc.enable()


def test_inputs_get_gradients_and_every_output_can_be_differentiated_without_a_loss():
    model = Blocks(drop=0.0)
    reference = copy.deepcopy(model)
    x = X.clone().requires_grad_()
    plan = checkpoint_model(model, x, budget="90%", strategy="chen2016_sqrt")
    assert plan.peak_bytes <= 0.9 * plan.plain.peak_bytes
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(mine).sin().sum().backward()
    reference(theirs).sin().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)


def test_frozen_parameters_get_none():
    model = Blocks()
    for parameter in model.blocks[:3].parameters():
        parameter.requires_grad_(False)
    graph = capture(model, (X, TARGET), step=mean_square).graph
    frozen_bytes = simulate(graph, Schedule.plain(graph)).peak_bytes
    checkpoint_step(model, mean_square, (X, TARGET), budget="90%", strategy="chen2016_sqrt")(X, TARGET).backward()
    assert all(parameter.grad is None for parameter in model.blocks[:3].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[3:].parameters())
    model.requires_grad_(True)
    graph = capture(model, (X, TARGET), step=mean_square).graph
    assert frozen_bytes < simulate(graph, Schedule.plain(graph)).peak_bytes


def test_eval_and_no_grad_run_as_written_and_removal_leaves_nothing():
    model = Blocks()
    checkpoint_model(model, X, budget="90%", strategy="chen2016_sqrt")
    with torch.no_grad():
        assert model(X).grad_fn is None
    model.eval()
    assert "_Run" not in str(model(X).grad_fn)
    model.train()
    assert "_Run" in str(model(X).grad_fn)
    assert remove_checkpointing(model) is model
    assert "forward" not in vars(model)
    assert "_Run" not in str(model(X).grad_fn)


def test_other_shapes_are_planned_when_they_come_and_many_are_warned_of():
    model, reference = (copy.deepcopy(m) for m in [Blocks(drop=0.0)] * 2)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    planned = vars(model)["forward"].run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (3, 7, 3, 1, 2, 4, 5, 6):
            assert torch.equal(model(X[:rows]), reference(X[:rows]))
    assert len(planned.plans) == 8
    assert sum("captured for 3 different shapes" in str(warning.message) for warning in caught) == 1


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, mask):
        x = self.drop(x)
        return self.a(x).square().mean() if mask.all() else (self.b(x).relu() * mask).square().mean()


def test_a_branch_on_a_number_is_checked_and_both_ways_are_right():
    model = Branching()
    reference = copy.deepcopy(model)
    full, half = torch.ones(12, 5, 1), (torch.arange(5) < 3).float().view(1, 5, 1).expand(12, 5, 1).contiguous()
    before = torch.get_rng_state()
    checkpoint_model(model, (X, full), budget="100%", strategy="chen2016_sqrt")
    assert torch.equal(torch.get_rng_state(), before)
    for seed, mask in enumerate((full, half, full, half, half)):
        torch.manual_seed(seed)
        ours = model(X, mask)
        torch.manual_seed(seed)
        theirs = reference(X, mask)
        assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
    assert len(vars(model)["forward"].run.plans) == 2
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name


def test_a_number_that_is_always_another_one_is_refused():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * (2 if x.sum().item() > 0.25 else 3)

    model = Looks(16, 4)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")

    def train():
        for seed in range(9):
            model(X + seed).backward()

    with pytest.raises(CaptureError, match="another one in each of 8 steps"):
        train()


def test_autocast_is_captured_and_is_another_variant():
    model = Blocks(drop=0.0)
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours, theirs = model(X), reference(X)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        ours.float().square().sum().backward()
        theirs.float().square().sum().backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert len(vars(model)["forward"].run.plans) == 2


def test_copies_and_pickles_plan_for_themselves():
    model = Blocks(drop=0.0)
    checkpoint_model(model, X, budget="90%", strategy="chen2016_sqrt")
    model(X).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        other(X).sum().backward()
        assert "_Run" in str(other(X).grad_fn)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert theirs is not mine
            assert torch.equal(mine.grad, theirs.grad)


class Running(nn.Module):
    """Reads a view of a buffer that it then updates, as running normalisations do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        h = torch.tanh(self.layers[0](x))
        h = torch.tanh(h - self.mean.view(1, -1))
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        self.mean.mul_(0.9).add_(1.0)
        return h.square().mean()


def test_what_reads_a_buffer_before_its_update_is_not_computed_after_it():
    model = Running()
    with pytest.raises(InfeasibleBudgetError) as caught:
        checkpoint_model(model, X, budget=1)
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget=caught.value.least_bytes)
    for _ in range(3):
        model(X).backward()
        reference(X).backward()
    assert torch.equal(model.mean, reference.mean)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Steps(nn.Module):
    """A loop over parts of a tensor, as long as the tensor has parts."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 8)

    def forward(self, x):
        hidden = x.new_zeros(4)
        for step in x:
            gate, new = self.cell(step + hidden).chunk(2)
            hidden = hidden + gate.sigmoid() * new.tanh()
        return hidden.square().sum()


def test_views_are_made_once_a_pass_and_go_with_their_storages():
    model, x = Steps(), torch.randn(40, 4)
    captured = capture(model, (x,))
    length = captured.graph.forward_count // 5
    segments = [list(range(s, min(s + length, captured.graph.forward_count))) for s in range(0, 5 * length + 5, length)]
    segments = [segment for segment in segments if segment]
    one = torch.ones(())
    for order in (range(len(captured.graph.ops)), order_of_segments(captured.graph, segments)):
        runner = Runner(captured, Schedule.from_order(captured.graph, order))
        calls = Counter()
        for name, value in list(runner.program.forward.__globals__.items()):
            if isinstance(value, torch._ops.OpOverload):
                runner.program.forward.__globals__[name] = counting(value, calls)
        inputs = [*model.parameters(), x]
        for parameter in model.parameters():
            parameter.grad = None
        with MeasuredPeak(inputs, one) as measured:
            runner(inputs).backward(one)
        assert measured.peak == simulate(captured.graph, runner.schedule).peak_bytes
        gradient = model.cell.weight.grad.clone()
        model.cell.weight.grad = None
        model(x).backward()
        assert torch.equal(gradient, model.cell.weight.grad)
        # 40 parts in one call, forward and, where the order recomputes, backward
        assert calls[torch.ops.aten.unbind.int] <= 2
        assert calls[torch.ops.aten.split.Tensor] <= 2 * 40


def counting(op, calls):
    def call(*args, **kwargs):
        calls[op] += 1
        return op(*args, **kwargs)

    return call


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return h, torch.fft.fft(h), torch.tanh(self.b(x)), h.detach(), h.argmax(-1)


def test_results_keep_what_they_are_and_unused_ones_send_nothing_back():
    model = Several()
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    for each in (model, reference):
        h, spectrum, _, target, index = each(X)
        assert [tensor.requires_grad for tensor in (h, spectrum, target, index)] == [True, True, False, False]
        ((h.transpose(1, 2) - target.transpose(1, 2)).square().sum() + spectrum.abs().mean()).backward()
    assert model.b.weight.grad is None
    assert torch.equal(model.a.weight.grad, reference.a.weight.grad)


def test_changed_models_are_planned_anew():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    planned = vars(model)["forward"].run
    model(X)
    assert len(planned.plans) == 1
    model[1].p = 0.0
    assert torch.equal(model(X), remove_checkpointing(copy.deepcopy(model))(X))
    model[2] = nn.Linear(16, 4)
    assert model(X).shape == (12, 5, 4)
    model[0].register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(model(X)[0, 0], model[2].bias)
    handle = model[2].weight
    model[2].weight = nn.Parameter(torch.zeros_like(handle))
    model(X).sum().backward()
    assert model[2].weight.grad is not None
    convert_linears(model, config=RMMConfig(ratio=0.5, min_rows=1))
    model(X)
    assert any(op.kind.startswith("rmm_linear.") for op in planned.plans[-1].graph.ops)
    model.requires_grad_(False)
    assert not model(X).requires_grad


def test_gradients_that_autograd_would_copy_are_counted():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.randn(64, 8))
            self.c = nn.Parameter(torch.randn(500, 4))

        def forward(self, x):
            return F.linear(x, torch.cat([self.a, self.b], 1)).square().mean() + self.c.sum()

    model, x, one = Joined(), torch.randn(30, 16), torch.ones(())
    step = checkpoint_step(model, None, x, budget="100%", strategy="chen2016_sqrt")
    with MeasuredPeak(list(model.parameters()), x, one) as measured:
        step(x).backward(one)
    assert measured.peak == step.plans[0].peak_bytes


def test_tensors_that_a_step_closes_over_are_read_and_never_trained():
    weights, model = torch.rand(16), nn.Linear(16, 16)
    step = checkpoint_step(model, lambda m, x: (m(x) * weights).sum(), X, budget="100%", strategy="chen2016_sqrt")
    assert torch.equal(step(X), (model(X) * weights).sum())
    trained = nn.Parameter(weights)
    with pytest.raises(CaptureError, match="needs a gradient and is neither a parameter"):
        checkpoint_step(model, lambda m, x: (m(x) * trained).sum(), X, budget="100%", strategy="chen2016_sqrt")


# Bad input


def test_state_that_a_plan_would_lose_is_refused():
    class Assigns(nn.Linear):
        def forward(self, x):
            self.n = self.n + 1
            return super().forward(x).sum() / self.n

    class Remembers(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            self.aux = h.mean()
            return h.sum()

    class DrawsInNumpy(nn.Linear):
        def forward(self, x):
            import numpy

            return super().forward(x).sum() * numpy.random.rand()  # noqa: NPY002

    model = Assigns(16, 4)
    model.register_buffer("n", torch.zeros(()))
    with pytest.raises(CaptureError, match="another tensor in the place of buffer 'model.n'|of buffer 'n'"):
        capture(model, (X,))
    model = Remembers(16, 4)
    with pytest.raises(CaptureError, match="sets `Remembers.aux` to a tensor"):
        capture(model, (X,))
    assert not hasattr(model, "aux")
    with pytest.raises(CaptureError, match="from `numpy.random`"):
        capture(DrawsInNumpy(16, 4), (X,))
    with pytest.raises(CaptureError, match="an argument is a object|an argument is a ndarray"):
        capture(nn.Linear(16, 4), (X.numpy(),))


def test_changing_a_weight_before_the_backward_pass_is_noticed():
    model = Blocks()
    loss = checkpoint_step(model, mean_square, (X, TARGET), budget="90%", strategy="chen2016_sqrt")(X, TARGET)
    with torch.no_grad():
        model.blocks[2][1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_pass_is_refused():
    model = Blocks()
    loss = checkpoint_step(model, mean_square, (X, TARGET), budget="90%", strategy="chen2016_sqrt")(X, TARGET)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran already"):
        loss.backward()


def test_a_gradient_that_was_not_planned_is_refused():
    model = Net()
    step = checkpoint_step(model, None, IMAGES, budget="100%", strategy="chen2016_sqrt")
    found = step(*IMAGES)
    assert found["input"] is IMAGES[0]
    assert found["count"] == 3
    with pytest.raises(RuntimeError, match="captured for its loss alone: .*checkpoint_step"):
        (found["loss"] + found["logits"].sum()).backward()


def test_double_backward_is_refused():
    model = Blocks(drop=0.0)
    loss = checkpoint_step(model, mean_square, (X, TARGET), budget="100%", strategy="chen2016_sqrt")(X, TARGET)
    with pytest.raises(DoubleBackwardError, match="create_graph=True asks"):
        torch.autograd.grad(loss, model.blocks[0][1].weight, create_graph=True)


class DependsOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        return self.a(x[x[:, 0, 0] > 0]).sum()


class DrawsInPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        import random

        return self.a(x).sum() if random.random() < 2 else x.sum()


def test_what_cannot_be_captured_is_told_with_its_line_and_a_remedy():
    model = DependsOnData()
    with pytest.raises(CaptureError, match=r"test_execution.py:\d+: return self.a\(x\[x.*blocks without"):
        checkpoint_model(model, X, budget="50%")
    assert "forward" not in vars(model)
    assert not model._forward_pre_hooks
    state = __import__("random").getstate()
    with pytest.raises(CaptureError, match="draws from `random`"):
        checkpoint_model(DrawsInPython(), X, budget="50%")
    assert __import__("random").getstate() == state


def test_a_workspace_that_is_not_told_is_warned_of():
    with pytest.warns(UserWarning, match="keeps a workspace whose size torch does not tell"):
        capture(nn.LSTM(8, 8), (torch.randn(4, 2, 8),))


def test_what_holds_tensors_of_its_own_is_not_returned():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(), {1, 2}

    with pytest.raises(CaptureError, match="returns a set, whose tensors a plan can't hand over"):
        capture(Odd(16, 4), (X,))


def test_nothing_to_train_is_told():
    model = Blocks().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing that the step returns depends on a parameter"):
        checkpoint_model(model, X, budget="50%")


@pytest.mark.parametrize("budget", [0, -5, 1.5, True, "", "60", "60 percent", "-3MB", "0%", "3PB", None])
def test_a_wrong_budget_is_named(budget):
    if budget == "60":
        # sixty bytes: a budget, and far too small
        with pytest.raises(InfeasibleBudgetError):
            checkpoint_model(Blocks(), X, budget=budget, strategy="chen2016_sqrt")
        return
    with pytest.raises(ValueError, match="is no budget: pass a positive number of bytes"):
        checkpoint_model(Blocks(), X, budget=budget, strategy="chen2016_sqrt")


def test_a_budget_that_cannot_be_met_names_the_least_and_that_one_is_met():
    model = Blocks()
    with pytest.raises(InfeasibleBudgetError, match="the least that was found") as caught:
        checkpoint_model(model, X, budget=1000, strategy="chen2016_sqrt")
    assert "forward" not in vars(model)
    plan = checkpoint_model(model, X, budget=caught.value.least_bytes, strategy="chen2016_sqrt")
    assert plan.peak_bytes == caught.value.least_bytes


def test_wrong_strategies_schedules_and_second_calls_are_named():
    model = Blocks()
    with pytest.raises(ValueError, match="strategy='magic' is unknown; choose one of .*chen2016"):
        checkpoint_model(model, X, budget="50%", strategy="magic")
    other = capture(model, (X[:2],)).graph
    with pytest.raises(ScheduleError, match="made for graph"):
        apply_schedule(model, None, X, Schedule.plain(other))
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    with pytest.raises(ValueError, match="checkpointed already"):
        checkpoint_model(model, X, budget="50%", strategy="chen2016_sqrt")


def test_a_plan_prints_what_it_keeps_by_block():
    plan = checkpoint_model(Blocks(), X, budget="70%", strategy="chen2016_sqrt")
    text = str(plan)
    assert "budget" in text
    assert "blocks.3" in text
    blocks = plan.by_block()
    assert sum(block.plain_bytes for block in blocks.values()) == plan.plain.forward_bytes
    kept = sum(block.kept_bytes for block in blocks.values())
    assert kept == plan.planned.forward_bytes < plan.plain.forward_bytes
    extra = sum(block.extra_cost for block in blocks.values())
    assert extra == pytest.approx(plan.planned.extra_cost)
