"""Models that run by plan beside copies of them that run as written, and comparisons of the two."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.checkpointing import checkpoint_model


def planned(model, sample, budget="100%", strategy="chen2016_sqrt", **options):
    """Plan a model, by a strategy that takes no time."""
    checkpoint_model(model, sample, budget=budget, strategy=strategy, **options)
    return model


def planned_and_plain(model, sample, budget="100%", **options):
    """The model, planned, and a copy of it that runs as written."""
    reference = copy.deepcopy(model)
    return planned(model, sample, budget, **options), reference


def planned_runs(model):
    return model._compiled_call_impl.planned_runs


def mean_square(model, x):
    return model(x).square().mean()


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(ours, theirs):
    """The same bits, and no tensor where there is none."""
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (other is None), place
        assert mine is None or torch.equal(mine, other), place


def assert_same_gradients(model, reference):
    assert_equal(gradients(model), gradients(reference))


def assert_same_step(model, reference, *inputs, loss=torch.sum, seed=0):
    """From one seed the same loss, gradients and buffers."""
    losses = []
    for each in (model, reference):
        torch.manual_seed(seed)
        losses.append(loss(each(*inputs)))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert_same_gradients(model, reference)
    assert_equal(model.buffers(), reference.buffers())


class Ops(TorchDispatchMode):
    """Counts the ops that torch runs; Dynamo compiles no forward pass under it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))
