"""Tables and figures of `experiments.glue.variance`: `python -m experiments.glue.variance_report FOLDER`.

Everything but the targets is computed from the CSV files of the folder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

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
    read_numbers,
    read_records,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[dict[str, Any]]
# the project's targets: budget -> all rows, padding left out
TARGETS = {0.25: (0.05, 0.03), 0.1: (0.80, 0.05), 0.05: (2.2, 0.60)}
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
    """Write `report.md` and the figures of what there is into a results folder.

    Args:
        folder: The folder of `against_bytes.csv`, `allocated.csv`, `over_training.csv` and
            `equal_bytes.csv`, or of some of them.

    Raises:
        HarnessError: If there is nothing to report, or the folder can't be written to.
    """
    parts: list[str] = []
    try:
        if (folder / GRID_FILE).exists():
            parts += _against_bytes(folder)
        if (folder / allocated.FILE).exists():
            parts += _allocated(folder)
        if (folder / over_training.FILE).exists():
            parts += _over_training(folder)
        if (folder / equal_bytes.FILE).exists():
            parts += _equal_bytes(folder)
        if not parts:
            raise HarnessError(f"{folder} holds no results; python -m experiments.glue.variance makes some")
        text = "\n\n".join(parts)
        replace_file(folder / "report.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    except OSError as error:
        raise HarnessError(
            f"the report can't be written to {folder} ({error.strerror or error}); make the folder writable"
        ) from error
    return f"{parts[2]}\n\nreport: {folder / 'report.md'}"


def _against_bytes(folder: Path) -> list[str]:
    records = read_records(folder / GRID_FILE)
    measured = read_records(folder / HEADLINE_FILE) if (folder / HEADLINE_FILE).exists() else []
    replace_file(folder / "against_bytes.png", lambda path: draw_figure(records, path))
    return [
        "# Relative variance against bytes",
        "E‖estimate - gᵀx‖² / ‖gᵀx‖², the mean over the model's linear layers.",
        targets_and_reached(records, measured),
        "![figure](against_bytes.png)",
        *_tables(records),
        _notes(records, measured),
    ]


def _allocated(folder: Path) -> list[str]:
    records = read_numbers(folder / allocated.FILE)
    return [
        "# Every lever together",
        _ALLOCATED.format(records[0]["batches"]),
        allocated.table(records, TARGETS if records[0]["task"] == TASKS[0] else {}),
        _origin(allocated.FILE, records),
    ]


def _over_training(folder: Path) -> list[str]:
    records = read_numbers(folder / over_training.FILE)
    replace_file(folder / over_training.FIGURE, lambda path: over_training.draw(records, path))
    return [
        "# Noise while the model trains",
        _OVER_TRAINING,
        over_training.table(records),
        f"![figure]({over_training.FIGURE})",
        _origin(over_training.FILE, records),
    ]


def _equal_bytes(folder: Path) -> list[str]:
    records = read_numbers(folder / equal_bytes.FILE)
    return [
        "# A ratio for every layer, at equal bytes",
        _EQUAL_BYTES.format(records[0]["batches"]),
        equal_bytes.table(records),
        _origin(equal_bytes.FILE, records),
    ]


def _origin(name: str, records: Records) -> str:
    first = records[0]
    return (
        f"`{name}`: {first['task']}, {first['model']}, rmm_linear {first['rmm_linear']} (commit {first['commit']}),"
        f" torch {first['torch']}, transformers {first['transformers']}, {first['hardware']}."
    )


def targets_and_reached(records: Records, measured: Records) -> str:
    """One table a padding: the targets and what is reached, budget by budget.

    Args:
        records: Rows of the grid.
        measured: Rows of the measured cells; none if nothing has been measured yet.

    Returns:
        The tables, of the first task of the usual order that the grid has, and its last state.
    """
    present = {record["task"] for record in records}
    task = next((name for name in TASKS if name in present), min(present))
    mine = [record for record in records if record["task"] == task]
    step = max(record["step"] for record in mine)
    parts = []
    for padding, label in ((TO_LONGEST, "padded to 128"), (TO_OWN, "padded to its longest")):
        header = [
            "bytes",
            "the paper's gaussian",
            "target",
            "reached",
            "with",
            "target, padding left out",
            "reached",
            "with",
        ]
        lines = [_row(header), "|" + "---|" * len(header)]
        for budget in HEADLINE_BUDGETS:
            cells = [f"{budget:g}"]
            panel = _panel(mine, step, padding, ALL_ROWS)
            papers = [row for row in _of_family(panel, FAMILIES[0]) if row["budget"] == budget]
            cells.append(_reached(papers[0], GAUSSIAN, budget, measured) if papers else "")
            for rows, bound in zip((ALL_ROWS, REAL_ROWS), TARGETS[budget], strict=True):
                best = best_within(_panel(mine, step, padding, rows), budget)
                cells.append(f"<= {bound:g}")
                if best is None:
                    cells += ["", ""]
                    continue
                met = best["relative_variance"] <= bound
                cells.append(_reached(best, BEST, budget, measured) + ("" if met else " (missed)"))
                cells.append(f"{describe(best)}, {best['bytes']:.4f}")
            lines.append(_row(cells))
        real = _panel(mine, step, padding, REAL_ROWS)[:1]
        share = f", {100 * real[0]['sketched_rows'] / real[0]['batch_rows']:.0f} % of the rows real" if real else ""
        parts.append(f"**{task}, {label}{share}, after {step} steps**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _reached(record: dict[str, Any], which: str, budget: float, measured: Records) -> str:
    """The closed form and, where it was measured, the measured mean, its standard error and z."""
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
    """Return the best row of a panel within a budget.

    Args:
        records: Rows of one task.
        step: The state of the model.
        padding: `TO_LONGEST` or `TO_OWN`.
        rows: `ALL_ROWS` or `REAL_ROWS`.
        budget: Bytes relative to the input in bfloat16.
        papers: Whether to look at the paper's Gaussian alone.

    Returns:
        The row, or None if nothing fits.
    """
    panel = _panel(records, step, padding, rows)
    return best_within(_of_family(panel, FAMILIES[0]) if papers else panel, budget)


def describe(record: dict[str, Any]) -> str:
    """Say in a few words how a row's layers keep their input.

    Args:
        record: A row of the grid.

    Returns:
        Such as "hadamard 0.4, centred, int4".
    """
    if record["ratio"] == 1:
        name = "the input" if record["storage"] else "the input as it is"
    else:
        name = f"{record['sketch']} {record['ratio']:g}"
    return ", ".join(
        [name, *(["centred"] if record["center"] else []), *([record["storage"]] if record["storage"] else [])]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
    last = [record for record in records if record["step"] == _last_step(records)]
    tasks = ", ".join(dict.fromkeys(record["task"] for record in records))
    parts = []
    for step in sorted({record["step"] for record in records}):
        lines = [
            "| bytes | rows | " + " | ".join(map(_family_name, FAMILIES)) + " |",
            "|" + "---|" * (len(FAMILIES) + 2),
        ]
        for budget in sorted({record["budget"] for record in records}, reverse=True):
            for padding, rows, label in _PANELS:
                means = [_means(_of_family(_panel(records, step, padding, rows), family)) for family in FAMILIES]
                if any(budget in each for each in means):
                    numbers = [_number(each[budget][1]) if budget in each else "" for each in means]
                    lines.append(_row([f"{budget:g}", label, *numbers]))
        parts.append(f"**After {step} steps: mean over {tasks}**\n\n" + "\n".join(lines))
    columns = [(label, _panel(last, last[0]["step"], padding, ALL_ROWS)) for padding, _, label in _PANELS[::2]]
    of = f"mean over {tasks}, after {last[0]['step']} steps"
    parts.append(
        f"**Every sketch in bfloat16 at {PLAIN_BUDGET:g} of the bytes: {of}**\n\n"
        + _cross(columns, PLAIN_BUDGET, lambda row: None if row["storage"] else "bfloat16")
    )
    real = [("", _panel(last, last[0]["step"], TO_LONGEST, REAL_ROWS))]
    parts.append(
        f"**Every sketch and storage at {CROSS_BUDGET:g} of the bytes, padded to 128, padding left out: {of}**\n\n"
        + _cross(real, CROSS_BUDGET, lambda row: row["storage"] or "bfloat16")
    )
    return parts


def _cross(columns: Sequence[tuple[str, Records]], budget: float, group: Callable[[dict[str, Any]], str | None]) -> str:
    """Sketches down, and across: centred or not, by what `group` says, in each of some panels."""
    found: dict[str, dict[str, float]] = {}
    order: dict[str, tuple[Any, ...]] = {}
    for number, (label, panel) in enumerate(columns):
        for key in dict.fromkeys((row["sketch"], row["center"], row["storage"]) for row in panel):
            storage = group({"storage": key[2]})
            means = _means(_of_family(panel, key))
            if storage is not None and budget in means:
                words = [label, *([storage] if len(columns) == 1 else []), *(["centred"] if key[1] else [])]
                head = ", ".join(filter(None, words))
                order[head] = (number, key[1], key[2] or "")
                found.setdefault(key[0], {})[head] = means[budget][1]
    heads = sorted(order, key=lambda head: order[head])
    lines = [_row(["sketch", *heads]), "|" + "---|" * (len(heads) + 1)]
    for sketch in sorted(found):
        lines.append(_row([sketch, *(_number(found[sketch][head]) if head in found[sketch] else "" for head in heads)]))
    return "\n".join(lines)


def _notes(records: Records, measured: Records) -> str:
    last, first = _last_step(records), min(record["step"] for record in records)
    notes = []
    notes.append(
        f"{records[0]['layers']} linear layers, the first {_sequences(records)} of the training split, dropout on; the "
        f"model after {first} and {last} steps of training with exact layers."
    )
    notes.append(
        "Bytes are all-in (scales, means, seeds) and relative to all rows of the input in bfloat16, also where padding "
        f"is left out. Values alone take the budget at most, and everything {100 * (ALLOWANCE - 1):.0f} % more at "
        "most. Variances are those of float32 computations."
    )
    notes.append('"The input": kept without a sketch. What fits a smaller budget stands under the larger ones as well.')
    if measured:
        far = [row for row in measured if abs(row["z"]) > _LARGEST_Z]
        notes.append(
            f"Measured: {min(row['draws'] for row in measured)} draws a cell or more, spread evenly over the layers; of"
            f" {len(measured)} cells {len(far)} differ from the closed form by more than {_LARGEST_Z} standard errors"
            f" (largest |z| {max(abs(row['z']) for row in measured):.1f})."
        )
    for name, rows in ((GRID_FILE, records), (HEADLINE_FILE, measured)):
        origins = dict.fromkeys(
            tuple(row[key] for key in ("model", "rmm_linear", "commit", "torch", "transformers", "hardware", "threads"))
            for row in rows
        )
        for model, version, commit, torch_version, transformers_version, hardware, threads in origins:
            notes.append(
                f"`{name}`: {model}, rmm_linear {version} (commit {commit}), torch {torch_version}, transformers"
                f" {transformers_version}, {hardware}, {threads} thread{'s' if threads != 1 else ''}."
            )
    return "\n".join(f"- {note}" for note in notes)


def _sequences(records: Records) -> str:
    rows = next((record["batch_rows"] for record in records if record["padding"] == TO_LONGEST), None)
    return "sequences" if rows is None else f"{rows // 128} sequences"


def draw_figure(records: Records, path: Path) -> None:
    """Draw relative variance over bytes, a panel a treatment of the padding, a line a family."""
    step = _last_step(records)
    figure, grid = plt.subplots(2, 2, figsize=(10.6, 9.2), sharex=True, sharey=True, layout="constrained")
    for axes, (padding, rows, label) in zip(grid.flat, _PANELS, strict=True):
        panel = _panel(records, step, padding, rows)
        for family, (colour, marker) in zip(FAMILIES, _STYLES, strict=True):
            _draw_line(axes, _means(_of_family(panel, family)), family, colour, marker)
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


def _draw_line(
    axes: Axes, means: dict[float, tuple[float, float]], family: tuple[str, bool, str | None], colour: str, marker: str
) -> None:
    # equal cells of several budgets are one point, and no variance at all has no place on the axis
    points = [point for point in dict.fromkeys(means.values()) if point[1] > 0 and math.isfinite(point[1])]
    axes.plot(
        [kept for kept, _ in points],
        [variance for _, variance in points],
        color=colour,
        marker=marker,
        markersize=7,
        linewidth=1.4,
        label=_family_name(family),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the user has something to put right.
    """
    return report_command(
        arguments,
        write_report,
        prog="python -m experiments.glue.variance_report",
        description="Write report.md and the figures into the results folder of experiments.glue.variance.",
        default=DEFAULT_OUTPUT,
    )


if __name__ == "__main__":
    sys.exit(main())
