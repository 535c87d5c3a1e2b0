"""What would every candidate configuration cost each layer, in bytes and in noise? The data of an allocation.

A layer's x and g of a few batches tell the variances of all configurations, whatever the layer itself is configured to:
its output and its grad_input are exact, so that no layer's noise reaches another's x or g within a step.

Two evaluations serve many ratios. Nearly every sketch's variance is a + b / rank, with a and b from x and g alone
(`Sketch.variance_family`). What low-bit storage adds is about (a + b log rows of a group) / rank.
"""

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.layer import SketchedLayer
from rmm_linear.memory.unchanged import drop_gradients, unchanged
from rmm_linear.rows import sequences_of
from rmm_linear.sketches import Centered, LowBit, Sketch
from rmm_linear.sketches.centered import centred
from rmm_linear.variance.allocation import LayerProfile, NoiseProfile, Option
from rmm_linear.variance.gradient_noise import _rows, dealt_rows, gradient_noise
from rmm_linear.variance.probe import LayerProbe, _read_as

# Draws of S for what low-bit storage adds.
_DRAWS = 2
_EXACT = RMMConfig(ratio=1.0)
_S = TypeVar("_S")


def layer_options(
    x: Tensor, g: Tensor, configs: Sequence[RMMConfig], *, index: Tensor | None = None
) -> tuple[Option, ...]:
    """Return the bytes and the variance of each configuration, in order, on one layer's input and gradient.

    `x` (..., in) and `g` (..., out) are as in `gradient_noise`; so is `index`, for the candidates that leave padding
    out.
    """
    shape = x.shape
    x, g = _rows(x, g)
    valid_rows = x.shape[0] if index is None else index.numel()
    # those that deal the rows out alike
    alike: dict[tuple[bool, tuple[int, ...]], list[RMMConfig]] = {}
    for config in configs:
        alike.setdefault((config.skip_padding and index is not None, config.keep_tokens), []).append(config)
    variances: dict[RMMConfig, float] = {}
    for (skips, tokens), some in alike.items():
        variances |= _variances(*dealt_rows(x, g, shape, tokens, index if skips else None), some)
    sequences = sequences_of(shape)
    return tuple(
        Option(
            config=config,
            saved_bytes=config.saved_bytes(x.shape[0], x.shape[1], g.dtype, valid_rows, sequences),
            variance=variances[config],
        )
        for config in configs
    )


def _variances(x: Tensor, g: Tensor, kept: int, configs: Sequence[RMMConfig]) -> dict[RMMConfig, float]:
    rows = x.shape[0]
    sketched = {config: config.sketch_object for config in configs if config.sketches(rows + kept, kept)}
    families: dict[Hashable, list[Sketch]] = {}
    for sketch in dict.fromkeys(sketched.values()):
        families.setdefault(_family(sketch, rows), []).append(sketch)
    found: dict[Sketch, float] = {}
    for members in families.values():
        members.sort(key=lambda sketch: sketch.rank(rows))
        found.update(zip(members, _of_family(x, g, members), strict=True))
    return {config: found[sketched[config]] if config in sketched else 0.0 for config in configs}


def _family(sketch: Sketch, rows: int) -> Hashable:
    """Equal for sketches that differ in their ratio alone, and whose variances tell each other."""
    inner = sketch.inner if isinstance(sketch, Centered) else sketch
    plain, storage = (inner.inner, inner.storage) if isinstance(inner, LowBit) else (inner, None)
    family = None if plain is None else plain.variance_family(rows)
    return sketch if family is None else (type(sketch), storage, family)


def _of_family(x: Tensor, g: Tensor, members: Sequence[Sketch]) -> list[float]:
    """The closed forms: of the sketches without their storages, and of what these add."""
    ranks = [max(1, sketch.rank(x.shape[0])) for sketch in members]
    if isinstance(members[0], Centered):
        x, g = centred(x), centred(g)
    inner = [sketch.inner if isinstance(sketch, Centered) else sketch for sketch in members]
    low_bit = [sketch for sketch in inner if isinstance(sketch, LowBit)]
    plain = [sketch.inner for sketch in low_bit] or inner
    found = _along_ranks(
        plain,
        evaluate=lambda sketch: 0.0 if sketch is None else float(sketch.variance(x, g)),
        shapes=[(1.0, 1 / rank) for rank in ranks],
    )
    if not low_bit:
        return found
    rounding = _along_ranks(
        low_bit,
        evaluate=lambda sketch: float(replace(sketch, draws=_DRAWS).rounding_variance(x, g)),
        # The squared range of the rows in a group, and so that of a step, grows like the logarithm of their number.
        shapes=[(1 / rank, math.log(min(rank, low_bit[0].group))) for rank in ranks],
    )
    return list(map(operator.add, found, rounding))


def _along_ranks(
    sketches: Sequence[_S], *, evaluate: Callable[[_S], float], shapes: Sequence[tuple[float, float]]
) -> list[float]:
    """Return u (a + b v) of each sketch, (u, v) being its shape; of more than two, the ends alone are evaluated."""
    if len(sketches) <= 2:
        return [evaluate(sketch) for sketch in sketches]
    (low_u, low_v), (high_u, high_v) = shapes[0], shapes[-1]
    low, high = evaluate(sketches[0]) / low_u, evaluate(sketches[-1]) / high_u
    shares = [(v - high_v) / (low_v - high_v) if low_v != high_v else 0.0 for _, v in shapes]
    return [max(0.0, u * (high + share * (low - high))) for (u, _), share in zip(shapes, shares, strict=True)]


@dataclass
class _Sums:
    """One layer's measurements, added up."""

    batches: int = 0
    gradient_squared: float = 0.0
    minibatch_variance: float = 0.0
    group: str | None = None
    # configuration -> bytes, variance
    options: dict[RMMConfig, list[float]] = field(default_factory=dict)


class ProfileBuilder:
    """Averages measurements of layers, made one at a time in whatever order, into a `NoiseProfile`.

    Its length is the number of layers measured so far.
    """

    def __init__(self) -> None:
        self._layers: dict[str, _Sums] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def add(
        self,
        name: str,
        x: Tensor,
        g: Tensor,
        configs: Sequence[RMMConfig],
        *,
        index: Tensor | None = None,
        group: str | None = None,
    ) -> None:
        """Add one layer's input and gradient of one batch; the arguments are those of `layer_options`.

        The minibatch's variance is that over the sequences, the first dimension of `x`; over the rows for a matrix, and
        for a single sequence; 0 for a single row. A gradient that is not finite, which a `GradScaler` skips, is left
        out.

        Raises:
            ValueError: If shapes do not fit, or the candidates are other ones than before.
        """
        sums = self._layers.get(name, _Sums())
        if sums.batches and set(sums.options) != set(configs):
            raise ValueError(f"{name!r} was measured for other configurations before; pass the same ones each time")
        noise = gradient_noise(x, g, _EXACT)
        options = layer_options(x, g, configs, index=index)
        # an infinity where g is zero leaves the gradient finite, and no variance
        if not all(
            math.isfinite(value) for value in (noise.gradient_squared, *(option.variance for option in options))
        ):
            return
        minibatch = noise.sequence_variance
        if minibatch is None or math.isnan(minibatch):
            minibatch = noise.row_variance
        sums.batches += 1
        sums.group = group
        sums.gradient_squared += noise.gradient_squared
        # rounding may leave less than nothing of what is 0
        sums.minibatch_variance += 0.0 if math.isnan(minibatch) else max(0.0, minibatch)
        for option in options:
            each = sums.options.setdefault(option.config, [0.0, 0.0])
            each[0] += option.saved_bytes
            each[1] += max(0.0, option.variance)
        self._layers[name] = sums

    def build(self) -> NoiseProfile:
        """Return the means, the layers in the order in which they were first added.

        Raises:
            ValueError: If nothing was added.
        """
        if not self._layers:
            raise ValueError("no layer was measured; run a forward and a backward pass of the model in training mode")
        return NoiseProfile(
            tuple(
                LayerProfile(
                    name=name,
                    gradient_squared=sums.gradient_squared / sums.batches,
                    minibatch_variance=sums.minibatch_variance / sums.batches,
                    group=sums.group,
                    options=tuple(
                        Option(config, round(kept / sums.batches), variance / sums.batches)
                        for config, (kept, variance) in sums.options.items()
                    ),
                )
                for name, sums in self._layers.items()
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured so far."""
        return {
            name: {**vars(sums), "options": [[config.to_dict(), *each] for config, each in sums.options.items()]}
            for name, sums in self._layers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the builder was that returned this `state_dict`.

        Raises:
            ValueError: If the state is something else.
        """
        with _read_as(type(self)):
            layers = {name: _Sums(**sums) for name, sums in state.items()}
            for sums in layers.values():
                pairs: Any = sums.options
                sums.options = {RMMConfig.from_dict(config): each for config, *each in pairs}
            self._layers = layers


def profile_noise(
    model: nn.Module, runs: Sequence[Callable[[], object]], configs: Sequence[RMMConfig], *, layers_at_once: int = 4
) -> NoiseProfile:
    """Measure, on a few batches, what each configuration would cost each sketched layer.

    Gradients, buffers and the random state are afterwards what they were before, and all runs see the same random
    numbers. Layers that get no gradient are left out.

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
        runs: A callable a batch, which runs forward and backward pass of that batch, and no optimizer step.
        configs: Candidates, the same for all layers. Those that leave padding out are measured without it where the
            model announces its mask to the layer (`rmm_linear.padding`).
        layers_at_once: Layers whose inputs may be held at the same time; each batch is run once for so many.

    Returns:
        Means over the batches.

    Raises:
        ValueError: If the model is compiled, not in training mode or has no sketched layer, an argument is empty or
            `layers_at_once` below 1, or no layer got a gradient.
    """
    if not model.training:
        raise ValueError("the model is in eval mode, where nothing is sketched; call model.train() first")
    if not runs or not configs:
        raise ValueError(f"{len(runs)} runs and {len(configs)} configurations; pass at least one of each")
    if isinstance(layers_at_once, bool) or not isinstance(layers_at_once, Integral) or layers_at_once < 1:
        raise ValueError(f"layers_at_once={layers_at_once!r} is not a positive int; pass 1 for the least memory")
    builder = ProfileBuilder()

    def measure(name: str, layer: SketchedLayer, x: Tensor, g: Tensor, index: Tensor | None) -> None:
        builder.add(name, x, g, configs, index=index, group=probe.groups.get(name))

    probe = LayerProbe(model, measure)
    names = list(probe.layers)
    devices = {parameter.device for parameter in model.parameters()}
    generators = [device.index for device in devices if device.type == "cuda"]
    with unchanged(model):
        try:
            for run in runs:
                for start in range(0, len(names), int(layers_at_once)):
                    probe.watch(names[start : start + int(layers_at_once)])
                    with torch.random.fork_rng(devices=generators):
                        run()
                    drop_gradients(model)
        finally:
            probe.close()
    return builder.build()
