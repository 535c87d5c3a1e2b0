"""Tables and figure of `experiments.checkpointing.run`'s results: `python -m experiments.checkpointing.report FOLDER`.

Everything is computed from the results, but for the peaks that Kusumoto et al. published, which stand beside ours.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from experiments import results_by_model
from experiments.blocks import filled
from experiments.command_line import HarnessError, report_command
from experiments.rows import replace_file

from .baselines import BLOCKS, BUDGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONTIERS_FILE, MEASURED_FILE, ARENAS_FILE = "frontiers.csv", "measured.csv", "arenas.csv"
PLANNED = "planned"
README = Path(__file__).parent / "README.md"
Rows = Sequence[dict[str, Any]]
_MIB, _GB = 2**20, 1e9
_WHOLE = ("batch", "size", "parameter_bytes", "ops", "plain_peak_bytes", "budget_percent", "peak_bytes")
_WHOLE += ("simulated_peak_bytes", "allocator_peak_bytes", "flops", "repeats")
_FRACTIONS = ("planning_s", "extra_cost", "extra_flops", "time_ratio", "time_ratio_q20", "time_ratio_q80")
_FRACTIONS += ("gradient_difference",)
_KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_WHOLE, int),
    **dict.fromkeys(_FRACTIONS, float),
    **dict.fromkeys(("same_gradients", "same_buffers"), lambda text: text == "True"),
}
_NEEDED = {"model", "shape", "batch", "size", "parameter_bytes", "peak_bytes", "extra_cost", "extra_flops", "strategy"}
_NEEDED |= {"commit"}
_BUDGETS = (80, 60, 40, 20)
# planners that ran on a few models alone; a second table shows them
_SOLVERS = ("jain2020", "kirisame2021", "zhang2023")
# of the plain step: a forward pass is about a third of it
_ONE_FORWARD = 1 / 3
# peak memory in GB: Kusumoto et al. 2019, table 1: none, Chen's algorithm, theirs; with liveness analysis
_PUBLISHED = {
    "resnet-50": (8.9, 3.7, 3.4),
    "resnet-152": (9.2, 2.4, 2.3),
    "vgg-19": (7.0, 4.7, 4.5),
    "densenet-161": (8.5, 1.8, 1.6),
    "googlenet": (8.5, 6.5, 5.2),
    "u-net": (9.1, 7.4, 5.0),
}
# the colours of Okabe and Ito, which colour-blind readers can tell apart; the dashes say the same again
_LINES = (
    ("#0072B2", "-"),
    ("#009E73", "--"),
    ("#E69F00", "-."),
    ("#CC79A7", ":"),
    ("#56B4E9", (0, (5, 1))),
    ("#8C6D31", (0, (3, 1, 1, 1))),
    ("#7570B3", (0, (1, 1))),
    ("#666666", (0, (8, 2))),
)
_MARKS = {BLOCKS: ("black", "P", 9), BUDGET: ("#D55E00", "X", 7), PLANNED: ("#0072B2", "o", 5)}
_PANELS_A_ROW = 4
# an unrolled loop has more: planning times of those stand in a line of their own
_MANY_OPS = 10_000
_TOP_PERCENT = 60


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a results file.

    Returns:
        Its rows, numbers as numbers and empty cells as None.

    Raises:
        HarnessError: If it is missing, empty or something else.
    """
    return results_by_model.read_rows(
        path, kinds=_KINDS, needed=_NEEDED, command="python -m experiments.checkpointing.run"
    )


def by_model(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each model, by its name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


def as_percent(fraction: float | None, sign: str = "") -> str:
    """Return a fraction as text: "-" for None, and three digits for large ones."""
    if fraction is None:
        return "-"
    percent = 100 * fraction
    # adding zero: -0.0 is none
    return f"{round(percent, 0 if abs(percent) >= 99.95 else 1) + 0.0:{sign}.{0 if abs(percent) >= 99.95 else 1}f} %"


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def _cheapest(rows: Rows, peak_bytes: float) -> dict[str, Any] | None:
    """The row of the least extra cost within a budget."""
    fitting = [row for row in rows if row["peak_bytes"] <= peak_bytes]
    return min(fitting, key=lambda row: (row["extra_cost"], row["peak_bytes"]), default=None)


def _least(rows: Rows, extra_cost: float) -> dict[str, Any] | None:
    """The row of the least peak for a price."""
    fitting = [row for row in rows if row["extra_cost"] <= extra_cost]
    return min(fitting, key=lambda row: (row["peak_bytes"], row["extra_cost"]), default=None)


def _at(rows: Rows, shape: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["shape"] == shape]


def _shapes(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["shape"] for row in rows))


def _pick(rows: Rows, shape: str, gradients: str) -> list[dict[str, Any]]:
    return [row for row in _at(rows, shape) if row["gradients"] == gradients]


def planned_table(rows: Rows, shape: str = "full", gradients: str = "kept") -> str:
    """Return what budgets cost, the cheapest strategy at each: a line a model.

    Args:
        rows: Rows of the frontiers.
        shape: Which sizes.
        gradients: "kept" until the end of the step, or "freed" as soon as each is made.
    """
    lines = []
    for model, each in by_model(_pick(rows, shape, gradients)).items():
        first = each[0]
        plain = first["plain_peak_bytes"]
        cells = [model, f"{first['batch']} x {first['size']}", str(first["ops"])]
        cells += [f"{first['parameter_bytes'] / _GB:.2f}", f"{plain / _GB:.2f}"]
        for percent in _BUDGETS:
            row = _cheapest(each, plain * percent / 100)
            cells.append("-" if row is None else as_percent(row["extra_cost"], "+"))
        for row in (_least(each, _ONE_FORWARD), _least(each, math.inf)):
            assert row is not None
            cells.append(f"{as_percent(row['peak_bytes'] / plain)} for {as_percent(row['extra_cost'], '+')}")
        lines.append(cells)
    head = ["model", "batch x size", "ops", "parameters, GB", "plain peak, GB"]
    head += [f"time at {percent} %" for percent in _BUDGETS]
    return markdown_table([*head, "least peak for a third more time", "least peak"], lines)


def strategies_table(rows: Rows, shape: str = "full", gradients: str = "kept") -> str:
    """Return each strategy's least peak whose extra time is at most a third, "-" where it refuses: a line a model.

    Args:
        rows: Rows of the frontiers.
        shape: Which sizes.
        gradients: See `planned_table`.
    """
    rows = [row for row in rows if not row["strategy"].startswith(_SOLVERS)]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    lines = []
    for model, each in by_model(_pick(rows, shape, gradients)).items():
        cells = [model]
        for name in names:
            own = [row for row in each if row["strategy"] == name]
            row = _least(own, _ONE_FORWARD)
            if row is None:
                cells.append("-")
                continue
            share = as_percent(row["peak_bytes"] / row["plain_peak_bytes"])
            cells.append(f"{share} for {as_percent(row['extra_cost'], '+')}")
        lines.append(cells)
    for what, found in (
        (f"planning, s (longest of up to {_MANY_OPS} ops)", [row for row in rows if row["ops"] <= _MANY_OPS]),
        ("planning, s (longest of more)", [row for row in rows if row["ops"] > _MANY_OPS]),
    ):
        seconds = [max((row["planning_s"] for row in found if row["strategy"] == name), default=None) for name in names]
        if found:
            lines.append([what, *("-" if longest is None else f"{longest:.1f}" for longest in seconds)])
    return markdown_table(["model", *names], lines)


def solvers_table(rows: Rows, shape: str = "full", gradients: str = "kept") -> str:
    """Return what budgets cost with each solver and online policy, and with the best of the others: a line each.

    Args:
        rows: Rows of the frontiers.
        shape: Which sizes.
        gradients: See `planned_table`.
    """
    lines = []
    for model, each in by_model(_pick(rows, shape, gradients)).items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in each:
            name = row["strategy"] if row["strategy"].startswith(_SOLVERS) else "best of the others"
            groups.setdefault(name, []).append(row)
        plain = each[0]["plain_peak_bytes"]
        for name, own in groups.items() if len(groups) > 1 else ():
            within = (_cheapest(own, plain * percent / 100) for percent in _BUDGETS)
            cells = ["-" if row is None else as_percent(row["extra_cost"], "+") for row in within]
            least = min(row["peak_bytes"] for row in own) / plain
            seconds = sum({row["strategy"]: row["planning_s"] for row in own}.values())
            lines.append([model, str(each[0]["ops"]), name, *cells, as_percent(least), f"{seconds:.1f}"])
    head = ["model", "ops", "strategy", *(f"time at {percent} %" for percent in _BUDGETS), "least peak"]
    return markdown_table([*head, "planning all budgets, s"], lines)


def arenas_table(folder: Path) -> str:
    """Return the least arenas that `experiments.checkpointing.arenas` found: a line a model.

    Args:
        folder: Where the rows are.
    """
    with (folder / ARENAS_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    head = [
        "model",
        *(f"{row['policy']}: {what}" for row in rows[:2] for what in ("least arena", "free where it fails")),
    ]
    lines = [
        [model, *(as_percent(float(row[key])) for row in each for key in ("least_arena", "free_at_failure"))]
        for model, each in by_model(rows).items()
    ]
    return markdown_table(head, lines)


def published_table(rows: Rows) -> str:
    """Return the peaks that Kusumoto et al. published beside ours, parameters included, gradients kept."""
    lines = []
    for model, each in by_model(_pick(rows, "full", "kept")).items():
        if model not in _PUBLISHED:
            continue
        none, chen, kusumoto = _PUBLISHED[model]
        first = each[0]
        total = first["plain_peak_bytes"] + first["parameter_bytes"]
        cells = [model, f"{none} GB", *(as_percent(peak / none) for peak in (chen, kusumoto)), f"{total / _GB:.2f} GB"]
        for wanted in ("chen", "kusumoto", ""):
            row = _least([row for row in each if wanted in row["strategy"]], _ONE_FORWARD)
            peak = None if row is None else (row["peak_bytes"] + first["parameter_bytes"]) / total
            cells.append(as_percent(peak))
        lines.append(cells)
    head = ["model", "paper: none", "Chen", "Kusumoto", "here: none", "Chen", "Kusumoto", "best of all"]
    return markdown_table(head, lines)


def exactness(rows: Rows) -> str:
    """Say in how many runs the simulator was right."""
    planned = [row for row in rows if row["method"] == PLANNED]
    right = sum(row["simulated_peak_bytes"] == row["peak_bytes"] for row in planned)
    same = sum(row["same_gradients"] and row["same_buffers"] for row in planned)
    names = len({row["strategy"] for row in planned})
    models, wide = by_model(planned), by_model(_at(planned, "wide"))
    widths = f" ({len(wide)} of them at published widths too)" if wide else ""
    return (
        f"{len(planned)} schedules of {names} strategies ran, on {len(models)} models{widths}: the measured peak is the"
        f" simulated one to the byte in {right}, all gradients and buffers are the plain step's bit for bit in {same}."
    )


def _flops_within(frontier: Rows, peak_bytes: int) -> float | None:
    return min((row["extra_flops"] for row in frontier if row["peak_bytes"] <= peak_bytes), default=None)


def baselines_table(frontiers: Rows, rows: Rows, shape: str = "small") -> str:
    """Return, for each baseline, what a plan of the same peak computes more: a line a model."""
    lines = []
    simulated = by_model(_pick(frontiers, shape, "kept"))
    for model, each in by_model(_at(rows, shape)).items():
        eager = each[0]["peak_bytes"]
        cells = [model]
        for method in (BLOCKS, BUDGET):
            own = [row for row in each if row["method"] == method]
            if not own:
                cells += ["-", "-", "-"]
                continue
            best = min(own, key=lambda row: row["peak_bytes"])
            cells.append(f"{as_percent(best['peak_bytes'] / eager)} ({best['setting']})")
            cells.append(as_percent(best["extra_flops"], "+"))
            cells.append(as_percent(_flops_within(simulated.get(model, ()), best["peak_bytes"]), "+"))
        least = min(simulated.get(model, ()), key=lambda row: row["peak_bytes"], default=None)
        cells.append("-" if least is None else as_percent(least["peak_bytes"] / eager))
        lines.append(cells)
    head = ["model"]
    for method in (BLOCKS, BUDGET):
        head += [f"{method}: least peak", "FLOPs", "a plan of that peak: FLOPs"]
    return markdown_table([*head, "least planned peak"], lines)


def _model_part(rows: Rows) -> str:
    first = rows[0]
    eager = first["peak_bytes"]
    lines = []
    for row in rows:
        simulated, allocated, ratio = row["simulated_peak_bytes"], row["allocator_peak_bytes"], row["time_ratio"]
        time = ""
        if ratio is not None:
            time = f"{ratio:.2f} ({row['time_ratio_q20']:.2f}-{row['time_ratio_q80']:.2f})"
        other = [] if row["same_gradients"] else [f"gradients by {row['gradient_difference']:.0e}"]
        other += [] if row["same_buffers"] else ["buffers"]
        lines.append(
            [
                row["method"],
                row["setting"] or "",
                row["strategy"] or row["note"] or "",
                f"{row['peak_bytes'] / _MIB:.2f}",
                as_percent(row["peak_bytes"] / eager),
                "" if simulated is None else str(simulated - row["peak_bytes"]),
                "" if allocated is None else f"{allocated / _MIB:.2f}",
                as_percent(row["extra_flops"], "+"),
                time,
                f"other {', '.join(other)}" if other else "same",
            ]
        )
    head = ["method", "setting", "what", "peak, MiB", "of eager", "simulated - measured, bytes"]
    head += ["allocator's peak, MiB", "FLOPs", "time, of eager", "bits"]
    parameters = first["parameter_bytes"] / _MIB
    wide = ", published widths" if first["shape"] == "wide" else ""
    text = f"## {first['model']}{wide}\n\n{first['batch']} x {first['size']}, {parameters:.2f} MiB of parameters."
    return f"{text}\n\n{markdown_table(head, lines)}"


def summary(frontiers: Rows, rows: Rows) -> str:
    """Return the tables of what was measured, for the terminal.

    Args:
        frontiers: Rows of the frontiers.
        rows: Measured rows.

    Returns:
        Markdown.
    """
    return f"{exactness(rows)}\n\n{baselines_table(frontiers, rows)}\n\n{strategies_table(frontiers, 'small')}"


def _origins(rows: Rows, name: str) -> str:
    keys = ("rmm_linear", "commit", "torch", "hardware")
    models: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        models.setdefault(tuple(row[key] for key in keys), []).append(row["model"])
    transformers = sorted({row["transformers"] for row in rows if row["transformers"]})
    lines = [
        f"- `{name}`, {', '.join(dict.fromkeys(each))}: rmm_linear {version} (commit {commit}), torch {torch_version},"
        f" {hardware}."
        for (version, commit, torch_version, hardware), each in models.items()
    ]
    return "\n".join([*lines, *(f"- Hugging Face's models: transformers {version}." for version in transformers)])


def blocks(folder: Path) -> dict[str, Callable[[], str]]:
    """Return what makes the blocks of this experiment's README.md.

    Returns:
        For `experiments.blocks.filled`; `compiled_report` makes the block "compiled".
    """
    frontiers, rows = read_rows(folder / FRONTIERS_FILE), read_rows(folder / MEASURED_FILE)
    return {
        "exactness": lambda: exactness(rows),
        "planned": lambda: planned_table(frontiers),
        "planned, gradients freed": lambda: planned_table(frontiers, gradients="freed"),
        "strategies": lambda: strategies_table(frontiers),
        "solvers": lambda: solvers_table(frontiers),
        "arenas": lambda: arenas_table(folder),
        "published": lambda: published_table(frontiers),
        "baselines": lambda: baselines_table(frontiers, rows),
        "baselines, published widths": lambda: baselines_table(frontiers, rows, "wide"),
        "origins": lambda: f"{_origins(frontiers, FRONTIERS_FILE)}\n{_origins(rows, MEASURED_FILE)}",
    }


def write_report(folder: Path) -> str:
    """Write `report.md` and `figure.png` into a results folder, and this experiment's README.md if it is its own.

    Raises:
        HarnessError: If there are no results, or the folder can't be written to.
    """
    frontiers, rows = read_rows(folder / FRONTIERS_FILE), read_rows(folder / MEASURED_FILE)
    head = "# Training steps as they ran\n\n" + exactness(rows)
    origins = f"## Where the numbers come from\n\n{_origins(rows, MEASURED_FILE)}"
    parts = [_model_part(_at(each, shape)) for each in by_model(rows).values() for shape in _shapes(each)]
    text = "\n\n".join([head, *parts, origins]) + "\n"
    try:
        replace_file(folder / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
        replace_file(folder / "figure.png", lambda path: draw_figure(frontiers, rows, path))
        if folder.resolve() == (README.parent / "results").resolve():
            new = filled(README.read_text(encoding="utf-8"), blocks(folder))
            replace_file(README, lambda path: path.write_text(new, encoding="utf-8"))
    except OSError as error:
        raise HarnessError(
            f"the report can't be written to {folder} ({error.strerror or error}); make the folder writable"
        ) from error
    return f"{summary(frontiers, rows)}\n\nreport: {folder / 'report.md'}"


def draw_figure(frontiers: Rows, rows: Rows, path: Path) -> None:
    """Draw a panel a model: extra FLOPs against the peak, a line a strategy, a mark a run of a baseline."""
    measured = by_model(_at(rows, "small"))
    small = by_model(_pick(frontiers, "small", "kept"))
    names = list(dict.fromkeys(row["strategy"] for row in frontiers))
    styles = {name: _LINES[place % len(_LINES)] for place, name in enumerate(names)}
    # the legend takes a panel of its own
    columns = min(_PANELS_A_ROW, len(measured) + 1)
    lines = math.ceil((len(measured) + 1) / columns)
    size = (3.5 * columns, 3.0 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes, (model, each) in zip(panels, measured.items(), strict=False):
        _draw_model(axes, each, small.get(model, []), styles)
    for axes in panels[len(measured) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=colour, linestyle=dashes, label=name) for name, (colour, dashes) in styles.items()]
    labels = {BLOCKS: "torch.utils.checkpoint, each block", BUDGET: "torch activation_memory_budget, .9 to .05"}
    for method, (colour, marker, extent) in _MARKS.items():
        label = labels.get(method, "a plan that ran, measured")
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=extent, linestyle="", label=label))
    panels[len(measured)].legend(handles=handles, loc="center", frameon=False, fontsize=9, labelspacing=0.7)
    figure.supxlabel("peak, % of the eager step's (parameters and batch left out)", fontsize=11)
    figure.supylabel("extra FLOPs, %", fontsize=11)
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def _draw_model(axes: Axes, rows: Rows, frontier: Rows, styles: dict[str, tuple[str, Any]]) -> None:
    eager = rows[0]["peak_bytes"]
    for name, (colour, dashes) in styles.items():
        own = sorted((row for row in frontier if row["strategy"] == name), key=lambda row: -row["peak_bytes"])
        points = [(100 * row["peak_bytes"] / eager, 100 * row["extra_flops"]) for row in own]
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.4, alpha=0.9)
    for method, (colour, marker, extent) in _MARKS.items():
        own = [row for row in rows if row["method"] == method]
        # those that were the cheapest of all strategies have been timed as well
        own = [row for row in own if method != PLANNED or row["time_ratio"] is not None]
        points = [(100 * row["peak_bytes"] / eager, 100 * row["extra_flops"]) for row in own]
        if points:
            xs, ys = zip(*points, strict=True)
            # white edges: marks of two methods may lie on each other
            axes.plot(xs, ys, color=colour, marker=marker, markersize=extent, linestyle="", markeredgecolor="white")
    axes.set_xscale("log")
    peaks = [row["peak_bytes"] for row in (*rows, *frontier)]
    left = 100 * min(peaks) / eager / 1.15
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 30, 50, 70, 100) if tick >= left]
    axes.set_xlim(left, 125)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(tick) for tick in ticks], fontsize=9)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_ylim(-3, _TOP_PERCENT)
    axes.grid(alpha=0.25)
    first = rows[0]
    axes.set_title(f"{first['model']}, {first['batch']} x {first['size']}", fontsize=10)


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
