"""Table and figure of `experiments.memory.run`'s results: `python -m experiments.memory.report FOLDER`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.blocks import table
from experiments.command_line import report_command
from experiments.rows import grouped, read_rows, replace_file

RESULTS = Path(__file__).parent / "results"
FILE = "memory.csv"
EXACT, CHECKPOINTING, ALONE, OURS = "exact", "checkpointing", "every layer alone", "rmm_linear"
Rows = Sequence[dict[str, Any]]
# the colours of Okabe and Ito, which colour-blind readers can tell apart; the markers say the same again
_STYLES = {EXACT: ("black", "*", 8), CHECKPOINTING: ("#D55E00", "p", 6), ALONE: ("#E69F00", "X", 5)}
_OURS, _STORED = ("#0072B2", "o", 5), ("#009E73", "s", 5)
_LEGEND = {
    "exact": _STYLES[EXACT],
    "gradient checkpointing": _STYLES[CHECKPOINTING],
    "every layer sketched alone (gaussian)": _STYLES[ALONE],
    "rmm_linear": _OURS,
    "rmm_linear, in 8 or 4 bits": _STORED,
}


def method_name(row: Mapping[str, Any]) -> str:
    """Name a row's method with its knobs, such as "rmm_linear 0.5, int4"."""
    if row["ratio"] is None:
        return str(row["method"])
    storage = f", {row['storage']}" if row["storage"] else ""
    return f"{row['method']} {row['ratio']:g}{storage}"


def summary_table(rows: Rows) -> str:
    """Return each method's share of the exact model's bytes, a line a method and a column a model."""
    models = grouped(rows, "model")
    shares = {(row["model"], method_name(row)): f"{100 * row['of_exact']:.1f} %" for row in rows}
    firsts = [each[0] for each in models.values()]
    freed = (f"{100 * first['own_bytes'] / first['exact_bytes']:.1f} %" for first in firsts)
    lines = [["exact, MiB", *(f"{first['exact_bytes'] / 2**20:.0f}" for first in firsts)]]
    lines.append(["the most that sketches can free", *freed])
    names = dict.fromkeys(method_name(row) for row in rows if row["method"] != EXACT)
    lines += [[name, *(shares.get((model, name), "-") for model in models)] for name in names]
    return table(["of exact", *models], lines)


def write_report(folder: Path) -> str:
    """Draw `figure.png` into a results folder; return the table."""
    rows = read_rows(folder / FILE)
    replace_file(folder / "figure.png", lambda path: draw_figure(rows, path))
    return f"{summary_table(rows)}\n\nfigure: {folder / 'figure.png'}"


def draw_figure(rows: Rows, path: Path) -> None:
    """Draw a line a model: a mark a method, where its bytes lie over the exact model's."""
    models = grouped(rows, "model")
    figure = Figure(figsize=(9, 0.8 * len(models) + 1.6), layout="constrained")
    axes = figure.subplots()
    for place, own in enumerate(models.values()):
        # kept by something other than linear layers
        axes.barh(place, 100 * (1 - own[0]["own_bytes"] / own[0]["exact_bytes"]), color="0.88", height=0.7)
        for number, row in enumerate(own):
            colour, marker, size = _STYLES.get(row["method"], _STORED if row["storage"] else _OURS)
            height = place + 0.6 * (number / len(own) - 0.5)
            axes.plot(100 * row["of_exact"], height, color=colour, marker=marker, markersize=size, linestyle="")
    sizes = [f"{name}\n{own[0]['batch']} x {own[0]['seq']}, {own[0]['dtype']}" for name, own in models.items()]
    axes.set_yticks(range(len(models)), sizes, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel("kept for the backward pass, % of the exact model's bytes (grey: what no sketch frees)")
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=size, linestyle="", label=label)
        for label, (colour, marker, size) in _LEGEND.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


if __name__ == "__main__":
    sys.exit(report_command(write_report, RESULTS))
