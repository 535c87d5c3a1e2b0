"""The study's score differences to exact with intervals, an equivalence test, and a figure over the noise.

Runs are paired by task and seed: data order and initial weights are the same. Of exact runs on several devices the run
on the method's own device counts, and another run where there is none. Where exact ran on a CPU and on a GPU, their
difference stands in the table as a method: it shows how far two exact runs of a seed lie apart, which differ in the
draws of dropout, in rounding, and in the versions of torch and transformers.

A method's mean difference is the mean over tasks of its mean over seeds, without the tasks that run last with fewer
seeds. Its standard error adds the squared errors of the tasks; the degrees of freedom follow from Satterthwaite's
approximation, and intervals are Student's. With two to five seeds a task the intervals are approximate: they hold the
truth in 88 to 98 % of all studies, depending on which task varies most.

The table also has intervals of a bootstrap, in which the seeds of each task are drawn with replacement. With five
seeds a task they hold the truth in 85 to 90 % of all studies, where 95 % are meant, and with two seeds in 76 %: methods
of fewer than five seeds have none.

Two one-sided t tests (5 % each) would call a method equivalent to exact for any margin above |mean| + t error: the
table has this least margin.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import chi2, norm
from scipy.stats import t as student_t

from experiments.blocks import table
from experiments.command_line import HarnessError, report_command
from experiments.rows import read_json_lines

from .comparison import check_comparable, label_of, noise_over_minibatch, points_between, rows_of_results
from .result_file import COMPLETE
from .settings import EXACT, load_named_config

RESULTS = Path(__file__).parent / "results" / "study"
ROWS, FIGURE = "rows.jsonl", "noise.png"
Result = dict[str, Any]
_CONFIDENCE, _LEVEL = 0.95, 0.05
# The left edge of the figure, and the difference below which a run is drawn at the lower edge.
_LEAST_NOISE, _LOWEST = 1e-3, -9.0
# Margins in points: of the equivalence test, and of the aim for a mean and for its interval.
_MARGIN, _AIM = 0.5, (0.3, 0.7)
# Draws of a bootstrap, and the seeds of each task that it needs.
_DRAWS, _LEAST_SEEDS = 10_000, 5
_ONCE_MORE = "exact, once more on a GPU"


@dataclass(frozen=True)
class Average:
    """A mean over tasks of the mean differences over seeds, its standard error, and the error's degrees of freedom."""

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
        return float(student_t.ppf((1 + _CONFIDENCE) / 2, self.freedom)) * self.error

    @property
    def least_margin(self) -> float:
        """The least margin within which two one-sided tests call the mean equivalent to 0."""
        return abs(self.mean) + float(student_t.ppf(1 - _LEVEL, self.freedom)) * self.error


def bootstrap_interval(tasks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over tasks whose seeds are drawn with replacement, task by task."""
    random = np.random.default_rng(0)
    means = np.mean([random.choice(values, (_DRAWS, len(values))).mean(axis=1) for values in tasks], axis=0)
    low, high = np.quantile(means, ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2))
    return float(low), float(high)


def chance_of_equal(spread: float, pairs: int, margin: float, *, most: float = math.inf, confidence: float) -> float:
    """Return how often a method that equals exact has an interval within ± margin, and a mean within ± most.

    Differences are normal with a standard deviation of `spread`; the interval is Student's.
    """
    share = (np.arange(1000) + 0.5) / 1000
    errors = spread * np.sqrt(chi2.ppf(share, pairs - 1) / (pairs - 1) / pairs)
    room = np.clip(margin - student_t.ppf((1 + confidence) / 2, pairs - 1) * errors, 0, most)
    return float(np.mean(2 * norm.cdf(room * math.sqrt(pairs) / spread) - 1))


@dataclass(frozen=True)
class Evidence:
    """One method over all tasks, with values a seed by task."""

    name: str
    # score minus exact's of the same seed, in points
    differences: Mapping[str, tuple[float, ...]]
    # variance added to the initial gradient over the minibatch's own; chance can make it negative; NaN if unknown
    noise: Mapping[str, tuple[float, ...]]
    # bytes over exact's on the same batch, mean over the runs of the study's tasks
    kept: float
    # how many differences are of runs on two kinds of machines
    crossed: int


def read_study(folder: Path = RESULTS) -> list[Result]:
    """Read the complete runs of the study."""
    results = [result for result in read_json_lines(folder / ROWS) if result["status"] == COMPLETE]
    if not results:
        raise HarnessError(f"{folder / ROWS} has no complete run; run `make study` first")
    check_comparable(results)
    return results


def evidence_of(results: Sequence[Result]) -> list[Evidence]:
    rows = rows_of_results(results)
    exact = [result for result in results if result["config"]["method"] == EXACT]
    found = []
    for label in dict.fromkeys(label_of(row.results[0]) for row in rows):
        own = [row for row in rows if label_of(row.results[0]) == label]
        runs = (result for result in results if label_of(result) == label)
        pairs = [(run, reference) for run in runs if (reference := _reference(run, exact)) is not None]
        kept = statistics.fmean(row.kept_share for row in own if row.task in _tasks([row.task for row in own]))
        name = _ONCE_MORE if own[0].method == EXACT else own[0].description
        if pairs:
            machines = ([(each["hardware"]["device"], each["hardware"].get("gpu")) for each in pair] for pair in pairs)
            crossed = sum(own != other for own, other in machines)
            found.append(Evidence(name, _by_task(pairs, points_between), _by_task(pairs, _noise), kept, crossed))
    return found


def _reference(result: Result, exact: Sequence[Result]) -> Result | None:
    device = result["hardware"]["device"]
    pairs = [each for each in exact if _pair(each) == _pair(result)]
    if result["config"]["method"] == EXACT:
        return next((each for each in pairs if device == "cuda" and each["hardware"]["device"] == "cpu"), None)
    return min(pairs, key=lambda each: each["hardware"]["device"] != device, default=None)


def _pair(result: Result) -> tuple[str, int]:
    return result["config"]["task"], result["config"]["seed"]


def _tasks(run: Iterable[str]) -> list[str]:
    """Return the tasks that methods are averaged over; SST-2, which has fewer seeds, is none of them."""
    found = sorted(set(run))
    return [task for task in found if task in load_named_config("study").tasks] or found


def _known_noise(each: Evidence, tasks: Iterable[str]) -> list[float]:
    return [value for task in tasks for value in each.noise.get(task, ()) if not math.isnan(value)]


def _by_task(
    pairs: Sequence[tuple[Result, Result]], value: Callable[[Result, Result], float]
) -> dict[str, tuple[float, ...]]:
    """Return the values of a task's seeds; runs of one seed on several devices have their mean."""
    found: dict[str, dict[int, list[float]]] = {}
    for run, reference in pairs:
        task, seed = _pair(run)
        found.setdefault(task, {}).setdefault(seed, []).append(value(run, reference))
    return {task: tuple(map(statistics.fmean, found[task].values())) for task in sorted(found)}


def _noise(result: Result, reference: Result) -> float:
    noise = None if result["config"]["method"] == EXACT else noise_over_minibatch(result, reference)
    return math.nan if noise is None else noise


def evidence_table(results: Sequence[Result]) -> str:
    """Return the table of differences to exact, and sentences below."""
    found = evidence_of(results)
    run = sorted({result["config"]["task"] for result in results})
    tasks = _tasks(run)
    last = [task for task in run if task not in tasks]
    mean = f"mean of {len(tasks)} tasks"
    header = ["method", "keeps", "noise", *tasks, mean, "bootstrap", "least margin of equivalence", *last]
    lines = []
    for each in found:
        seeds = [each.differences.get(task, ()) for task in tasks]
        bootstrap = mean_of_tasks = margin = ""
        if average := Average.of(seeds):
            mean_of_tasks, margin = f"{average.mean:+.1f} ± {average.half:.1f}", f"± {average.least_margin:.1f}"
        if min(map(len, seeds)) >= _LEAST_SEEDS:
            bootstrap = "{:+.1f} to {:+.1f}".format(*bootstrap_interval(seeds))
        cells = {task: difference_cell(each.differences.get(task, ())) for task in run}
        line = [each.name, f"{100 * each.kept:.0f} %", _noise_cell(each, tasks), *(cells[task] for task in tasks)]
        lines.append([*line, mean_of_tasks, bootstrap, margin, *(cells[task] for task in last)])
    commits, changed = len({result["commit"] for result in results}), sum(r.get("modified", False) for r in results)
    crossed = sum(each.crossed for each in found if each.name != _ONCE_MORE)
    multiples = sorted({result["config"].get("pad_multiple", 0) for result in results} - {0})
    padding = "".join(f" Batches of codes are padded to a multiple of {each} tokens." for each in multiples)
    sentences = (
        "Score minus exact's of the same seed in points: mean over seeds ± half of the 95 % interval (number of seeds);"
        f" {len(results)} runs of {commits} commits, {changed} of them with changes; {crossed} pairs of two kinds of"
        f" machines. Keeps: of what exact keeps on the same batch.{padding} Noise: the variance that the method adds to"
        " the whole gradient before the training, over the minibatch's own: mean over runs ± two standard errors."
    )
    return f"{table(header, lines)}\n\n{' '.join((sentences, *_scatter(results, found)))}"


def _noise_cell(each: Evidence, tasks: Sequence[str]) -> str:
    noise = _known_noise(each, tasks)
    if not noise:
        return "-"
    mean = statistics.fmean(noise)
    digits = 3 if abs(mean) < 0.1 else 2
    text = f"{round(mean, 3) + 0.0:.{digits}f}"
    if len(noise) < 2:
        return text
    return f"{text} ± {2 * statistics.stdev(noise) / math.sqrt(len(noise)):.{digits}f}"


def _scatter(results: Sequence[Result], found: Sequence[Evidence]) -> Iterator[str]:
    """Say how far exact runs lie apart, and how many pairs would show how little."""
    scores: dict[str, dict[str, list[float]]] = {}
    for result in (result for result in results if result["config"]["method"] == EXACT):
        of_device = scores.setdefault(str(result["hardware"]["device"]), {})
        of_device.setdefault(result["config"]["task"], []).append(100 * result["final"]["score"])
    device = max(sorted(scores), key=lambda device: sum(map(len, scores[device].values())), default="")
    spread = {task: statistics.stdev(values) for task, values in scores.get(device, {}).items() if len(values) > 1}
    if spread:
        text = ", ".join(f"{task} {spread[task]:.1f}" for task in sorted(spread))
        yield f"Exact runs of different seeds on the device {device} have a standard deviation of {text} points."
    size, pairs = _of_two_exact_runs(found)
    if pairs > 1:
        low, high = (size * math.sqrt(pairs / chi2.ppf(share, pairs)) for share in (0.975, 0.025))
        yield (
            f"Two exact runs of a seed, one on a CPU and one on a GPU, differ by {size:.1f} points (root mean square of"
            f" {pairs} pairs; its 95 % interval is {low:.1f} to {high:.1f})."
        )
        half = norm.ppf(0.975) * size / math.sqrt(20)
        # two one-sided tests of 5 %, with a power of 80 %
        needed = ((norm.ppf(0.95) + norm.ppf(0.9)) * size / _MARGIN) ** 2
        power = [100 * chance_of_equal(each, 20, _MARGIN, confidence=0.9) for each in (size, low, high)]
        aim = 100 * chance_of_equal(size, 20, _AIM[1], most=_AIM[0], confidence=_CONFIDENCE)
        yield (
            f"If a method's differences scatter like that, a mean of 4 tasks of 5 seeds is known to ± {half:.1f}. A"
            f" method that equals exact is then found equivalent within {_MARGIN:g} points in {power[0]:.1f} % of such"
            f" studies ({power[1]:.0f} % at the lower end of that interval, {power[2]:.1f} % at the upper), and reaches"
            f" the aim, a mean within {_AIM[0]:g} and an interval within {_AIM[1]:g}, in {aim:.0f} %. Equivalence"
            f" within {_MARGIN:g} points takes some {needed:.0f} pairs for a power of 80 %."
        )


def _of_two_exact_runs(found: Sequence[Evidence]) -> tuple[float, int]:
    """Return the root mean square of the differences between two exact runs of a seed, and how many there are."""
    again = (each.differences.values() for each in found if each.name == _ONCE_MORE)
    values = [value for differences in again for of_task in differences for value in of_task]
    return math.hypot(*values) / math.sqrt(max(1, len(values))), len(values)


def difference_cell(values: Sequence[float]) -> str:
    """Return the mean of differences, half of its 95 % interval, and how many there are."""
    return f"{mean_cell(values, 1)} ({len(values)})" if values else ""


def mean_cell(values: Sequence[float], digits: int) -> str:
    """Return the mean of differences, and half of its 95 % interval where it has one."""
    average = Average.of([values])
    return f"{statistics.fmean(values):+.{digits}f}" + ("" if average is None else f" ± {average.half:.{digits}f}")


def drawn(results: Sequence[Result]) -> Figure:
    """Draw score differences over the noise: a point a run, a colour a method, a marker a task.

    The runs of a method on a task stand at their mean noise, or at the method's if no run on the task measured it. A
    method whose noise is within two standard errors of 0 stands on the left, at the same place for all tasks. Methods
    whose noise was not measured are left out.
    """
    found = [each for each in evidence_of(results) if _known_noise(each, each.noise)]
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    tasks = sorted({task for each in found for task in each.differences})
    markers = dict(zip(tasks, "osv^DP", strict=False))
    edge = _LEAST_NOISE
    for place, each in enumerate(found):
        noise = _known_noise(each, each.noise)
        is_zero = len(noise) < 2 or statistics.fmean(noise) <= 2 * statistics.stdev(noise) / math.sqrt(len(noise))
        edge /= 1.5 if is_zero else 1
        axes.plot([], [], "o", color=f"C{place}", label=each.name)
        for task, values in each.differences.items():
            x = edge if is_zero else max(_LEAST_NOISE, statistics.fmean(_known_noise(each, [task]) or noise))
            heights = [max(value, _LOWEST) for value in values]
            axes.plot([x] * len(values), heights, markers[task], color=f"C{place}", markersize=5, alpha=0.75)
            for value in values:
                if value < _LOWEST:
                    axes.annotate(f"{value:.0f}", (x, _LOWEST), (6, -3), textcoords="offset points", fontsize=8)
    for task, marker in markers.items():
        axes.plot([], [], marker, color="0.4", label=task)
    axes.axhline(0, color="0.3", linewidth=1)
    axes.axvline(_LEAST_NOISE, color="0.6", linewidth=1, linestyle=":")
    floor, pairs = _of_two_exact_runs(evidence_of(results))
    if pairs:
        axes.axhspan(-floor, floor, color="0.9", zorder=0, label="between two exact runs (root mean square)")
    axes.set_xscale("log")
    axes.set_xlabel("variance added over the minibatch's own (left of the line: not told from 0)")
    axes.set_ylabel("score minus exact's of the same seed, points")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _work(folder: Path) -> str:
    results = read_study(folder)
    drawn(results).savefig(folder / FIGURE, dpi=150)
    return f"{evidence_table(results)}\n\nfigure: {folder / FIGURE}"


if __name__ == "__main__":
    sys.exit(report_command(_work, RESULTS))
