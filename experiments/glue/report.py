"""Table and figure from a folder of result files: `python -m experiments.glue.report FOLDER`.

Everything is computed from the results; nothing that is typed here says how a method did.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.blocks import table
from experiments.command_line import report_command
from experiments.rows import replace_file

from .comparison import Comparison, Mean, Quantiles, Row, compare
from .settings import CHECKPOINTING, EXACT

_MIB = 2**20
# exact's step time over its own: smaller differences are not told from drift over a run
_EXACT_TIME = Quantiles(0.95, 1.0, 1.05)
# shares of exact's bytes that count as the same
_SAME_SHARE = 0.03
_TASKS_A_ROW = 3
_NOISE_COLOURS = colormaps["plasma"]
# in inches: the width of a method's name
_LEGEND_WIDTH = 3.6


def write_report(folder: Path) -> str:
    """Write `report.md` and `report.png` into a results folder; return a text for the terminal."""
    comparison = compare(folder)
    numbers, notes, beaten = markdown_table(comparison), _notes(comparison), beaten_methods(comparison)
    parts = [f"# Results: {', '.join(comparison.tasks)}", numbers, "![figure](report.png)", beaten, notes]
    text = "\n\n".join(filter(None, parts)) + "\n"
    replace_file(folder / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
    replace_file(folder / "report.png", lambda path: draw_figure(comparison, path))
    return "\n".join(filter(None, [f"{numbers}\n\n{notes}\n\nfigure: {folder / 'report.png'}", beaten]))


def _points(value: Mean) -> str:
    return f"{value.mean:.1f}" if value.spread is None else f"{value.mean:.1f} ± {value.spread:.1f}"


def _signed_points(value: Mean) -> str:
    # adding zero turns a rounded -0.0 into 0.0
    mean, *interval = (f"{round(points, 1) + 0.0:+.1f}" for points in (value.mean, *(value.interval() or ())))
    return f"{mean} [{', '.join(interval)}]" if interval else mean


def markdown_table(comparison: Comparison) -> str:
    """Return one Markdown table a task, each under the task's name if there are several."""
    parts = []
    for task, rows in comparison.tasks.items():
        left_out = {name for name in ("storage", "bits", "budget") if not any(row.knob(name) for row in rows)}
        left_out |= set() if any(row.variant for row in rows) else {"variant"}
        left_out |= set() if all(row.noise is not None for row in rows) else {"noise"}
        left_out |= set() if comparison.has_times else {"training s", "step time / exact"}
        lines = [{name: cell for name, cell in _cells(row).items() if name not in left_out} for row in rows]
        title = f"**{task}**\n\n" if len(comparison.tasks) > 1 else ""
        parts.append(title + table(list(lines[0]), [list(line.values()) for line in lines]))
    return "\n\n".join(parts)


def _cells(row: Row) -> dict[str, str]:
    """Return all cells of a row by the names of their columns."""
    ratio, time, names = row.knob("ratio"), row.step_time, list(row.metrics)
    # a task with one metric has it for a score
    several = names if len(names) > 1 else []
    pairs = row.score.seeds if row.difference is None else row.difference.seeds
    return {
        "method": row.method,
        "ratio": "" if ratio is None else f"{ratio:g}",
        "centered": {None: "", True: "yes", False: "no"}[row.knob("center")],
        **{name: row.knob(name) or "" for name in ("storage", "bits", "budget")},
        "variant": ", ".join(row.variant),
        "kept MiB": f"{row.kept_bytes / _MIB:.2f}",
        "of exact": f"{100 * row.kept_share:.1f} %",
        "score" if several else names[0].replace("_", " "): _points(row.score),
        **{name: _points(row.metrics[name]) for name in several},
        "minus exact": "" if row.difference is None else _signed_points(row.difference),
        # and the number of pairs with exact if it is smaller
        "seeds": f"{row.score.seeds}" + (f" ({pairs} paired)" if pairs < row.score.seeds else ""),
        "noise": f"{row.noise:.1g}" if row.noise else "0",
        "training s": "" if row.train_seconds is None else _points(row.train_seconds),
        "step time / exact": "" if time is None else f"{time.median:.2f} [{time.low:.2f}, {time.high:.2f}]",
    }


def _notes(comparison: Comparison) -> str:
    """The meaning of the columns, and limits of the numbers."""
    results, timed = [result for row in comparison.rows for result in row.results], comparison.has_times
    chosen = set()
    for result in (result for result in results if "fitted" in result):
        fitted = result["fitted"]
        peak = f"{100 * fitted['peak_bytes'] / fitted['exact_peak_bytes']:.0f} %"
        chosen.add(f"{fitted['chosen']} (measured peak {peak}) at {result['config']['budget']}")
    limits = [(result["config"]["max_grad_norm"], result["steps"]["grad_norm"]) for result in results]
    # null is a norm that was not finite
    clipped = sorted(
        sum(norm is None or norm > limit for norm in norms) / len(norms) for limit, norms in limits if limit
    )
    shares = " to ".join(dict.fromkeys(f"{100 * share:.0f}" for share in (*clipped[:1], *clipped[-1:])))
    fewest = min(row.score.seeds for row in comparison.rows)
    spread = ", mean ± standard deviation over the seeds" if fewest > 1 else ""
    notes = {
        f"Scores are in points after the last epoch, never the best one{spread}; a task with two metrics is scored by"
        " their mean. Kept bytes: bytes that one training step on one fixed batch keeps for its backward pass,"
        " without parameters.": True,
        "Differences to exact are paired by seed, with their 95 % interval (Student's t; one interval a row, not"
        " corrected for their number).": any(row.difference and row.difference.seeds > 1 for row in comparison.rows),
        "Noise: the variance that a method adds to the gradient of the initial weights, over the variance that"
        " minibatches have anyway.": any(row.noise is not None for row in comparison.rows if row.method != EXACT),
        "One seed supports no claim of equal accuracy: seeds alone move such scores by points.": fewest == 1,
        "Checkpointing's kept bytes leave out tensors that a block recomputes in its backward pass.": any(
            row.method == CHECKPOINTING for row in comparison.rows
        ),
        f"Fit chose, with noise of at most 1 %: {', '.join(sorted(chosen))}.": chosen,
        f"The gradient was clipped in {shares} % of a run's steps: a clipped sketched gradient is not"
        " unbiased.": clipped,
        "Step time: forward, backward and optimizer over exact's on the same batch, median with 20 and 80 % quantiles"
        " over all steps but the first two. The runs came one after another, so that the quantiles show the steps'"
        " spread and no drift from run to run: less than 5 % is called no difference.": timed,
        "Times are left out: the machine had other work during these runs (`timing` is off in them).": not timed,
        f"Left out, for they are not complete: {', '.join(comparison.incomplete)}.": comparison.incomplete,
    }
    origins: dict[str, set[str]] = {}
    for result in results:
        hardware, versions, commit = result["hardware"], result["versions"], result["commit"]
        threads = hardware["torch_threads"]
        commit = f"commit {commit[:7]}{' with changes' if result['modified'] else ''}" if commit else "no commit"
        where = (
            f"torch {versions['torch']}, transformers {versions['transformers']} on"
            f" {hardware['gpu'] or hardware['cpu']}, {threads} thread{'s' if threads != 1 else ''}."
        )
        origins.setdefault(f"{versions['rmm_linear']} ({{}}), {where}", set()).add(commit)
    ran = [f"Ran with rmm_linear {of.format(', '.join(sorted(commits)))}" for of, commits in sorted(origins.items())]
    return "\n".join(f"- {note}" for note in (*(note for note, holds in notes.items() if holds), *ran))


def beaten_methods(comparison: Comparison) -> str:
    """A sentence a task: which methods kept more and were slower than another one, and had no less noise.

    Nothing of tasks whose noise or times are unknown.
    """
    sentences = []
    for task, rows in comparison.tasks.items():
        if not comparison.has_times or all(row.noise is None for row in rows if row.method != EXACT):
            continue
        beaten: dict[str, list[str]] = {}
        for row in rows:
            better = [other for other in rows if _dominates(other, row)]
            if better:
                best = min(better, key=lambda other: other.kept_bytes)
                beaten.setdefault(best.description, []).append(row.description)
        words = _listed([f"{best} beat {_listed(others)}" for best, others in beaten.items()])
        sentences.append(f"{task}: in kept bytes and step time, at no more noise, {words or 'no method beat another'}.")
    return " ".join(sentences)


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _dominates(first: Row, second: Row) -> bool:
    if first.noise is None or second.noise is None or first.noise > second.noise:
        return False
    mine, others = (_EXACT_TIME if row.method == EXACT else row.step_time for row in (first, second))
    # nearly all steps of one have to be faster than nearly all of the other
    return bool(mine and others and mine.high < others.low) and first.kept_share <= second.kept_share - _SAME_SHARE


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
    for task, members in tasks.items():
        axes = next(panels)
        _draw(axes, [(row, *row.score[:2]) for row in members], names, scale)
        seeds = min(row.score.seeds for row in members)
        axes.set_title(f"{task}: score, {seeds} seed{'s' if seeds > 1 else ''}")
        axes.set_ylabel(f"score (points; {', '.join(name.replace('_', ' ') for name in members[0].metrics)})")
        if comparison.has_times:
            axes = next(panels)
            timed = [(row, row.step_time.median, None) for row in members if row.step_time is not None]
            if not timed:
                # no exact run to compare with
                axes.set_visible(False)
                continue
            timed += [(row, 1.0, None) for row in members if row.method == EXACT]
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
    axes: Any, points: Sequence[tuple[Row, float, float | None]], names: Sequence[str], scale: LogNorm | None
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


if __name__ == "__main__":
    sys.exit(report_command(write_report))
