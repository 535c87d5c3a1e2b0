"""What a planned step depends on beside its tensors: a change is followed, planned anew, refused or warned of."""

import argparse
import copy
import gc
import threading
import warnings
import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.checkpointing import capture, checkpoint_model, checkpoint_step
from rmm_linear.errors import CaptureError

X = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
PLAN = {"budget": "100%", "strategy": "chen2016_sqrt"}
SCALE = 1.0
SETTINGS = argparse.Namespace(scale=1.0)


class Plain:
    scale = 1.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


@dataclass
class Nested:
    inner: Plain = field(default_factory=Plain)
    scales: dict = field(default_factory=lambda: {"a": [1.0, 2.0]})


class Reads(nn.Module):
    """Multiplies by all that a forward pass can read in Python."""

    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.number, self.tensor, self.array = 1.0, torch.tensor(1.0), np.ones(4, dtype=np.float32)
        self.tensors, self.by_name = [torch.ones(4), torch.ones(4)], {"a": torch.ones(4)}
        self.pair = (torch.ones(4), torch.ones(4))
        self.plain, self.slots, self.nested = Plain(), Slots(), Nested()
        self.lists = [[1.0], {"a": (1.0, 2.0)}]
        self.act = torch.tanh

    def forward(self, x):
        h = self.linear(x) * self.number * self.tensor * torch.tensor(self.array)
        h = h * self.tensors[0] * self.by_name["a"] * self.pair[0] * self.plain.scale * self.slots.scale
        h = h * self.nested.inner.scale * getattr(self.nested, "scales")["a"][1]  # noqa: B009
        return self.act(h * self.lists[0][0] * self.lists[1]["a"][0] * self.of_class * SCALE * SETTINGS.scale).mean()


def set_scale(holder, value=0.5):
    holder.scale = value


CHANGES = {
    "a number": lambda m: setattr(m, "number", 0.5),
    "a tensor": lambda m: setattr(m, "tensor", torch.tensor(0.5)),
    "a tensor's contents": lambda m: m.tensor.fill_(0.5),
    "a tensor's data": lambda m: setattr(m.tensor, "data", torch.tensor(0.5)),
    "an array's contents": lambda m: m.array.fill(0.5),
    "a tensor in a list": lambda m: m.tensors.__setitem__(0, torch.full((4,), 0.5)),
    "a tensor in a dict": lambda m: m.by_name.update(a=torch.full((4,), 0.5)),
    "a tensor in a tuple": lambda m: setattr(m, "pair", (torch.full((4,), 0.5), m.pair[1])),
    "contents of a tensor in a tuple": lambda m: m.pair[0].fill_(0.5),
    "an object's field": lambda m: set_scale(m.plain),
    "an object": lambda m: (setattr(m, "plain", Plain()), set_scale(m.plain)),
    "a slot": lambda m: set_scale(m.slots),
    "a field of a field": lambda m: set_scale(m.nested.inner),
    "a field's list in a dict": lambda m: m.nested.scales["a"].__setitem__(1, 0.5),
    "a nested list's entry": lambda m: m.lists[0].__setitem__(0, 0.5),
    "a nested tuple": lambda m: m.lists[1].update(a=(0.5, 2.0)),
    "a function": lambda m: setattr(m, "act", torch.sin),
    "a lambda": lambda m: setattr(m, "act", lambda x: torch.tanh(x) * 0.5),
}


@pytest.fixture(scope="module")
def reading():
    torch.manual_seed(0)
    model = Reads()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        # after three variants
        warnings.simplefilter("ignore")
        checkpoint_model(model, X, **PLAN)
        yield model, plain


def assert_equal_steps(model, plain):
    losses = []
    for each in (model, plain):
        each.zero_grad()
        losses.append(each(X))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings("ignore:a planned step is captured for 3")
def test_what_a_forward_reads_is_followed(reading, what):
    model, plain = reading
    for each in (model, plain):
        CHANGES[what](each)
    assert_equal_steps(model, plain)


@pytest.mark.filterwarnings("ignore:a planned step is captured for 3")
def test_classes_and_global_variables_are_followed(reading, monkeypatch):
    model, plain = reading
    with monkeypatch.context() as patch:
        patch.setattr(Reads, "of_class", 0.5)
        assert_equal_steps(model, plain)
        patch.setitem(globals(), "SCALE", 0.25)
        assert_equal_steps(model, plain)
        patch.setattr(SETTINGS, "scale", 2.0)
        assert_equal_steps(model, plain)
        patch.setattr(Reads, "forward", lambda self, x: self.linear(x).sum())
        assert_equal_steps(model, plain)
    assert_equal_steps(model, plain)


@pytest.mark.filterwarnings("ignore:a planned step is captured for 3")
def test_what_a_step_closes_over_is_followed():
    model = nn.Linear(16, 4)
    offset, options, scale = torch.zeros(4), {"power": 2}, 1.0

    def loss_fn(model, x):
        return ((model(x) + offset) * scale).abs().pow(options["power"]).mean()

    step = checkpoint_step(model, loss_fn, X, **PLAN)
    assert torch.equal(step(X), loss_fn(model, X))
    scale = 3.0
    assert torch.equal(step(X), loss_fn(model, X))
    options["power"] = 3
    assert torch.equal(step(X), loss_fn(model, X))
    offset.fill_(2.0)
    assert torch.equal(step(X), loss_fn(model, X))
    offset = torch.ones(4)
    assert torch.equal(step(X), loss_fn(model, X))


def test_nothing_is_planned_twice_for_what_stays():
    model = Reads()
    checkpoint_model(model, X, **PLAN)
    planned = vars(model)["forward"].run
    for _ in range(3):
        model(X).backward()
    model.unread, model.plain.unread, model.tensor = object(), 5, torch.tensor(2.0)
    model.unread = None
    del model.unread
    model(X)
    assert len(planned.plans) == 1


def test_a_tensor_of_a_module_is_an_input_and_is_written_into():
    class Counts(nn.Linear):
        def forward(self, x):
            self.count += 1
            self.history[0].add_(2)
            return super().forward(x).mean() * self.count

    model = Counts(16, 4)
    model.count, model.history = torch.zeros(()), [torch.zeros(())]
    plain = copy.deepcopy(model)
    checkpoint_model(model, X, **PLAN)
    for _ in range(3):
        assert torch.equal(model(X), plain(X))
    assert (model.count, model.history) == (3, [6])


# Counters


class Counter(nn.Linear):
    def __init__(self, reads=False):
        super().__init__(16, 4)
        self.calls, self.stats, self.plain, self.reads = 0, {"calls": [0]}, Plain(), reads

    def forward(self, x):
        self.calls += 1
        self.stats["calls"].append(self.calls)
        self.plain.scale += 1
        return super().forward(x).mean() * (self.calls if self.reads else 1)


def test_a_counter_is_named_and_left_as_it_is():
    model = Counter()
    plain = copy.deepcopy(model)
    with pytest.warns(
        UserWarning, match=r"changes `Counter.calls` \(0, then 1\), `Counter.stats.calls`, `Counter.plain.sc"
    ):
        checkpoint_model(model, X, **PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(model(X), plain(X))
    assert (model.calls, model.stats, model.plain.scale) == (0, {"calls": [0]}, 1.0)
    assert len(vars(model)["forward"].run.plans) == 1


def test_a_counter_that_the_loss_depends_on_is_refused():
    model = Counter(reads=True)
    with pytest.raises(CaptureError, match=r"changes `Counter.calls` \(0, then 1\).*and computes something else when"):
        checkpoint_model(model, X, **PLAN)
    assert (model.calls, model.stats) == (0, {"calls": [0]})
    assert torch.equal(model(X), nn.functional.linear(X, model.weight, model.bias).mean())


def test_what_settles_after_the_first_run_is_no_counter():
    class Remembers(nn.Linear):
        def forward(self, x):
            self.last_shape, self.ran = tuple(x.shape), True
            return super().forward(x).mean()

    model = Remembers(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_model(model, X, **PLAN)
        model(X).backward()
    assert not hasattr(model, "ran")


STEPS = 0


@pytest.mark.parametrize("reads", [False, True])
def test_counters_of_a_step_function(reads):
    global STEPS
    model, STEPS, calls, history = nn.Linear(16, 4), 0, 0, []

    def loss_fn(model, x):
        global STEPS
        nonlocal calls
        STEPS += 1
        calls += 1
        history.append(calls)
        return model(x).mean() * (STEPS + calls if reads else 1)

    if reads:
        with pytest.raises(CaptureError, match=r"changes `loss_fn.calls` \(0, then 1\), `loss_fn.history`, `STEPS`"):
            checkpoint_step(model, loss_fn, X, **PLAN)
    else:
        with pytest.warns(
            UserWarning, match=r"`loss_fn.calls` \(0, then 1\), `loss_fn.history`, `STEPS` \(0, then 1\)"
        ):
            step = checkpoint_step(model, loss_fn, X, **PLAN)
        assert torch.equal(step(X), model(X).mean())
        assert len(step.plans) == 1
    assert (STEPS, calls, history) == (0, 0, [])


def test_losses_that_a_step_collects_are_refused():
    history = []

    def loss_fn(model, x):
        history.append(model(x).mean())
        return history[-1]

    with pytest.raises(CaptureError, match=r"sets `loss_fn.history` to a tensor"):
        checkpoint_step(nn.Linear(16, 4), loss_fn, X, **PLAN)
    assert history == []


def count_a_step():
    global STEPS
    STEPS += 1


def test_what_other_threads_change_is_theirs():
    global STEPS
    STEPS = 0

    def loss_fn(model, x):
        other = threading.Thread(target=count_a_step)
        other.start()
        other.join()
        return model(x).mean()

    captured = capture(nn.Linear(16, 4), (X,), step=loss_fn)
    assert STEPS > 0
    assert captured.changed == ()


# The backward pass


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, given):
        ctx.given = given
        return x.view_as(x)


class Reverses(Passes):
    @staticmethod
    def backward(ctx, gradient):
        return -SCALE * ctx.given.scale * gradient, None


class ReadsInBackward(nn.Linear):
    def __init__(self):
        super().__init__(16, 4)
        self.plain, self.of_hook = Plain(), Slots()

    def forward(self, x):
        h = Reverses.apply(super().forward(x), self.plain)
        h.register_hook(lambda gradient: gradient * self.of_hook.scale)
        return h.square().mean()


def gradient_of(model):
    model.zero_grad()
    model(X).backward()
    return model.weight.grad.clone()


@pytest.mark.filterwarnings("ignore:a planned step is captured for 3")
def test_what_a_backward_pass_reads_is_followed(monkeypatch):
    model = ReadsInBackward()
    plain = copy.deepcopy(model)
    checkpoint_model(model, X, **PLAN)
    assert torch.equal(gradient_of(model), gradient_of(plain))
    monkeypatch.setitem(globals(), "SCALE", 0.25)
    assert torch.equal(gradient_of(model), gradient_of(plain))
    for each in (model, plain):
        set_scale(each.plain)
    assert torch.equal(gradient_of(model), gradient_of(plain))
    for each in (model, plain):
        set_scale(each.of_hook)
    assert torch.equal(gradient_of(model), gradient_of(plain))


class Counts(Passes):
    @staticmethod
    def backward(ctx, gradient):
        global STEPS
        STEPS += 1
        return gradient * (STEPS if ctx.given else 1), None


def test_a_counter_of_a_backward_pass():
    global STEPS
    model, STEPS = nn.Linear(16, 4), 0
    with pytest.warns(UserWarning, match=r"changes `STEPS` \(0, then 1\)"):
        checkpoint_step(model, lambda m, x: Counts.apply(m(x), False).mean(), X, **PLAN)
    with pytest.raises(CaptureError, match=r"changes `STEPS` \(0, then 1\), and computes something else"):
        checkpoint_step(model, lambda m, x: Counts.apply(m(x), True).mean(), X, **PLAN)
    assert STEPS == 0


# Bounds


@pytest.mark.filterwarnings("ignore:a planned step is captured for 3")
def test_what_is_too_large_or_too_deep_is_named():
    class Large(nn.Linear):
        def forward(self, x):
            deep = self.deep
            while isinstance(deep, list):
                (deep,) = deep
            return super().forward(x).mean() * self.table[0] * deep

    model = Large(16, 4)
    model.table, model.deep, model.unread = list(range(1, 20_000)), 1.0, list(range(20_000))
    for _ in range(20):
        model.deep = [model.deep]
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"won't notice changes inside of Large.deep\[0\].*, Large.table, too large"):
        checkpoint_model(model, X, **PLAN)
    for each in (model, plain):
        each.table = [3, *range(20_000)]
    assert torch.equal(model(X), plain(X))


def test_the_last_difference_is_named_after_three_variants():
    model = Reads()
    model.plain.scale = 1.5
    checkpoint_model(model, X, **PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.number = 2.0
        model(X)
    model.plain.scale = 3.0
    with pytest.warns(
        UserWarning, match=r"for 3 different .* the last one differs in Reads.plain.scale \(1.5, then 3.0"
    ):
        model(X)


# Hooks


def test_a_models_own_hooks_run_once_a_step():
    model, seen = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), []

    def twice(module, args, output):
        seen.append(type(output))
        return output * 2

    model.register_forward_hook(twice)
    plain = copy.deepcopy(model)
    checkpoint_model(model, X, **PLAN)
    seen.clear()
    assert torch.equal(model(X), plain(X))
    assert seen == [torch.Tensor] * 2
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    assert seen == [torch.Tensor] * 4


def test_hooks_inside_of_a_plan_are_named():
    model, seen = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), []

    def records(module, args, output):
        seen.append(1)
        return output * 2

    def before(module, args):
        return (args[0] + 1,)

    model[0].register_forward_hook(records)
    model[1].register_forward_pre_hook(before)
    with pytest.warns(UserWarning, match=r"forward hook `records` of 0, forward pre-hook `before` of 1 ran at the"):
        checkpoint_model(model, X, **PLAN)
    seen.clear()
    planned = model(X)
    assert seen == []
    assert torch.equal(planned, torch.tanh(model[0](X) + 1))


def test_a_capture_tells_what_its_code_reads():
    captured = capture(Reads(), (X,))
    assert {"linear", "number", "plain", "scale", "scales", "SETTINGS", "of_class"} <= captured.read.names
    assert {"SCALE", "SETTINGS"} <= {name for holder, name in captured.read.places if holder is globals()}


def test_a_converted_model_is_planned_once():
    model = convert_linears(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), config=RMMConfig(ratio=0.5, min_rows=1)
    )
    checkpoint_model(model, X, **PLAN)
    for _ in range(20):
        model(X).sum().backward()
    assert len(vars(model)["forward"].run.plans) == 1


def test_a_plan_keeps_no_tensor_alive_that_was_replaced():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bank = nn.Linear(8, 8), torch.zeros(8)

        def forward(self, x):
            return self.linear(x) * self.bank

    model, x = Scaled(), torch.randn(4, 8)
    checkpoint_model(model, x, budget="100%")
    replaced = weakref.ref(model.bank), weakref.ref(model.linear.weight)
    model.bank = torch.ones(8)
    model(x).sum().backward()
    model.linear.weight = nn.Parameter(torch.ones(8, 8))
    assert torch.equal(model(x), model.linear(x))
    gc.collect()
    assert [tensor() is None for tensor in replaced] == [True, True]
    assert len(vars(model)["forward"].run.plans) == 1
