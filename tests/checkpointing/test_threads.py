"""A planned model in several threads, and calls of its own forward from within."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model, checkpoint_step, remove_checkpointing

X = torch.randn(6, 8)


def is_planned(output):
    return "_Run" in str(output.grad_fn)


class Waits(nn.Module):
    """An evaluation that is under way until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.at_work.set()
            self.go_on.wait(20)
        return self.layers(x)


@pytest.mark.parametrize("nested", [False, True], ids=["model", "step"])
def test_training_is_planned_while_another_thread_evaluates(nested):
    model = Waits()
    reference = copy.deepcopy(model)
    Waits.at_work, Waits.go_on = threading.Event(), threading.Event()
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    replaced, found = vars(model)["forward"], []
    step = checkpoint_step(model, None, X, budget="100%", strategy="chen2016_sqrt") if nested else model

    def evaluate():
        with torch.no_grad():
            found.append(step(X))

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert Waits.at_work.wait(60)
    outputs, present = [model(X) for _ in range(3)], vars(model).get("forward")
    Waits.go_on.set()
    thread.join(60)
    assert present is replaced
    assert all(map(is_planned, outputs))
    assert found[0].grad_fn is None
    assert torch.equal(found[0], reference(X))


class AsksItsParent(nn.Module):
    """A part that calls the whole model again."""

    def __init__(self, parent):
        super().__init__()
        self.parents = (parent,)

    def forward(self, x):
        (parent,) = self.parents
        return parent.forward(x, depth=1) + parent(x, depth=1)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.part = AsksItsParent(self)

    def forward(self, x, depth=0):
        x = torch.tanh(self.layer(x))
        return x if depth else self.part(x)


def test_a_part_may_call_the_whole_model():
    model = Recursive()
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_planned(each(X))
        assert torch.equal(each(X), reference(X))
        each.zero_grad()
        each(X).sum().backward()
        assert all(weight.grad is not None for weight in each.parameters())
        with torch.no_grad():
            assert torch.equal(each(X), reference(X))
        each.eval()
        assert not is_planned(each(X))


def test_a_forward_of_the_instance_is_called_as_it_was():
    model = nn.Linear(8, 8)
    model.forward = lambda x: nn.functional.linear(x, model.weight * 2)
    own = model.forward
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    assert is_planned(model(X))
    with torch.no_grad():
        assert torch.equal(model(X), own(X))
    assert remove_checkpointing(model).forward is own


def test_a_compiler_finds_the_model_as_it_was_written():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), reference(X))
    torch.compiler.reset()


def test_two_threads_capture_two_models_at_once():
    errors, start = [], threading.Barrier(2)

    def train():
        try:
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
            start.wait(20)
            for _ in range(2):
                checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
                model(X).sum().backward()
                remove_checkpointing(model)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
