"""Measure the variance of WTA-CRS with norms of the epoch before: `python -m experiments.glue.cached_norms --help`.

A model is trained for an epoch with exact layers, and once more. One batch is taken before and after the second epoch,
under other masks of dropout: x and g of each linear layer, padding left out. A layer's noise is
E||estimate - g^T x||^2 / ||g^T x||^2 in closed form, of WTA-CRS that draws rows by the input alone, by the norms of g
that the same samples had an epoch before (`rmm_linear.NormCache`; layers of one input by the root of the sum of their
squares), and by the norms of the same step, which nothing can know; and of the default sketch.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.blocks import table
from experiments.glue.sketch_noise import Captured, Subject, subject_parser
from experiments.provenance import origin
from experiments.rows import read_rows, write_rows
from rmm_linear import RMMConfig
from rmm_linear.sketches import WTACRS
from rmm_linear.variance import gradient_noise

FILE = Path(__file__).parent / "results" / "cached_norms.csv"
TASKS = ("mrpc", "stsb", "rte")
RATIOS = (0.1, 0.3)
DEFAULT, ALONE, BEFORE, NOW = "(hadamard, centered)", "the input alone", "the epoch before", "the same step"


def noises(subject: Subject, steps: int) -> Iterator[dict[str, Any]]:
    """Train for twice as many steps, and compute the noise of each way to draw, mean over the layers."""
    subject.train(steps)
    before = subject.capture(0)
    subject.train(steps)
    now = subject.capture(0, seed=1)
    index = now.index
    norms_before, norms_now = _norms(before, now, index), _norms(now, now, index)
    for ratio in RATIOS:
        found: dict[str, list[float]] = {}
        for name, (x, g) in now.layers.items():
            rows, gradient = x.flatten(0, 1)[index], g.flatten(0, 1)[index]
            squared = float((gradient.double().t() @ rows.double()).square().sum())
            for way, known in ((ALONE, None), (BEFORE, norms_before[name]), (NOW, norms_now[name])):
                variance = WTACRS(ratio=ratio).variance(rows, gradient, gradient_norms=known)
                found.setdefault(way, []).append(float(variance) / squared)
            noise = gradient_noise(rows, gradient, RMMConfig(ratio=ratio))
            found.setdefault(DEFAULT, []).append(noise.relative_variance)
        for way, values in found.items():
            yield {"ratio": ratio, "way": way, "relative_variance": statistics.fmean(values), "layers": len(values)}


def _norms(captured: Captured, readers: Captured, index: Tensor) -> dict[str, Tensor]:
    """The norms of the gradient's rows as a cache holds them: of all layers that read one input."""
    found, groups = dict[str, Tensor](), dict[int, list[str]]()
    for name, (x, _) in readers.layers.items():
        groups.setdefault(x.data_ptr(), []).append(name)
    for names in groups.values():
        norms = [torch.linalg.vector_norm(captured.layers[name][1].flatten(0, 1)[index], dim=1) for name in names]
        found |= dict.fromkeys(names, torch.stack(norms).square().sum(0).sqrt().bfloat16())
    return found


def cached_norms_table(path: Path = FILE) -> str:
    rows = read_rows(path)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["ratio"], row["way"], row["task"]): row["relative_variance"] for row in rows}
    lines = [
        [f"{ratio:g}", way, *(f"{found[ratio, way, task]:.3g}" for task in tasks)]
        for ratio, way in dict.fromkeys((row["ratio"], row["way"]) for row in rows)
    ]
    first = rows[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    steps = ", ".join(f"{task} {epoch}" for task, epoch in {row["task"]: row["steps"] for row in rows}.items())
    head = (
        f"Relative variance of weight gradients in {first['model']}, mean of {first['layers']} layers, a batch of 32"
        f" after two epochs (steps of one: {steps}), commit {commits}:"
    )
    return f"{head}\n\n{table(['ratio', 'rows drawn by the norms of', *tasks], lines)}"


def _run(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for task in options.tasks:
        subject = Subject(task, options.model, options.data)
        last = {"model": Path(options.model).name, **origin()}
        rows += [{"task": task, "steps": subject.epoch, **row, **last} for row in noises(subject, subject.epoch)]
        write_rows(options.output, rows)
    print(cached_norms_table(options.output))


if __name__ == "__main__":
    sys.exit(subject_parser(__doc__, TASKS, FILE).run(_run))
