"""The figure of a report: score, and step time, against the bytes kept for the backward pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from .comparison import Comparison, Mean, Row
from .settings import CHECKPOINTING, EXACT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
_TASKS_A_ROW = 3
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
_NOISE_COLOURS = colormaps["plasma"]
_REFERENCES = {EXACT: ("black", "*", 15), CHECKPOINTING: ("black", "p", 10)}


def draw_figure(comparison: Comparison, path: Path) -> None:
    """Draw one row of panels a task: scores and, where they mean something, times."""
    tasks = comparison.tasks
    # with times a row of two panels a task, without them the tasks side by side
    columns = 2 if comparison.has_times else min(len(tasks), _TASKS_A_ROW)
    rows = len(tasks) if comparison.has_times else math.ceil(len(tasks) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.6 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    panels = iter(grid.flat)
    for task in tasks:
        _draw_scores(next(panels), task, comparison.of_task(task))
        if comparison.has_times:
            _draw_times(next(panels), task, comparison.of_task(task))
    for unused in panels:
        unused.set_visible(False)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _draw_scores(axes: Axes, task: str, rows: tuple[Row, ...]) -> None:
    _draw_panel(axes, rows)
    seeds = min(len(row.seeds) for row in rows)
    axes.set_title(f"{task}: score, {seeds} seed{'s' if seeds > 1 else ''}")
    axes.set_ylabel(f"score (points; {', '.join(name.replace('_', ' ') for name in rows[0].metrics)})")


def _draw_times(axes: Axes, task: str, rows: tuple[Row, ...]) -> None:
    """Draw step times, with the noise as colour: black for exact gradients, grey where it was not measured."""
    timed = [
        (row, 1.0 if row.method == EXACT else row.step_time.median)
        for row in rows
        if row.step_time or row.method == EXACT
    ]
    noisy = [(row, time) for row, time in timed if row.noise]
    scale = LogNorm(min(row.noise for row, _ in noisy), max(row.noise for row, _ in noisy)) if noisy else None
    for row, time in timed:
        colour = "0.6" if row.noise is None else "black"
        if row.noise and scale:
            colour = _NOISE_COLOURS(scale(row.noise))
        place = row.kept_bytes / _MIB, time
        axes.plot(*place, "o", markersize=9, color=colour, markeredgecolor="black")
        axes.annotate(row.description, place, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
    if scale:
        axes.figure.colorbar(
            ScalarMappable(scale, _NOISE_COLOURS), ax=axes, label="noise (share of the minibatch's variance)"
        )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_title(f"{task}: step time; black: exact gradients")
    axes.set_ylabel("step time over exact's")
    _finish(axes, rows)


def _draw_panel(axes: Axes, rows: tuple[Row, ...]) -> None:
    families: dict[str, list[tuple[Row, Mean]]] = {}
    for row in rows:
        value = row.score
        if row.knob is None:
            colour, marker, size = _REFERENCES[row.method]
            _draw_points(axes, [(row, value)], colour=colour, marker=marker, size=size, label=row.method)
        else:
            knobs = [*(["centered"] if row.center else []), *([row.storage] if row.storage else []), *row.variant]
            families.setdefault(", ".join([row.method, *knobs]), []).append((row, value))
        if row.method == EXACT:
            axes.axhline(value.mean, color="black", linewidth=0.8, linestyle=":", zorder=0)
    for number, (label, members) in enumerate(families.items()):
        colour, marker = _STYLES[number % len(_STYLES)]
        _draw_points(axes, members, colour=colour, marker=marker, size=8, label=label)
        for row, value in members:
            # families are labelled on the right and on the left by turns, for their points lie close together
            is_right = number % 2 == 0
            axes.annotate(
                row.knob,
                (row.kept_bytes / _MIB, value.mean),
                xytext=(8 if is_right else -8, 0),
                textcoords="offset points",
                ha="left" if is_right else "right",
                va="center",
                fontsize=8,
                color=colour,
            )
    _finish(axes, rows)


def _finish(axes: Axes, rows: tuple[Row, ...]) -> None:
    axes.set_xlabel("kept for backward, one batch (MiB)")
    axes.set_xlim(0, 1.08 * max(row.kept_bytes for row in rows) / _MIB)
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
