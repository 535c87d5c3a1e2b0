"""Measure how noisy sketched weight gradients are on real text: `python -m experiments.glue.sketch_noise --help`.

A model is trained for a few steps with exact layers; then the input x and the gradient g of each linear layer are taken
from one batch, padded to 128 tokens. The noise of a layer is E||estimate - g^T x||^2 / ||g^T x||^2. A row of the
results has the layers' kept bytes, as a share of x's bytes in bfloat16 (scales, means and seeds included), and the
mean of their noises:

- of one configuration for all layers, in closed form: its values fill a budget of bytes, and it takes at most 4 % more
  with scales, means and seeds. Either all rows are sketched, or real ones alone (a padding row's g is zero);
- of a configuration for each layer, chosen on two other batches, with the first token's rows kept where that is
  better: the noise is that of real sketches.

The computations are in float32; bytes are counted in bfloat16.
"""

import argparse
import bisect
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.blocks import table
from experiments.command_line import HarnessError, Parser
from experiments.provenance import origin
from experiments.rows import read_rows, write_rows
from rmm_linear import RMMConfig, available_sketches
from rmm_linear.variance import (
    LayerProfile,
    NoiseProfile,
    Option,
    allocate_ratios,
    gradient_noise,
    layer_options,
    measure_sketch_variance,
)

from .settings import RunSettings, stay_offline

FILE = Path(__file__).parent / "results" / "sketch_noise.csv"
TASKS = ("mrpc", "stsb", "sst2")
ALL_ROWS, REAL_ROWS = "all", "real"
ONE_FOR_ALL, ONE_A_LAYER = "one for all", "one a layer, first token kept"
BUDGETS = (0.5, 0.25, 0.1, 0.05)
# The budgets that a configuration for each layer is chosen for, and those that all sketches are compared at.
SHOWN_BUDGETS = (0.25, 0.1, 0.05)
INT4_BUDGET, CROSS_BUDGET = 0.1, 0.05
_ALLOWANCE = 1.04
_LONGEST = 128
_BITS = {None: 16, "int8": 8, "int4": 4, "int2": 2}
# Sketches whose S is a dense matrix of random numbers: a draw of one takes seconds at the ranks of low-bit storage.
_DENSE = ("gaussian", "rademacher", "dct", "dft")
_RATIO_STEPS = 1000
# Draws of S over which the rounding's part of a closed form is averaged.
_DRAWS = 4
_GAUSSIAN = ("gaussian", False, None)
_FAMILIES: tuple[tuple[str, bool, str | None], ...] = (
    _GAUSSIAN,
    ("wta_crs", False, None),
    *(("hadamard", True, storage) for storage in (None, "int8", "int4", "int2")),
)
# The sketches of a layer: the default, and one that is better where it keeps nearly all rows.
_RATIOS = (0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_STORAGES = (None, "int8", "int4", "int2")
_SKETCHES = ("hadamard", "rows_without_replacement")
_SEQUENCES = 32
Layers = Mapping[str, tuple[Tensor, Tensor]]


class Cell(NamedTuple):
    """One configuration for all layers within a budget, which is a share of x's bytes in bfloat16."""

    sketch: str
    center: bool
    storage: str | None
    budget: float


@dataclasses.dataclass(frozen=True)
class Captured:
    """One batch's inputs and gradients."""

    # name -> x (sequences, tokens, in) and g (sequences, tokens, out) of a linear layer
    layers: Layers
    # which rows are no padding, shape (rows,), bool
    real: Tensor

    @property
    def index(self) -> Tensor:
        # leaving out rows that have a gradient would be a bias
        for name, (_, g) in self.layers.items():
            if g.flatten(0, -2)[~self.real].any():
                raise HarnessError(f"padding has a gradient in the layer {name!r}; pass another --model")
        return self.real.nonzero().squeeze(1)

    @property
    def bytes(self) -> int:
        """Bytes of all inputs in bfloat16."""
        return sum(x.numel() for x, _ in self.layers.values()) * torch.bfloat16.itemsize


class Subject:
    """A model that is trained for a few steps, and the batches of its task."""

    def __init__(self, task: str, model: str, data: str, *, batch_size: int = _SEQUENCES) -> None:
        settings = RunSettings(task=task, model=model, data=data, batch_size=batch_size, max_length=_LONGEST)
        self.settings = settings
        stay_offline(settings)
        from transformers import DataCollatorWithPadding

        from .training import PreparedRun, sketched_layers

        self._sketched_layers = sketched_layers
        self._prepared = PreparedRun(settings, cpu=True)
        self.model, self._split = self._prepared.model.train(), self._prepared.splits["train"]
        if len(self._split) < 3 * batch_size:
            raise HarnessError(f"the task {task} has {len(self._split)} training rows, fewer than three batches")
        tokenizer = self._prepared.tokenizer
        longest = min(_LONGEST, tokenizer.model_max_length)
        self._pad = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=longest)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        self._generator, self._order, self._steps = torch.Generator().manual_seed(settings.seed), list[int](), 0

    @property
    def epoch(self) -> int:
        return len(self._split) // self.settings.batch_size

    def train(self, steps: int) -> None:
        """Train on with exact layers at a constant rate, on shuffled batches that are padded to their own longest."""
        settings, size = self.settings, self.settings.batch_size
        for _ in range(steps):
            if len(self._order) < size:
                self._order = torch.randperm(len(self._split), generator=self._generator).tolist()
            rows, self._order = self._order[:size], self._order[size:]
            self._steps += 1
            torch.manual_seed(settings.seed + self._steps)
            self.model(**self._prepared.collate([self._split[row] for row in rows])).loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def capture(self, number: int, *, seed: int = 0) -> Captured:
        """Take x and g of the layers that `convert_linears` converts from a batch of the split in its own order."""
        size = self.settings.batch_size
        batch = self._pad([self._split[row] for row in range(number * size, (number + 1) * size)])
        layers: dict[str, tuple[Tensor, Tensor]] = {}

        def see(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor, name: str) -> None:
            x = arguments[0].detach()
            # poolers and heads see a row a sequence
            if x.shape[:-1] == batch["input_ids"].shape:
                output.register_hook(lambda g: layers.update({name: (x, g.detach().clone())}))

        handles = [
            layer.register_forward_hook(functools.partial(see, name=name))
            for name, layer in self._sketched_layers(self.model, self.settings.model).items()
        ]
        # of dropout
        torch.manual_seed(seed)
        self.model(**batch).loss.backward()
        for handle in handles:
            handle.remove()
        self.model.zero_grad()
        if not layers:
            raise HarnessError(f"no linear layer of {self.settings.model!r} sees a row a token; pass a Transformer")
        # in the model's order: hooks run from the last layer to the first
        return Captured(dict(reversed(layers.items())), batch["attention_mask"].bool().flatten())


def cells(rows: str) -> list[Cell]:
    """Return the configurations to compute: on real rows, also the configurations that compare all sketches."""
    found = [Cell(*family, budget) for budget in BUDGETS for family in _FAMILIES]
    if rows == REAL_ROWS:
        for sketch, center in itertools.product(available_sketches(), (False, True)):
            is_dense = sketch in _DENSE
            found += [] if is_dense else [Cell(sketch, center, "int4", INT4_BUDGET)]
            storages = (None, "int4") if is_dense else (None, "int8", "int4", "int2")
            found += [Cell(sketch, center, storage, CROSS_BUDGET) for storage in storages]
    return list(dict.fromkeys(found))


def config_of(cell: Cell, widths: Sequence[int], *, rows: int, sketched: int) -> tuple[RMMConfig, float] | None:
    """Return the largest ratio's configuration within a budget, and the share of bytes; None if nothing fits."""
    most = int(_RATIO_STEPS * min(1.0, cell.budget * 16 / _BITS[cell.storage] * rows / sketched) + 1e-9)
    for step in range(most, 0, -1):
        ratio = step / _RATIO_STEPS
        config = RMMConfig(ratio=ratio, sketch=cell.sketch, center=cell.center, storage=cell.storage, min_rows=1)
        kept = sum(config.saved_bytes(sketched, width, torch.bfloat16) for width in widths)
        share = kept / (rows * sum(widths) * torch.bfloat16.itemsize)
        if share <= _ALLOWANCE * cell.budget:
            # without a sketch its name means nothing, and equal configurations are computed once
            return (config if ratio < 1 else config.replace(sketch="hadamard")), share
    return None


def noises_of_one(captured: Captured, rows: str) -> Iterator[dict[str, Any]]:
    """Compute the noise of one configuration for all layers, for each cell."""
    layers = {name: (x.flatten(0, -2), g.flatten(0, -2)) for name, (x, g) in captured.layers.items()}
    if rows == REAL_ROWS:
        index = captured.index
        layers = {name: (x[index], g[index]) for name, (x, g) in layers.items()}
    widths = [x.shape[1] for x, _ in layers.values()]
    sizes = {"batch_rows": captured.real.numel(), "sketched_rows": next(iter(layers.values()))[0].shape[0]}
    known: dict[RMMConfig, float] = {}
    for cell in cells(rows):
        found = config_of(cell, widths, rows=sizes["batch_rows"], sketched=sizes["sketched_rows"])
        if found is None:
            continue
        config, share = found
        if config not in known:
            draws = 1 if config.sketch in _DENSE else _DRAWS
            known[config] = statistics.fmean(
                gradient_noise(x, g, config, draws=draws).relative_variance for x, g in layers.values()
            )
        row = {"rows": rows, "way": ONE_FOR_ALL, **cell._asdict(), "ratio": config.ratio, "bytes": share}
        yield row | {"relative_variance": known[config], "layers": len(layers)} | sizes


def noises_by_layer(captured: Captured, others: Sequence[Captured], draws: int) -> Iterator[dict[str, Any]]:
    """Choose a configuration for each layer by other batches, and measure it with real sketches, padding left out."""
    profile, index = _profile(captured, others), captured.index
    for budget in SHOWN_BUDGETS:
        most = int(_ALLOWANCE * budget * captured.bytes)
        if sum(min(option.saved_bytes for option in layer.options) for layer in profile.layers) > most:
            continue
        allocation = allocate_ratios(profile, most, objective="relative")
        noises, errors = [], []
        each = max(2, -(-draws // len(captured.layers)))
        for number, (name, (x, g)) in enumerate(captured.layers.items()):
            config = allocation.configs[name]
            found = measure_sketch_variance(x, g, config, index=index, draws=each, seed=number)
            squared = gradient_noise(x, g, RMMConfig(ratio=1.0)).gradient_squared
            noises.append(found.value / squared)
            errors.append(found.standard_error / squared)
        yield {
            "rows": REAL_ROWS,
            "way": ONE_A_LAYER,
            "budget": budget,
            "bytes": allocation.saved_bytes / captured.bytes,
            "relative_variance": statistics.fmean(noises),
            "standard_error": math.hypot(*errors) / len(errors),
            "configs": describe_all(list(allocation.configs.values())),
            "layers": len(noises),
            "batch_rows": captured.real.numel(),
            "sketched_rows": index.numel(),
        }


def _profile(captured: Captured, others: Sequence[Captured]) -> NoiseProfile:
    """Return the layers' options: their bytes on the captured batch, their mean relative variance on the others."""
    rows, valid = captured.real.numel(), captured.index.numel()
    sequences = next(iter(captured.layers.values()))[0].shape[0]
    widths = {name: x.shape[-1] for name, (x, _) in captured.layers.items()}

    def size(config: RMMConfig, width: int) -> int:
        return config.saved_bytes(rows, width, torch.bfloat16, valid, sequences)

    configs: list[RMMConfig] = []
    for tokens, storage, sketch in itertools.product(((), (0,)), _STORAGES, _SKETCHES):
        base = RMMConfig(sketch=sketch, storage=storage, keep_tokens=tokens, skip_padding=True, min_rows=1)

        def kept(step: int, base: RMMConfig = base) -> int:
            return sum(size(base.replace(ratio=step / _RATIO_STEPS), width) for width in widths.values())

        ratios = set(_RATIOS)
        for budget in SHOWN_BUDGETS:
            # the largest that fits if all layers have it: bytes never fall with the ratio
            fitting = bisect.bisect_right(range(1, _RATIO_STEPS + 1), _ALLOWANCE * budget * captured.bytes, key=kept)
            ratios |= {fitting / _RATIO_STEPS} if fitting else set()
        # at ratio 1 there is no sketch, and no two of them
        configs += [base.replace(ratio=ratio) for ratio in sorted(ratios) if ratio < 1 or sketch == _SKETCHES[0]]
    layers = []
    for name, width in widths.items():
        found: dict[RMMConfig, list[float]] = {}
        for other in others:
            x, g = other.layers[name]
            squared = gradient_noise(x, g, RMMConfig(ratio=1.0)).gradient_squared
            for option in layer_options(x, g, configs, index=other.index):
                found.setdefault(option.config, []).append(option.variance / squared if squared else 0.0)
        options = (Option(each, size(each, width), statistics.fmean(found[each])) for each in configs)
        layers.append(LayerProfile(name, gradient_squared=1.0, minibatch_variance=0.0, options=tuple(options)))
    return NoiseProfile(tuple(layers))


def describe_all(configs: Sequence[RMMConfig]) -> str:
    """Write the configurations of the layers, such as "0.3 to 1, int2 x 30, int4 x 6, first token x 36"."""
    ratios = sorted({config.ratio for config in configs})
    counts = {storage or "bfloat16": sum(config.storage == storage for config in configs) for storage in _STORAGES}
    counts |= {sketch: sum(config.sketch == sketch for config in configs) for sketch in _SKETCHES[1:]}
    counts["first token"] = sum(bool(config.keep_tokens) for config in configs)
    words = [f"{word} x {count}" for word, count in counts.items() if count]
    return ", ".join([f"{ratios[0]:g}" if len(ratios) == 1 else f"{ratios[0]:g} to {ratios[-1]:g}", *words])


def budgets_table(path: Path = FILE, task: str = TASKS[0]) -> str:
    """Return the noise that a few budgets of bytes buy on a task: the paper's sketch, and the best of the cells."""
    rows = [row for row in read_rows(path) if row["task"] == task]
    of_one = [row for row in rows if row["way"] == ONE_FOR_ALL]
    by_layer = {row["budget"]: row for row in rows if row["way"] == ONE_A_LAYER}
    lines = []
    for budget in SHOWN_BUDGETS:
        fitting = [row for row in of_one if row["bytes"] <= _ALLOWANCE * budget]
        of_all, of_real = ([row for row in fitting if row["rows"] == rows] for rows in (ALL_ROWS, REAL_ROWS))
        papers = [row for row in of_all if (row["sketch"], row["center"], row["storage"]) == _GAUSSIAN]
        best = [f"{row['relative_variance']:.2g} ({_describe(row)})" for row in (_best(of_all), _best(of_real))]
        last = by_layer.get(budget)
        best.append(f"{last['relative_variance']:.2g} ({last['configs']})" if last else "")
        lines.append([f"{100 * budget:g} %", f"{_best(papers)['relative_variance']:.3g}", *best])
    first, real = of_one[0], next(row for row in of_one if row["rows"] == REAL_ROWS)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in by_layer.values()))
    head = (
        f"{task.upper()}, 32 sequences padded to 128 tokens ({100 * real['sketched_rows'] / real['batch_rows']:.0f} %"
        f" of the rows real), {first['model']} after {first['step']} steps, mean of {first['layers']} layers, closed"
        f" forms, commit {first['commit']}; the last column is measured, commit {commits}:"
    )
    header = ["bytes", "the paper's gaussian", "best here", "padding left out", "and the first token kept, one a layer"]
    return f"{head}\n\n{table(header, lines)}"


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: (row["relative_variance"], row["bytes"]))


def _describe(row: dict[str, Any]) -> str:
    name = f"{row['sketch']} {row['ratio']:g}" if row["ratio"] < 1 else "the input"
    return ", ".join(filter(None, (name, "centred" if row["center"] else "", row["storage"])))


def sketches_table(path: Path = FILE) -> str:
    """Return the noise of every sketch in every storage at one budget: the mean over the tasks."""
    rows = [row for row in read_rows(path) if (row["way"], row["rows"]) == (ONE_FOR_ALL, REAL_ROWS)]
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["budget"] == CROSS_BUDGET:
            found.setdefault((row["sketch"], row["storage"], row["center"]), []).append(row["relative_variance"])
    storages = [storage for storage in _BITS if any(key[1] == storage for key in found)]

    def cell(sketch: str, storage: str | None) -> str:
        return " / ".join(f"{statistics.fmean(found[sketch, storage, center]):.2g}" for center in (True, False))

    lines = [
        [sketch, *(cell(sketch, storage) if (sketch, storage, True) in found else "" for storage in storages)]
        for sketch in sorted({key[0] for key in found})
    ]
    head = (
        f"Each sketch keeps {100 * CROSS_BUDGET:g} % of the bytes and leaves padding out. A cell has the relative"
        f" variance with `center=True` / `False`, mean over {', '.join(dict.fromkeys(row['task'] for row in rows))}:"
    )
    return f"{head}\n\n{table(['sketch', *(storage or 'bfloat16' for storage in storages)], lines)}"


def subject_parser(about: str, tasks: Sequence[str], file: Path) -> Parser:
    """Return a parser of the arguments that make a `Subject` for each task, and of the results file."""
    parser = Parser(about)
    parser.add_argument("--model", required=True, help="a folder that from_pretrained reads, a hub name, or demo")
    parser.add_argument("--data", required=True, help="a folder in the official GLUE layout, hub or demo")
    parser.add_argument("--tasks", nargs="+", default=tasks, help=f"whose batches (default: {' '.join(tasks)})")
    parser.add_argument("--output", type=Path, default=file, help="results file (default: the committed one)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = subject_parser(__doc__, TASKS, FILE)
    parser.add_argument("--steps", type=int, default=30, help="training steps before the measurement (default: 30)")
    parser.add_argument("--draws", type=int, default=2500, help="real sketches of a row, over all layers")
    return parser.run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    for task in options.tasks:
        subject = Subject(task, options.model, options.data)
        subject.train(options.steps)
        captured, *others = (subject.capture(number) for number in range(3))
        first, last = {"task": task, "step": options.steps}, {"model": Path(options.model).name, **origin()}
        ways = [noises_of_one(captured, ALL_ROWS), noises_of_one(captured, REAL_ROWS)]
        # hours with large models: the first task alone
        ways += [noises_by_layer(captured, others, options.draws)] if task == options.tasks[0] else []
        for row in itertools.chain(*ways):
            found.append(first | row | last)
            # after each row, for some take minutes
            write_rows(options.output, found)
            print(f"{task}, {row['rows']}: {row['budget']}, {row['relative_variance']:.3g}", flush=True)
    print(budgets_table(options.output, options.tasks[0]))


if __name__ == "__main__":
    sys.exit(main())
