"""The local metric folder against scikit-learn and scipy called directly, and against the formulas."""

import evaluate
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from experiments.glue.demo import DEMO_TASK
from experiments.glue.tasks import TASKS, Task
from experiments.glue.training import METRIC_FOLDER


def _compute(task: str, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    metric = evaluate.load(str(METRIC_FOLDER), task, keep_in_memory=True)
    result: dict[str, float] = metric.compute(predictions=predictions, references=references)
    return result


def _labels(classes: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(7)
    references = generator.integers(classes, size=211)
    wrong = generator.random(211) < 0.3
    return np.where(wrong, generator.integers(classes, size=211), references), references


@pytest.mark.parametrize("task", [*TASKS.values(), DEMO_TASK], ids=lambda task: task.name)
def test_each_task_gets_the_metrics_that_it_names(task: Task) -> None:
    predictions, references = _labels(2)
    assert tuple(_compute(task.name, predictions, references)) == task.metrics


@pytest.mark.parametrize("classes", [2, 3])
def test_accuracy_is_the_share_of_hits(classes: int) -> None:
    predictions, references = _labels(classes)
    result = _compute("mnli", predictions, references)["accuracy"]
    assert result == pytest.approx(sum(predictions == references) / 211, abs=1e-15)
    assert result == sk.accuracy_score(references, predictions)


def test_f1_is_that_of_the_positive_class() -> None:
    predictions, references = _labels(2)
    hits = int(((predictions == 1) & (references == 1)).sum())
    by_hand = 2 * hits / (int((predictions == 1).sum()) + int((references == 1).sum()))
    assert _compute("mrpc", predictions, references)["f1"] == pytest.approx(by_hand, abs=1e-15)
    assert _compute("qqp", predictions, references)["f1"] == sk.f1_score(references, predictions)


def test_matthews_correlation_is_pearsons_of_binary_labels() -> None:
    predictions, references = _labels(2)
    result = _compute("cola", predictions, references)["matthews_correlation"]
    assert result == sk.matthews_corrcoef(references, predictions)
    assert result == pytest.approx(np.corrcoef(predictions, references)[0, 1], abs=1e-12)


def test_correlations_are_scipys() -> None:
    generator = np.random.default_rng(3)
    references = np.round(generator.random(101) * 5, 1).astype(np.float32)
    predictions = (references + generator.normal(size=101)).astype(np.float32)
    result = _compute("stsb", predictions, references)
    assert result["pearson"] == pytest.approx(stats.pearsonr(references, predictions)[0], abs=1e-7)
    assert result["pearson"] == pytest.approx(np.corrcoef(predictions, references)[0, 1], abs=1e-6)
    # Spearman's is Pearson's of the ranks, ties averaged
    ranks = stats.rankdata(references), stats.rankdata(predictions)
    assert result["spearmanr"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)


def test_a_constant_prediction_scores_zero_instead_of_nan() -> None:
    references = np.linspace(0, 5, 11)
    assert _compute("stsb", np.full(11, 2.5), references) == {"pearson": 0.0, "spearmanr": 0.0}
    assert _compute("cola", np.ones(11, dtype=int), np.arange(11) % 2)["matthews_correlation"] == 0.0
