"""The figure of a report: score, and step time, over the bytes kept for the backward pass, with the noise as colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from .comparison import Comparison, Row
from .settings import EXACT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
_TASKS_A_ROW = 3
_NOISE_COLOURS = colormaps["plasma"]
# in points: how near is close, and the height of a number; in inches: the width of a method's name
_CLOSE, _TEXT_HEIGHT = 18, 9
_LEGEND_WIDTH = 3.6


def draw_figure(comparison: Comparison, path: Path) -> None:
    """Draw one row of panels a task: scores and, where they mean something, times; numbers stand for the methods."""
    tasks = comparison.tasks
    # with times a row of two panels a task, without them the tasks side by side
    columns = 2 if comparison.has_times else min(len(tasks), _TASKS_A_ROW)
    rows = len(tasks) if comparison.has_times else math.ceil(len(tasks) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.6 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(row.description for row in comparison.rows))
    noises = [row.noise for row in comparison.rows if row.noise]
    scale = LogNorm(min(noises), max(noises)) if noises else None
    panels = iter(grid.flat)
    labels = []
    for task in tasks:
        members = comparison.of_task(task)
        axes = next(panels)
        spreads = [row.score.spread or 0.0 for row in members]
        labels.append((axes, _draw(axes, [(row, row.score.mean) for row in members], names, scale, spreads)))
        seeds = min(len(row.seeds) for row in members)
        axes.set_title(f"{task}: score, {seeds} seed{'s' if seeds > 1 else ''}")
        axes.set_ylabel(f"score (points; {', '.join(name.replace('_', ' ') for name in members[0].metrics)})")
        if comparison.has_times:
            axes = next(panels)
            timed = [(row, row.time_over_exact) for row in members if row.time_over_exact is not None]
            labels.append((axes, _draw(axes, timed, names, scale)))
            axes.set_title(f"{task}: step time")
            axes.set_ylabel("step time over exact's")
    for unused in panels:
        unused.set_visible(False)
    if scale:
        label = "noise / minibatch's own (black: none)"
        figure.colorbar(ScalarMappable(scale, _NOISE_COLOURS), ax=grid[:, -1], label=label)
    handles = [
        Line2D([], [], linestyle="", marker=f"${number}$", color="black", markersize=8, label=name)
        for number, name in enumerate(names, start=1)
    ]
    legend_columns = max(1, int(5.6 * columns / _LEGEND_WIDTH))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=legend_columns, frameon=False, handlelength=1, fontsize=9
    )
    # places on the paper are known after the layout
    figure.draw_without_rendering()
    for axes, points in labels:
        _write_numbers(axes, points)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _draw(
    axes: Axes,
    points: Sequence[tuple[Row, float]],
    names: Sequence[str],
    scale: LogNorm | None,
    spreads: Iterable[float] | None = None,
) -> list[tuple[int, float, float]]:
    """Draw a panel; return each point's number and place."""
    places = []
    for (row, value), spread in zip(points, spreads or [0.0] * len(points), strict=True):
        colour = _NOISE_COLOURS(scale(row.noise)) if row.noise and scale else "0.6" if row.noise is None else "black"
        kept = row.kept_bytes / _MIB
        axes.errorbar(
            kept, value, spread or None, color=colour, marker="o", markersize=8, markeredgecolor="black", capsize=3
        )
        if row.method == EXACT:
            axes.axhline(value, color="black", linewidth=0.8, linestyle=":", zorder=0)
        places.append((names.index(row.description) + 1, kept, value))
    axes.set_xlabel("kept for backward, one batch (MiB)")
    axes.set_xlim(0, 1.1 * max(kept for _, kept, _ in places))
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    return places


def _write_numbers(axes: Axes, points: Iterable[tuple[int, float, float]]) -> None:
    """Write the numbers on the right of points that lie close together, from below and none over another."""
    scale = 72 / axes.figure.dpi
    places = [(number, (x, y), axes.transData.transform((x, y)) * scale) for number, x, y in points]
    written: list[tuple[float, float]] = []
    for number, point, (across, up) in sorted(places, key=lambda place: place[2][1]):
        close = [x for *_, (x, y) in places if 0 <= x - across < _CLOSE and abs(y - up) < _CLOSE]
        right = max(close)
        height = max([up, *(top + _TEXT_HEIGHT for other, top in written if abs(other - right) < _CLOSE)])
        written.append((right, height))
        axes.annotate(
            str(number),
            point,
            (right - across + 8, height - up),
            textcoords="offset points",
            va="center",
            fontsize=9,
            zorder=5,
            arrowprops={"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
        )
