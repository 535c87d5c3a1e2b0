"""Table and figure of `experiments.memory.run`'s results: `python -m experiments.memory.report FOLDER`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments import results_by_model
from experiments.command_line import HarnessError, report_command
from experiments.rows import replace_file

from .methods import ALONE, CHECKPOINTING, EXACT
from .on_gpu import BUDGETS_GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE, GPU_FILE = "memory.csv", "memory-cuda.csv"
Rows = Sequence[dict[str, Any]]
_MIB = 2**20
_NUMBERS = {"ratio": float, "dropout": float, "attention_dropout": float, "of_exact": float, "step_ms": float}
_WHOLE = ("batch", "seq", "sketched_layers", "peak_bytes", "kept_bytes", "predicted_bytes", "exact_bytes", "own_bytes")
_KINDS: dict[str, Any] = {
    **_NUMBERS,
    **dict.fromkeys((*_WHOLE, *(f"largest_batch_{budget}_gib" for budget in BUDGETS_GIB)), int),
    **dict.fromkeys(("centered", "shared"), lambda text: text == "True"),
}
_NEEDED = {"model", "attention", "batch", "seq", "dtype", "dropout", "method", "ratio", "storage", "kept_bytes"}
_NEEDED |= {
    "attention_dropout",
    "sketched_layers",
    "predicted_bytes",
    "exact_bytes",
    "own_bytes",
    "of_exact",
    "note",
    "commit",
}
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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a results file.

    Returns:
        Its rows, numbers as numbers and empty cells as None.

    Raises:
        HarnessError: If it is missing, empty or something else.
    """
    return results_by_model.read_rows(path, kinds=_KINDS, needed=_NEEDED, command="python -m experiments.memory.run")


def method_name(row: dict[str, Any]) -> str:
    """Name a row's method with its knobs.

    Returns:
        Such as "rmm_linear 0.5, int4".
    """
    if row["ratio"] is None:
        return str(row["method"])
    storage = f", {row['storage']}" if row["storage"] else ""
    return f"{row['method']} {row['ratio']:g}{storage}"


def _main_rows(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """The rows of each model, of its first batch size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_model = found.setdefault(row["model"], [])
        if not of_model or of_model[0]["batch"] == row["batch"]:
            of_model.append(row)
    return found


def _ceiling(row: dict[str, Any]) -> float:
    return float(row["own_bytes"]) / float(row["exact_bytes"])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def summary_table(rows: Rows) -> str:
    """Return what each method keeps of the exact model's bytes, a line a method and a column a model."""
    models = _main_rows(rows)
    names = list(dict.fromkeys(method_name(row) for each in models.values() for row in each))
    shares = {(model, method_name(row)): row["of_exact"] for model, each in models.items() for row in each}
    lines = [
        ["exact, MiB", *(f"{each[0]['exact_bytes'] / _MIB:.0f}" for each in models.values())],
        ["the most that sketches can free", *(f"{100 * _ceiling(each[0]):.1f} %" for each in models.values())],
    ]
    for name in [name for name in names if name != EXACT]:
        values = [shares.get((model, name)) for model in models]
        lines.append([name, *("-" if value is None else f"{100 * value:.1f} %" for value in values)])
    return _table(["of exact", *models], lines)


def _model_part(rows: Rows) -> str:
    first = rows[0]
    lines = []
    for row in rows:
        kept, predicted = row["kept_bytes"], row["predicted_bytes"]
        lines.append(
            [
                method_name(row),
                "" if not row["sketched_layers"] else str(row["sketched_layers"]),
                "-" if kept is None else f"{kept / _MIB:.2f}",
                "-" if kept is None else f"{100 * row['of_exact']:.1f} %",
                "" if None in (kept, predicted) else str(predicted - kept),
            ]
        )
    head = (
        f"## {first['model']}\n\n{first['batch']} x {first['seq']}, {first['dtype']}, attention {first['attention']},"
        f" dropout {first['dropout']:g} ({first['attention_dropout']:g} in the attention):"
        f" {100 * _ceiling(first):.1f} % of what the exact model keeps are inputs of linear layers that nothing else"
        " needs."
    )
    notes = dict.fromkeys(row["note"] for row in rows if row["note"])
    table = _table(["method", "sketched layers", "kept MiB", "of exact", "predicted - measured, bytes"], lines)
    return "\n\n".join([head, table, *(f"Nothing to convert: {note}." for note in notes)])


def _batches_part(rows: Rows) -> list[str]:
    """What a sequence keeps in batches of other sizes, for the models that were measured at several."""
    sizes: dict[str, list[int]] = {}
    for row in rows:
        sizes.setdefault(row["model"], []).append(row["batch"])
    kept = {(row["model"], method_name(row), row["batch"]): row["kept_bytes"] for row in rows if row["kept_bytes"]}
    lines = []
    for model, found in sizes.items():
        first, last = found[0], found[-1]
        for (name, method, batch), small in kept.items():
            if first != last and (name, batch) == (model, first) and (model, method, last) in kept:
                a, b = small / first, kept[model, method, last] / last
                # adding zero: -0.0 is none
                change = round(100 * (b / a - 1), 2) + 0.0
                cells = [f"{a / _MIB:.3f}", f"{b / _MIB:.3f}", f"{change:+.2f} %"]
                lines.append([model, method, f"{first} and {last}", *cells])
    if not lines:
        return []
    head = ["model", "method", "batches", "MiB a sequence in the first", "in the second", "change"]
    return ["## Bytes a sequence, in batches of two sizes", _table(head, lines)]


def _gpu_part(rows: Rows) -> list[str]:
    lines = [
        [
            row["model"],
            f"{row['batch']} x {row['seq']}",
            method_name(row),
            f"{row['kept_bytes'] / _MIB:.0f}",
            f"{row['peak_bytes'] / _MIB:.0f}",
            f"{row['step_ms']:.1f}",
            *(str(row[f"largest_batch_{budget}_gib"]) for budget in BUDGETS_GIB),
        ]
        for row in rows
        if row.get("peak_bytes")
    ]
    head = ["model", "batch", "method", "kept MiB", "peak MiB", "step ms"]
    head += [f"largest batch in {budget} GiB" for budget in BUDGETS_GIB]
    text = "AdamW steps; the largest batch is extrapolated from the peaks of this batch and of one of twice its size."
    return [f"## On a GPU\n\n{text}", _table(head, lines), _origins(rows, GPU_FILE)]


def _origins(rows: Rows, name: str) -> str:
    keys = ("rmm_linear", "commit", "torch", "transformers", "hardware")
    models: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        models.setdefault(tuple(row[key] for key in keys), []).append(row["model"])
    peft = sorted({row["peft"] for row in rows if row["peft"]})
    lines = [
        f"- `{name}`, {', '.join(dict.fromkeys(each))}: rmm_linear {version} (commit {commit}), torch {torch_version},"
        f" transformers {transformers_version}, {hardware}."
        for (version, commit, torch_version, transformers_version, hardware), each in models.items()
    ]
    return "\n".join([*lines, *(f"- LoRA: PEFT {version}." for version in peft)])


def write_report(folder: Path) -> str:
    """Write `report.md` and `figure.png` into a results folder.

    Args:
        folder: The folder of `memory.csv`, of `memory-cuda.csv`, or of both.

    Raises:
        HarnessError: If there are no results, or the folder can't be written to.
    """
    on_gpu = read_rows(folder / GPU_FILE) if (folder / GPU_FILE).exists() else []
    rows = read_rows(folder / FILE) if (folder / FILE).exists() or not on_gpu else on_gpu
    table = summary_table(rows)
    head = (
        "# Kept for the backward pass\n\nOf the exact model's bytes, one forward pass each in training mode. Lower is"
        " less memory; `README.md` says what each method costs."
    )
    parts = [
        head,
        table,
        *map(_model_part, _main_rows(rows).values()),
        *_batches_part(rows),
        *([] if rows is on_gpu else ["## Where the numbers come from", _origins(rows, FILE)]),
        *(_gpu_part(on_gpu) if on_gpu else []),
    ]
    text = "\n\n".join(parts) + "\n"
    try:
        replace_file(folder / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
        replace_file(folder / "figure.png", lambda path: draw_figure(rows, path))
    except OSError as error:
        raise HarnessError(
            f"the report can't be written to {folder} ({error.strerror or error}); make the folder writable"
        ) from error
    return f"{table}\n\nreport: {folder / 'report.md'}"


def draw_figure(rows: Rows, path: Path) -> None:
    """Draw a panel a model: a line a method, a point where its bytes lie over the exact model's."""
    models = _main_rows(rows)
    names = list(dict.fromkeys(method_name(row) for each in models.values() for row in each))
    # the legend takes a panel of its own
    lines = math.ceil((len(models) + 1) / _PANELS_A_ROW)
    columns = min(_PANELS_A_ROW, len(models) + 1)
    size = (3.3 * columns + 1.6, (0.31 * len(names) + 1.1) * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, sharex=True, layout="constrained")
    panels = list(grid.flat)
    most = max((row["of_exact"] for row in rows if row["of_exact"] is not None), default=1.0)
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
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the user has something to put right.
    """
    return report_command(arguments, write_report, default=Path(__file__).parent / "results")


if __name__ == "__main__":
    sys.exit(main())
