"""The GLUE metrics for `evaluate.load(<this folder>)`: no hub, computed by scikit-learn and scipy.

`evaluate.load("glue")` downloads a script; this folder is a metric module of the same kind that needs no network.
The configuration name is a task's name, and `compute` returns that task's metrics.
"""

from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

METRICS_OF_TASK: dict[str, tuple[str, ...]]
METRICS_OF_TASK = dict.fromkeys(("sst2", "mnli", "qnli", "rte", "wnli", "demo"), ("accuracy",))
METRICS_OF_TASK |= dict.fromkeys(("mrpc", "qqp"), ("accuracy", "f1"))
METRICS_OF_TASK |= {"cola": ("matthews_correlation",), "stsb": ("pearson", "spearmanr")}

_FUNCTIONS = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda references, predictions: _correlation(pearsonr, references, predictions),
    "spearmanr": lambda references, predictions: _correlation(spearmanr, references, predictions),
}


def _correlation(function: Callable[..., Any], references: Any, predictions: Any) -> Any:
    # a model that predicts one constant has no correlation; scipy answers nan, which is no JSON number
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return 0.0
    return function(references, predictions)[0]


class GlueMetric(evaluate.Metric):
    """Accuracy, F1, Matthews correlation, Pearson and Spearman correlation, as each GLUE task asks for."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS_OF_TASK:
            raise KeyError(f"{self.config_name!r} is no GLUE task; known: {', '.join(METRICS_OF_TASK)}")
        kind = "float32" if self.config_name == "stsb" else "int64"
        return evaluate.MetricInfo(
            description="GLUE metrics, offline",
            citation="",
            inputs_description="predictions and references: class indices, or scores for stsb",
            features=datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {name: float(_FUNCTIONS[name](references, predictions)) for name in METRICS_OF_TASK[self.config_name]}
