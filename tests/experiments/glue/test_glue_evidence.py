"""The study's statistics: pairs, intervals that hold the truth as often as they say, and an equivalence test."""

import numpy as np
import pytest

from experiments.command_line import HarnessError
from experiments.glue.evidence import MARGIN, Average, evidence_of, evidence_table, read_study

_SEEDS, _SPREADS = (5, 5, 2, 3), (1.0, 3.0, 0.5, 2.0)
_DRAWS = 4000


def _draws(mean: float, seed: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    columns = [random.normal(mean, spread, (_DRAWS, seeds)) for spread, seeds in zip(_SPREADS, _SEEDS, strict=True)]
    return [[column[place] for column in columns] for place in range(_DRAWS)]


def _bootstrap(tasks: list[np.ndarray], random: np.random.Generator) -> tuple[float, float]:
    means = sum(random.choice(values, (400, len(values))).mean(1) for values in tasks) / len(tasks)
    low, high = np.quantile(means, (0.025, 0.975))
    return low, high


def test_intervals_hold_the_truth_as_often_as_they_say():
    """95 % within 1.5 points: 4 standard errors of 4,000 draws, so that one run in 16,000 fails by chance."""
    found = [Average.of(tasks) for tasks in _draws(0.3, seed=0)]
    share = np.mean([abs(average.mean - 0.3) <= average.half for average in found])
    assert abs(share - 0.95) < 0.015


def test_intervals_of_a_percentile_bootstrap_are_too_narrow():
    random = np.random.default_rng(1)
    intervals = [_bootstrap(tasks, random) for tasks in _draws(0.3, seed=2)[:1000]]
    share = np.mean([low <= 0.3 <= high for low, high in intervals])
    assert share < 0.90


def test_a_difference_of_the_margin_passes_for_none_in_one_of_twenty_runs():
    small = [[values * 0.1 + MARGIN for values in tasks] for tasks in _draws(0.0, seed=3)]
    share = np.mean([Average.of(tasks).is_equivalent() for tasks in small])
    assert 0.03 < share < 0.065


def test_power_is_the_share_of_equal_methods_that_pass():
    small = [[values * 0.25 for values in tasks] for tasks in _draws(0.0, seed=4)]
    found = [Average.of(tasks) for tasks in small]
    share = np.mean([average.is_equivalent() for average in found])
    assert np.mean([average.power() for average in found]) == pytest.approx(share, abs=0.05)


def test_a_task_of_one_seed_has_no_interval():
    assert Average.of([[1.0, 2.0], [3.0]]) is None


def test_runs_without_any_spread_are_equivalent_if_their_mean_is():
    assert Average.of([[0.1, 0.1], [0.2, 0.2]]).is_equivalent()
    assert not Average.of([[0.6, 0.6]]).is_equivalent()


def _result(task: str, method: str, seed: int, score: float, **more) -> dict:
    config = {"task": task, "method": method, "ratio": None, "center": None, "seed": seed, "timing": False}
    if method != "exact":
        config |= {"ratio": 0.5, "center": True}
    return {
        "name": f"{task}-{method}{'' if method == 'exact' else '-0.5'}-seed{seed}",
        "status": "complete",
        "config": config,
        "metrics": ["accuracy"],
        "final": {"score": score, "accuracy": score},
        "data": {"sha256": ""},
        "model": {"initial_weights_sha256": ""},
        "kept_bytes": {"model": 80, "exact_model": 100},
        "final_weights_sha256": "",
        "hardware": dict.fromkeys(("device", "gpu", "cpu", "torch_threads")),
        "commit": "0" * 40,
        **more,
    }


def test_scores_are_compared_seed_by_seed_and_runs_without_a_pair_left_out():
    results = [
        _result("rte", "exact", 0, 0.60),
        _result("rte", "hadamard", 1, 0.71, noise_ratio=0.5),
        _result("rte", "hadamard", 0, 0.61, noise_ratio=0.3),
        _result("rte", "exact", 1, 0.70),
        _result("rte", "hadamard", 2, 0.10, noise_ratio=9.0),
        _result("sst2", "hadamard", 0, 0.2, gradient_noise={"step_variance": 1.0, "minibatch_variance": 4.0}),
        _result("sst2", "exact", 0, 0.2),
    ]
    (found,) = evidence_of(results)
    assert found.differences == {"rte": pytest.approx((1.0, 1.0)), "sst2": (0.0,)}
    assert found.noise == {"rte": (0.5, 0.3), "sst2": (0.25,)}
    assert found.kept == 0.8
    table = evidence_table(results)
    assert "| centered hadamard at 0.5 | 80 % | 0.3 | +1.0 ± 0.0 (2) | +0.0 (1) |  |  |" in table


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(HarnessError, match="has no complete run; run `make study` first"):
        read_study(tmp_path)
