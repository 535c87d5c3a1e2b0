"""From result files to the rows of a table: means and spreads over seeds, and differences to exact, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student_t

from experiments.command_line import HarnessError

from .result_file import COMPLETE, read_result
from .settings import BITS, EXACT, FIT, IRRELEVANT, KNOBS, VARIANTS

# settings that may differ between the runs of one table
# rows of padding, which masks leave out, change no exact result
_VARIED = ("method", *KNOBS, "seed", "executor", "pad_multiple", *IRRELEVANT)
_SKETCH_ONLY = ("min_rows", "exclude_modules")
# two runs' times compare if all of this is equal
_SPEED = ("device", "gpu", "cpu", "torch_threads")
# of the squared gradient: sums of float32 in another order differ by so much
_ROUNDING = 1e-12
# the first steps of a run warm up, and RMMCallback's measurement is in the very first
_UNTIMED_STEPS = 2


class Mean(NamedTuple):
    """A mean over seeds, and their sample standard deviation, which is None for a single seed."""

    mean: float
    spread: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        spread = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), spread, len(values))

    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean by Student's t; None for a single seed."""
        if self.spread is None:
            return None
        half = float(student_t.ppf(0.975, self.seeds - 1)) * self.spread / math.sqrt(self.seeds)
        return self.mean - half, self.mean + half


class Quantiles(NamedTuple):
    """The 20 % quantile, the median and the 80 % quantile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        return cls(*np.quantile(values, (0.2, 0.5, 0.8)).tolist())

    def columns(self) -> dict[str, float]:
        """Return the columns of a results file that `blocks.quantiles` reads."""
        return {"time": self.median, "time_q20": self.low, "time_q80": self.high}


@dataclass(frozen=True)
class Row:
    """One method on one task, over its seeds. Scores are in points, after the last epoch."""

    task: str
    results: tuple[dict[str, Any], ...]
    score: Mean
    metrics: dict[str, Mean]
    # score minus the exact score of the same seed; None for exact itself or without exact runs
    difference: Mean | None
    # bytes kept for the backward pass of one batch, and the same over the exact model's
    kept_bytes: float
    kept_share: float
    # variance added to the initial gradient over the minibatch's own; None where it was not measured
    noise: float | None
    # None where the machine was not quiet
    train_seconds: Mean | None
    # of each step but the first two, over exact's time on the same batch; None as both, and on different hardware
    step_time: Quantiles | None

    def knob(self, name: str) -> Any:
        """A setting of the method; None where it has none, or its results are older."""
        return self.results[0]["config"].get(name)

    @property
    def method(self) -> str:
        return str(self.knob("method"))

    @property
    def variant(self) -> tuple[str, ...]:
        """The other settings, in the words of `VARIANTS`."""
        return variant_of(self.results[0]["config"])

    @property
    def description(self) -> str:
        """Method and knobs in words, for a sentence."""
        ratio, bits, budget, storage = (self.knob(name) for name in ("ratio", "bits", "budget", "storage"))
        if bits is not None:
            return f"{bits}-bit {self.method}"
        if budget is not None:
            return f"fit at {budget}" if self.method == FIT else f"a {self.method} of {budget}"
        if ratio is None:
            return self.method
        variant = f" ({', '.join(self.variant)})" if self.variant else ""
        centered = "centered " if self.knob("center") else ""
        return f"{centered}{self.method} at {ratio:g}{f' in {storage}' if storage else ''}{variant}"


@dataclass(frozen=True)
class Comparison:
    """The contents of a report: the rows of each task, and names and status of the incomplete results."""

    tasks: dict[str, list[Row]]
    incomplete: tuple[str, ...]

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.tasks.values() for row in rows]

    @property
    def has_times(self) -> bool:
        return all(row.train_seconds is not None for row in self.rows)


def compare(folder: Path) -> Comparison:
    # each JSON file of the folder has to be a result
    found = [result for path in sorted(folder.glob("*.json")) if (result := read_result(path)) is not None]
    complete = [result for result in found if result["status"] == COMPLETE]
    if not complete:
        raise HarnessError(f"the results folder {folder} holds no complete run; run something into it first")
    check_comparable(complete)
    tasks: dict[str, list[Row]] = {}
    for row in rows_of_results(complete):
        tasks.setdefault(row.task, []).append(row)
    others = (result for result in found if result["status"] != COMPLETE)
    return Comparison(tasks, tuple(f"{result['name']} ({result['status']})" for result in others))


def rows_of_results(complete: Sequence[dict[str, Any]]) -> list[Row]:
    groups: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for result in complete:
        config = result["config"]
        groups.setdefault((config["task"], *_order(config)), {})[config["seed"]] = result
    exact = {key[0]: by_seed for key, by_seed in groups.items() if EXACT in key}
    return [_row(groups[key], exact.get(key[0], {})) for key in sorted(groups)]


def _order(config: Mapping[str, Any]) -> tuple[Any, ...]:
    # exact, budgets, checkpointing, codes of falling bits and fits, then the sketches by name and falling ratio
    ratio, bits = config.get("ratio"), config.get("bits")
    kind: tuple[Any, ...] = (ratio is not None, config["method"] != EXACT, config["method"], config.get("budget") or "")
    kind += (list(BITS).index(bits) if bits else 0, config.get("storage") or "", variant_of(config))
    return (*kind, -(ratio or 0.0), bool(config.get("center")))


def label_of(result: Mapping[str, Any]) -> str:
    """The result's name without task and seed."""
    return str(result["name"]).partition("-")[2].rpartition("-seed")[0]


def variant_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(word for name, word in VARIANTS.items() if config.get(name))


def check_comparable(results: Sequence[dict[str, Any]]) -> None:
    """Refuse results of which two of one task differ in other settings than a table's columns."""
    first: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for result in results:
        config, weights = result["config"], result["model"]["initial_weights_sha256"]
        # settings that a method has no use for are None
        alike: dict[tuple[Any, ...], Any] = {
            (key,): value for key, value in config.items() if key not in (*_VARIED, *_SKETCH_ONLY)
        }
        alike |= {(key,): config[key] for key in _SKETCH_ONLY if config.get(key) is not None}
        alike |= {("data sha256",): result["data"]["sha256"], ("starting weights", config["seed"]): weights}
        for key, value in alike.items():
            other, expected = first.setdefault((config["task"], *key), (result["name"], value))
            if expected != value:
                raise HarnessError(
                    f"{other} and {result['name']} can't share a table: {key[0]} is {expected!r} in one and"
                    f" {value!r} in the other; keep them in folders of their own (--results)"
                )


def _row(by_seed: dict[int, dict[str, Any]], exact: dict[int, dict[str, Any]]) -> Row:
    results = [by_seed[seed] for seed in sorted(by_seed)]
    is_exact = results[0]["config"]["method"] == EXACT
    pairs = [] if is_exact else [(by_seed[seed], exact[seed]) for seed in sorted(by_seed) if seed in exact]
    timed = all(result["config"]["timing"] for result in results)
    speeds = {tuple(result["hardware"][key] for key in _SPEED) for pair in pairs for result in pair}
    ratios = [ratio for pair in pairs for ratio in _step_ratios(*pair)] if timed and len(speeds) == 1 else []
    kept = [result["kept_bytes"] for result in results]
    noises = [noise for pair in pairs if (noise := noise_over_minibatch(*pair)) is not None]
    points = {name: Mean.of([100 * each["final"][name] for each in results]) for name in results[0]["final"]}
    return Row(
        task=results[0]["config"]["task"],
        results=tuple(results),
        score=points["score"],
        metrics={name: points[name] for name in results[0]["metrics"]},
        difference=Mean.of([points_between(*pair) for pair in pairs]) if pairs else None,
        kept_bytes=statistics.fmean(each["model"] for each in kept),
        kept_share=statistics.fmean(each["model"] / each["exact_model"] for each in kept),
        noise=0.0 if is_exact else max(0.0, statistics.fmean(noises)) if noises else None,
        train_seconds=Mean.of([result["train_seconds"] for result in results]) if timed else None,
        step_time=Quantiles.of(ratios) if ratios else None,
    )


def points_between(mine: dict[str, Any], reference: dict[str, Any]) -> float:
    return float(100 * (mine["final"]["score"] - reference["final"]["score"]))


def noise_over_minibatch(mine: dict[str, Any], reference: dict[str, Any]) -> float | None:
    """Divide the variance that a run's method adds to the initial gradient by the minibatch's own.

    Chance can make the ratio negative; it is None if one of the two runs did not measure it.
    """
    own, exact = mine.get("gradient_noise"), reference.get("gradient_noise")
    if not own or not exact:
        return None
    if own["step_variance"] <= _ROUNDING * own["gradient_squared"]:
        return 0.0
    # exact's own variance is dropout's
    return float((own["step_variance"] - exact["step_variance"]) / exact["minibatch_variance"])


def _step_ratios(mine: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Time of each step over the reference's time of the same step, which saw the same batch."""
    times = list(zip(mine["steps"]["seconds"], reference["steps"]["seconds"], strict=True))
    return [one / other for one, other in times[_UNTIMED_STEPS:] or times]
