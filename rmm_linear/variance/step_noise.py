"""The noise of a whole step's gradient, measured: the variance over the step's own draws, and over minibatches.

The method works for any step: with sketches, codes or dropout, in eager mode and compiled. Each of two batches has two
gradients, a, b and a', b', which differ by the step's draws alone:

    E||a - b||^2 / 2            the step's variance
    E<a - a', b - b'> / 2       the minibatch's variance, without the step's, since the draws are independent
    E<a, b>                     the squared gradient of a batch
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.autocasting import autocast_as
from rmm_linear.memory.unchanged import unchanged
from rmm_linear.variance.gradient_noise import Measured, _ratio

_LEAST_BATCHES = 4


@dataclass(frozen=True)
class StepNoise:
    """Variances of the gradient of all parameters, on the scale of the squared gradient; means over the batches.

    Attributes:
        gradient_squared: Squared norm of a batch's gradient, without the step's variance.
        step: Variance over the step's own draws.
        minibatch: Variance over batches, without the step's variance; it may be below 0 by chance for few batches.
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
    buffers and the random state are restored. Standard errors are over batches (for the step) and pairs of batches (for
    the minibatch).

    Args:
        model: The model in its training mode, or the compiled model that torch.compile returned.
        batches: Minibatches of one size, four or more; if their number is odd, the last is left out.
        loss_fn: Called as `loss_fn(model, batch)`, returns the loss; `model(**batch).loss` if None.

    Raises:
        ValueError: If there are fewer than four batches, or no parameter requires a gradient.
    """
    return measured_until(model, batches, loss_fn, lambda noise: False)


def measured_until(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor] | None,
    is_enough: Callable[[StepNoise], bool],
) -> StepNoise:
    """Measure as `measure_step_noise` does; stop after the first four or more batches that are enough."""
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
            noise = StepNoise(
                gradient_squared=statistics.fmean(products),
                step=_measured(step),
                minibatch=_measured(minibatch),
                by_parameter={name: statistics.fmean(variances) for name, variances in by_parameter.items()},
            )
            if is_enough(noise):
                break
    return noise


def _product(first: Tensor, second: Tensor) -> float:
    double = first.to(torch.promote_types(first.dtype, torch.float64))
    return float((double.conj() * second).sum().real)


def gradient_of(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor] | None) -> dict[str, Tensor]:
    """Run a step, return the gradients by the names of their parameters, and set each `.grad` to None."""
    loss = model(**batch).loss if loss_fn is None else loss_fn(model, batch)
    # as in training: the backward pass runs outside the forward pass's autocast region
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
    # statistics.stdev fails for values that are not finite, and for one value
    deviation = statistics.stdev(values) if math.isfinite(mean) and len(values) > 1 else math.nan
    return Measured(mean, deviation / len(values) ** 0.5, len(values))
