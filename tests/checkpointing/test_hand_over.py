"""Each gradient is handed over when it is ready: hooks, sums and optimizers in the backward pass work as in eager."""

import torch
from measured_peak import MeasuredPeak
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.checkpointing import checkpoint_model

X, TANGENT = torch.randn(32, 64), torch.ones(32, 64)
# of the plain step's peak; None for the plain step itself
BUDGETS = (None, "100%")


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))


def planned(model, budget):
    if budget is not None:
        checkpoint_model(model, X, budget=budget, strategy="chen2016_sqrt")
    return model


class Ops(TorchDispatchMode):
    """Counts what torch runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def arrivals(model):
    """For each parameter, in the order of arrival, its name and the part of the backward pass that was over."""
    found = []
    with Ops() as ops:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append((name, ops.count)))
        out = model(X)
        ops.count = 0
        out.backward(TANGENT)
    return [(name, count / ops.count) for name, count in found]


def test_gradients_arrive_while_the_backward_pass_runs():
    eager, ours = arrivals(layers()), arrivals(planned(layers(), "100%"))
    assert eager[0][1] < 0.2
    assert ours[0][1] < 0.2
    layer = [name.partition(".")[0] for name, _ in ours]
    assert layer == [name.partition(".")[0] for name, _ in eager] == sorted(layer, key=int, reverse=True)


def stepping(model):
    """An optimizer in the backward pass: it takes each gradient as soon as it is there."""

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return model


def peak_of(model):
    there = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with MeasuredPeak(there, X, TANGENT) as measured:
        model(X).backward(TANGENT)
    return measured.peak


def test_an_optimizer_in_the_backward_pass_frees_gradients():
    eager, ours = stepping(layers()), stepping(planned(layers(), "100%"))
    assert peak_of(ours) <= peak_of(eager)
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(theirs, mine)


def test_a_second_micro_batch_takes_what_it_takes_in_eager():
    eager, ours = layers(), planned(layers(), "100%")
    (first, *later), (first_of_eager, *later_of_eager) = ([peak_of(model) for _ in range(3)] for model in (ours, eager))
    assert first == first_of_eager
    assert max(later) <= min(later_of_eager) < first
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(theirs.grad, mine.grad)
