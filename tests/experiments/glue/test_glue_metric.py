"""The local metric folder against the formulas."""

import evaluate
import numpy as np
import pytest
from scipy import stats

from experiments.glue.demo import DEMO_TASK
from experiments.glue.tasks import TASKS
from experiments.glue.training import METRIC_FOLDER


def _compute(task, predictions, references):
    metric = evaluate.load(str(METRIC_FOLDER), task, keep_in_memory=True)
    return metric.compute(predictions=predictions, references=references)


@pytest.mark.parametrize("task", [*TASKS.values(), DEMO_TASK], ids=lambda task: task.name)
def test_each_task_gets_the_metrics_that_it_names_by_their_formulas(task):
    random = np.random.default_rng(7)
    if task.is_regression:
        references = np.round(random.random(101) * 5, 1).astype(np.float32)
        predictions = (references + random.normal(size=101)).astype(np.float32)
    else:
        references = random.integers(task.num_outputs, size=211)
        wrong = random.random(211) < 0.3
        predictions = np.where(wrong, random.integers(task.num_outputs, size=211), references)
    found = _compute(task.name, predictions, references)
    assert tuple(found) == task.metrics
    hits = int(((predictions == 1) & (references == 1)).sum())
    correlation = np.corrcoef(predictions, references)[0, 1]
    # Spearman's is Pearson's of the ranks, ties averaged
    ranks = stats.rankdata(references), stats.rankdata(predictions)
    expected = {
        "accuracy": (predictions == references).mean(),
        # of the positive class
        "f1": 2 * hits / max(1, int((predictions == 1).sum()) + int((references == 1).sum())),
        # Pearson's of binary labels
        "matthews_correlation": correlation,
        "pearson": correlation,
        "spearmanr": np.corrcoef(*ranks)[0, 1],
    }
    assert found == pytest.approx({name: expected[name] for name in task.metrics}, abs=1e-6)


def test_a_constant_prediction_scores_zero_instead_of_nan():
    references = np.linspace(0, 5, 11)
    assert _compute("stsb", np.full(11, 2.5), references) == {"pearson": 0.0, "spearmanr": 0.0}
    assert _compute("cola", np.ones(11, dtype=int), np.arange(11) % 2)["matthews_correlation"] == 0.0
