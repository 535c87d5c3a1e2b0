"""The noise of a whole step's gradient, measured: the variance over the step's own draws, and over minibatches.

It works for any step: sketches, codes, dropout, in eager mode and compiled. Two batches have two gradients each, a, b
and a', b', which differ by the step's draws alone:

    E||a - b||^2 / 2            the step's variance
    E<a - a', b - b'> / 2       the minibatch's variance; the step's is not in it, for the draws are independent
    E<a, b>                     the squared gradient of a batch
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.compiler.autocasting import autocast_as
from rmm_linear.memory.unchanged import unchanged
from rmm_linear.variance.gradient_noise import Measured, _ratio

_LEAST_BATCHES = 4


@dataclass(frozen=True)
class StepNoise:
    """Variances of the gradient of all parameters, of the size of the squared gradient; means over the batches.

    Attributes:
        gradient_squared: Squared norm of a batch's gradient; the step's variance is not in it.
        step: Variance over the step's own draws.
        minibatch: Variance over batches, without the step's own; by chance below 0 if there are few.
        by_parameter: The step's variance, by the name of the parameter.
    """

    gradient_squared: float
    step: Measured
    minibatch: Measured
    by_parameter: Mapping[str, float]

    @property
    def relative_variance(self) -> float:
        """The step's variance over the squared gradient."""
        return _ratio(self.step.value, self.gradient_squared)

    @property
    def noise_ratio(self) -> float:
        """The step's variance over the minibatch's."""
        return _ratio(self.step.value, self.minibatch.value)


def measure_step_noise(
    model: nn.Module, batches: Sequence[Any], *, loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
) -> StepNoise:
    """Measure the noise of a step's gradient by repeating the step.

    Each batch takes two forward and backward passes; four gradients are in memory. The gradients of the parameters, the
    buffers and the random state are afterwards as they were. Standard errors are over batches (of the step) and pairs
    of them (of the minibatch).

    Args:
        model: The model, in the mode in which it is trained, or the model that torch.compile returned for it.
        batches: Minibatches of one size, four or more; if their number is odd, the last is left out.
        loss_fn: Called as `loss_fn(model, batch)`, returns the loss; `model(**batch).loss` if None.

    Raises:
        ValueError: If there are fewer batches, or no parameter requires a gradient.
    """
    if len(batches) < _LEAST_BATCHES:
        raise ValueError(f"{len(batches)} batches leave no standard error: pass at least {_LEAST_BATCHES}")
    products, minibatch, step = [], [], []
    by_parameter: dict[str, list[float]] = {}
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient")
    with unchanged(model):
        for at in range(0, len(batches) - 1, 2):
            draws = [[gradient_of(model, batch, loss_fn) for _ in range(2)] for batch in batches[at : at + 2]]
            for a, b in draws:
                own = {name: _product(a[name] - b[name], a[name] - b[name]) / 2 for name in a}
                step.append(sum(own.values()))
                products.append(sum(_product(a[name], b[name]) for name in a))
                for name, variance in own.items():
                    by_parameter.setdefault(name, []).append(variance)
            (a, b), (c, d) = draws
            minibatch.append(sum(_product(a[name] - c[name], b[name] - d[name]) for name in a) / 2)
    return StepNoise(
        gradient_squared=statistics.fmean(products),
        step=_measured(step),
        minibatch=_measured(minibatch),
        by_parameter={name: statistics.fmean(variances) for name, variances in by_parameter.items()},
    )


def _product(first: Tensor, second: Tensor) -> float:
    return float((first.double() * second).sum())


def gradient_of(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor] | None) -> dict[str, Tensor]:
    """Run a step, and return the gradients by the names of their parameters, whose `.grad` is None afterwards."""
    loss = model(**batch).loss if loss_fn is None else loss_fn(model, batch)
    # as in training: a backward pass is no part of the autocast that the forward pass runs under
    with autocast_as((), {loss.device.type, *(parameter.device.type for parameter in model.parameters())}):
        loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
    return found


def _measured(values: Sequence[float]) -> Measured:
    mean = statistics.fmean(values)
    # of numbers that are not finite there is no deviation
    deviation = statistics.stdev(values) if math.isfinite(mean) else math.nan
    return Measured(mean, deviation / len(values) ** 0.5, len(values))
