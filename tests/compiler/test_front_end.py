"""A planned model in the hands of its user: the loss and gradients of eager mode, or a refusal that names the line."""

import copy
import enum
import functools
import gc
import logging
import types
import warnings
import weakref

import pytest
import torch
from model_of import ModelOf, linears
from torch import nn

from rmm_linear.checkpointing import remove_checkpointing
from rmm_linear.compiler.torch_private import compiled
from rmm_linear.errors import CaptureError
from tests.checkpointing.planned_models import Ops, assert_equal, gradients, planned_runs
from tests.checkpointing.planned_models import planned as planned_for

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
REGISTRY = {"act": nn.Tanh}


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


class Lazy:
    """Computes a value when it is first asked for it."""

    def __init__(self):
        self.scale, self._cached = 1.0, None

    def get(self):
        if self._cached is None:
            self._cached = self.scale * 1.0
        return self._cached

    def change(self):
        self.scale, self._cached = 3.0, None


class Counter:
    calls = 0


def make(state=None, read=lambda model: 1.0):
    """A model that multiplies by what a function of it finds in its state."""
    torch.manual_seed(0)
    model = ModelOf(lambda it, x: (it.layer(x) * read(it)).square().mean(), **linears("layer", 8))
    model.state = state
    return model


def planned(model):
    return planned_for(model, X)


def step(model):
    model.zero_grad()
    loss = model(X)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def count(model):
    model.state.calls += 1
    return 1.0 if model.state.calls % 2 else 3.0


# a state, what the forward pass reads of it, and what changes it after the first step
STATES = {
    "tensor": (lambda: torch.tensor(1.0), lambda m: m.state, lambda m: setattr(m, "state", torch.tensor(3.0))),
    "tensor in place": (lambda: (torch.tensor(1.0),), lambda m: m.state[0], lambda m: m.state[0].fill_(3.0)),
    "nested list": (lambda: [[1.0]], lambda m: m.state[0][0], lambda m: m.state[0].__setitem__(0, 3.0)),
    "object": (lambda: types.SimpleNamespace(k=1.0), lambda m: m.state.k, lambda m: setattr(m.state, "k", 3.0)),
    "variables of an object": (
        lambda: types.SimpleNamespace(k=1.0),
        lambda m: sum(vars(m.state).values()),
        lambda m: setattr(m.state, "k", 3.0),
    ),
    "lazy value": (Lazy, lambda m: m.state.get(), lambda m: m.state.change()),
    "enumeration": (
        lambda: Mode.FIRST,
        lambda m: 1.0 if m.state is Mode.FIRST else 3.0,
        lambda m: setattr(m, "state", Mode.SECOND),
    ),
    "set": (lambda: {1}, lambda m: 1.0 if 1 in m.state else 3.0, lambda m: m.state.clear()),
    "partial function": (
        lambda: functools.partial(lambda k: k, k=1.0),
        lambda m: m.state(),
        lambda m: m.state.keywords.update(k=3.0),
    ),
    "counter": (Counter, count, lambda m: None),
    "module in a list": (lambda: [nn.Linear(8, 8)], lambda m: m.state[0](X), lambda m: m.state[0].weight.data.mul_(2)),
}


@pytest.mark.parametrize("name", STATES)
def test_a_change_of_state_changes_planned_steps_as_it_changes_eager_ones(name):
    state, read, change = STATES[name]
    plain = make(state(), read)
    model = planned(copy.deepcopy(plain))
    for number in range(3):
        if number == 1:
            change(plain)
            change(model)
        assert_equal(step(model), step(plain))
    assert planned_runs(model) == 3
    if isinstance(plain.state, Counter | Lazy):
        assert vars(model.state) == vars(plain.state)


def test_a_capture_leaves_globals_that_the_forward_pass_reads_as_they_are():
    before = dict(REGISTRY)
    model = planned(make(None, lambda m: REGISTRY["act"]()(X)))
    assert before == REGISTRY
    assert REGISTRY["act"] is nn.Tanh
    assert_equal(step(model), step(make(None, lambda m: torch.tanh(X))))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_wrapper_that_is_put_around_forward_later_runs_once(mode):
    plain, model, calls = make(), planned(make()), []
    for each in (plain, model):
        forward = each.forward
        each.forward = lambda x, forward=forward: 2 * forward(x)
        each.layer.register_forward_hook(lambda *_: calls.append(1))
        each.train(mode == "train")
    assert_equal(step(model), step(plain))
    assert len(calls) == 2


def test_a_message_that_a_logger_writes_once_breaks_no_graph(monkeypatch):
    monkeypatch.setattr(logging.Logger, "warning_once", functools.lru_cache(logging.Logger.warning), raising=False)
    logger = logging.getLogger("front end")

    def read(model):
        logger.warning_once("told")
        return 1.0

    assert_equal(step(planned(make(None, read))), step(make()))


def test_a_step_that_is_no_longer_one_graph_is_planned_in_parts_with_one_warning():
    def read(model):
        return model.layer(X) * (3.0 if model.state and model.layer.weight.sum() < 100 else 1.0)

    plain, model = make(False, read), planned(make(False, read))
    for each in (plain, model):
        each.state = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_equal(step(model), step(plain))
    told = [str(each.message) for each in caught if "planned one by one" in str(each.message)]
    assert len(told) == 1
    assert "test_front_end.py" in told[0]
    assert planned_runs(model) >= 4


def test_where_torch_compile_traces_nothing_steps_run_as_written_with_one_warning():
    model, expected = planned(make()), step(make())
    with warnings.catch_warnings(record=True) as caught, Ops() as mode:
        warnings.simplefilter("always")
        assert_equal(step(model), expected)
        step(model)
    assert len([each for each in caught if "Ops, a TorchDispatchMode, is active" in str(each.message)]) == 1
    assert mode.count > 0
    assert planned_runs(model) == 0
    with Ops(), pytest.raises(CaptureError, match="can't be captured now: Ops"):
        planned(make())
    with torch._dynamo.config.patch(disable=True), pytest.raises(CaptureError, match="torch.compile is switched off"):
        planned(make())
    with torch.inference_mode(), pytest.raises(CaptureError, match="torch.inference_mode is on"):
        planned(make())


def test_wrappers_share_no_code_so_that_recompilations_of_models_are_counted_apart():
    one, other = (compiled(function, print, fullgraph=True)._torchdynamo_orig_callable for function in (abs, max))
    assert one.__code__ is not other.__code__


def test_hooks_of_all_modules_that_are_registered_later_run_with_one_warning():
    plain, model, calls = make(), planned(make()), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, x, y: calls.append(module) or 2 * y)
    try:
        expected = step(plain)
        with pytest.warns(UserWarning, match="hooks of all modules are registered"):
            assert_equal(step(model), expected)
        with pytest.raises(CaptureError, match="hooks of all modules"):
            planned(make())
    finally:
        handle.remove()
    assert calls == [plain.layer, plain, model.layer, model]
    assert_equal(step(model), step(plain))
    assert planned_runs(model) == 1


def test_a_step_with_a_backward_hook_runs_as_written_and_by_its_plan_once_the_hook_is_removed():
    plain, model, calls = make(), planned(make()), []
    expected = step(plain)
    for register in (model.layer.register_full_backward_hook, model.layer.register_full_backward_pre_hook):
        runs, hook = planned_runs(model), register(lambda *_: calls.append(1))
        model._compiled_call_impl._told.clear()
        with pytest.warns(UserWarning, match="ran as written, outside of the budget: backward hooks of modules"):
            assert_equal(step(model), expected)
        with pytest.raises(CaptureError, match="can't be captured now: backward hooks of modules"):
            planned(copy.deepcopy(model))
        hook.remove()
        assert_equal(step(model), expected)
        assert planned_runs(model) == runs + 1
    assert calls == [1, 1]


def _positive(model):
    if model.state < 0:
        raise ZeroDivisionError("the state is negative")
    return model.state


@pytest.mark.parametrize(
    ("args", "state", "error"),
    [
        ((X,), -1.0, ZeroDivisionError),
        ((X[:, :3],), 1.0, RuntimeError),
        ((X.to("meta"),), 1.0, RuntimeError),
        ((), 1.0, TypeError),
    ],
    ids=["code", "shape", "device", "arguments"],
)
def test_an_exception_of_the_models_own_leaves_the_plan_as_it_is(args, state, error, recwarn):
    plain, model = make(1.0, _positive), planned(make(1.0, _positive))
    step(model)
    for _ in range(2):
        model.state = plain.state = state
        with pytest.raises(error) as expected:
            plain(*args)
        with pytest.raises(error) as found:
            model(*args)
        assert str(found.value) == str(expected.value)
        model.state = plain.state = 1.0
        assert_equal(step(model), step(plain))
    assert planned_runs(model) == 3
    assert len(model._compiled_call_impl.plans) == 1
    assert not recwarn


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_planned_model_goes_with_its_last_reference(is_removed):
    model = planned(make())
    step(model)
    if is_removed:
        remove_checkpointing(model)
    model, gone = None, weakref.ref(model)
    gc.collect()
    assert gone() is None


def test_a_step_that_is_whole_again_has_the_whole_budget():
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))]
    model = nn.Sequential(*layers)
    planned_for(model, X, "1MiB")
    hook = model[3].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.warns(UserWarning, match="no longer one graph"):
        model(X).sum().backward()
    hook.remove()
    for rows in (X, X[:-1], X[:-2]):
        model(rows).sum().backward()
    assert model._compiled_call_impl.plans[-1].budget_bytes == 2**20
