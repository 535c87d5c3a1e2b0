"""Planned models under torch.func and forward-mode differentiation: they run as they were written."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from rmm_linear.checkpointing import checkpoint_model

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    return model, plain


def tangent(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


WAYS = {
    "forward mode": tangent,
    "jvp": lambda model: torch.func.jvp(model, (X,), (torch.ones_like(X),))[1],
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "jacrev": lambda model: torch.func.jacrev(model)(X),
    "vmap": lambda model: torch.func.vmap(model)(X[None]),
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_see_the_model_as_it_was_written(models, way):
    model, plain = models
    assert torch.equal(WAYS[way](model), WAYS[way](plain))
    planned = model._compiled_call_impl.planned_runs
    assert torch.equal(model(X), plain(X))
    assert model._compiled_call_impl.planned_runs == planned + 1


def test_a_level_of_forward_mode_without_dual_tensors_is_no_transform():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with forward_ad.dual_level():
        plan = checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    assert plan.graph.forward_count < len(plan.graph.ops)


def test_gradients_that_are_mapped_over_are_right_or_refused(models):
    jacobians = []
    for model in models:
        y = model(X).sum(1)
        (jacobian,) = torch.autograd.grad(y, model[0].weight, torch.eye(4), is_grads_batched=True)
        jacobians.append(jacobian)
    torch.testing.assert_close(*jacobians)
