"""The figure of a report: score, and training time, against the bytes kept for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from .comparison import Comparison, Mean, Row
from .settings import CHECKPOINTING, EXACT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
# the colours of Okabe and Ito, which colour-blind readers can tell apart; the markers say the same again
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "^"),
    ("#009E73", "s"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#8C6D31", "X"),
    ("#555555", "<"),
    ("#B2182B", ">"),
    ("#7570B3", "h"),
)
_REFERENCES = {EXACT: ("black", "*", 15), CHECKPOINTING: ("black", "p", 10)}


def draw_figure(comparison: Comparison, path: Path) -> None:
    """Draw one row of panels a task: scores and, where they mean something, times.

    Args:
        comparison: What to draw.
        path: The PNG file to write.
    """
    tasks = comparison.tasks
    panels = 2 if comparison.has_times else 1
    figure, axes = plt.subplots(
        len(tasks), panels, figsize=(5.6 * panels, 4.2 * len(tasks)), squeeze=False, layout="constrained"
    )
    for task, row_of_axes in zip(tasks, axes, strict=True):
        rows = comparison.of_task(task)
        names = ", ".join(name.replace("_", " ") for name in rows[0].metrics)
        seeds = comparison.fewest_seeds
        _draw_panel(row_of_axes[0], rows, [row.score for row in rows])
        row_of_axes[0].set_ylabel(f"score (points; {names})")
        row_of_axes[0].set_title(f"{task}: score, {seeds} seed{'s' if seeds > 1 else ''}")
        if panels == 2:
            _draw_panel(row_of_axes[1], rows, [row.train_seconds for row in rows if row.train_seconds])
            row_of_axes[1].set_ylabel("training time (s)")
            row_of_axes[1].set_ylim(bottom=0)
            row_of_axes[1].set_title(f"{task}: time in training steps")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _draw_panel(axes: Axes, rows: tuple[Row, ...], values: list[Mean]) -> None:
    pairs = list(zip(rows, values, strict=True))
    families: dict[str, list[tuple[Row, Mean]]] = {}
    for row, value in pairs:
        if row.ratio is None:
            colour, marker, size = _REFERENCES[row.method]
            _draw_points(axes, [(row, value)], colour=colour, marker=marker, size=size, label=row.method)
        else:
            families.setdefault(row.method + (", centered" if row.center else ""), []).append((row, value))
        if row.method == EXACT:
            axes.axhline(value.mean, color="black", linewidth=0.8, linestyle=":", zorder=0)
    for number, (label, members) in enumerate(families.items()):
        colour, marker = _STYLES[number % len(_STYLES)]
        _draw_points(axes, members, colour=colour, marker=marker, size=8, label=label)
        for row, value in members:
            # families go above and below by turns, so that equal bytes don't put one label on another
            offset = 9 if number % 2 else -15
            axes.annotate(
                f"{row.ratio:g}",
                (row.kept_bytes / _MIB, value.mean),
                xytext=(0, offset),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
    axes.set_xlabel("kept for backward, one batch (MiB)")
    axes.set_xlim(left=0)
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)


def _draw_points(
    axes: Axes, members: list[tuple[Row, Mean]], *, colour: str, marker: str, size: int, label: str
) -> None:
    axes.errorbar(
        [row.kept_bytes / _MIB for row, _ in members],
        [value.mean for _, value in members],
        # a single seed has no spread to draw
        yerr=[value.spread or 0.0 for _, value in members] if members[0][1].spread is not None else None,
        color=colour,
        marker=marker,
        markersize=size,
        linewidth=1.0,
        capsize=3,
        label=label,
    )
