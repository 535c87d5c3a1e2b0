"""Tables, figure and one sentence from a folder of result files: `python -m experiments.glue.report FOLDER`.

Everything is computed from the results; nothing that is typed here says how a method did.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.blocks import table

from .command_line import report_command
from .comparison import Comparison, Mean, Row, compare
from .errors import HarnessError
from .figure import draw_figure
from .settings import CHECKPOINTING, EXACT, VARIANTS

_MIB = 2**20
# points of score within which a method counts as equal to exact
_EQUAL = 1.0
# shares of exact's bytes that count as the same
_SAME_SHARE = 0.03


def write_report(folder: Path) -> str:
    """Write `report.md`, `table.csv`, `runs.csv` and `report.png` into a results folder.

    Returns:
        The table, the path of the figure and the one sentence, for the terminal.

    Raises:
        HarnessError: If there is nothing to report, the runs don't compare, or the folder can't be written to.
    """
    comparison = compare(folder)
    numbers, sentence = markdown_table(comparison), one_sentence(comparison)
    notes, beaten = _notes(comparison), beaten_methods(comparison)
    figure = folder / "report.png"
    parts = [f"# Results: {', '.join(comparison.tasks)}", sentence, numbers, "![figure](report.png)", beaten, notes]
    text = "\n\n".join(filter(None, parts))
    try:
        replace_file(folder / "report.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
        replace_file(folder / "table.csv", lambda path: path.write_text(_table_csv(comparison), encoding="utf-8"))
        replace_file(folder / "runs.csv", lambda path: path.write_text(_runs_csv(comparison), encoding="utf-8"))
        replace_file(figure, lambda path: draw_figure(comparison, path))
    except OSError as error:
        raise HarnessError(
            f"the report can't be written to {folder} ({error.strerror or error}); make the folder writable"
        ) from error
    return "\n".join(filter(None, [f"{numbers}\n\n{notes}\n\nfigure: {figure}", sentence, beaten]))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file beside `path`, then put it in its place as a whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(temporary))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _points(value: Mean) -> str:
    return f"{value.mean:.1f}" if value.spread is None else f"{value.mean:.1f} ± {value.spread:.1f}"


def _signed_points(value: Mean) -> str:
    interval = value.interval()
    text = _signed(value.mean)
    return text if interval is None else f"{text} [{_signed(interval[0])}, {_signed(interval[1])}]"


def _signed(points: float) -> str:
    # adding zero turns a rounded -0.0 into 0.0
    return f"{round(points, 1) + 0.0:+.1f}"


def markdown_table(comparison: Comparison) -> str:
    """Return one Markdown table a task, each under the task's name if there are several."""
    parts = []
    for task in comparison.tasks:
        rows = comparison.of_task(task)
        metrics = list(rows[0].metrics)
        # a task with one metric has it for a score
        shown = metrics if len(metrics) > 1 else []
        score = "score" if shown else metrics[0].replace("_", " ")
        knobs = [name for name in ("storage", "bits", "budget", "variant") if any(getattr(row, name) for row in rows)]
        header = ["method", "ratio", "centered", *knobs, "kept MiB", "of exact", score, *shown, "minus exact", "seeds"]
        has_noise = all(row.noise is not None for row in rows)
        if has_noise:
            header.append("noise")
        if comparison.has_times:
            header += ["training s", "step time / exact"]
        lines = []
        for row in rows:
            cells = _cells(row, shown, knobs)
            if has_noise:
                cells.append(f"{row.noise:.1g}" if row.noise else "0")
            lines.append([*cells, *(_time_cells(row) if comparison.has_times else [])])
        title = f"**{task}**\n\n" if len(comparison.tasks) > 1 else ""
        parts.append(title + table(header, lines))
    return "\n\n".join(parts)


def _cells(row: Row, metrics: Sequence[str], knobs: Sequence[str]) -> list[str]:
    return [
        row.method,
        "" if row.ratio is None else f"{row.ratio:g}",
        "" if row.center is None else ("yes" if row.center else "no"),
        *(", ".join(row.variant) if name == "variant" else getattr(row, name) or "" for name in knobs),
        f"{row.kept_bytes / _MIB:.2f}",
        f"{100 * row.kept_share:.1f} %",
        _points(row.score),
        *(_points(row.metrics[name]) for name in metrics),
        "" if row.difference is None else _signed_points(row.difference),
        _seeds(row),
    ]


def _time_cells(row: Row) -> list[str]:
    assert row.train_seconds is not None
    time = row.step_time
    return [_points(row.train_seconds), "" if time is None else f"{time.median:.2f} [{time.low:.2f}, {time.high:.2f}]"]


def _seeds(row: Row) -> str:
    """How many seeds there are, and how many of them the difference to exact rests on if those are fewer."""
    seeds = len(row.seeds)
    if row.difference is None or row.difference.seeds == seeds:
        return str(seeds)
    return f"{seeds} ({row.difference.seeds} paired)"


def _notes(comparison: Comparison) -> str:
    """What the columns mean, and what the numbers can't bear."""
    notes = [
        "Scores are in points after the last epoch, never the best one"
        + (", mean ± standard deviation over the seeds" if comparison.fewest_seeds > 1 else "")
        + "; a task with two metrics is scored by their mean. Kept bytes: what one training step on one fixed batch "
        "keeps for its backward pass, parameters excluded."
    ]
    if comparison.most_pairs > 1:
        notes.append(
            "Differences to exact are paired by seed, with their 95 % interval (Student's t; one interval a row, not "
            "corrected for their number)."
        )
    if any(row.noise is not None for row in comparison.rows if row.method != EXACT):
        notes.append(
            "Noise: the variance that a method adds to the gradient of the initial weights, over the variance that "
            "minibatches have anyway."
        )
    if comparison.fewest_seeds == 1:
        notes.append("One seed supports no claim of equal accuracy: seeds alone move such scores by points.")
    checkpointed = [row for row in comparison.rows if row.method == CHECKPOINTING]
    if checkpointed:
        notes.append(
            "Checkpointing's kept bytes leave out what a block holds again while its backward pass recomputes it."
        )
    if any(row.same_weights for row in checkpointed):
        same = ", ".join(row.task for row in checkpointed if row.same_weights)
        notes.append(f"Checkpointing ended with exact's weights, bit for bit, in every seed: {same}.")
    chosen = {
        f"{_chosen(result['fitted'])} at {result['config']['budget']}"
        for result in comparison.results
        if "fitted" in result
    }
    if chosen:
        notes.append(f"Fit chose, with noise of at most 1 %: {', '.join(sorted(chosen))}.")
    if comparison.has_times:
        notes.append(
            "Step time: forward, backward and optimizer over exact's on the same batch, median with 20 and 80 % "
            "quantiles over all steps but the first two. The runs came one after another, so that the quantiles show "
            "the steps' spread and not what drifts from run to run: less than 5 % is called no difference."
        )
    else:
        notes.append("Times are left out: the machine had other work during these runs (`timing` is off in them).")
    if comparison.incomplete:
        notes.append("Left out, for they are not complete: " + ", ".join(comparison.incomplete) + ".")
    origins: dict[str, set[str]] = {}
    for result in comparison.results:
        hardware, versions = result["hardware"], result["versions"]
        threads = hardware["torch_threads"]
        where = (
            f"torch {versions['torch']}, transformers {versions['transformers']} on"
            f" {hardware['gpu'] or hardware['cpu']}, {threads} thread{'s' if threads != 1 else ''}."
        )
        origins.setdefault(f"{versions['rmm_linear']} ({{}}), {where}", set()).add(_commit(result))
    for origin, commits in sorted(origins.items()):
        notes.append("Ran with rmm_linear " + origin.format(", ".join(sorted(commits))))
    return "\n".join(f"- {note}" for note in notes)


def _chosen(fitted: dict[str, Any]) -> str:
    return f"{fitted['chosen']} (measured peak {100 * fitted['peak_bytes'] / fitted['exact_peak_bytes']:.0f} %)"


def _commit(result: dict[str, Any]) -> str:
    if result["commit"] is None:
        return "no commit"
    return f"commit {result['commit'][:7]}{' with changes' if result['modified'] else ''}"


def one_sentence(comparison: Comparison) -> str:
    """What the results show, in one sentence computed from them."""
    clauses = [_task_clause(task, comparison.of_task(task)) for task in comparison.tasks]
    if comparison.fewest_seeds == 1:
        clauses.append("one seed supports no claim of equal accuracy")
    elif any(_is_wide(row) for row in comparison.rows if row.ratio is not None):
        clauses.append(f"intervals beyond ±{_EQUAL:g} point support no claim of equal accuracy")
    return "; ".join(clauses) + "."


def _is_wide(row: Row) -> bool:
    """Whether the difference to exact may be larger than what counts as none."""
    if row.difference is None:
        return False
    interval = row.difference.interval()
    return interval is None or max(map(abs, interval)) > _EQUAL


def _task_clause(task: str, rows: Sequence[Row]) -> str:
    exact = next((row for row in rows if row.method == EXACT), None)
    sketches = sorted((row for row in rows if row.ratio is not None), key=lambda row: -row.score.mean)
    if exact is None or not sketches:
        missing = "exact" if exact is None else "sketched"
        return f"{task}: there is no {missing} run yet to compare with"
    fewest = min(row.kept_share for row in sketches)
    # chosen by bytes and not by score: the best of several would owe some of its lead to luck
    shown = [row for row in sketches if row.kept_share <= fewest + _SAME_SHARE]
    words = [f"{row.description} scored {_outcome(row)}" for row in shown]
    for row in rows:
        if row.ratio is None and row.method != EXACT:
            words.append(f"{row.description} scored {_outcome(row)}{_step_time(row)}")
    return f"{task}: against {exact.score.mean:.1f} of exact, " + ", ".join(words) + _sketch_times(sketches)


def beaten_methods(comparison: Comparison) -> str:
    """A sentence a task: which methods kept more and were slower than another one, and had no less noise.

    Nothing of tasks whose noise or times are unknown.
    """
    sentences = []
    for task in comparison.tasks:
        rows = comparison.of_task(task)
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
    return _is_faster(first, second) and first.kept_share <= second.kept_share - _SAME_SHARE


def _is_faster(first: Row, second: Row) -> bool:
    """Whether nearly all steps of one were faster than nearly all of the other; no median that the noise allows."""
    if EXACT in (first.method, second.method):
        return first.time_differs < second.time_differs
    return bool(first.step_time and second.step_time and first.step_time.high < second.step_time.low)


def _outcome(row: Row) -> str:
    """Score, difference to exact, whose interval the table has, and share of the bytes kept."""
    score = f"{row.score.mean:.1f}"
    if row.difference is not None:
        score += f" ({_signed(row.difference.mean)})"
    return f"{score} with {100 * row.kept_share:.0f} % of its bytes"


def _step_time(row: Row) -> str:
    if row.step_time is None or row.time_differs == 0:
        return ""
    return f" at {row.step_time.median:.2f} times its step time"


def _sketch_times(sketches: Sequence[Row]) -> str:
    """Which sketches were faster or slower than exact; nothing that the noise does not allow."""
    timed = [row for row in sketches if row.step_time is not None]
    if not timed:
        return ""
    slower = [row for row in timed if row.time_differs > 0]
    faster = [row for row in timed if row.time_differs < 0]
    words = [
        f"{_who(group, timed)} {word} than exact ({_range(group)} times its step time)"
        for group, word in ((faster, "faster"), (slower, "slower"))
        if group
    ]
    if not words:
        words.append("no sketch's step time can be told from exact's")
    return ", " + ", ".join(words)


def _who(group: Sequence[Row], everyone: Sequence[Row]) -> str:
    if len(group) == 1:
        return f"{group[0].description} is"
    return "all sketches are" if len(group) == len(everyone) else f"{len(group)} of {len(everyone)} sketches are"


def _range(group: Sequence[Row]) -> str:
    medians = sorted(row.step_time.median for row in group if row.step_time is not None)
    return f"{medians[0]:.2f}" if len(medians) == 1 else f"{medians[0]:.2f} to {medians[-1]:.2f}"


def _table_csv(comparison: Comparison) -> str:
    records = []
    for row in comparison.rows:
        interval = row.difference.interval() if row.difference else None
        knobs = ("task", "method", "ratio", "center", "storage", "bits", "budget")
        records.append(
            {
                **{name: getattr(row, name) for name in knobs},
                "variant": " ".join(row.variant),
                "seeds": len(row.seeds),
                "kept_bytes": round(row.kept_bytes),
                "kept_share_of_exact": row.kept_share,
                "noise": row.noise,
                "score_mean": row.score.mean,
                "score_spread": row.score.spread,
                "minus_exact_mean": row.difference.mean if row.difference else None,
                "minus_exact_95_low": interval[0] if interval else None,
                "minus_exact_95_high": interval[1] if interval else None,
                "train_seconds_mean": row.train_seconds.mean if row.train_seconds else None,
                "train_seconds_spread": row.train_seconds.spread if row.train_seconds else None,
                "step_time_over_exact_20": row.step_time.low if row.step_time else None,
                "step_time_over_exact_median": row.step_time.median if row.step_time else None,
                "step_time_over_exact_80": row.step_time.high if row.step_time else None,
            }
        )
    return as_csv(records)


def _runs_csv(comparison: Comparison) -> str:
    records = []
    for result in comparison.results:
        config = result["config"]
        timed = config["timing"]
        records.append(
            {
                **{key: config.get(key) for key in ("task", "method", "ratio", "center", "storage", "bits", "budget")},
                "variant": " ".join(word for name, word in VARIANTS.items() if config.get(name)),
                "seed": config["seed"],
                "score": 100 * result["final"]["score"],
                "metrics": " ".join(f"{name}={100 * result['final'][name]:.4f}" for name in result["metrics"]),
                "kept_bytes": result["kept_bytes"]["model"],
                "exact_kept_bytes": result["kept_bytes"]["exact_model"],
                "peak_bytes": result["peak_memory"]["bytes"],
                "peak_of": result["peak_memory"]["what"],
                "train_seconds": result["train_seconds"] if timed else None,
                "clipped_share": _clipped_share(result),
                "commit": result["commit"],
            }
        )
    return as_csv(records)


def _clipped_share(result: dict[str, Any]) -> float | None:
    """Share of the steps whose gradient was clipped: there a sketched gradient is no longer unbiased."""
    limit, norms = result["config"]["max_grad_norm"], result["steps"]["grad_norm"]
    if not limit:
        return None
    # null is a norm that was not finite
    return sum(norm is None or norm > limit for norm in norms) / len(norms)


def as_csv(records: Sequence[dict[str, Any]]) -> str:
    """Return records of equal keys as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    return report_command(
        arguments,
        write_report,
        prog="python -m experiments.glue.report",
        description="Write report.md, table.csv, runs.csv and report.png into a results folder.",
    )


if __name__ == "__main__":
    sys.exit(main())
