"""The paper's figure, and what it should have shown: how noisy a sketched gradient is while a model trains.

    python -m experiments.glue.variance over-training --model MODEL --data GLUE

The model trains with exact layers; every few steps all of them are measured on the step's own batch. A row of the file
is one layer at one step: the variance of three ways of keeping its input, next to that of the minibatch over rows (as
Bershatsky et al. 2022 define it) and over sequences (as minibatches are drawn), and the paper's own ratio and bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from torch import Tensor

from experiments.blocks import table
from rmm_linear import RMMConfig, SketchedLayer, convert_linears
from rmm_linear.variance import gradient_noise, paper_quantities
from rmm_linear.variance.probe import LayerProbe

from .sketch_noise import Subject, provenance_columns

FILE, FIGURE = "over_training.csv", "over_training.png"
# the paper's sketch at a tenth of the bytes, ours, and ours with everything, at no more bytes
PAPER_RATIO = 0.1
CONFIGS = {
    "gaussian 0.1": RMMConfig(ratio=PAPER_RATIO, sketch="gaussian", center=False, min_rows=1),
    "hadamard 0.1 centered": RMMConfig(ratio=PAPER_RATIO, min_rows=1),
    "hadamard 0.4 centered, int4, unpadded": RMMConfig(ratio=0.4, storage="int4", skip_padding=True, min_rows=1),
}


def over_training(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, and measure every layer every few steps."""
    origin = provenance_columns(subject)
    # exact layers that announce which rows are padding
    convert_linears(subject.model, config=RMMConfig(ratio=1.0, skip_padding=True))
    records: list[dict[str, Any]] = []

    def measure(name: str, layer: SketchedLayer, x: Tensor, g: Tensor, index: Tensor | None) -> None:
        # poolers and heads, which see a row a sequence
        if x.dim() > 2:
            records.append({"step": subject.step, "layer": name, **_noise(x, g, index), **origin})

    probe = LayerProbe(subject.model, measure)
    for step in range(0, options.steps, options.every):
        subject.train(step)
        probe.watch(probe.layers)
        subject.train(step + 1)
        probe.close()
        yield from records
        records.clear()


def _noise(x: Tensor, g: Tensor, index: Tensor | None) -> dict[str, float]:
    rows = x.numel() // x.shape[-1]
    found: dict[str, float] = {}
    for label, config in CONFIGS.items():
        noise = gradient_noise(x, g, config, index=index if config.skip_padding else None, draws=2)
        # the minibatch's as the paper has it: over all rows, padding included
        if not found:
            found |= {
                "gradient_squared": noise.gradient_squared,
                "sequence_variance": math.nan if noise.sequence_variance is None else noise.sequence_variance,
                "row_variance": noise.row_variance,
                "alpha": noise.alpha,
            }
        found[label] = noise.sketch_variance
    paper = paper_quantities(x, g, rank=max(1, round(PAPER_RATIO * rows)))
    return {"rows": rows, **found, "paper_ratio": paper.paper_ratio, "paper_bound": paper.paper_bound}


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a step: the layers' variances summed, over the minibatch's, and the paper's quantities of each."""
    rows = []
    for step in sorted({record["step"] for record in records}):
        layers = [record for record in records if record["step"] == step]
        total = {
            key: math.fsum(layer[key] for layer in layers) for key in ("sequence_variance", "row_variance", *CONFIGS)
        }
        rows.append(
            {
                "step": step,
                **{label: total[label] / total["sequence_variance"] for label in CONFIGS},
                "rows over sequences": total["row_variance"] / total["sequence_variance"],
                "paper_ratio": sorted(layer["paper_ratio"] for layer in layers),
                "paper_bound": sorted(layer["paper_bound"] for layer in layers),
                "broken": sum(layer["paper_ratio"] > layer["paper_bound"] for layer in layers),
                "layers": len(layers),
            }
        )
    return rows


def summary_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the summary of some steps as markdown."""
    rows = summary(records)
    header = ["step", *CONFIGS, "over rows / over sequences", "paper's ratio", "paper's bound", "layers above it"]
    lines = []
    for row in rows[:: max(1, len(rows) // 12)]:
        ratio, bound = (row[key][len(row[key]) // 2] for key in ("paper_ratio", "paper_bound"))
        noises = [f"{row[label]:.3g}" for label in CONFIGS]
        broken = f"{row['broken']} of {row['layers']}"
        of_rows = f"{row['rows over sequences']:.2f}"
        lines.append([f"{row['step']}", *noises, of_rows, f"{ratio:.3g}", f"{bound:.3g}", broken])
    return table(header, lines) + "\n\nThe paper's ratio and its bound are the median layer's."


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the noise over the steps: ours on the left, the paper's quantities on the right."""
    rows = summary(records)
    steps = [row["step"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (label, _), colour in zip(CONFIGS.items(), ("#D55E00", "#0072B2", "#009E73"), strict=True):
        values = [row[label] for row in rows]
        left.plot(steps, values, color=colour, marker=".", label=label)
    left.axhline(1, color="black", linewidth=0.8, linestyle=":")
    left.annotate("as noisy as the minibatch", (steps[-1], 1), xytext=(0, 3), textcoords="offset points", ha="right")
    left.set_yscale("log")
    left.set_ylabel("sketches' variance / minibatch's (over sequences)")
    left.legend(frameon=False)
    for key, colour, label in (
        ("paper_bound", "#555555", "bound (alpha + 1) / alpha"),
        ("paper_ratio", "#D55E00", "(r / (n - 1)) D2_RMM / D2_SGD"),
    ):
        right.plot(steps, [row[key][len(row[key]) // 2] for row in rows], color=colour, label=f"{label}, median layer")
        right.fill_between(
            steps, [row[key][0] for row in rows], [row[key][-1] for row in rows], color=colour, alpha=0.15, linewidth=0
        )
    right.set_yscale("log")
    right.set_ylabel("the paper's quantities, gaussian 0.1")
    right.legend(frameon=False, title="shaded: all layers", alignment="left")
    for axes in (left, right):
        axes.set_xlabel("training step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
