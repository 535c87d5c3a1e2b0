"""The figure of a report: score, and step time, over the bytes kept for the backward pass, with the noise as colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .comparison import Comparison, Row
from .settings import EXACT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
_TASKS_A_ROW = 3
_NOISE_COLOURS = colormaps["plasma"]
# in inches: the width of a method's name
_LEGEND_WIDTH = 3.6


def draw_figure(comparison: Comparison, path: Path) -> None:
    """Draw one row of panels a task: scores and, where they mean something, times; numbers stand for the methods."""
    tasks = comparison.tasks
    # with times a row of two panels a task, without them the tasks side by side
    columns = 2 if comparison.has_times else min(len(tasks), _TASKS_A_ROW)
    rows = len(tasks) if comparison.has_times else math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(5.6 * columns, 4.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    names = list(dict.fromkeys(row.description for row in comparison.rows))
    noises = [row.noise for row in comparison.rows if row.noise]
    scale = LogNorm(min(noises), max(noises)) if noises else None
    panels = iter(grid.flat)
    for task in tasks:
        members = comparison.of_task(task)
        axes = next(panels)
        _draw(axes, [(row, row.score.mean, row.score.spread) for row in members], names, scale)
        seeds = min(len(row.seeds) for row in members)
        axes.set_title(f"{task}: score, {seeds} seed{'s' if seeds > 1 else ''}")
        axes.set_ylabel(f"score (points; {', '.join(name.replace('_', ' ') for name in members[0].metrics)})")
        if comparison.has_times:
            axes = next(panels)
            timed = [(row, row.time_over_exact, None) for row in members if row.time_over_exact is not None]
            if not timed:
                # no exact run to compare with
                axes.set_visible(False)
                continue
            _draw(axes, timed, names, scale)
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
    columns = max(1, int(5.6 * columns / _LEGEND_WIDTH))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handlelength=1, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _draw(
    axes: Axes, points: Sequence[tuple[Row, float, float | None]], names: Sequence[str], scale: LogNorm | None
) -> None:
    """Draw a panel; the numbers of neighbouring points are on different sides."""
    for place, (row, value, spread) in enumerate(sorted(points, key=lambda point: point[1])):
        colour = _NOISE_COLOURS(scale(row.noise)) if row.noise and scale else "0.6" if row.noise is None else "black"
        kept = row.kept_bytes / _MIB
        axes.errorbar(kept, value, spread, color=colour, marker="o", markersize=8, markeredgecolor="black", capsize=3)
        number = str(names.index(row.description) + 1)
        side = {"ha": "right", "xytext": (-7, 0)} if place % 2 else {"ha": "left", "xytext": (7, 0)}
        axes.annotate(number, (kept, value), **side, textcoords="offset points", va="center", fontsize=9)
        if row.method == EXACT:
            axes.axhline(value, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlabel("kept for backward, one batch (MiB)")
    axes.set_xlim(0, 1.1 * max(row.kept_bytes / _MIB for row, *_ in points))
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
