"""Tables and figures of `experiments.glue.variance`: `python -m experiments.glue.variance_report FOLDER`.

All is computed from the CSV files of the folder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.blocks import table

from . import allocated, equal_bytes, over_training
from .command_line import report_command
from .errors import HarnessError
from .report import replace_file
from .sketch_noise import (
    ALL_ROWS,
    ALLOWANCE,
    BEST,
    CROSS_BUDGET,
    DEFAULT_OUTPUT,
    FAMILIES,
    GAUSSIAN,
    GRID_FILE,
    HEADLINE_BUDGETS,
    HEADLINE_FILE,
    PLAIN_BUDGET,
    REAL_ROWS,
    TASKS,
    TO_LONGEST,
    TO_OWN,
    best_within,
    read_records,
)

Records = Sequence[dict[str, Any]]
_LARGEST_Z = 4.5
_OVER_TRAINING = (
    "The sketches' variance over the minibatch's (sequences drawn independently), both summed over the layers; and the"
    " paper's ratio (r / (n - 1)) D2_RMM / D2_SGD next to its bound (alpha + 1) / alpha."
)
_ALLOCATED = (
    "Relative variance, the mean over the layers, and the bytes kept, within 4 % of each budget: one configuration for"
    " all layers, or one a layer, of centred hadamard or rows without replacement, a ratio and a storage; with and"
    " without the first token's rows kept beside the sketch. Chosen on {:g} other batches of the same padding; closed"
    " forms, whose low-bit part is an average over 64 draws. What is measured are real sketches of the last way."
)
_EQUAL_BYTES = (
    "Relative variances on {:g} batches that the ratios were not chosen by, centred hadamard, padding left out. The sum"
    " of the variances is over that of the squared gradients; of the relative variances it is the mean over the layers."
)
_PANELS = (
    (TO_LONGEST, ALL_ROWS, "padded to 128, all rows"),
    (TO_LONGEST, REAL_ROWS, "padded to 128, padding left out"),
    (TO_OWN, ALL_ROWS, "padded to the longest, all rows"),
    (TO_OWN, REAL_ROWS, "padded to the longest, padding left out"),
)
# the colours of Okabe and Ito, which colour-blind readers can tell apart; the markers say the same again
_STYLES = (("#555555", "X"), ("#E69F00", "v"), ("#56B4E9", "D"), ("#009E73", "s"), ("#0072B2", "o"), ("#D55E00", "^"))


def write_report(folder: Path) -> str:
    """Write `report.md` and the figures of the results that there are into their folder, and return the first table.

    Raises:
        HarnessError: If there is nothing to report, or the folder can't be written to.
    """
    parts: list[str] = []
    try:
        for name, section in (
            (GRID_FILE, _against_bytes),
            (allocated.FILE, _allocated),
            (over_training.FILE, _over_training),
            (equal_bytes.FILE, _equal_bytes),
        ):
            if (folder / name).exists():
                records = read_records(folder / name)
                parts += section(folder, records)
                if section is not _against_bytes:
                    parts.append(_origin(name, records))
        if not parts:
            raise HarnessError(f"{folder} holds no results; python -m experiments.glue.variance makes some")
        text = "\n\n".join(parts)
        replace_file(folder / "report.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    except OSError as error:
        raise HarnessError(
            f"the report can't be written to {folder} ({error.strerror or error}); make the folder writable"
        ) from error
    return f"{parts[2]}\n\nreport: {folder / 'report.md'}"


def _against_bytes(folder: Path, records: Records) -> list[str]:
    measured = read_records(folder / HEADLINE_FILE) if (folder / HEADLINE_FILE).exists() else []
    replace_file(folder / "against_bytes.png", lambda path: draw_figure(records, path))
    return [
        "# Relative variance against bytes",
        "E‖estimate - gᵀx‖² / ‖gᵀx‖², the mean over the model's linear layers.",
        reached(records, measured),
        "![figure](against_bytes.png)",
        *_tables(records),
        _notes(records, measured),
    ]


def _allocated(folder: Path, records: Records) -> list[str]:
    return ["# Every lever together", _ALLOCATED.format(records[0]["batches"]), allocated.ways_table(records)]


def _over_training(folder: Path, records: Records) -> list[str]:
    replace_file(folder / over_training.FIGURE, lambda path: over_training.draw(records, path))
    figure = f"![figure]({over_training.FIGURE})"
    return ["# Noise while the model trains", _OVER_TRAINING, over_training.summary_table(records), figure]


def _equal_bytes(folder: Path, records: Records) -> list[str]:
    what = _EQUAL_BYTES.format(records[0]["batches"])
    return ["# A ratio for every layer, at equal bytes", what, equal_bytes.comparison_table(records)]


def _origin(name: str, records: Records) -> str:
    first, tasks = records[0], ", ".join(dict.fromkeys(record["task"] for record in records))
    return (
        f"`{name}`: {tasks}, {first['model']}, rmm_linear {first['rmm_linear']} (commit {first['commit']}),"
        f" torch {first['torch']}, transformers {first['transformers']}, {first['hardware']}."
    )


def reached(records: Records, measured: Records) -> str:
    """Return what is reached budget by budget, a table a padding, of the usual first task and its last state."""
    present = {record["task"] for record in records}
    task = next((name for name in TASKS if name in present), min(present))
    mine = [record for record in records if record["task"] == task]
    step = _last_step(mine)
    parts = []
    for padding, label in ((TO_LONGEST, "padded to 128"), (TO_OWN, "padded to its longest")):
        lines = []
        for budget in HEADLINE_BUDGETS:
            papers = best_of(mine, step, padding, ALL_ROWS, budget, papers=True)
            cells = [f"{budget:g}", _reached(papers, GAUSSIAN, budget, measured)]
            for rows in (ALL_ROWS, REAL_ROWS):
                best = best_of(mine, step, padding, rows, budget)
                how = "" if best is None else f"{describe(best)}, {best['bytes']:.4f}"
                cells += [_reached(best, BEST, budget, measured), how]
            lines.append(cells)
        real = _panel(mine, step, padding, REAL_ROWS)[:1]
        share = f", {100 * real[0]['sketched_rows'] / real[0]['batch_rows']:.0f} % of the rows real" if real else ""
        header = ["bytes", "the paper's gaussian", "best here", "with", "padding left out", "with"]
        parts.append(f"**{task}, {label}{share}, after {step} steps**\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def _reached(record: dict[str, Any] | None, which: str, budget: float, measured: Records) -> str:
    """The closed form and, where it was measured, the measured mean, its standard error and z."""
    if record is None:
        return ""
    keys = ("task", "step", "padding", "rows", "sketch", "center", "storage", "ratio")
    for row in measured:
        if row["which"] == which and row["budget"] == budget and all(row[key] == record[key] for key in keys):
            return (
                f"{_number(row['closed_form'])}; measured {_number(row['measured'])} ± {row['standard_error']:.1g}"
                f" (z {row['z']:+.1f})"
            )
    return _number(record["relative_variance"])


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value >= 1e-4 else f"{value:.1e}"


def best_of(
    records: Records, step: int, padding: str, rows: str, budget: float, *, papers: bool = False
) -> dict[str, Any] | None:
    """Return the best row of a panel within a budget, of all or of the paper's Gaussian; None if nothing fits."""
    panel = _panel(records, step, padding, rows)
    return best_within(_of_family(panel, FAMILIES[0]) if papers else panel, budget)


def describe(record: dict[str, Any]) -> str:
    """Say in a few words how a row's layers keep their input, such as "hadamard 0.4, centred, int4"."""
    if record["ratio"] == 1:
        name = "the input" if record["storage"] else "the input as it is"
    else:
        name = f"{record['sketch']} {record['ratio']:g}"
    return ", ".join([name, *(["centred"] if record["center"] else []), *filter(None, [record["storage"]])])


def _panel(records: Records, step: int, padding: str, rows: str) -> list[dict[str, Any]]:
    return [each for each in records if (each["step"], each["padding"], each["rows"]) == (step, padding, rows)]


def _of_family(records: Records, family: tuple[str, bool, str | None]) -> list[dict[str, Any]]:
    # a ratio of 1 leaves no sketch; the cell keeps the name that it was asked for by
    return [each for each in records if (each["sketch"], each["center"], each["storage"]) == family]


def _last_step(records: Records) -> int:
    return max(record["step"] for record in records)


def _means(records: Records) -> dict[float, tuple[float, float]]:
    """Budget -> bytes and variance, means over the tasks; budgets that not every task has are left out."""
    tasks = {record["task"] for record in records}
    found = {}
    for budget in sorted({record["budget"] for record in records}):
        of_budget = [record for record in records if record["budget"] == budget]
        if {record["task"] for record in of_budget} == tasks and len(of_budget) == len(tasks):
            found[budget] = (
                sum(record["bytes"] for record in of_budget) / len(tasks),
                sum(record["relative_variance"] for record in of_budget) / len(tasks),
            )
    return found


def _family_name(family: tuple[str, bool, str | None]) -> str:
    sketch, center, storage = family
    return f"{sketch}{', centred' if center else ''}{f', {storage}' if storage else ''}"


def _tables(records: Records) -> list[str]:
    step = _last_step(records)
    tasks = ", ".join(dict.fromkeys(record["task"] for record in records))
    parts = []
    for each_step in sorted({record["step"] for record in records}):
        lines = []
        for budget in sorted({record["budget"] for record in records}, reverse=True):
            for padding, rows, label in _PANELS:
                panel = _panel(records, each_step, padding, rows)
                means = [_means(_of_family(panel, family)) for family in FAMILIES]
                if any(budget in each for each in means):
                    numbers = [_number(each[budget][1]) if budget in each else "" for each in means]
                    lines.append([f"{budget:g}", label, *numbers])
        text = table(["bytes", "rows", *map(_family_name, FAMILIES)], lines)
        parts.append(f"**After {each_step} steps: mean over {tasks}**\n\n{text}")
    of = f"mean over {tasks}, after {step} steps"
    columns = [(label, _panel(records, step, padding, ALL_ROWS)) for padding, _, label in _PANELS[::2]]
    plain = _cross(columns, PLAIN_BUDGET, lambda storage: None if storage else "")
    parts.append(f"**Every sketch in bfloat16 at {PLAIN_BUDGET:g} of the bytes: {of}**\n\n{plain}")
    real = [("", _panel(records, step, TO_LONGEST, REAL_ROWS))]
    crossed = _cross(real, CROSS_BUDGET, lambda storage: storage or "bfloat16")
    where = f"at {CROSS_BUDGET:g} of the bytes, padded to 128, padding left out"
    return [*parts, f"**Every sketch and storage {where}: {of}**\n\n{crossed}"]


def _cross(columns: Sequence[tuple[str, Records]], budget: float, name: Callable[[str | None], str | None]) -> str:
    """Sketches down, and across: each of some panels, centred or not, and storages by their names; None for none."""
    found: dict[str, dict[str, float]] = {}
    order: dict[str, tuple[Any, ...]] = {}
    for number, (label, panel) in enumerate(columns):
        for key in dict.fromkeys((row["sketch"], row["center"], row["storage"]) for row in panel):
            means, storage = _means(_of_family(panel, key)), name(key[2])
            if storage is not None and budget in means:
                head = ", ".join(filter(None, [label, storage, "centred" if key[1] else ""]))
                order[head] = (number, key[1], key[2] or "")
                found.setdefault(key[0], {})[head] = means[budget][1]
    heads = sorted(order, key=lambda head: order[head])
    lines = [
        [sketch, *(_number(found[sketch][head]) if head in found[sketch] else "" for head in heads)]
        for sketch in sorted(found)
    ]
    return table(["sketch", *heads], lines)


def _notes(records: Records, measured: Records) -> str:
    first, last = min(record["step"] for record in records), _last_step(records)
    longest = next((record["batch_rows"] for record in records if record["padding"] == TO_LONGEST), None)
    sequences = "sequences" if longest is None else f"{longest // 128} sequences"
    most = f"{100 * (ALLOWANCE - 1):.0f} %"
    notes = [
        (
            f"{records[0]['layers']} linear layers, the first {sequences} of the training split, dropout on; the model"
            f" after {first} and {last} steps of training with exact layers."
        ),
        (
            "Bytes are all-in (scales, means, seeds) and relative to all rows of the input in bfloat16, also where"
            f" padding is left out. Values alone take the budget at most, and everything {most} more at most. Variances"
            " are computed in float32."
        ),
        '"The input": kept without a sketch. What fits a smaller budget stands under the larger ones as well.',
    ]
    if measured:
        far = [row for row in measured if abs(row["z"]) > _LARGEST_Z]
        notes.append(
            f"Measured: {min(row['draws'] for row in measured)} draws a cell or more, spread evenly over the layers; of"
            f" {len(measured)} cells {len(far)} differ from the closed form by more than {_LARGEST_Z} standard errors"
            f" (largest |z| {max(abs(row['z']) for row in measured):.1f})."
        )
    for name, rows in ((GRID_FILE, records), (HEADLINE_FILE, measured)):
        for commit in dict.fromkeys(row["commit"] for row in rows):
            notes.append(_origin(name, [row for row in rows if row["commit"] == commit]))
    return "\n".join(f"- {note}" for note in notes)


def draw_figure(records: Records, path: Path) -> None:
    """Draw relative variance over bytes, a panel a treatment of the padding, a line a family."""
    step = _last_step(records)
    figure, grid = plt.subplots(2, 2, figsize=(10.6, 9.2), sharex=True, sharey=True, layout="constrained")
    for axes, (padding, rows, label) in zip(grid.flat, _PANELS, strict=True):
        panel = _panel(records, step, padding, rows)
        for family, (colour, marker) in zip(FAMILIES, _STYLES, strict=True):
            means = _means(_of_family(panel, family))
            # equal cells of several budgets are one point, and no variance at all has no place on the axis
            points = [point for point in dict.fromkeys(means.values()) if point[1] > 0 and math.isfinite(point[1])]
            kept, variances = [point[0] for point in points], [point[1] for point in points]
            style = {"color": colour, "marker": marker, "markersize": 7, "linewidth": 1.4}
            axes.plot(kept, variances, label=_family_name(family), **style)
        axes.set_title(label)
        axes.grid(alpha=0.25)
    for axes in grid[-1]:
        axes.set_xlabel("bytes kept / bytes of the input in bfloat16")
    for axes in grid[:, 0]:
        axes.set_ylabel("E‖estimate - gᵀx‖² / ‖gᵀx‖²")
    axes = grid[0][0]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([0.02, *sorted({record["budget"] for record in records})])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    tasks = ", ".join(dict.fromkeys(record["task"] for record in records))
    figure.suptitle(f"Noise of sketched weight gradients: mean over layers and {tasks}, after {step} steps")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    return report_command(
        arguments,
        write_report,
        prog="python -m experiments.glue.variance_report",
        description="Write report.md and the figures into the results folder of experiments.glue.variance.",
        default=DEFAULT_OUTPUT,
    )


if __name__ == "__main__":
    sys.exit(main())
