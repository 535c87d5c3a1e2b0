"""The study's statistics: pairs, intervals that hold the truth as often as they say, and an equivalence test."""

import json

import numpy as np
import pytest

from experiments.glue import peers
from experiments.glue.evidence import Average, bootstrap_interval, chance_of_equal, drawn, evidence_of, evidence_table
from experiments.glue.study import ROWS
from experiments.rows import write_rows

_SEEDS = (5, 5, 2, 3)
# the task of two seeds varies least, or most
_SPREADS = {"favourable": (1.0, 3.0, 0.5, 2.0), "unfavourable": (0.3, 0.3, 3.0, 0.3)}


def _draws(mean, seed, case, draws):
    random = np.random.default_rng(seed)
    spreads = _SPREADS[case]
    columns = [random.normal(mean, spread, (draws, seeds)) for spread, seeds in zip(spreads, _SEEDS, strict=True)]
    return [[column[place] for column in columns] for place in range(draws)]


@pytest.mark.parametrize(
    ("case", "share", "most", "draws"),
    [("favourable", 0.955, 0.065, 1500), pytest.param("unfavourable", 0.89, 0.1, 4000, marks=pytest.mark.slow)],
)
def test_intervals_hold_the_truth_as_often_as_the_module_says(case, share, most, draws):
    """Within 2 points: 3.7 standard errors of the draws at least, so that one run in 5,000 fails by chance."""
    found = [Average.of(tasks) for tasks in _draws(0.3, 0, case, draws)]
    assert abs(np.mean([abs(average.mean - 0.3) <= average.half for average in found]) - share) < 0.02
    # a difference of a margin passes for none in one of ten studies at most
    small = [[values * 0.1 + 0.5 for values in tasks] for tasks in _draws(0.0, 3, case, draws)]
    assert 0.02 < np.mean([Average.of(tasks).least_margin < 0.5 for tasks in small]) < most


def test_bootstrap_intervals_hold_the_truth_less_often_than_the_module_promises_of_students():
    """4 tasks of 5 seeds: 85 to 90 % are stated, and 400 studies have a standard error of 1.7 points."""
    studies = np.random.default_rng(1).normal(0.3, 1.0, (400, 4, 5))
    found = [bootstrap_interval(tasks) for tasks in studies]
    assert 0.82 < np.mean([low <= 0.3 <= high for low, high in found]) < 0.94
    held = [abs(average.mean - 0.3) <= average.half for average in map(Average.of, studies.tolist())]
    assert np.mean(held) > 0.92


@pytest.mark.parametrize(("margin", "most", "confidence"), [(0.5, np.inf, 0.9), (1.0, np.inf, 0.9), (1.2, 0.3, 0.95)])
def test_the_chance_that_an_equal_method_is_found_equal_is_that_of_simulated_studies(margin, most, confidence):
    """With 20,000 studies: at most four standard errors apart."""
    draws = np.random.default_rng(2).normal(0.0, 1.7, (20_000, 20))
    means, errors = draws.mean(axis=1), draws.std(axis=1, ddof=1) / np.sqrt(20)
    halves = {0.9: 1.7291, 0.95: 2.0930}[confidence] * errors
    simulated = np.mean((np.abs(means) + halves <= margin) & (np.abs(means) <= most))
    found = chance_of_equal(1.7, 20, margin, most=most, confidence=confidence)
    assert abs(found - simulated) < 4 * np.sqrt(max(simulated, 0.001) / 20_000)


def test_methods_of_five_seeds_a_task_have_a_bootstrap_interval():
    results = [_result("rte", method, seed, 0.6) for method in ("exact", "hadamard") for seed in range(5)]
    for place, result in enumerate(results[5:]):
        result["final"] = dict.fromkeys(("score", "accuracy"), 0.6 + place / 100)
    assert "| +2.0 ± 2.0 (5) | +2.0 ± 2.0 | +0.8 to +3.2 |" in evidence_table(results)


@pytest.mark.parametrize("tasks", [[[1.0, 2.0], [3.0]], [[0.1, 0.1], [0.2, 0.4]], []])
def test_seeds_that_are_one_or_alike_have_no_interval(tasks):
    assert Average.of(tasks) is None


def _result(task, method, seed, score, **more):
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
        "hardware": dict.fromkeys(("device", "gpu", "cpu", "torch_threads")),
        "commit": "0" * 40,
        **more,
    }


def _gradient_noise(variance):
    return {"step_variance": variance, "minibatch_variance": 4.0, "gradient_squared": 1.0}


def test_scores_are_compared_seed_by_seed_and_runs_without_a_pair_left_out():
    results = [
        # dropout's
        _result("rte", "exact", 0, 0.60, gradient_noise=_gradient_noise(2.0)),
        _result("rte", "hadamard", 1, 0.71, gradient_noise=_gradient_noise(4.0)),
        _result("rte", "hadamard", 0, 0.61, gradient_noise=_gradient_noise(3.2)),
        _result("rte", "exact", 1, 0.70, gradient_noise=_gradient_noise(2.0)),
        _result("rte", "hadamard", 2, 0.10, gradient_noise=_gradient_noise(9.0)),
        _result("sst2", "hadamard", 0, 0.2, gradient_noise=_gradient_noise(3.0)),
        _result("sst2", "exact", 0, 0.2, gradient_noise=_gradient_noise(2.0)),
    ]
    (found,) = evidence_of(results)
    assert found.differences == {"rte": pytest.approx((1.0, 1.0)), "sst2": (0.0,)}
    assert found.noise == {"rte": (0.5, pytest.approx(0.3)), "sst2": (0.25,)}
    assert found.crossed == 0
    assert found.kept == pytest.approx(0.8)
    table = evidence_table(results)
    assert "| centered hadamard at 0.5 | 80 % | 0.40 ± 0.20 | +1.0 (2) |  |  |  | +0.0 (1) |" in table


def test_runs_are_compared_with_exact_on_their_own_device_and_exact_with_itself_on_two():
    def on(device, method, seed, score):
        hardware = dict.fromkeys(("gpu", "cpu", "torch_threads")) | {"device": device}
        return _result("rte", method, seed, score, hardware=hardware)

    results = [
        on("cpu", "exact", 0, 0.60),
        on("cuda", "exact", 0, 0.63),
        on("cuda", "exact", 1, 0.70),
        on("cuda", "hadamard", 0, 0.64),
        on("cpu", "hadamard", 0, 0.58),
        # the only exact run of this seed is on the other device
        on("cpu", "hadamard", 1, 0.75),
    ]
    exact, sketch = evidence_of(results)
    assert exact.differences == {"rte": pytest.approx((3.0,))}
    # the two runs of a seed are one value
    assert sketch.differences == {"rte": pytest.approx((-0.5, 5.0))}
    assert (exact.crossed, sketch.crossed) == (1, 1)
    assert "1 pairs of two kinds of machines" in evidence_table(results)
    # the mean leaves out tasks that run last
    last = [_result("sst2", method, 0, 0.2, gradient_noise=_gradient_noise(2.0)) for method in ("exact", "hadamard")]
    assert "| +2.3 ± 34.9 (2) | +2.3 ± 34.9 |  | ± 19.6 | +0.0 (1) |" in evidence_table([*results, *last])
    table = evidence_table([*results, on("cpu", "exact", 1, 0.74)])
    assert "differ by 3.5 points (root mean square of 2 pairs" in table
    # exact runs of the two seeds on each device: 60 and 74, and 63 and 70
    assert "on the device cpu have a standard deviation of rte 9.9 points" in table


def test_a_diverged_seed_of_a_peer_counts_and_runs_on_a_gpu_do_not(tmp_path):
    exact = [_result("rte", "exact", seed, 0.6, hardware={"device": "cpu"}) for seed in (0, 1)]
    on_gpu = [_result("rte", "exact", 2, 0.9, hardware={"device": "cuda"})]
    (tmp_path / ROWS).write_text("".join(json.dumps(each) + "\n" for each in exact + on_gpu), encoding="utf-8")
    row = {"peer": "theirs", "peer_commit": "abc", "task": "rte", "kept": 0.5, "commit": "def", "torch": "2.13"}
    scores = {0: (0.59, None), 1: (0.41, "diverged: the training loss is not finite at the end"), 2: (0.6, None)}
    rows = [row | {"seed": seed, "score": score, "error": error} for seed, (score, error) in scores.items()]
    write_rows(tmp_path / peers.FILE, rows)
    table = peers.peers_table(tmp_path, tmp_path)
    assert "| theirs (abc) | -10.0 ± " in table
    assert "(2) | 50.0 % | - | diverged: the training loss is not finite at the end |" in table


def test_runs_of_an_unfinished_study_are_drawn():
    """One run a method and task, with a noise or without."""
    results = [
        _result("rte", "exact", 0, 0.6, gradient_noise=_gradient_noise(2.0)),
        _result("rte", "hadamard", 0, 0.5, gradient_noise=_gradient_noise(9.0)),
        _result("cola", "exact", 0, 0.6),
        _result("cola", "hadamard", 0, 0.5),
    ]
    points = [line for line in drawn(results).axes[0].lines if len(line.get_xdata()) and line.get_marker() in "os"]
    assert [list(line.get_ydata()) for line in points] == [[pytest.approx(-9.0)], [pytest.approx(-9.0)]]
