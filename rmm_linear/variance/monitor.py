"""VarianceMonitor: measure the noise of the weight gradients of a model during training, layer by layer.

With L layers and `every=N`, each is measured once in N steps, at most ceil(L / N) in one step.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from rmm_linear import ops
from rmm_linear.layer import SketchedLayer
from rmm_linear.variance.gradient_noise import _ratio, gradient_noise
from rmm_linear.variance.probe import LayerProbe

# Draws of S for the variance of low-bit storage: its relative error is a few percent for one layer, less for the sum.
DRAWS = 2


@dataclass(frozen=True)
class NoiseRecord:
    """One layer's noise in one step; the minibatch's variance of a single sequence is nan.

    Attributes:
        step: Optimizer steps before this one.
        layer: Name of the layer.
        rows: Rows of its input, without the padding that the layer leaves out.
        gradient_squared: C = ||g^T x||^2, of the exact gradient.
        sketch_variance: V = E||estimate - g^T x||^2.
        minibatch_variance: M, over the sequences of the batch (the first dimension of the input), or over the rows of
            a matrix.
        relative_variance: V / C.
        noise_ratio: V / M.
        snr: max(C - M, 0) / (M + V).
        alpha: C / (||x||^2 ||g||^2).
    """

    step: int
    layer: str
    rows: int
    gradient_squared: float
    sketch_variance: float
    minibatch_variance: float
    relative_variance: float
    noise_ratio: float
    snr: float
    alpha: float


@dataclass(frozen=True)
class NoiseSummary:
    """The noise of all layers together, each by its latest record: C, V and M are summed over the layers.

    C - M estimates ||E G||^2 without bias, G being the gradient of a random minibatch: M estimates E||G - E G||^2.

    Attributes:
        relative_variance: sum V / sum C; noise inflates the gradient's norm by sqrt(1 + relative_variance).
        noise_ratio: sum V / sum M, the sketches' noise over the minibatch's; nan if no layer has an M.
        snr: max(sum C - sum M, 0) / (sum M + sum V), signal over noise; nan if no layer has an M.
    """

    relative_variance: float
    noise_ratio: float
    snr: float


class VarianceMonitor:
    """Measures the noise of a model's weight gradients while it trains.

    Call `step()` after each optimizer step. Records are made during the backward passes: `latest` has each layer's last
    record, `noise()` sums the records up, and the file at `path` has all records, as JSON lines. Records are closed
    forms of the input and the gradient at the layer's first call in a step; a monitor does not change the training.

    Warning:
        With a `GradScaler`, C, V and M are of the scaled loss: larger by the square of the scale. Ratios are unchanged.

    Args:
        model: A model with sketched layers, in eager mode.
        every: Steps in which each layer is measured once.
        path: JSON-lines file to which data-parallel rank 0 appends records, with null for numbers that are not finite;
            None for no file.

    Attributes:
        latest: The last record of each layer measured so far.

    Raises:
        ValueError: If the model is compiled or has no sketched layer, `every` is no positive int, or `path` is a
            folder.
    """

    def __init__(self, model: nn.Module, *, every: int = 50, path: str | os.PathLike[str] | None = None) -> None:
        # None after `close`: the probe refers to the layers
        self._probe: LayerProbe | None = LayerProbe(model, self._measure)
        self._layers = tuple(self._probe.layers)
        self._steps = 0
        self.latest: dict[str, NoiseRecord] = {}
        # ints, or tensors on the norms' device: counting must not synchronise
        self._observed: int | Tensor = 0
        self._clipped: int | Tensor = 0
        self._file: TextIO | None = None
        if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
            raise ValueError(f"every={every!r} is not a positive int; pass the steps from one sample to the next")
        self._every: int = int(every)
        if path is not None:
            self._file = _appended(Path(path))
        self._begin_step()

    def step(self) -> None:
        """End a training step; call it after each optimizer step. After `close` it has no effect."""
        self._steps += self._probe is not None
        self._begin_step()

    def _begin_step(self) -> None:
        if self._probe is not None:
            count, turn = len(self._layers), self._steps % self._every
            self._probe.watch(self._layers[turn * count // self._every : (turn + 1) * count // self._every])

    def _measure(self, name: str, layer: SketchedLayer, x: Tensor, g: Tensor, index: Tensor | None) -> None:
        noise = gradient_noise(x, g, layer.rmm_config, index=index, draws=DRAWS)
        c, v, m = noise.gradient_squared, noise.sketch_variance, noise.minibatch_variance
        record = NoiseRecord(
            step=self._steps,
            layer=name,
            rows=x.shape[:-1].numel() if index is None else index.numel(),
            gradient_squared=c,
            sketch_variance=v,
            minibatch_variance=m,
            relative_variance=noise.relative_variance,
            noise_ratio=noise.noise_ratio,
            snr=_snr(c, v, m),
            alpha=noise.alpha,
        )
        self.latest[name] = record
        if self._file is not None and ops.data_parallel_rank() == 0:
            self._file.write(json.dumps(_finite(asdict(record)), allow_nan=False) + "\n")
            self._file.flush()

    def noise(self) -> NoiseSummary | None:
        """Sum up the latest records of all layers; None before the first record."""
        found = self.latest.values()
        records = [record for record in found if math.isfinite(record.gradient_squared + record.sketch_variance)]
        if not records:
            return None
        known = [record for record in records if math.isfinite(record.minibatch_variance)]
        c, v, m = _sums(known)
        all_c, all_v, _ = _sums(records)
        return NoiseSummary(
            relative_variance=_ratio(all_v, all_c),
            noise_ratio=_ratio(v, m) if known else math.nan,
            snr=_snr(c, v, m) if known else math.nan,
        )

    def observe_gradient_norm(self, norm: float | Tensor, max_norm: float) -> None:
        """Count a step, and whether its gradient was clipped from `norm` to `max_norm`, without a synchronisation.

        A norm that is not finite is not counted: a `GradScaler` skips such a step.
        """
        norm = torch.as_tensor(norm).detach()
        self._observed = self._observed + norm.isfinite().long()
        self._clipped = self._clipped + (norm.isfinite() & (norm > max_norm)).long()

    @property
    def clip_fraction(self) -> float | None:
        """Part of the observed steps whose gradient was clipped; None before the first step."""
        observed = int(self._observed)
        return int(self._clipped) / observed if observed else None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and latest records, for a resumed run."""
        return {
            "steps": self._steps,
            "observed": int(self._observed),
            "clipped": int(self._clipped),
            "latest": [_finite(asdict(record)) for record in self.latest.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters and latest records of a `state_dict`, between two steps.

        Raises:
            ValueError: If the state is not of a monitor, or has records of layers that this model lacks.
        """
        try:
            steps, observed, clipped = (int(state[name]) for name in ("steps", "observed", "clipped"))
            latest = [_restored(record) for record in state["latest"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this is no state of VarianceMonitor ({type(error).__name__}: {error}); pass the result of"
                " state_dict()"
            ) from None
        if unknown := [record.layer for record in latest if record.layer not in self._layers]:
            raise ValueError(
                f"the state has a record of {unknown[0]!r}, which is no sketched layer of this model; convert the model"
                " as it was when the state was saved"
            )
        self._steps, self._observed, self._clipped = steps, observed, clipped
        self.latest = {record.layer: record for record in latest}
        self._begin_step()

    def close(self) -> None:
        """Remove the hooks from the model, and close the file; the records remain."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "VarianceMonitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sums(records: Sequence[NoiseRecord]) -> tuple[float, float, float]:
    return (
        math.fsum(record.gradient_squared for record in records),
        math.fsum(record.sketch_variance for record in records),
        math.fsum(record.minibatch_variance for record in records),
    )


def _snr(c: float, v: float, m: float) -> float:
    # no max(): max(nan, 0) depends on the order of its arguments
    return _ratio(0.0 if c <= m else c - m, m + v)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def _restored(record: Mapping[str, Any]) -> NoiseRecord:
    values: dict[str, Any] = {field.name: record[field.name] for field in fields(NoiseRecord)}
    return NoiseRecord(**(values | {name: math.nan for name, value in values.items() if value is None}))


def _appended(path: Path) -> TextIO | None:
    if path.is_dir():
        raise ValueError(f"path={str(path)!r} is a folder; pass the path of a file in it, such as noise.jsonl")
    if ops.data_parallel_rank() != 0:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8")
