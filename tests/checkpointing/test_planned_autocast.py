"""Planned steps under autocast: the bits of the plain step, wherever its backward pass runs, or a refusal."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_of import ModelOf, linears
from planned_models import assert_equal, planned_and_plain, planned_runs
from torch import nn

from rmm_linear.checkpointing import checkpoint_step
from rmm_linear.compiler import inductor_program, plans
from rmm_linear.errors import AutocastBackwardError

X = torch.randn(4, 16, 32)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def attention():
    """Attention with dropout, whose backward pass computes in other dtypes inside of autocast."""

    def run(it, x):
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in it.qkv(it.norm(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + it.out(mixed.transpose(1, 2).flatten(2))

    return ModelOf(run, norm=nn.LayerNorm(32), qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))


def repeated():
    """A layer that runs three times: autocast casts its weight once."""

    def run(it, x):
        for _ in range(3):
            x = torch.relu(it.layer(x))
        return it.head(x)

    return ModelOf(run, layer=nn.Linear(32, 32), head=nn.Linear(32, 8))


def mean_square(model, x):
    return model(x).float().square().mean()


def gradients(model, step, inside):
    torch.manual_seed(5)
    model.zero_grad()
    with autocast():
        loss = step(X)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def plain_gradients(model, inside):
    return gradients(model, lambda x: mean_square(model, x), inside)


def step_and_reference(model, is_cast=True):
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        step = checkpoint_step(model, mean_square, X, budget="100%", strategy="chen2016_sqrt")
    return step, reference


@pytest.mark.parametrize("kind", [attention, pytest.param(repeated, marks=pytest.mark.grid)])
def test_a_backward_pass_outside_of_autocast_has_the_plain_bits(kind):
    model = kind()
    step, reference = step_and_reference(model)
    for _ in range(2):
        assert_equal(gradients(model, step, inside=False), plain_gradients(reference, inside=False))
    # without autocast the step is another variant
    torch.manual_seed(6)
    ours = step(X)
    torch.manual_seed(6)
    assert torch.equal(ours, mean_square(reference, X))
    assert (len(step.plans), step.planned_runs) == (2, 3)


def test_a_backward_pass_inside_of_autocast_has_the_plain_bits_where_it_computes_the_same():
    model, reference = planned_and_plain(repeated(), X)
    for inside in (True, False, True):
        assert_equal(plain_gradients(model, inside), plain_gradients(reference, inside))
    assert planned_runs(model) == 3


@pytest.mark.parametrize("executor", ["exact", "inductor"])
def test_what_is_changed_in_the_graph_after_its_trace_lets_no_backward_pass_be_refused(executor, monkeypatch):
    monkeypatch.setattr(inductor_program, "compile_by_inductor", lambda module, *_, **__: lambda args: module(*args))
    monkeypatch.setattr(inductor_program, "measured_peak_bytes", lambda *_: 1)
    torch._dynamo.reset()

    # a gradient is copied into its weight's layout, a sigmoid computed again
    def changed(it, x):
        return torch.relu(it.layer(x)) * torch.sigmoid(x) + F.embedding((x[..., 0] > 0).long(), it.signs)

    model = ModelOf(changed, layer=nn.Linear(32, 32), signs=nn.Parameter(torch.rand(32, 2).t()))
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend="rmm_linear", options={"budget": "100%", "executor": executor})
    ours = gradients(model, lambda x: mean_square(run, x), inside=True)
    assert len(plans(model)) == 1
    torch.testing.assert_close(ours, plain_gradients(reference, inside=True))


def test_a_backward_pass_inside_of_autocast_that_computes_in_other_dtypes_is_refused_by_name():
    model = attention()
    step, reference = step_and_reference(model)
    for _ in range(2):
        with pytest.raises(AutocastBackwardError, match=r"inside of torch.autocast.*call it outside"):
            gradients(model, step, inside=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal(gradients(model, step, inside=False), plain_gradients(reference, inside=False))


def test_a_step_without_autocast_has_the_plain_bits_where_its_backward_pass_is_inside_of_it():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    step, reference = step_and_reference(model, is_cast=False)
    found = []
    for loss in (step(X), mean_square(reference, X)):
        with autocast():
            try:
                loss.backward()
            except AutocastBackwardError:
                found.append(None)
    ours, theirs = ([parameter.grad for parameter in each.parameters()] for each in (model, reference))
    assert found or all(map(torch.equal, ours, theirs))


def test_inputs_that_are_leaves_are_cast_once_and_others_for_each_use():
    parts = linears("a b c", 32)
    model, reference = planned_and_plain(ModelOf(lambda it, x: it.a(x) + it.b(x) + it.c(x), **parts), X)
    leaf = X.clone().requires_grad_()
    for is_leaf in (True, False):
        found = []
        for each in (model, reference):
            leaf.grad = None
            with autocast():
                loss = mean_square(each, leaf if is_leaf else leaf * 1)
            loss.backward()
            found.append(leaf.grad)
        assert torch.equal(*found)
