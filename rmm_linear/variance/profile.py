"""Measure the bytes and the noise of every candidate configuration in each layer, for an allocation.

A layer's x and g of a few batches give the variances of all configurations, for any configuration of the layer itself:
its output and its grad_input are exact, so that no layer's noise reaches another layer's x or g within a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral

from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.layer import SketchedLayer
from rmm_linear.memory.unchanged import unchanged
from rmm_linear.rows import sequences_of
from rmm_linear.sketches.low_bit import with_draws
from rmm_linear.variance.allocation import LayerProfile, NoiseProfile, Option
from rmm_linear.variance.gradient_noise import dealt_rows, gradient_noise
from rmm_linear.variance.probe import LayerProbe

# Draws of S for the variance of low-bit storage.
_DRAWS = 2


def layer_options(
    x: Tensor, g: Tensor, configs: Sequence[RMMConfig], *, index: Tensor | None = None
) -> tuple[Option, ...]:
    """Return the bytes and the variance of each configuration, in order, on one layer's input and gradient.

    `x` (..., in), `g` (..., out) and `index` are as in `gradient_noise`; `index` applies to candidates with
    `skip_padding`.
    """
    rows, sequences = x.shape[:-1].numel(), sequences_of(x.shape)
    valid_rows = rows if index is None else index.numel()
    options = []
    for config in configs:
        some_x, some_g, kept = dealt_rows(x, g, config.keep_tokens, index if config.skip_padding else None)
        variance = 0.0
        if config.sketches(some_x.shape[0] + kept, kept):
            variance = float(with_draws(config.sketch_object, _DRAWS).variance(some_x, some_g))
        saved_bytes = config.saved_bytes(rows, x.shape[-1], g.dtype, valid_rows, sequences)
        options.append(Option(config, saved_bytes, variance))
    return tuple(options)


def _measured(x: Tensor, g: Tensor, configs: Sequence[RMMConfig], index: Tensor | None) -> LayerProfile | None:
    """Measure one layer, without a name, on one batch; None if its gradient is not finite."""
    noise = gradient_noise(x, g, RMMConfig(ratio=1.0))
    options = layer_options(x, g, configs, index=index)
    # an infinity of x in a row where g is zero leaves the gradient finite, but not the variance
    if not all(map(math.isfinite, (noise.gradient_squared, *(option.variance for option in options)))):
        return None
    minibatch = noise.sequence_variance
    if minibatch is None or math.isnan(minibatch):
        minibatch = noise.row_variance
    # rounding may give values slightly below 0
    minibatch = 0.0 if math.isnan(minibatch) else max(0.0, minibatch)
    options = tuple(replace(option, variance=max(0.0, option.variance)) for option in options)
    return LayerProfile("", noise.gradient_squared, minibatch, options)


def _mean(batches: list[LayerProfile]) -> LayerProfile:
    count, options = len(batches), []
    found = [{option.config: option for option in each.options} for each in batches]
    for config in found[0]:
        kept, variance = (sum(getattr(each[config], name) for each in found) for name in ("saved_bytes", "variance"))
        options.append(Option(config, round(kept / count), variance / count))
    return replace(
        batches[-1],
        gradient_squared=sum(each.gradient_squared for each in batches) / count,
        minibatch_variance=sum(each.minibatch_variance for each in batches) / count,
        options=tuple(options),
    )


def profile_noise(
    model: nn.Module, runs: Sequence[Callable[[], object]], configs: Sequence[RMMConfig], *, layers_at_once: int = 4
) -> NoiseProfile:
    """Measure, on a few batches, the bytes and the variance of each configuration in each sketched layer.

    Gradients, buffers and the random state are restored, and all runs draw the same random numbers. Layers that get no
    gradient are left out, and so is a batch's gradient that is not finite, which a `GradScaler` skips. The minibatch's
    variance is taken over the sequences, the first dimension of `x`; over the rows for a matrix and for a single
    sequence; it is 0 for a single row.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig, convert_linears
        >>> from rmm_linear.variance import profile_noise
        >>> model, x = convert_linears(torch.nn.Sequential(torch.nn.Linear(8, 4))), torch.randn(256, 8)
        >>> configs = [RMMConfig(ratio=ratio) for ratio in (0.1, 0.5, 1.0)]
        >>> profile = profile_noise(model, [lambda: model(x).square().sum().backward()], configs)
        >>> [option.variance > 0 for option in profile.layers[0].options]
        [True, True, False]

    Args:
        model: A model with sketched layers, in eager and in training mode.
        runs: One callable for each batch, which runs the batch's forward and backward pass, without an optimizer step.
        configs: Candidates, the same for all layers. Candidates with `skip_padding` are measured without padding if
            the model announces its mask to the layer (`rmm_linear.padding`).
        layers_at_once: Layers whose inputs may be held at the same time; each batch runs once for each such set.

    Returns:
        Means over the batches.

    Raises:
        ValueError: If the model is compiled, not in training mode or has no sketched layer, an argument is empty, two
            of `configs` are equal, `layers_at_once` is below 1, or no layer got a finite gradient.
    """
    if not model.training:
        raise ValueError("the model is in eval mode, in which no layer sketches; call model.train() first")
    if not runs or not configs:
        raise ValueError(f"{len(runs)} runs and {len(configs)} configurations; pass at least one of each")
    if len(set(configs)) < len(configs):
        raise ValueError(f"{len(configs)} configurations, and some are equal; pass each once")
    if isinstance(layers_at_once, bool) or not isinstance(layers_at_once, Integral) or layers_at_once < 1:
        raise ValueError(f"layers_at_once={layers_at_once!r} is not a positive int; pass 1 for the least memory")
    # the profiles of each layer, one for each batch
    found: dict[str, list[LayerProfile]] = {}

    def measure(name: str, layer: SketchedLayer, x: Tensor, g: Tensor, index: Tensor | None) -> None:
        measured = _measured(x, g, configs, index)
        if measured is not None:
            found.setdefault(name, []).append(replace(measured, name=name, group=probe.groups.get(name)))

    probe = LayerProbe(model, measure)
    names = list(probe.layers)
    try:
        for run in runs:
            for start in range(0, len(names), int(layers_at_once)):
                probe.watch(names[start : start + int(layers_at_once)])
                with unchanged(model):
                    run()
    finally:
        probe.close()
    if not found:
        raise ValueError("no layer got a finite gradient; run a forward and a backward pass in training mode")
    return NoiseProfile(tuple(map(_mean, found.values())))
