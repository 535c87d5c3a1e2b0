"""Planned models in several threads; under transforms and other compilers they run as they were written."""

import copy
import threading

import pytest
import torch
from planned_models import assert_same_gradients, assert_same_step, planned, planned_and_plain, planned_runs
from torch import nn
from torch.autograd import forward_ad

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return planned_and_plain(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), X)


def tangent(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


WAYS = {
    "forward mode": tangent,
    "jvp": lambda model: torch.func.jvp(model, (X,), (torch.ones_like(X),))[1],
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "jacrev": lambda model: torch.func.jacrev(model)(X),
    "vmap": lambda model: torch.func.vmap(model)(X[None]),
    "compiled around": lambda model: torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)(X),
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_see_the_model_as_it_was_written(models, way):
    model, plain = models
    before = planned_runs(model)
    assert torch.equal(WAYS[way](model), WAYS[way](plain))
    assert planned_runs(model) == before
    assert torch.equal(model(X), plain(X))
    assert planned_runs(model) == before + 1


def test_a_level_of_forward_mode_without_dual_tensors_is_no_transform():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with forward_ad.dual_level():
        (plan,) = planned(model, X)._compiled_call_impl.plans
    assert plan.graph.forward_count < len(plan.graph.ops)


def test_gradients_that_are_mapped_over_are_right_or_refused(models):
    jacobians = []
    for model in models:
        y = model(X).sum(1)
        (jacobian,) = torch.autograd.grad(y, model[0].weight, torch.eye(4), is_grads_batched=True)
        jacobians.append(jacobian)
    torch.testing.assert_close(*jacobians)


def test_threads_train_planned_copies_at_once():
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    models, failures, start = [copy.deepcopy(plain) for _ in range(2)], [], threading.Barrier(2)
    plain(X).sum().backward()

    def train(model):
        try:
            start.wait(20)
            planned(model, X)
            for _ in range(3):
                model.zero_grad()
                model(X).sum().backward()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for model in models:
        assert planned_runs(model) == 3
        assert_same_gradients(model, plain)


def test_a_trace_in_another_thread_is_waited_for(monkeypatch):
    # torch keeps one flag for the traces of all threads
    if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        pytest.skip("this torch has no flag that all threads share")
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    model, plain = planned_and_plain(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), X)
    assert_same_step(model, plain, X)
    assert planned_runs(model) == 1
