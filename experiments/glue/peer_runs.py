"""Runs of the study in which the code of another project takes part; `experiments.glue.peers` has the command.

The code is loaded from checkouts, and replaces the linear layers that `convert_linears` would convert. Kept bytes count
the tensors that autograd's hooks see, and the tensors that a Python function of the graph has as attributes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from experiments.peers import fewbit
from rmm_linear.memory import SavedTensors, profile

from .settings import RunSettings
from .training import PreparedRun

# options of PyTorch's pass: a threshold in MiB that activations of a batch of 32 reach, and the dtype of the study
_PASS = {"size_in_mb": 1, "allowed_dtypes": "torch.float32"}
# without this option, the forward pass scales its FP8 numbers, and the backward pass reads them without the scale
_SCALED = {**_PASS, "use_scaling": True}


@dataclass(frozen=True)
class Peer:
    """Code of another project, which `install` brings into the model of a prepared run."""

    name: str
    install: Callable[[PeerRun], Any]
    # None for torch's own pass
    checkout: Path | None = None
    pad_multiple: int = 0
    # whether one task and seed are enough
    is_run_once: bool = False


class PeerRun(PreparedRun):
    """A run of the study, exact until `install`, whose batches bring the numbers of their samples."""

    def __init__(self, peer: Peer, settings: RunSettings) -> None:
        super().__init__(settings, cpu=True)
        self._install, self.checkout = peer.install, peer.checkout or Path()
        # A peer sets them: `begin` gets the numbers of the samples before each forward pass of the training, and `end`
        # is called after the backward pass.
        self.begin: Callable[[list[int]], None] = lambda samples: None
        self.end: Callable[[], None] = lambda: None
        train = self.splits["train"]
        self.splits["train"] = train.add_column("sample", list(range(len(train))))
        self.model.register_forward_pre_hook(self._announced, with_kwargs=True)

    def _announced(self, model: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        samples = inputs.pop("sample", None)
        if model.training and samples is not None:
            self.begin(samples.tolist())
        return args, inputs

    def linears(self) -> list[tuple[str, Any]]:
        """Find the layers that `convert_linears` converts, and that have the rows for it."""
        with self.first_batch() as batch:
            calls = profile(self.model, **batch).linears
        names = [call.layer for call in calls if not call.stays and call.rows >= self.settings.min_rows]
        return [(name, self.model.get_submodule(name)) for name in names]

    @contextlib.contextmanager
    def first_batch(self) -> Iterator[dict[str, Tensor]]:
        """Put the model into training mode, and yield the first batch of the training split."""
        with self._training() as batch_at:
            yield batch_at(0)

    def _conversion(self) -> tuple[Any, ...]:
        self._install(self)
        return ()

    def _kept_bytes(self) -> int:
        with self.first_batch() as batch, SavedTensors(self.model) as kept:
            loss = self.model(**batch).loss
            # a function that saves tensors which other functions only hold, so that a storage counts once
            _Saved.apply(loss, *_held(loss))
        return int(kept.bytes)

    def _gradient_noise(self, trainer: Any) -> None:
        """Leave the measurement out: it comes before the training, and changes nothing of it."""

    def _trainer(self, checkpoints: Path, on_save: Any, conversion: Any, callbacks: tuple[TrainerCallback, ...]) -> Any:
        trainer = super()._trainer(checkpoints, on_save, conversion, (*callbacks, _EndOfStep(self)))
        trainer.args.remove_unused_columns = False
        return trainer

    def timed_step(self) -> Callable[[], float]:
        """Convert the model, and return a function that does a step on the first batch and returns its CPU seconds."""
        self._install(self)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate)
        with self.first_batch() as batch:
            pass
        self.model.train()

        def step() -> float:
            began = time.process_time()
            self.model(**batch).loss.backward()
            self.end()
            optimizer.step()
            optimizer.zero_grad()
            return time.process_time() - began

        return step


class _EndOfStep(TrainerCallback):
    def __init__(self, run: PeerRun) -> None:
        self._run = run

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._run.end()


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return loss.clone()


def _held(loss: Tensor) -> list[Tensor]:
    """Find the tensors that Python functions of a graph have as attributes, where hooks do not see them."""
    nodes, seen, found = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for value in getattr(node, "__dict__", {}).values():
            found += [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor)]
    return found


def peers(options: argparse.Namespace) -> list[Peer]:
    """Return all peers in the order of a seed's runs: peers that end soon with an error come first."""
    few, wta = options.fewbit, options.wtacrs
    return [
        Peer("WTA-CRS at 0.1, unchanged", functools.partial(_with_samples, ratio=0.1, is_patched=False), wta, 128),
        Peer("GACT", _with_gact, options.gact),
        Peer("exact, once more", lambda run: None, is_run_once=True),
        Peer("fewbit: gaussian at 0.1", functools.partial(_with_linear, kind="gaussian"), few),
        Peer("WTA-CRS at 0.1", functools.partial(_with_samples, ratio=0.1), wta, 128),
        Peer("fewbit: GELU in 3 bits, its native function", functools.partial(_with_gelu, is_native=True), few),
        Peer("fewbit: rademacher at 0.1", functools.partial(_with_linear, kind="rademacher"), few),
        Peer("WTA-CRS at 0.3", functools.partial(_with_samples, ratio=0.3), wta, 128),
        Peer("fewbit: dct at 0.1", functools.partial(_with_linear, kind="dct"), few, is_run_once=True),
        Peer("fewbit: GELU in 3 bits", _with_gelu, few, is_run_once=True),
        Peer("torch.compile, activations in FP8", functools.partial(_compiled, quantization=_SCALED), pad_multiple=64),
        Peer("torch.compile", _compiled, pad_multiple=64, is_run_once=True),
        Peer("torch.compile, FP8 by default", functools.partial(_compiled, quantization=_PASS), None, 64, True),
    ]


def _package(folder: Path, name: str) -> Any:
    """Import a package from a checkout anew: parts of it may be loaded, and have the state of another run."""
    top = name.partition(".")[0]
    for loaded in [each for each in sys.modules if each.partition(".")[0] == top]:
        del sys.modules[loaded]
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        return importlib.import_module(name)


def _with_gact(run: PeerRun) -> None:
    _package(run.checkout / "gact", "gact")
    raise NotImplementedError("GACT's extension loads here, and no run with it is written")


def _with_linear(run: PeerRun, kind: str) -> None:
    (function,) = (layer for name, layer in fewbit(run.checkout) if name.endswith(kind))
    for _, each in run.linears():

        def forward(x: Tensor, layer: Any = each) -> Tensor:
            # its layers draw in evaluation as well, which changes no output
            return (function if layer.training else nn.functional.linear)(x, layer.weight, layer.bias)

        each.forward = forward


def _with_gelu(run: PeerRun, is_native: bool = False) -> None:
    package = _package(run.checkout, "fewbit")
    borders, levels = importlib.import_module("fewbit.functional.activations").store.get("gelu", 3)

    def native(x: Tensor) -> Any:
        return torch.ops.fewbit.gelu(x, borders[1:-1], levels)

    encoder: Any = run.model.base_model.encoder
    for layer in encoder.layer:
        layer.intermediate.intermediate_act_fn.forward = native if is_native else package.GELU().forward


def _with_samples(run: PeerRun, ratio: float, is_patched: bool = True) -> None:
    """Install WTA-CRS with the switches of its scripts, and drive its cache of norms as its trainer does."""
    package = _package(run.checkout, "seq2seq.approxlinear")
    scheme = importlib.import_module("seq2seq.approxlinear.scheme").Scheme
    config = package.ApproxLinearConfig()
    config.sampling_ratio, config.deter_ratio, config.mix_replacement = ratio, 0, True
    for name, layer in run.linears():
        ours = package.ApproxLinear(layer.in_features, layer.out_features, layer.bias is not None, config=config)
        ours.weight, ours.bias = layer.weight, layer.bias
        run.model.set_submodule(name, ours)

    def patched() -> contextlib.ExitStack:
        # its cache uses a name that NumPy has dropped, and copies norms to a GPU
        stack = contextlib.ExitStack()
        if is_patched:
            stack.enter_context(mock.patch.object(np, "int", int, create=True))
            stack.enter_context(mock.patch.object(Tensor, "cuda", lambda tensor: tensor))
        return stack

    with run.first_batch() as batch, torch.no_grad(), patched():
        scheme.num_samples = len(run.splits["train"])
        # each layer finds its place in the cache in a first forward pass
        run.model(**batch)
        scheme._init_buffer()

    def begin(samples: list[int]) -> None:
        scheme.batch = samples
        with patched():
            scheme.fetch_data()

    run.begin, run.end = begin, scheme.step


def _compiled(run: PeerRun, quantization: dict[str, Any] | None = None) -> None:
    options: dict[str, Any] = {}
    if quantization:
        options["post_grad_fusion_options"] = {"activation_quantization_aten_pass": quantization}
    torch.compiler.reset()
    # one graph a length: a size that is not a number is never above the pass's threshold
    exact, ours = run.model.forward, torch.compile(run.model.forward, dynamic=False, options=options)

    @functools.wraps(exact)
    def forward(*args: Any, **inputs: Any) -> Any:
        return (ours if run.model.training else exact)(*args, **inputs)

    run.model.forward = forward
