"""Table and figure of `experiments.memory.run`'s results: `python -m experiments.memory.report FOLDER`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.blocks import table
from experiments.command_line import report_command
from experiments.rows import by_model, read_rows, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
FILE = "memory.csv"
EXACT, CHECKPOINTING, ALONE, OURS = "exact", "checkpointing", "every layer alone", "rmm_linear"
Rows = Sequence[dict[str, Any]]
_NEEDED = ("model", "method", "ratio", "storage", "exact_bytes", "own_bytes", "of_exact", "commit")
_PANELS_A_ROW = 4
# the colours of Okabe and Ito, which colour-blind readers can tell apart; the markers say the same again
_STYLES = {EXACT: ("black", "*", 12), CHECKPOINTING: ("#D55E00", "p", 9), ALONE: ("#E69F00", "X", 8)}
_OURS, _STORED = ("#0072B2", "o", 8), ("#009E73", "s", 7)
_LEGEND = {
    "exact": _STYLES[EXACT],
    "gradient checkpointing: runs\nthe forward pass again": _STYLES[CHECKPOINTING],
    "every layer sketched alone\n(gaussian): noise": _STYLES[ALONE],
    "rmm_linear: noise": _OURS,
    "rmm_linear, in 8 or 4 bits: noise": _STORED,
}


def method_name(row: Mapping[str, Any]) -> str:
    """Name a row's method with its knobs, such as "rmm_linear 0.5, int4"."""
    if row["ratio"] is None:
        return str(row["method"])
    storage = f", {row['storage']}" if row["storage"] else ""
    return f"{row['method']} {row['ratio']:g}{storage}"


def _ceiling(row: dict[str, Any]) -> float:
    return float(row["own_bytes"]) / float(row["exact_bytes"])


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(method_name(row) for row in rows))


def summary_table(rows: Rows) -> str:
    """Return what each method keeps of the exact model's bytes, a line a method and a column a model."""
    models = by_model(rows)
    shares = {(row["model"], method_name(row)): row["of_exact"] for row in rows}
    lines = [
        ["exact, MiB", *(f"{each[0]['exact_bytes'] / 2**20:.0f}" for each in models.values())],
        ["the most that sketches can free", *(f"{100 * _ceiling(each[0]):.1f} %" for each in models.values())],
    ]
    for name in _names(rows):
        values = [shares.get((model, name)) for model in models]
        if name != EXACT:
            lines.append([name, *("-" if value is None else f"{100 * value:.1f} %" for value in values)])
    return table(["of exact", *models], lines)


def write_report(folder: Path) -> str:
    """Draw `figure.png` into a results folder; return the table.

    Raises:
        HarnessError: If there are no results, or the folder can't be written to.
    """
    rows = read_rows(folder / FILE, needed=_NEEDED, command="python -m experiments.memory.run")
    replace_file(folder / "figure.png", lambda path: draw_figure(rows, path))
    return f"{summary_table(rows)}\n\nfigure: {folder / 'figure.png'}"


def draw_figure(rows: Rows, path: Path) -> None:
    """Draw a panel a model: a line a method, a point where its bytes lie over the exact model's."""
    models, names = by_model(rows), _names(rows)
    # the legend takes a panel of its own
    lines = math.ceil((len(models) + 1) / _PANELS_A_ROW)
    columns = min(_PANELS_A_ROW, len(models) + 1)
    size = (3.3 * columns + 1.6, (0.31 * len(names) + 1.1) * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, sharex=True, layout="constrained")
    panels = list(grid.flat)
    most = max(row["of_exact"] for row in rows if row["of_exact"] is not None)
    for place, (axes, each) in enumerate(zip(panels, models.values(), strict=False)):
        _draw_model(axes, each, names, has_labels=place % columns == 0)
        axes.set_xlim(0, 100 * most + 22)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, markersize=size, linestyle="", label=label)
        for label, (colour, marker, size) in _LEGEND.items()
    ]
    handles.append(Patch(facecolor="0.88", label="kept by something other than\nlinear layers: no sketch gets here"))
    panels[len(models)].legend(handles=handles, loc="center", frameon=False, fontsize=9, labelspacing=0.9)
    figure.supxlabel("kept for the backward pass, % of the exact model's bytes", fontsize=11)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _draw_model(axes: Axes, rows: Rows, names: Sequence[str], *, has_labels: bool) -> None:
    first = rows[0]
    floor = 100 * (1 - _ceiling(first))
    axes.axvspan(0, floor, color="0.88", zorder=0, linewidth=0)
    axes.axvline(100, color="black", linewidth=0.8, linestyle=":", zorder=1)
    for row in rows:
        place = names.index(method_name(row))
        if row["of_exact"] is None:
            axes.annotate("nothing to convert", (100, place), ha="center", va="center", fontsize=8, color="0.4")
            continue
        share = 100 * row["of_exact"]
        colour, marker, size = _STYLES.get(row["method"], _STORED if row["storage"] else _OURS)
        axes.plot([share], [place], color=colour, marker=marker, markersize=size, linestyle="")
        axes.annotate(
            f"{share:.0f}",
            (share, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            # over the line of the exact model, not through it
            bbox={"facecolor": "white" if share > floor else "0.88", "edgecolor": "none", "pad": 0.6},
        )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names if has_labels else [], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(f"{first['model']}\n{first['batch']} x {first['seq']}, {first['dtype']}", fontsize=10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    return report_command(arguments, write_report, default=RESULTS)


if __name__ == "__main__":
    sys.exit(main())
