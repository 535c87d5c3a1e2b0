"""What the study shows: score differences to exact with intervals, an equivalence test, and a figure over the noise.

    python -m experiments.glue.evidence

Runs are paired by task and seed: data order and initial weights are the same. Of exact runs on several devices, the one
on the method's own counts. Where exact ran on a CPU and on a GPU, their difference stands in the table as a method: it
shows how far two exact runs of a seed lie apart, which differ in dropout's draws and in rounding.

A method's mean difference is the mean over tasks of its mean over seeds. Its standard error adds the squared errors of
the tasks; the degrees of freedom follow from Satterthwaite's approximation, and intervals are Student's. With two to
five seeds a task the intervals are approximate: they hold the truth in 89 to 98 % of all studies, depending on which
task varies most. A percentile bootstrap within each task holds it less often.

Two one-sided t tests (5 % each) would call a method equivalent to exact for any margin above |mean| + t error: the
table has this least margin.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import t as student_t

from experiments.blocks import table
from experiments.command_line import HarnessError, Parser, exit_status

from .comparison import added_noise, check_comparable, rows_of_results
from .result_file import COMPLETE
from .settings import EXACT

RESULTS = Path(__file__).parent / "results" / "study"
ROWS, FIGURE = "rows.jsonl", "noise.png"
_CONFIDENCE, _LEVEL = 0.95, 0.05
_ONCE_MORE = "exact, once more on a GPU"


@dataclass(frozen=True)
class Average:
    """A mean over tasks of the mean differences over seeds.

    Attributes:
        mean: In points.
        error: Its standard error.
        freedom: Degrees of freedom of the standard error.
    """

    mean: float
    error: float
    freedom: float

    @classmethod
    def of(cls, tasks: Sequence[Sequence[float]]) -> Average | None:
        """Average the differences of some tasks; None unless each has two seeds at the least, which differ."""
        if not tasks or any(len(set(values)) < 2 for values in tasks):
            return None
        squares = [statistics.variance(values) / len(values) / len(tasks) ** 2 for values in tasks]
        total = sum(squares)
        parts = (square**2 / (len(values) - 1) for square, values in zip(squares, tasks, strict=True))
        freedom = total**2 / sum(parts)
        return cls(statistics.fmean(map(statistics.fmean, tasks)), math.sqrt(total), freedom)

    @property
    def half(self) -> float:
        """Half of the width of the 95 % interval."""
        return float(student_t.ppf((1 + _CONFIDENCE) / 2, self.freedom)) * self.error

    @property
    def least_margin(self) -> float:
        """The least margin within which two one-sided tests call the mean equivalent to 0."""
        return abs(self.mean) + float(student_t.ppf(1 - _LEVEL, self.freedom)) * self.error


@dataclass(frozen=True)
class Evidence:
    """One method over all tasks.

    Attributes:
        name: The method in words.
        differences: Score minus exact's of the same seed, in points, by task.
        noise: Variance that the method adds over the minibatch's own, by task, one value a run. Of sketches it is that
            of their weight gradients, mean over the training; of others that of the whole gradient before it, less
            dropout's. NaN where it was not measured, also of the exact run.
        kept: Bytes kept over exact's, mean over tasks.
    """

    name: str
    differences: Mapping[str, tuple[float, ...]]
    noise: Mapping[str, tuple[float, ...]]
    kept: float

    @property
    def average(self) -> Average | None:
        """The mean over tasks."""
        return Average.of(list(self.differences.values()))


def read_study(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the complete runs of the study.

    Raises:
        HarnessError: If there are none.
    """
    path = folder / ROWS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    results = [result for result in map(json.loads, lines) if result["status"] == COMPLETE]
    if not results:
        raise HarnessError(f"{path} has no complete run; run `make study` first")
    check_comparable(results)
    return results


def evidence_of(results: Sequence[dict[str, Any]]) -> list[Evidence]:
    """Pair the runs with exact's, method by method."""
    rows = rows_of_results(results)
    exact = [result for result in results if result["config"]["method"] == EXACT]
    found = []
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        differences: dict[str, list[float]] = {}
        noise: dict[str, list[float]] = {}
        for result in results:
            task = result["config"]["task"]
            if result["name"] != f"{task}-{label}-seed{result['config']['seed']}":
                continue
            if (reference := _reference(result, exact)) is not None:
                score = 100 * (result["final"]["score"] - reference["final"]["score"])
                differences.setdefault(task, []).append(score)
                noise.setdefault(task, []).append(_noise(result, reference))
        kept = statistics.fmean(row.kept_share for row in own)
        name = _ONCE_MORE if own[0].method == EXACT else own[0].description
        if differences:
            found.append(Evidence(name, _tuples(differences), _tuples(noise), kept))
    return found


def _reference(result: dict[str, Any], exact: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    device = result["hardware"]["device"]
    pairs = [each for each in exact if _pair(each) == _pair(result)]
    if result["config"]["method"] == EXACT:
        return next((each for each in pairs if device == "cuda" and each["hardware"]["device"] == "cpu"), None)
    return min(pairs, key=lambda each: each["hardware"]["device"] != device, default=None)


def _pair(result: dict[str, Any]) -> tuple[str, int]:
    return result["config"]["task"], result["config"]["seed"]


def _tuples(lists: Mapping[str, list[float]]) -> dict[str, tuple[float, ...]]:
    return {task: tuple(lists[task]) for task in sorted(lists)}


def _noise(result: dict[str, Any], reference: dict[str, Any]) -> float:
    if result["config"]["method"] == EXACT:
        return math.nan
    if "noise_ratio" in result:
        return float(result["noise_ratio"])
    measured = added_noise([(result, reference)])
    return math.nan if measured is None else measured


def evidence_table(results: Sequence[dict[str, Any]]) -> str:
    """Write the table of differences to exact, in Markdown, and a sentence below."""
    found = evidence_of(results)
    tasks = sorted({result["config"]["task"] for result in results})
    header = ["method", "keeps", "noise", *tasks, "mean of tasks", "least margin of equivalence"]
    lines = []
    for each in found:
        average = each.average if set(each.differences) == set(tasks) else None
        noise = [value for values in each.noise.values() for value in values if not math.isnan(value)]
        lines.append(
            [
                each.name,
                f"{100 * each.kept:.0f} %",
                f"{statistics.median(noise):.2g}" if noise else "-",
                *(_cell(each.differences.get(task, ())) for task in tasks),
                "" if average is None else f"{average.mean:+.1f} ± {average.half:.1f}",
                "" if average is None else f"± {average.least_margin:.1f}",
            ]
        )
    spread = {
        task: statistics.stdev(scores)
        for task in tasks
        if len(scores := list(_exact_scores(results, task).values())) > 1
    }
    commits = len({result["commit"] for result in results})
    text = ", ".join(f"{task} {value:.1f}" for task, value in spread.items())
    floor = ""
    if pairs := _of_two_exact_runs(found):
        size = f"{_root_mean_square(pairs):.1f} points (root mean square of {len(pairs)} pairs)"
        floor = f" Two exact runs of a seed, one of them on a GPU, differ by {size}."
    return (
        f"{table(header, lines)}\n\nScore minus exact's of the same seed in points: mean over seeds ± half of the 95 %"
        f" interval (number of seeds); {len(results)} runs of {commits} commits. Noise: the variance that the method"
        " adds over the minibatch's own, median over runs. Exact runs of different seeds have a standard deviation of"
        f" {text} points.{floor}"
    )


def _of_two_exact_runs(found: Sequence[Evidence]) -> list[float]:
    again = (each.differences.values() for each in found if each.name == _ONCE_MORE)
    return [value for differences in again for of_task in differences for value in of_task]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def _exact_scores(results: Sequence[dict[str, Any]], task: str) -> dict[int, float]:
    # one a seed
    exact = [result for result in results if (result["config"]["task"], result["config"]["method"]) == (task, EXACT)]
    return {result["config"]["seed"]: 100 * result["final"]["score"] for result in exact}


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    average = Average.of([values])
    text = f"{statistics.fmean(values):+.1f}" + ("" if average is None else f" ± {average.half:.1f}")
    return f"{text} ({len(values)})"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw score differences over the noise: a point a run, a colour a method, a marker a task."""
    found = evidence_of(results)
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    tasks = sorted({task for each in found for task in each.differences})
    markers = dict(zip(tasks, "osv^DP", strict=False))
    for place, each in enumerate(found):
        for task, values in each.differences.items():
            axes.plot(
                each.noise[task], values, markers[task], color=f"C{place}", markersize=5, alpha=0.75, linestyle="none"
            )
        # a logarithm has no place for noise that could not be told from zero
        if any(value > 0 for values in each.noise.values() for value in values):
            axes.plot([], [], "o", color=f"C{place}", label=each.name)
    for task, marker in markers.items():
        axes.plot([], [], marker, color="0.4", label=task)
    axes.axhline(0, color="0.3", linewidth=1)
    if pairs := _of_two_exact_runs(found):
        floor = _root_mean_square(pairs)
        axes.axhspan(-floor, floor, color="0.9", zorder=0, label="between two exact runs (root mean square)")
    axes.set_xscale("log")
    axes.set_xlabel("noise: variance added over the minibatch's own (mean over the run)")
    axes.set_ylabel("score minus exact's of the same seed, points")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and draw the figure."""
    parser = Parser(prog="python -m experiments.glue.evidence", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the study's rows")

    def work(options: argparse.Namespace) -> int:
        results = read_study(options.results)
        draw(results, options.results / FIGURE)
        print(f"{evidence_table(results)}\n\nfigure: {options.results / FIGURE}")
        return 0

    return exit_status(lambda: work(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
