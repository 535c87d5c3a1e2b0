"""The report: its numbers recomputed from the result files by other means, and what it must not claim."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from scipy import stats

from experiments.command_line import HarnessError
from experiments.glue.comparison import compare, label_of
from experiments.glue.report import beaten_methods
from experiments.glue.settings import RunSettings

SEEDS = (0, 1, 2, 5)
# knobs, what the score lies below exact's, the share of the bytes, and the step time over exact's
METHODS = {
    "exact": ({}, 0.0, 1.0, 1.0),
    "checkpointing": ({"method": "checkpointing"}, 0.0, 0.125, 1.4),
    "gaussian-0.1": ({"method": "gaussian", "ratio": 0.1, "center": False}, 0.08, 0.5, 1.0),
    "hadamard-0.5-centered": ({"method": "hadamard", "ratio": 0.5}, 0.0, 0.75, 0.7),
    "hadamard-0.1-centered": ({"method": "hadamard", "ratio": 0.1}, 0.03, 0.51, 1.0),
}


def _fake_results(folder, step_variances=None, **changed):
    """Write result files with made-up numbers, and with the noise of each method if it is given."""
    results = []
    for (label, (knobs, below, share, slower)), seed in itertools.product((METHODS | changed).items(), SEEDS):
        settings = RunSettings(seed=seed, timing=True, **knobs)
        noise = random.Random(f"{label} {seed}")
        luck = random.Random(seed).gauss(0, 0.01) + (0.0 if settings.ratio is None else noise.gauss(0, 0.005))
        score = 0.9 - below + luck
        seconds = [0.02 * slower * noise.uniform(0.95, 1.05) for _ in range(50)]
        result = {
            "format": 1,
            "name": settings.name,
            "status": "complete",
            "config": settings.recorded(),
            "metrics": list(settings.task_description.metrics),
            "data": {"sha256": "rows"},
            "model": {"initial_weights_sha256": str(seed)},
            "hardware": {"device": "cpu", "gpu": None, "cpu": "Some Processor", "torch_threads": 2},
            "kept_bytes": {"model": int(8e6 * share), "exact_model": 8_000_000},
            "final": {"score": score, **dict.fromkeys(settings.task_description.metrics, score)},
            "train_seconds": sum(seconds),
            "steps": {"seconds": seconds, "grad_norm": [0.1] * 50},
        }
        if step_variances is not None:
            variances = {"step_variance": step_variances.get(label, 0.0)}
            result["gradient_noise"] = variances | {"minibatch_variance": 1.0, "gradient_squared": 1.0}
        (folder / f"{settings.name}.json").write_text(json.dumps(result))
        results.append(result)
    return results


def test_the_rows_numbers_are_those_of_the_results(tmp_path):
    by_label = {}
    for result in _fake_results(tmp_path):
        by_label.setdefault(label_of(result), []).append(result)
    rows = {label_of(row.results[0]): row for row in compare(tmp_path).rows}
    assert rows.keys() == by_label.keys()
    exact_steps = np.array([result["steps"]["seconds"] for result in by_label["exact"]])
    exact = np.array([100 * result["final"]["score"] for result in by_label["exact"]])
    for label, members in by_label.items():
        row, scores = rows[label], 100 * np.array([result["final"]["score"] for result in members])
        assert (row.score.mean, row.score.spread) == pytest.approx((scores.mean(), scores.std(ddof=1)))
        assert row.score.seeds == len(SEEDS)
        share = METHODS[label][2]
        assert (row.kept_bytes, row.kept_share) == pytest.approx((8e6 * share, share))
        assert row.train_seconds.mean == pytest.approx(np.mean([result["train_seconds"] for result in members]))
        if label == "exact":
            assert row.difference is row.step_time is None
            continue
        differences = scores - exact
        assert row.difference.mean == pytest.approx(differences.mean(), abs=1e-9)
        # checkpointing has exact's score in every seed: unpaired, its interval would be as wide as the seeds' spread
        interval = (0.0, 0.0)
        if label != "checkpointing":
            scale = differences.std(ddof=1) / math.sqrt(len(SEEDS))
            interval = stats.t.interval(0.95, len(SEEDS) - 1, loc=differences.mean(), scale=scale)
        assert row.difference.interval() == pytest.approx(interval, abs=1e-9)
        # the first two steps warm up
        ratios = (np.array([result["steps"]["seconds"] for result in members]) / exact_steps)[:, 2:]
        quantiles = (row.step_time.low, row.step_time.median, row.step_time.high)
        assert quantiles == pytest.approx(np.quantile(ratios, (0.2, 0.5, 0.8)))
    (tmp_path / "demo-exact-seed5.json").unlink()
    row = next(row for row in compare(tmp_path).rows if label_of(row.results[0]) == "gaussian-0.1")
    # a seed without an exact run is left out of differences alone
    assert (row.difference.seeds, row.score.seeds) == (3, 4)


@pytest.mark.parametrize(
    ("noise", "time", "exact_time", "words"),
    [
        (1.0, 0.8, 1.0, "centered hadamard at 0.1 beat gaussian at 0.1"),
        # more noise, a spread of steps that overlaps, and a step that is hardly faster than exact's
        (3.0, 0.8, 1.0, "no method beat another"),
        (1.0, 0.98, 1.0, "no method beat another"),
        (0.0, 0.98, 1.3, "centered hadamard at 0.1 beat gaussian at 0.1"),
        (0.0, 0.6, 1.3, "centered hadamard at 0.1 beat exact, gaussian at 0.1 and centered hadamard at 0.5"),
    ],
)
def test_the_sentence_says_what_is_worse_in_bytes_time_and_noise(noise, time, exact_time, words, tmp_path):
    sketch, other = "hadamard-0.1-centered", "gaussian-0.1"
    changed = {sketch: (METHODS[sketch][0], 0.03, 0.4, time), other: (METHODS[other][0], 0.08, 0.5, exact_time)}
    _fake_results(tmp_path, {sketch: noise, other: 2.0, "hadamard-0.5-centered": 0.5}, **changed)
    # hadamard at 0.5 and exact gradients have less noise, and checkpointing keeps less
    assert beaten_methods(compare(tmp_path)) == f"demo: in kept bytes and step time, at no more noise, {words}."


@pytest.mark.parametrize(
    ("part", "key", "message"),
    [
        ("config", "learning_rate", "can't share a table: learning_rate is"),
        ("model", "initial_weights_sha256", "can't share a table: starting weights is"),
        ("data", "sha256", "can't share a table: data sha256 is"),
        ("config", "save_steps", None),
    ],
)
def test_runs_that_differ_in_more_than_method_and_seed_share_no_table(part, key, message, tmp_path):
    _fake_results(tmp_path)
    path = tmp_path / "demo-gaussian-0.1-seed1.json"
    result = json.loads(path.read_text())
    result[part][key] = 0.5
    path.write_text(json.dumps(result))
    if message is None:
        assert len(compare(tmp_path).rows) == len(METHODS)
        return
    with pytest.raises(HarnessError, match=message):
        compare(tmp_path)


def test_rounding_is_no_noise(tmp_path):
    noises = {"exact": 0.0, "gaussian-0.1": 2e-14, "hadamard-0.1-centered": 2e-5}
    _fake_results(tmp_path, noises)
    found = {label_of(row.results[0]): row.noise for row in compare(tmp_path).rows}
    assert found["gaussian-0.1"] == 0.0
    assert found["hadamard-0.1-centered"] == pytest.approx(2e-5)
