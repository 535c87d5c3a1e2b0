"""Draws of a step's gradients, compared with the exact ones."""

import torch
from torch import nn

from rmm_linear.compiler.rewrites.codes import draw_keys


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Weighted(nn.Module):
    """A function that is linear in a model's results: gradients of the last layer depend on nothing that is drawn."""

    def __init__(self, model, weights):
        super().__init__()
        self.model = model
        self.register_buffer("weights", weights)

    def forward(self, x):
        return (self.model(x) * self.weights).sum()


def gradients(model, run, x):
    """The gradient of each parameter after one step, and of the input if it needs one."""
    model.zero_grad()
    x.grad = None
    run(x).backward()
    trained = dict(model.named_parameters()) | ({"x": x} if x.requires_grad else {})
    return {name: each.grad.double().clone() for name, each in trained.items()}


def judge(model, run, x, draws, exact=None):
    """For each estimated parameter: slope, its standard error, n |mean error|^2 / mean |error|^2, relative error."""
    exact = gradients(model, model, x) if exact is None else exact
    slopes = {name: [] for name in exact}
    totals, squares = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0)
    for _ in range(draws):
        for name, found in gradients(model, run, x).items():
            error = found - exact[name]
            slopes[name].append(float((found * exact[name]).sum() / exact[name].square().sum()))
            totals[name] = totals[name] + error
            squares[name] += float(error.square().sum())
    result = {}
    for name, each in slopes.items():
        relative = (squares[name] / draws / float(exact[name].square().sum())) ** 0.5
        # below, it is computed exactly, in another order
        if relative >= 1e-6:
            slope = torch.tensor(each, dtype=torch.float64)
            ratio = float(totals[name].square().sum()) / squares[name]
            result[name] = float(slope.mean()), float(slope.std() / draws**0.5), ratio, relative
    return result


def squared_errors(model, run, x, draws, name):
    """Of each draw, the squared error of a parameter's gradient."""
    exact = gradients(model, model, x)[name]
    return torch.stack([(gradients(model, run, x)[name] - exact).square().sum() for _ in range(draws)])


def keys_of_one(x, *, count):
    """A mistake in place of `rewrites._keys`: one key for all codes and sketches."""
    (key,) = draw_keys(torch.ops.rmm_linear.draw_seed.default(x, None), 1)
    return tuple(key.clone() for _ in range(count))
