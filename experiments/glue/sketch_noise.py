"""How noisy sketched weight gradients are on real text and a pretrained model.

`against-bytes` trains the model for a few steps and captures, before and after, what every linear layer of one batch
has for an input x and a gradient g of its output. For each way of keeping x it writes one row: bytes relative to x in
bfloat16, all-in (scales, means and seeds included), and E||estimate - g^T x||^2 / ||g^T x||^2, the mean over the layers
of the closed form. Cells are given by a budget of bytes: the ratio is the one whose values alone take the budget, or
less, so that everything stays within 4 % of it. `headline` draws real sketches for the best cell of every budget.

A batch is padded to 128 tokens or to its own longest sequence, and all of its rows are sketched or the real ones alone
(a padding row's g is zero, which is checked; bytes are always relative to all rows). Everything is computed in float32
as the CPU has it; bfloat16 is what the bytes are counted in.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rmm_linear import RMMConfig, SketchedLayer, available_sketches, convert_linears, revert_linears
from rmm_linear.variance import gradient_noise, measure_sketch_variance

from .errors import HarnessError

if TYPE_CHECKING:
    from .training import PreparedRun

DEFAULT_OUTPUT = Path(__file__).parent / "results" / "variance"
GRID_FILE, HEADLINE_FILE = "against_bytes.csv", "headline.csv"
TASKS = ("mrpc", "stsb", "sst2")
BUDGETS = (0.05, 0.1, 0.25, 0.5)
HEADLINE_BUDGETS = (0.25, 0.1, 0.05)
# what everything that goes with the values may take beyond the budget
ALLOWANCE = 1.04
LONGEST = 128
TO_LONGEST, TO_OWN = "to 128", "dynamic"
ALL_ROWS, REAL_ROWS = "all", "real"
GAUSSIAN, BEST = "gaussian", "best"
# of bfloat16's 16; the dtype that bytes are counted in
_BITS = {None: 16, "int8": 8, "int4": 4, "int2": 2}
# those that the sketches are compared in
_CROSS_STORAGES = (None, "int8", "int4", "int2")
# draws of S over which the rounding's part of the closed form is averaged; all layers have the same ones, so that the
# mean over layers of a single draw is off by 2 to 5 %
_GRID_DRAWS, _DENSE_DRAWS, _MEASURED_DRAWS = 4, 1, 64
# relative variances that are nothing but the rounding of float32
_ROUNDING = 1e-10
# sketches whose S is a dense matrix of random numbers: at low-bit ranks a draw of one takes seconds
_DENSE = ("gaussian", "rademacher", "dct", "dft")
_RATIO_STEPS = 1000
# columns that hold words, in files where all others hold numbers
_TEXTS = (
    "task", "layer", "padding", "rows", "way", "which", "sketch", "configs", "storage", "objective", "weights", "model",
    "rmm_linear", "torch", "transformers", "hardware", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One way of keeping x within a budget of bytes.

    Attributes:
        sketch: Name of the sketch.
        center: Whether the column mean is kept apart.
        storage: Low-bit storage, or None for bfloat16.
        budget: Bytes relative to x in bfloat16.
    """

    sketch: str
    center: bool
    storage: str | None
    budget: float


# the lines of the figure
FAMILIES: tuple[tuple[str, bool, str | None], ...] = (
    ("gaussian", False, None),
    ("wta_crs", False, None),
    ("hadamard", True, None),
    ("hadamard", True, "int8"),
    ("hadamard", True, "int4"),
    ("hadamard", True, "int2"),
)
# the budget at which all sketches are compared, and the one at which all sketches in all storages are
PLAIN_BUDGET, CROSS_BUDGET = 0.1, 0.05


@dataclass(frozen=True)
class Captured:
    """One batch's inputs and gradients.

    Attributes:
        layers: Name -> x (rows, in) and g (rows, out), of every linear layer that sees a row a token.
        real: Which rows are no padding, shape (rows,), bool.
    """

    layers: dict[str, tuple[Tensor, Tensor]]
    real: Tensor

    def chosen(self, rows: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the rows that are sketched, of `ALL_ROWS` or `REAL_ROWS`.

        Raises:
            HarnessError: If a row that would be left out has a gradient: the rest would be biased.
        """
        if rows == ALL_ROWS:
            return self.layers
        for name, (_, g) in self.layers.items():
            if g[~self.real].any():
                raise HarnessError(
                    f"padding has a gradient in the layer {name!r}, so that leaving it out would be a bias; pass a"
                    " model whose loss does not depend on its padding, as BERT's does not"
                )
        return {name: (x[self.real], g[self.real]) for name, (x, g) in self.layers.items()}


def grid(padding: str, rows: str, *, trained: bool) -> list[Cell]:
    """Return the cells of one panel.

    The lines of the figure everywhere. Of the trained model also every sketch, centred or not, at one budget; and where
    padding is left out every sketch in int4 at that budget, and in every storage at another (of the dense ones, which
    take long, int4 at the other only).
    """
    if not trained:
        families = [family for family in FAMILIES if family[0] != "wta_crs" and family[2] != "int8"]
        return [Cell(*family, budget) for budget in HEADLINE_BUDGETS for family in families]
    cells = [Cell(*family, budget) for budget in BUDGETS for family in FAMILIES]
    pairs = [(sketch, center) for sketch in available_sketches() for center in (False, True)]
    if rows == ALL_ROWS:
        cells += [Cell(*pair, None, PLAIN_BUDGET) for pair in pairs]
        return list(dict.fromkeys(cells))
    # few rows are lost there, and a sketch that is exact where it keeps all of them may beat the family's
    cells += [Cell(*pair, "int4", PLAIN_BUDGET) for pair in pairs if pair[0] not in _DENSE]
    if padding == TO_LONGEST:
        storages = {pair: (None, "int4") if pair[0] in _DENSE else _CROSS_STORAGES for pair in pairs}
        cells += [Cell(*pair, storage, CROSS_BUDGET) for pair in pairs for storage in storages[pair]]
    return list(dict.fromkeys(cells))


def kept_share(config: RMMConfig, widths: Sequence[int], *, rows: int, sketched: int) -> float:
    """Return the bytes that layers of these widths keep, relative to their inputs in bfloat16."""
    kept = sum(config.saved_bytes(sketched, width, torch.bfloat16) for width in widths)
    return kept / (rows * sum(widths) * torch.bfloat16.itemsize)


def config_of(cell: Cell, widths: Sequence[int], *, rows: int, sketched: int) -> RMMConfig | None:
    """Return the cell's configuration: the largest ratio that its budget allows, or None if nothing fits."""
    steps = int(_RATIO_STEPS * min(1.0, cell.budget * 16 / _BITS[cell.storage] * rows / sketched) + 1e-9)
    for step in range(steps, 0, -1):
        config = RMMConfig(
            ratio=step / _RATIO_STEPS, sketch=cell.sketch, center=cell.center, storage=cell.storage, min_rows=1
        )
        if kept_share(config, widths, rows=rows, sketched=sketched) <= ALLOWANCE * cell.budget:
            # without a sketch its name means nothing, and without it equal cells are computed once
            return config if config.ratio < 1 else config.replace(sketch="hadamard")
    return None


def noise_of(
    layers: Mapping[str, tuple[Tensor, Tensor]],
    configs: Mapping[str, RMMConfig],
    *,
    index: Tensor | None = None,
    draws: int | None = None,
) -> dict[str, Any]:
    """Return the mean over the layers of E||estimate - g^T x||^2 / ||g^T x||^2, in closed form and of real sketches.

    Args:
        layers: Name -> x and g.
        configs: How each is sketched.
        index: Rows that are no padding; None for all.
        draws: How many sketches to draw at least, spread evenly over the layers; None for the closed form alone.
    """
    found = {
        name: gradient_noise(x, g, configs[name], index=index, draws=_MEASURED_DRAWS)
        for name, (x, g) in layers.items()
    }  # fmt: skip
    closed = statistics.fmean(noise.relative_variance for noise in found.values())
    row: dict[str, Any] = {"closed_form": closed, "measured": "", "standard_error": "", "z": "", "draws": ""}
    if draws is not None:
        each = max(2, -(-draws // len(layers)))
        values, errors = [], []
        for number, (name, (x, g)) in enumerate(layers.items()):
            measured = measure_sketch_variance(x, g, configs[name], index=index, draws=each, seed=number)
            values.append(measured.value / found[name].gradient_squared)
            errors.append(measured.standard_error / found[name].gradient_squared)
        value, error = statistics.fmean(values), sum(one**2 for one in errors) ** 0.5 / len(layers)
        # float32 rounds where nothing else does
        z = (value - closed) / error if value > _ROUNDING else 0.0
        row |= {"measured": value, "standard_error": error, "z": z, "draws": each * len(layers)}
    return row


class Subject:
    """A model, the batch that is captured, and the steps that it has been trained for."""

    def __init__(self, task: str, options: argparse.Namespace) -> None:
        """Load everything that `options` names: `model`, `data` and `batch_size`.

        Raises:
            HarnessError: If data or model are not usable.
        """
        model, data, batch_size = options.model, options.data, options.batch_size
        # the hub's client reads it when it is imported
        if data != "hub" and (model == "demo" or Path(model).is_dir()):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # imports that take seconds, and read the environment
        from transformers import DataCollatorWithPadding

        from .settings import RunSettings
        from .training import PreparedRun

        settings = RunSettings(
            task=task, model=model, data=data, batch_size=batch_size, learning_rate=2e-5, max_length=LONGEST
        )
        self.prepared: PreparedRun = PreparedRun(settings, cpu=True)
        self.model, self._train_split = self.prepared.model, self.prepared.splits["train"]
        if len(self._train_split) < batch_size:
            raise HarnessError(
                f"the task {task} has {len(self._train_split)} training rows, fewer than a batch of {batch_size};"
                " download its files again"
            )
        self._longest = min(LONGEST, self.prepared.tokenizer.model_max_length)
        self._pad = {
            TO_LONGEST: DataCollatorWithPadding(
                self.prepared.tokenizer, padding="max_length", max_length=self._longest
            ),
            TO_OWN: self.prepared.collate,
        }
        self.step = 0
        self._order = self._rows()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )

    def _rows(self) -> Iterator[list[int]]:
        """Batches of a shuffled epoch after the other, ragged ends dropped."""
        size, generator = self.prepared.settings.batch_size, torch.Generator().manual_seed(self.prepared.settings.seed)
        while True:
            order = torch.randperm(len(self._train_split), generator=generator).tolist()
            yield from (order[start : start + size] for start in range(0, len(order) - size + 1, size))

    def train(self, until: int) -> None:
        """Train at a constant rate, with exact layers and the harness's other settings."""
        self.model.train()
        while self.step < until:
            torch.manual_seed(self.prepared.settings.seed + 1 + self.step)
            batch = self._pad[TO_OWN]([self._train_split[row] for row in next(self._order)])
            self.model(**batch).loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.prepared.settings.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.step += 1

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        """Draw the training batches that would come next, padded to their own longest sequences."""
        return [dict(self._pad[TO_OWN]([self._train_split[row] for row in next(self._order)])) for _ in range(count)]

    def capture(self, padding: str, *, batch: int = 0) -> Captured:
        """Run a batch of the unshuffled training split forward and backward, and keep what the linear layers see.

        Raises:
            HarnessError: If no linear layer sees a row a token, or the split has no such batch.
        """
        size = self.prepared.settings.batch_size
        numbers = range(batch * size, (batch + 1) * size)
        if numbers[-1] >= len(self._train_split):
            raise HarnessError(
                f"the training split has {len(self._train_split)} rows, too few for {batch + 1} batches of {size}; pass"
                " a smaller --batch-size, or fewer --batches"
            )
        return self._captured(self._pad[padding]([self._train_split[row] for row in numbers]))

    def _captured(self, batch: Any) -> Captured:
        inputs: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        handles = []

        def watch(name: str, layer: nn.Module) -> None:
            def see(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
                if arguments[0].shape[:-1] == batch["input_ids"].shape:
                    inputs[name] = arguments[0].detach().flatten(0, -2)
                    output.register_hook(lambda g: gradients.update({name: g.detach().flatten(0, -2).clone()}))

            handles.append(layer.register_forward_hook(see))

        for name, layer in _converted_layers(self.model).items():
            watch(name, layer)
        torch.manual_seed(self.prepared.settings.seed)
        self.model.train()
        try:
            self.model(**batch).loss.backward()
        finally:
            for handle in handles:
                handle.remove()
            self.model.zero_grad()
        layers = {name: (x, gradients[name]) for name, x in inputs.items() if name in gradients}
        if not layers:
            raise HarnessError(
                f"no linear layer of the model {self.prepared.settings.model!r} sees a row a token; pass a Transformer"
                " that the library can convert"
            )
        return Captured(layers, batch["attention_mask"].bool().flatten())


def _converted_layers(model: nn.Module) -> dict[str, SketchedLayer]:
    """The layers that `convert_linears` would sketch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            convert_linears(model)
        except ValueError as error:
            raise HarnessError(f"the model can't have sketched layers ({error}); pass another --model") from error
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SketchedLayer)}
    revert_linears(model)
    return layers


def provenance_columns(subject: Subject) -> dict[str, Any]:
    """Return the last columns of every row: what it was computed from, with what, on what."""
    from . import provenance

    commit, hardware, versions = provenance.commit(), provenance.hardware(torch.device("cpu")), provenance.versions()
    return {
        # equal if and only if the weights are, bit for bit
        "weights": provenance.weights_fingerprint(subject.model)[:12],
        "model": Path(subject.prepared.settings.model).name,
        "rmm_linear": versions["rmm_linear"],
        "torch": versions["torch"],
        "transformers": versions["transformers"],
        "hardware": f"{hardware['cpu']}, {hardware['cpu_cores']} cores",
        "threads": hardware["torch_threads"],
        "commit": (commit["commit"] or "none")[:7] + ("+" if commit["modified"] else ""),
    }


def against_bytes(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compute the grid before the training and after it, for each padding, of all rows and of the real ones."""
    for step in dict.fromkeys((0, options.steps)):
        subject.train(step)
        origin = provenance_columns(subject)
        for padding in (TO_LONGEST, TO_OWN):
            captured = subject.capture(padding)
            for rows in (ALL_ROWS, REAL_ROWS):
                for row in _panel(captured, rows, grid(padding, rows, trained=step == options.steps)):
                    yield {"step": step, "padding": padding, "rows": rows, **row, **origin}


def _panel(captured: Captured, rows: str, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    layers = captured.chosen(rows)
    widths = [x.shape[1] for x, _ in layers.values()]
    batch_rows, sketched = captured.real.numel(), next(iter(layers.values()))[0].shape[0]
    known: dict[RMMConfig, list[float]] = {}
    for cell in cells:
        config = config_of(cell, widths, rows=batch_rows, sketched=sketched)
        if config is None:
            continue
        if config not in known:
            draws = _DENSE_DRAWS if config.sketch in _DENSE else _GRID_DRAWS
            noises = [gradient_noise(x, g, config, draws=draws) for x, g in layers.values()]
            known[config] = [noise.relative_variance for noise in noises]
        values = known[config]
        yield {
            **dataclasses.asdict(cell),
            "ratio": config.ratio,
            "bytes": kept_share(config, widths, rows=batch_rows, sketched=sketched),
            "relative_variance": sum(values) / len(values),
            "largest_layer": max(values),
            "layers": len(values),
            "batch_rows": batch_rows,
            "sketched_rows": sketched,
        }


def headline(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the best cells of a grid, and the Gaussian sketch, with real sketches.

    Raises:
        HarnessError: If there is no grid, or it has no row of the task.
    """
    task = subject.prepared.settings.task
    mine = [record for record in read_records(options.output / GRID_FILE) if record["task"] == task]
    if not mine:
        raise HarnessError(f"the grid has no rows of the task {task}; run against-bytes with --tasks {task} first")
    step = max(record["step"] for record in mine)
    subject.train(step)
    origin = provenance_columns(subject)
    for padding in (TO_LONGEST, TO_OWN):
        captured = subject.capture(padding)
        for rows in (ALL_ROWS, REAL_ROWS):
            layers = captured.chosen(rows)
            panel = [each for each in mine if (each["step"], each["padding"], each["rows"]) == (step, padding, rows)]
            for which, record in _headline_cells(panel, rows):
                knobs = {key: record[key] for key in ("ratio", "sketch", "center", "storage")}
                began = time.perf_counter()
                found = noise_of(layers, dict.fromkeys(layers, RMMConfig(min_rows=1, **knobs)), draws=options.draws)
                kept = ("step", "padding", "rows", "budget", "sketch", "center", "storage", "ratio", "bytes")
                seconds = round(time.perf_counter() - began, 1)
                yield {"which": which, **{key: record[key] for key in kept}, **found, "seconds": seconds, **origin}


def best_within(records: Sequence[dict[str, Any]], budget: float) -> dict[str, Any] | None:
    """Return the row of least variance within a budget and its allowance, of equal ones that of fewest bytes."""
    fitting = [record for record in records if record["bytes"] <= ALLOWANCE * budget]
    return min(fitting, key=lambda record: (record["relative_variance"], record["bytes"]), default=None)


def _headline_cells(panel: Sequence[dict[str, Any]], rows: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for budget in HEADLINE_BUDGETS:
        papers = [row for row in panel if (row["sketch"], row["center"], row["storage"]) == FAMILIES[0]]
        if rows == ALL_ROWS:
            yield from ((GAUSSIAN, row) for row in papers if row["budget"] == budget)
        best = best_within(panel, budget)
        if best is not None:
            yield BEST, {**best, "budget": budget}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a results file, whose cells are texts in some columns and numbers in all others; None where one is empty.

    Raises:
        HarnessError: If it is missing, empty or something else.
    """

    def parsed(key: str, text: str) -> Any:
        if key == "center":
            return text == "True"
        if not text or key in _TEXTS:
            return text or None
        return int(text) if text.isdecimal() else float(text)

    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = [{key: parsed(key, text) for key, text in row.items()} for row in csv.DictReader(file)]
    except OSError as error:
        raise HarnessError(
            f"{path} can't be read ({error.strerror or error}); python -m experiments.glue.variance makes it"
        ) from error
    except (ValueError, TypeError) as error:
        raise HarnessError(f"{path} is no results file of this experiment ({error}); make it anew") from error
    if not records or not {"task", "step", "commit"} <= records[0].keys():
        raise HarnessError(f"{path} is no results file of this experiment; make it anew")
    return records


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a results file as a whole.

    Raises:
        HarnessError: If it can't be written.
    """
    from .report import as_csv, replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = as_csv([{key: _rounded(value) for key, value in record.items()} for record in records])
        replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise HarnessError(
            f"{path} can't be written ({error.strerror or error}); pass --output <a folder of yours>"
        ) from error


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
