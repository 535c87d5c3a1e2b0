"""Fine-tune with the code of other projects in the study's harness, on a CPU: score, kept bytes and time of each.

    python -m experiments.glue.peers --model MODEL --data GLUE --fewbit FEWBIT --wtacrs WTACRS --gact GACT
    python -m experiments.glue.peers ... --time

FEWBIT, WTACRS and GACT are checkouts (`experiments.peers` has two of the addresses; the third is
https://github.com/LiuXiaoxuanPKU/GACT-ICML). Their code is loaded from these folders, and nothing of it is part of this
project. fewbit's activation functions need its native library beside its `__init__.py`:

    cmake -S FEWBIT -B BUILD -DCMAKE_PREFIX_PATH="$(python -c 'import torch.utils as u; print(u.cmake_prefix_path)')"
    cmake --build BUILD && cp BUILD/fewbit/libfewbit.so FEWBIT/fewbit/

Learning rate, epochs, batches and their order are the study's of the task and the seed, and the layers are those that
`convert_linears` would convert. A run that is finished, or that has failed, is a row at once, and is not run again.
Kept bytes are those that autograd's hooks see, and the tensors that a Python function of the graph has as attributes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from experiments.blocks import percent, table
from experiments.command_line import HarnessError, Parser, exit_status
from experiments.peers import RATIO, commit_of, fewbit, first_line
from experiments.provenance import origin
from experiments.rows import read_rows, write_rows
from rmm_linear import RMMConfig, convert_linears
from rmm_linear.memory import SavedTensors, profile

from .comparison import Quantiles
from .evidence import RESULTS as STUDY
from .evidence import difference_cell, evidence_of, read_study
from .settings import EXACT, RunSettings, load_named_config
from .training import PreparedRun, not_finite

RESULTS = Path(__file__).parent / "results"
FILE, TIMES = "peers.csv", "peers_time.csv"
AGAIN, COMPILED = "exact, once more", "torch.compile (Inductor)"
# methods of the study, by their names there -> their layers' configuration, None where there are none to time
_OURS = {
    "gaussian at 0.1": RMMConfig(ratio=RATIO, sketch="gaussian", center=False),
    "centered hadamard at 0.1": RMMConfig(ratio=RATIO),
    "centered hadamard at 1 in int4": RMMConfig(ratio=1.0, storage="int4"),
    "8-bit codes": None,
}
_PASS = {"size_in_mb": 1, "allowed_dtypes": "torch.float32"}
_ROUNDS = 20


@dataclass(frozen=True)
class Peer:
    """Code of another project.

    Attributes:
        name: In words.
        install: Called with a prepared run, whose model it changes.
        folder: The checkout, None for what comes with torch.
        pad_multiple: What the lengths of batches have to be a multiple of.
        is_run_once: Whether a run of one task and seed says all.
    """

    name: str
    install: Callable[[PeerRun], None]
    folder: Path | None = None
    pad_multiple: int = 0
    is_run_once: bool = False


class PeerRun(PreparedRun):
    """A run of the study, exact until `install`, whose batches bring the numbers of their samples."""

    def __init__(self, peer: Peer, settings: RunSettings) -> None:
        """Load everything."""
        super().__init__(settings, cpu=True)
        self.peer = peer
        # told the numbers of the samples before each forward pass of the training, and that its backward pass is over
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

    def linears(self) -> list[str]:
        """Name the layers that `convert_linears` converts, and that have the rows for it."""
        with self._training() as batch_at:
            calls = profile(self.model, **batch_at(0)).linears
        return [call.layer for call in calls if not call.stays and call.rows >= self.settings.min_rows]

    @contextlib.contextmanager
    def first_batch(self) -> Iterator[dict[str, Tensor]]:
        """Put the model into training mode, and yield the first batch of the training split."""
        with self._training() as batch_at:
            yield batch_at(0)

    def _conversion(self) -> tuple[Any, ...]:
        self.peer.install(self)
        return ()

    def _kept_bytes(self) -> int:
        with self._training() as batch_at, SavedTensors(self.model) as kept:
            loss = self.model(**batch_at(0)).loss
            # a function that saves what others only hold, so that a storage counts once
            _Saved.apply(loss, *_held(loss))
        return int(kept.bytes)

    def _gradient_noise(self, trainer: Any) -> None:
        """Nothing: it comes before the training, and changes nothing of it."""

    def _trainer(self, checkpoints: Path, on_save: Any, conversion: Any, callbacks: tuple[TrainerCallback, ...]) -> Any:
        trainer = super()._trainer(checkpoints, on_save, conversion, (*callbacks, _EndOfStep(self)))
        trainer.args.remove_unused_columns = False
        return trainer


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
    """All that is run, in the order of the table."""
    few, wta = options.fewbit, options.wtacrs
    return [
        Peer(AGAIN, lambda run: None, is_run_once=True),
        Peer("fewbit: gaussian at 0.1", functools.partial(_with_linear, few, "gaussian"), few),
        Peer("WTA-CRS at 0.1", functools.partial(_with_samples, wta, 0.1), wta, 128),
        Peer("fewbit: GELU in 3 bits, its native function", functools.partial(_with_gelu, few, is_native=True), few),
        Peer("fewbit: rademacher at 0.1", functools.partial(_with_linear, few, "rademacher"), few),
        Peer("WTA-CRS at 0.3", functools.partial(_with_samples, wta, 0.3), wta, 128),
        Peer("fewbit: dct at 0.1", functools.partial(_with_linear, few, "dct"), few, is_run_once=True),
        Peer("fewbit: GELU in 3 bits", functools.partial(_with_gelu, few), few, is_run_once=True),
        Peer("WTA-CRS at 0.1, unchanged", functools.partial(_with_samples, wta, 0.1, is_patched=False), wta, 128, True),
        Peer("GACT", lambda run: _package(options.gact / "gact", "gact"), options.gact, is_run_once=True),
        Peer("torch.compile, activations in FP8", functools.partial(_compiled, quantization=_PASS), None, 64),
        Peer(COMPILED, _compiled, None, 64, is_run_once=True),
    ]


def _package(folder: Path, name: str) -> Any:
    """Import a package from a checkout anew: parts of it may be loaded, and have the state of another run."""
    top = name.partition(".")[0]
    for loaded in [each for each in sys.modules if each.partition(".")[0] == top]:
        del sys.modules[loaded]
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        return importlib.import_module(name)


def _with_linear(folder: Path, kind: str, run: PeerRun) -> None:
    (function,) = (layer for name, layer in fewbit(folder) if name.endswith(kind))
    for name in run.linears():
        layer: Any = run.model.get_submodule(name)

        def forward(x: Tensor, layer: Any = layer) -> Tensor:
            # its layers draw in evaluation as well, which changes no output
            return (function if layer.training else nn.functional.linear)(x, layer.weight, layer.bias)

        layer.forward = forward


def _with_gelu(folder: Path, run: PeerRun, *, is_native: bool = False) -> None:
    package = _package(folder, "fewbit")
    borders, levels = importlib.import_module("fewbit.functional.activations").store.get("gelu", 3)

    def native(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.fewbit.gelu(x, borders[1:-1], levels)
        return found

    for layer in run.model.base_model.encoder.layer:
        layer.intermediate.intermediate_act_fn.forward = native if is_native else package.GELU().forward


def _with_samples(folder: Path, ratio: float, run: PeerRun, *, is_patched: bool = True) -> None:
    """Install WTA-CRS with the switches of its scripts, and drive its cache of norms as its trainer does."""
    package = _package(folder, "seq2seq.approxlinear")
    scheme = importlib.import_module("seq2seq.approxlinear.scheme").Scheme
    config = package.ApproxLinearConfig()
    config.sampling_ratio, config.deter_ratio, config.mix_replacement = ratio, 0, True
    for name in run.linears():
        layer: Any = run.model.get_submodule(name)
        ours = package.ApproxLinear(layer.in_features, layer.out_features, layer.bias is not None, config=config)
        ours.weight, ours.bias = layer.weight, layer.bias
        run.model.set_submodule(name, ours)

    def patched() -> contextlib.ExitStack:
        # its cache uses a name that NumPy has dropped, and copies what it reads to a GPU
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
    options = {"post_grad_fusion_options": {"activation_quantization_aten_pass": quantization}} if quantization else {}
    torch.compiler.reset()
    # one graph a length: a size that is not a number is never above the pass's threshold
    exact, ours = run.model.forward, torch.compile(run.model.forward, dynamic=False, options=options)

    @functools.wraps(exact)
    def forward(*args: Any, **inputs: Any) -> Any:
        return (ours if run.model.training else exact)(*args, **inputs)

    run.model.forward = forward


def outcome(peer: Peer, settings: RunSettings) -> dict[str, Any]:
    """Fine-tune with a peer: score, kept bytes over exact's, and the error of a run that fails."""
    found: dict[str, Any] = {"score": None, "kept": None, "error": None}
    try:
        with tempfile.TemporaryDirectory() as checkpoints:
            trained = PeerRun(peer, settings).train(Path(checkpoints))
    except HarnessError:
        raise
    # whatever it is, it is the result
    except Exception as error:
        traceback.print_exc()
        return {**found, "error": first_line(error)}
    kept = trained["kept_bytes"]
    lost = not_finite(trained)
    return {
        "score": trained["final"]["score"],
        "kept": kept["model"] / kept["exact_model"],
        "error": lost and f"diverged: {lost} is not finite at the end",
    }


def _settings(options: argparse.Namespace, task: str, seed: int, pad_multiple: int) -> RunSettings:
    model = {"model": options.model, "data": options.data, "pad_multiple": pad_multiple}
    return load_named_config("study").run(task=task, seed=seed, method=EXACT, **model)


def run_all(options: argparse.Namespace) -> None:
    """Do the runs that have no row, seed by seed."""
    # asked for before the runs, for later the files may differ from the code that runs
    path, made_by = options.results / FILE, origin()
    for seed in options.seeds:
        for task in options.tasks:
            for peer in peers(options):
                rows = read_rows(path) if path.exists() else []
                done = [row for row in rows if row["peer"] == peer.name]
                if any((row["task"], row["seed"]) == (task, seed) or row["error"] for row in done):
                    continue
                if done and peer.is_run_once:
                    continue
                names = {"peer": peer.name, "peer_commit": None if peer.folder is None else commit_of(peer.folder)}
                found = outcome(peer, _settings(options, task, seed, peer.pad_multiple))
                rows = read_rows(path) if path.exists() else []
                write_rows(path, [*rows, {**names, "task": task, "seed": seed, **found, **made_by}])
                print({**names, "task": task, "seed": seed, **found}, flush=True)


def time_all(options: argparse.Namespace) -> None:
    """Measure steps of all peers, of exact layers and of our sketches in turn, on one batch."""
    ours = [
        Peer(name, lambda run, config=config: _converted(run, config))
        for name, config in _OURS.items()
        if config is not None
    ]
    steps = {}
    for peer in (Peer(EXACT, lambda run: None), *ours, *peers(options)):
        run = PeerRun(peer, _settings(options, options.tasks[0], 0, 128))
        try:
            peer.install(run)
            steps[peer.name] = _step_of(run)
            for _ in range(2):
                steps[peer.name]()
        # its error has a row already
        except Exception:
            traceback.print_exc()
            steps.pop(peer.name, None)
    seconds = [{name: step() for name, step in steps.items()} for _ in range(_ROUNDS)]
    rows = []
    for name in steps:
        found = Quantiles.of([each[name] / each[EXACT] for each in seconds])
        times = {"time": found.median, "time_q20": found.low, "time_q80": found.high}
        rows.append({"name": name, **times, "seconds": statistics.median(each[name] for each in seconds), **origin()})
    write_rows(options.results / TIMES, rows)


def _converted(run: PeerRun, config: RMMConfig) -> None:
    convert_linears(run.model, config=config)


def _step_of(run: PeerRun) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-5)
    with run.first_batch() as batch:
        pass
    run.model.train()

    def step() -> float:
        began = time.perf_counter()
        run.model(**batch).loss.backward()
        run.end()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def peers_table(folder: Path = RESULTS, study: Path = STUDY) -> str:
    """Write the table of the committed rows beside the study's of the same tasks and seeds, in Markdown."""
    rows = read_rows(folder / FILE)
    times = {row["name"]: row for row in read_rows(folder / TIMES)} if (folder / TIMES).exists() else {}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    seeds = {row["seed"] for row in rows}
    results = [
        each for each in read_study(study) if each["config"]["task"] in tasks and each["config"]["seed"] in seeds
    ]
    # the device of these rows last: it counts where exact ran on several
    exact = {
        (each["config"]["task"], each["config"]["seed"]): each["final"]["score"]
        for each in sorted(results, key=lambda each: each["hardware"]["device"] == "cpu")
        if each["config"]["method"] == EXACT
    }
    lines = []
    for found in evidence_of(results):
        if found.name in _OURS:
            cells = [difference_cell(found.differences.get(task, ())) for task in tasks]
            lines.append([f"rmm_linear: {found.name}", *cells, percent(found.kept), _time_cell(times, found.name), ""])
    for name, commit in dict.fromkeys((row["peer"], row["peer_commit"]) for row in rows):
        own = [row for row in rows if row["peer"] == name]
        complete = [row for row in own if row["error"] is None]
        differences = {
            task: [100 * (row["score"] - exact[task, row["seed"]]) for row in complete if row["task"] == task]
            for task in tasks
        }
        kept = [row["kept"] for row in own if row["kept"] is not None]
        lines.append(
            [
                name + ("" if commit is None else f" ({commit})"),
                *(difference_cell(differences[task]) for task in tasks),
                percent(statistics.fmean(kept) if kept else None),
                _time_cell(times, name),
                next((row["error"] for row in own if row["error"]), ""),
            ]
        )
    header = ["method", *tasks, "keeps", "time of a step", "error"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return (
        f"{table(header, lines)}\n\nScore minus exact's of the same seed in points:"
        " mean over seeds ± half of the 95 % interval (number of seeds). Keeps: of what exact keeps on the same"
        " batch. Time: a step over one of eager exact layers, on one batch of 32 x 128; median and 20-80 % quantiles"
        f" of {_ROUNDS} rounds. Commit {commits}, torch {rows[0]['torch']}; rows of rmm_linear are the study's."
    )


def _time_cell(times: dict[str, dict[str, Any]], name: str) -> str:
    row = times.get(name)
    return "-" if row is None else f"{row['time']:.2f} ({row['time_q20']:.2f}-{row['time_q80']:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, or time all, and print the table."""
    parser = Parser(prog="python -m experiments.glue.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder that from_pretrained reads, or a name on the hub")
    parser.add_argument("--data", required=True, help="folder in the official GLUE layout")
    parser.add_argument("--fewbit", type=Path, required=True, help="checkout of fewbit")
    parser.add_argument("--wtacrs", type=Path, required=True, help="checkout of WTA-CRS")
    parser.add_argument("--gact", type=Path, required=True, help="checkout of GACT")
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "rte"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument(
        "--time", action="store_true", help="measure steps, where the machine is quiet, and train nothing"
    )

    def work(options: argparse.Namespace) -> int:
        (time_all if options.time else run_all)(options)
        print(peers_table(options.results))
        return 0

    return exit_status(lambda: work(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
