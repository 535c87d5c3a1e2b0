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


def _scores(references: np.ndarray) -> np.ndarray:
    return (references + np.random.default_rng(3).normal(size=211)).astype(np.float32)


@pytest.mark.parametrize(
    ("task", "metric", "classes", "expected"),
    [
        ("mnli", "accuracy", 2, sk.accuracy_score),
        ("mnli", "accuracy", 3, sk.accuracy_score),
        # that of the positive class
        ("mrpc", "f1", 2, sk.f1_score),
        ("qqp", "f1", 2, sk.f1_score),
        ("cola", "matthews_correlation", 2, sk.matthews_corrcoef),
        ("stsb", "pearson", None, lambda references, predictions: stats.pearsonr(references, predictions)[0]),
        # ties are averaged
        ("stsb", "spearmanr", None, lambda references, predictions: stats.spearmanr(references, predictions)[0]),
    ],
)
def test_metrics_are_those_of_scikit_learn_and_scipy(task: str, metric: str, classes: int | None, expected) -> None:
    predictions, references = _labels(classes or 6)
    if classes is None:
        predictions, references = _scores(references), references.astype(np.float32)
    assert _compute(task, predictions, references)[metric] == pytest.approx(expected(references, predictions), abs=1e-7)


def test_a_constant_prediction_scores_zero_instead_of_nan() -> None:
    references = np.linspace(0, 5, 11)
    assert _compute("stsb", np.full(11, 2.5), references) == {"pearson": 0.0, "spearmanr": 0.0}
    assert _compute("cola", np.ones(11, dtype=int), np.arange(11) % 2)["matthews_correlation"] == 0.0
