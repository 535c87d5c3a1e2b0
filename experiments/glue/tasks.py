"""The nine GLUE tasks and the demo's: their texts, labels and metrics, read from the hub or from official files."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.command_line import HarnessError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features

# `datasets` is imported where it is needed: it takes seconds, and asks the environment whether the hub is to be reached


@dataclass(frozen=True)
class Task:
    """A task, independent of the origin of its files; the official release and the hub differ in some names."""

    name: str
    # columns of the loaded dataset that hold the text, one for single sentences, two for pairs
    text_keys: tuple[str, ...]
    # class names in the order of their integer labels; empty for a regression task
    labels: tuple[str, ...]
    folder: str
    # official column of each text key and, last, of the label
    columns: tuple[str, ...]
    # as `glue_metric` returns them; the task's score is their mean
    metrics: tuple[str, ...] = ("accuracy",)
    # number of columns of a file without a header, in which `columns` are positions; 0 for files with a header
    width: int = 0
    # whether the official files hold the names of classes, and not their numbers
    has_names: bool = False
    dev_file: str = "dev.tsv"
    hub_split: str = "validation"
    # rows of the official release that lack columns, and are left out, as in the hub's copy; more are an error
    malformed_rows: int = 0

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def num_outputs(self) -> int:
        return max(len(self.labels), 1)

    @property
    def features(self) -> Features:
        from datasets import ClassLabel, Features, Value

        label = Value("float32") if self.is_regression else ClassLabel(names=list(self.labels))
        return Features({**{key: Value("string") for key in self.text_keys}, "label": label})

    def parse_label(self, text: str) -> float | int:
        if self.is_regression:
            score = float(text)
            if not 0.0 <= score <= 5.0:
                raise ValueError(text)
            return score
        names = [name if self.has_names else str(number) for number, name in enumerate(self.labels)]
        return names.index(text)


_PAIR, _QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
_FIRST, _BOTH = ("sentence",), ("accuracy", "f1")
_ACCEPTABLE, _EQUIVALENT = ("unacceptable", "acceptable"), ("not_equivalent", "equivalent")
_DUPLICATE, _ENTAILMENT = ("not_duplicate", "duplicate"), ("entailment", "not_entailment")
_THREE = ("entailment", "neutral", "contradiction")
_MNLI_FILES: dict[str, Any] = {"dev_file": "dev_matched.tsv", "hub_split": "validation_matched"}
_ALL_TASKS = (
    Task("cola", _FIRST, _ACCEPTABLE, "CoLA", ("3", "1"), ("matthews_correlation",), width=4),
    Task("sst2", _FIRST, ("negative", "positive"), "SST-2", ("sentence", "label")),
    Task("mrpc", _PAIR, _EQUIVALENT, "MRPC", ("#1 String", "#2 String", "Quality"), _BOTH),
    Task("qqp", _QUESTIONS, _DUPLICATE, "QQP", (*_QUESTIONS, "is_duplicate"), _BOTH, malformed_rows=40),
    Task("stsb", _PAIR, (), "STS-B", (*_PAIR, "score"), ("pearson", "spearmanr")),
    Task("mnli", ("premise", "hypothesis"), _THREE, "MNLI", (*_PAIR, "gold_label"), has_names=True, **_MNLI_FILES),
    Task("qnli", ("question", "sentence"), _ENTAILMENT, "QNLI", ("question", "sentence", "label"), has_names=True),
    Task("rte", _PAIR, _ENTAILMENT, "RTE", (*_PAIR, "label"), has_names=True),
    Task("wnli", _PAIR, _ENTAILMENT[::-1], "WNLI", (*_PAIR, "label")),
)
TASKS = {task.name: task for task in _ALL_TASKS}
# `demo.py` generates its sentences
DEMO_TASK = Task("demo", _FIRST, ("broken", "grammatical"), "demo", ("sentence", "label"))


def load_task(task: Task, data: str) -> DatasetDict:
    """Load the train and validation splits of a task from `"hub"` or a folder in the official GLUE layout."""
    from datasets import DatasetDict

    if data == "hub":
        return _load_from_hub(task)
    if not Path(data).is_dir():
        raise HarnessError(
            f"the data folder {data} does not exist; pass --data <folder in the official GLUE layout>, "
            "--data hub or --data demo"
        )
    folder = Path(data) / task.folder
    return DatasetDict(
        train=read_official_file(task, folder / "train.tsv"),
        validation=read_official_file(task, folder / task.dev_file),
    )


def _load_from_hub(task: Task) -> DatasetDict:
    from datasets import DatasetDict, load_dataset

    try:
        splits = load_dataset("nyu-mll/glue", task.name)
    # the hub client raises a dozen unrelated exception types for "no network", "offline mode" and "not found"
    except Exception as error:
        raise HarnessError(
            f"the task {task.name} could not be loaded from the hub ({error}); check the network, or pass "
            "--data <folder in the official GLUE layout> or --data demo"
        ) from error
    columns = [*task.text_keys, "label"]
    return DatasetDict(train=splits["train"], validation=splits[task.hub_split]).select_columns(columns)


def read_official_file(task: Task, path: Path) -> Dataset:
    """Read one official TSV file; texts and `label` in the order of the file."""
    from datasets import Dataset

    def fault(problem: str) -> HarnessError:
        return HarnessError(f"the file {path} {problem}; download it again")

    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise fault(f"is no UTF-8 tab-separated text ({error})") from error
    names = [str(at) for at in range(task.width)] or (rows.pop(0) if rows else [])
    if missing := [column for column in task.columns if column not in names]:
        raise fault(f"has no column {', '.join(missing)} (found: {', '.join(names) or 'nothing'})")
    whole = [row for row in rows if len(row) == len(names)]
    # a download that was cut off ends in a short row; other short rows are the official release's
    if not whole or rows[-1] is not whole[-1] or len(rows) - len(whole) > task.malformed_rows or text[-1] not in "\r\n":
        faults = f"{len(rows) - len(whole)} of {len(rows)} rows have other than {len(names)} columns"
        raise fault(f"is truncated or not tab-separated: {faults}, or the last line has no end")
    *text_columns, label_column = (names.index(column) for column in task.columns)
    columns: dict[str, list[Any]] = {
        key: [row[at] for row in whole] for key, at in zip(task.text_keys, text_columns, strict=True)
    }
    try:
        columns["label"] = [task.parse_label(row[label_column]) for row in whole]
    except ValueError as error:
        raise fault(f"has a label that the task {task.name} does not have ({error})") from error
    return Dataset.from_dict(columns, features=task.features)
