"""Tables and figure of `experiments.checkpointing.compiled`'s results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from experiments import results_by_model
from experiments.blocks import filled
from experiments.rows import replace_file

from .baselines import BLOCKS, BUDGET, EAGER
from .report import README, as_percent, by_model, markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS_FILE = "compiled.csv"
COMPILED, EXACT, INDUCTOR = "torch.compile", "planned, exact", "planned, inductor"
# settings of budgets that lie evenly between the plain peak and the least
SPREAD = "spread"
_EAGER_BLOCKS, _COMPILED_BLOCKS, _COMPILED_BUDGET = (
    f"{EAGER}, {BLOCKS}",
    f"{COMPILED}, {BLOCKS}",
    f"{COMPILED}, {BUDGET}",
)
COMMAND = "python -m experiments.checkpointing.compiled"
Row = dict[str, Any]
Rows = Sequence[Row]
_MIB = 2**20
_WHOLE = ("batch", "size", "parameter_bytes", "rounds")
_BYTES = ("budget_bytes", "simulated_peak_bytes", "peak_bytes", "tensors_peak_bytes")
_FRACTIONS = ("step_s", "step_s_q20", "step_s_q80", "gradient_difference", "compile_s")
_KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_WHOLE + _BYTES, int),
    **dict.fromkeys(_FRACTIONS, float),
    "same_gradients": lambda text: text == "True",
}
_NEEDED = {"model", "method", "setting", "peak_bytes", "step_s", "budget_bytes", "commit"}
# colours of Okabe and Ito; the marks say the same again
_FAMILIES = {
    EAGER: ("black", "s"),
    _EAGER_BLOCKS: ("black", "P"),
    COMPILED: ("#E69F00", "s"),
    _COMPILED_BLOCKS: ("#E69F00", "P"),
    _COMPILED_BUDGET: ("#D55E00", "X"),
    EXACT: ("#56B4E9", "o"),
    INDUCTOR: ("#0072B2", "o"),
}


def read_compiled_rows(path: Path) -> list[Row]:
    """Read a results file.

    Returns:
        Its rows, numbers as numbers and empty cells as None.
    """
    rows = results_by_model.read_rows(path, kinds=_KINDS, needed=_NEEDED, command=COMMAND)
    return [row | {"setting": row["setting"] or ""} for row in rows]


def _family(row: Row) -> str:
    if row["method"] not in (EAGER, COMPILED) or not row["setting"]:
        return row["method"]
    return f"{row['method']}, {BLOCKS if row['setting'] == BLOCKS else BUDGET}"


def _of(rows: Rows, family: str) -> list[Row]:
    return [row for row in rows if _family(row) == family and row["peak_bytes"] is not None]


def _within(rows: Rows, method: str, peak_bytes: int) -> Row | None:
    """The plan of the largest budget that is at most a rival's peak."""
    fitting = [row for row in _of(rows, method) if row["budget_bytes"] <= peak_bytes]
    return max(fitting, key=lambda row: row["budget_bytes"], default=None)


def claims(rows: Rows) -> str:
    """Say how many plans kept their budgets and bits."""
    spread = [row for row in rows if row["method"] == INDUCTOR and row["setting"].startswith(SPREAD)]
    within = sum(row["peak_bytes"] is not None and row["peak_bytes"] <= row["budget_bytes"] for row in spread)
    monotone = 0
    for own in by_model(spread).values():
        ordered = sorted(own, key=lambda row: row["budget_bytes"])
        peaks = [row["peak_bytes"] for row in ordered]
        monotone += None not in peaks and peaks == sorted(peaks)
    rivals = [row for row in _of(rows, INDUCTOR) if row not in spread]
    kept = sum(row["peak_bytes"] <= row["budget_bytes"] for row in rivals)
    exact = _of(rows, EXACT)
    to_the_byte = sum(row["tensors_peak_bytes"] == row["simulated_peak_bytes"] for row in exact)
    same = sum(row["same_gradients"] for row in exact)
    return (
        f'`executor="inductor"`: the measured peak is at most the budget in {within} of {len(spread)} budgets that lie'
        f" evenly, and in {kept} of {len(rivals)} others; it grows with the budget on {monotone} of"
        f' {len(by_model(spread))} models. `executor="exact"`: the measured peak, without what kernels hold for'
        f" themselves, is the simulated one to the byte in {to_the_byte} of {len(exact)} plans, and all gradients are"
        f" those of eager mode bit for bit in {same}."
    )


def _share(row: Row, eager: Row) -> str:
    return f"{as_percent(row['peak_bytes'] / eager['peak_bytes'])}, {row['step_s'] / eager['step_s']:.2f}"


def _ratios(rows: Rows, rivals: Rows) -> Iterator[float]:
    for rival in rivals:
        plan = _within(rows, INDUCTOR, rival["peak_bytes"])
        if plan is not None:
            yield plan["step_s"] / rival["step_s"]


def compiled_table(rows: Rows) -> str:
    """Return plans beside what torch.compile has, a line a model."""
    lines = []
    for model, own in by_model(rows).items():
        (eager,) = _of(own, EAGER)
        cells = [f"{model}, {eager['batch']} x {eager['size']}", f"{eager['step_s']:.2f}"]
        for family in (_EAGER_BLOCKS, COMPILED, _COMPILED_BLOCKS):
            cells += [_share(row, eager) for row in _of(own, family)]
        plain = next(row for row in _of(own, INDUCTOR) if row["setting"] == "100 %")
        (unlimited,) = _of(own, COMPILED)
        cells.append(
            f"{as_percent(plain['peak_bytes'] / eager['peak_bytes'])}, {plain['step_s'] / unlimited['step_s']:.2f}"
        )
        cells += [f"{ratio:.2f}" for ratio in _ratios(own, _of(own, _COMPILED_BLOCKS))] or ["-"]
        budgets = _of(own, _COMPILED_BUDGET)
        ratios = list(_ratios(own, budgets))
        least = min(budgets, key=lambda row: row["peak_bytes"])
        cells.append(as_percent(least["peak_bytes"] / eager["peak_bytes"]))
        cells.append(f"{statistics.median(ratios):.2f} ({max(ratios):.2f}), {len(ratios)}" if ratios else "-")
        cells.append(_share(min(_of(own, INDUCTOR), key=lambda row: row["peak_bytes"]), eager))
        lines.append(cells)
    head = ["model", "eager, s", f"eager, {BLOCKS}", COMPILED, _COMPILED_BLOCKS]
    head += [f"plan of 100 %: peak, time over {COMPILED}'s", f"plan at the peak of {COMPILED}, {BLOCKS}: time over its"]
    head += [f"{BUDGET}: least peak", "plans at its peaks: time over its, median (worst), how many"]
    return markdown_table([*head, "least plan"], lines)


def _model_part(rows: Rows) -> str:
    (eager,) = _of(rows, EAGER)
    lines = []
    for row in rows:
        budget, peak, simulated = row["budget_bytes"], row["peak_bytes"], row["simulated_peak_bytes"]
        cells = [row["method"], row["setting"], f"{budget / _MIB:.2f}" if isinstance(budget, int) else ""]
        if peak is None:
            lines.append([*cells, *[""] * 6, row["note"]])
            continue
        cells += ["" if simulated is None else f"{simulated / _MIB:.2f}", f"{row['tensors_peak_bytes'] / _MIB:.2f}"]
        cells.append(f"{peak / _MIB:.2f}")
        times = [row[key] / eager["step_s"] for key in ("step_s", "step_s_q20", "step_s_q80")]
        cells += [as_percent(peak / eager["peak_bytes"]), "{:.2f} ({:.2f}-{:.2f})".format(*times)]
        cells.append("" if row["compile_s"] is None else f"{row['compile_s']:.0f}")
        bits = "same" if row["same_gradients"] else f"other by {row['gradient_difference']:.0e}"
        lines.append([*cells, ", ".join(part for part in (bits, row["note"]) if part)])
    head = ["method", "setting", "budget, MiB", "simulated peak", "measured: tensors", "measured: all", "of eager"]
    table = markdown_table([*head, "time, of eager", "s to compile", "gradients"], lines)
    return (
        f"## {eager['model']}\n\n{eager['batch']} x {eager['size']}, {eager['parameter_bytes'] / _MIB:.2f} MiB of"
        f" parameters, `{eager['config']}`; an eager step takes {eager['step_s']:.3f} s, median of"
        f" {eager['rounds']}.\n\n{table}"
    )


def compiled_summary(rows: Rows) -> str:
    """Return everything that was measured, for the terminal."""
    parts = [_model_part(own) for own in by_model(rows).values()]
    return "\n\n".join([claims(rows), compiled_table(rows), *parts])


def compiled_block(folder: Path) -> str:
    """Return the block of this experiment's README.md."""
    path = folder / ROWS_FILE
    if not path.exists():
        return f"No results are committed: `{COMMAND}` makes them."
    rows = read_compiled_rows(path)
    origins = dict.fromkeys(
        f"rmm_linear {row['rmm_linear']} (commit {row['commit']}), torch {row['torch']}, {row['hardware']}."
        for row in rows
    )
    return "\n\n".join(["![time against peak](results/compiled.png)", compiled_table(rows), claims(rows), *origins])


def write_compiled_report(folder: Path) -> str:
    """Write `compiled.md` and `compiled.png` into a results folder, and this experiment's README.md if it is its."""
    rows = read_compiled_rows(folder / ROWS_FILE)
    text = f"# Compiled steps as they ran\n\n{compiled_summary(rows)}\n"
    replace_file(folder / "compiled.md", lambda path: path.write_text(text, encoding="utf-8"))
    replace_file(folder / "compiled.png", lambda path: draw_compiled(rows, path))
    if folder.resolve() == (README.parent / "results").resolve():
        new = filled(README.read_text(encoding="utf-8"), {"compiled": lambda: compiled_block(folder)})
        replace_file(README, lambda path: path.write_text(new, encoding="utf-8"))
    return f"{claims(rows)}\n\n{compiled_table(rows)}\n\nreport: {folder / 'compiled.md'}"


def draw_compiled(rows: Rows, path: Path) -> None:
    """Draw a panel a model: the step's time against its peak, both of eager mode's."""
    models = by_model(rows)
    # the legend takes a panel of its own
    columns = min(3, len(models) + 1)
    lines = (len(models) + columns) // columns
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    panels = list(grid.flat)
    for axes, own in zip(panels, models.values(), strict=False):
        _draw_model(axes, own)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=c, marker=m, linestyle="-", label=name) for name, (c, m) in _FAMILIES.items()]
    panels[len(models)].legend(handles=handles, loc="center", frameon=False, labelspacing=0.8)
    figure.supxlabel("measured peak, % of the eager step's (parameters and batch left out)")
    figure.supylabel("time of a step, of the eager step's")
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def _draw_model(axes: Axes, rows: Rows) -> None:
    (eager,) = _of(rows, EAGER)
    for family, (colour, marker) in _FAMILIES.items():
        own = sorted(_of(rows, family), key=lambda row: row["peak_bytes"])
        points = [(100 * row["peak_bytes"] / eager["peak_bytes"], row["step_s"] / eager["step_s"]) for row in own]
        if points:
            xs, ys = zip(*points, strict=True)
            size = 5 if family in (EXACT, INDUCTOR) else 10
            axes.plot(xs, ys, color=colour, marker=marker, markersize=size, markeredgecolor="white", alpha=0.9)
    axes.set_title(f"{eager['model']}, {eager['batch']} x {eager['size']}", fontsize=10)
    axes.grid(alpha=0.25)
