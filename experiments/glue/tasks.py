"""The nine GLUE tasks: their texts, labels and metrics, and how to read them from the hub or from official files.

A folder in the official layout holds one folder a task (`CoLA/`, `SST-2/`, ...) with `train.tsv` and `dev.tsv`
(MNLI: `dev_matched.tsv`). The files are tab-separated with bare quotation marks inside the fields, so they are read
with `csv.QUOTE_NONE`; every row is checked, since a reader that fills missing fields would train on a truncated
download without a word.

The generated task `demo` lives in `demo.py` and uses the same `Task` description.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset

from .errors import HarnessError

HUB_DATASET = "nyu-mll/glue"


@dataclass(frozen=True)
class Task:
    """What one task is, independent of where its files come from.

    Attributes:
        name: The name used on the command line and on the hub.
        text_keys: Columns of the loaded dataset that hold the text, one for single sentences, two for pairs.
        labels: Class names in the order of their integer labels; empty for a regression task.
        metrics: Names of the metrics, as `glue_metric` returns them. The task's score is their mean.
        folder: Folder of the task in the official layout.
        columns: Official column of each text key and, last, of the label.
        header: Whether the official files open with a line of column names; if not, `columns` are positions.
        width: Number of columns of a file without a header.
        dev_file: The official file of the validation split.
        hub_split: The hub's name of the validation split.
        malformed_rows: How many rows of the official release are known to lack columns. These are left out, as in the
            hub's copy; anything beyond is an error.
    """

    name: str
    text_keys: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: str
    columns: tuple[str, ...]
    header: bool = True
    width: int = 0
    dev_file: str = "dev.tsv"
    hub_split: str = "validation"
    malformed_rows: int = 0

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number to predict rather than a class."""
        return not self.labels

    @property
    def num_outputs(self) -> int:
        """Size of the model's output: one for regression, else the number of classes."""
        return max(len(self.labels), 1)

    @property
    def features(self) -> Features:
        """Column types of the loaded dataset."""
        label = Value("float32") if self.is_regression else ClassLabel(names=list(self.labels))
        return Features({**{key: Value("string") for key in self.text_keys}, "label": label})

    def parse_label(self, text: str) -> float | int:
        """Turn a label field of an official file into a number.

        Raises:
            ValueError: If it is no class name, class number, or score from 0 to 5, as the task has them.
        """
        if self.is_regression:
            score = float(text)
            if not (math.isfinite(score) and 0.0 <= score <= 5.0):
                raise ValueError(text)
            return score
        if text in self.labels:
            return self.labels.index(text)
        # CoLA, MRPC, QQP, SST-2 and WNLI write the number of the class, the others its name
        if text in _class_numbers(self):
            return int(text)
        raise ValueError(text)

    @property
    def label_values(self) -> str:
        """What a label field may hold, for messages."""
        if self.is_regression:
            return "a number from 0 to 5"
        return "one of " + ", ".join(_class_numbers(self) or self.labels)


def _class_numbers(task: Task) -> tuple[str, ...]:
    written_as_names = task.name in ("mnli", "qnli", "rte")
    return () if written_as_names else tuple(str(index) for index in range(len(task.labels)))


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="cola",
            text_keys=("sentence",),
            labels=("unacceptable", "acceptable"),
            metrics=("matthews_correlation",),
            folder="CoLA",
            columns=("3", "1"),
            header=False,
            width=4,
        ),
        Task(
            name="sst2",
            text_keys=("sentence",),
            labels=("negative", "positive"),
            metrics=("accuracy",),
            folder="SST-2",
            columns=("sentence", "label"),
        ),
        Task(
            name="mrpc",
            text_keys=_PAIR,
            labels=("not_equivalent", "equivalent"),
            metrics=("accuracy", "f1"),
            folder="MRPC",
            columns=("#1 String", "#2 String", "Quality"),
        ),
        Task(
            name="qqp",
            text_keys=("question1", "question2"),
            labels=("not_duplicate", "duplicate"),
            metrics=("accuracy", "f1"),
            folder="QQP",
            columns=("question1", "question2", "is_duplicate"),
            malformed_rows=40,
        ),
        Task(
            name="stsb",
            text_keys=_PAIR,
            labels=(),
            metrics=("pearson", "spearmanr"),
            folder="STS-B",
            columns=("sentence1", "sentence2", "score"),
        ),
        Task(
            name="mnli",
            text_keys=("premise", "hypothesis"),
            labels=("entailment", "neutral", "contradiction"),
            metrics=("accuracy",),
            folder="MNLI",
            columns=("sentence1", "sentence2", "gold_label"),
            dev_file="dev_matched.tsv",
            hub_split="validation_matched",
        ),
        Task(
            name="qnli",
            text_keys=("question", "sentence"),
            labels=_ENTAILMENT,
            metrics=("accuracy",),
            folder="QNLI",
            columns=("question", "sentence", "label"),
        ),
        Task(
            name="rte",
            text_keys=_PAIR,
            labels=_ENTAILMENT,
            metrics=("accuracy",),
            folder="RTE",
            columns=("sentence1", "sentence2", "label"),
        ),
        Task(
            name="wnli",
            text_keys=_PAIR,
            labels=("not_entailment", "entailment"),
            metrics=("accuracy",),
            folder="WNLI",
            columns=("sentence1", "sentence2", "label"),
        ),
    )
}


def load_task(task: Task, data: str) -> DatasetDict:
    """Load the train and validation splits of a task from `"hub"` or a folder in the official GLUE layout.

    Raises:
        HarnessError: If the folder, a file or a row is not what the official layout says, or the hub can't be reached.
    """
    if data == "hub":
        return _load_from_hub(task)
    root = Path(data)
    if not root.is_dir():
        raise HarnessError(
            f"the data folder {data} does not exist; pass --data <folder in the official GLUE layout>, "
            "--data hub or --data demo"
        )
    folder = root / task.folder
    if not folder.is_dir():
        raise HarnessError(
            f"{root} has no folder {task.folder} for the task {task.name}; expected {task.folder}/train.tsv and "
            f"{task.folder}/{task.dev_file}"
        )
    return DatasetDict(
        train=read_official_file(task, folder / "train.tsv"),
        validation=read_official_file(task, folder / task.dev_file),
    )


def _load_from_hub(task: Task) -> DatasetDict:
    try:
        splits = load_dataset(HUB_DATASET, task.name)
    # the hub client raises a dozen unrelated exception types for "no network", "offline mode" and "not found"
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HarnessError(
            f"the task {task.name} could not be loaded from the hub ({reason}); check the network, or pass "
            "--data <folder in the official GLUE layout> or --data demo"
        ) from error
    columns = [*task.text_keys, "label"]
    return DatasetDict(
        train=splits["train"].select_columns(columns), validation=splits[task.hub_split].select_columns(columns)
    )


def read_official_file(task: Task, path: Path) -> Dataset:
    """Read one official TSV file, checking every row; texts and `label` in the order of the file.

    Raises:
        HarnessError: Naming path, line and remedy, if the file is missing, empty, truncated or ill-formed.
    """

    def fault(what: str, line: int | None = None) -> HarnessError:
        where = "" if line is None else f", line {line},"
        return HarnessError(f"the file {path}{where} {what}; download it again")

    if not path.is_file():
        raise fault(f"does not exist, and the task {task.name} needs it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
    except (csv.Error, UnicodeDecodeError) as error:
        raise fault(f"is not UTF-8 tab-separated text ({error})") from error
    if text and not text.endswith(("\r", "\n")):
        raise fault("is truncated: its last line has no line end")
    names = rows[0] if task.header and rows else [str(at) for at in range(task.width)]
    if missing := [column for column in task.columns if column not in names]:
        raise fault(f"has no column {', '.join(missing)} (found: {', '.join(names) or 'nothing'})", 1)
    positions = [names.index(column) for column in task.columns]
    lines = list(enumerate(rows, start=1))[int(task.header) :]
    malformed = [(line, len(row)) for line, row in lines if len(row) != len(names)]
    # a download that was cut off ends in a short row, whatever faults the official release has before
    is_cut = bool(malformed) and malformed[-1][0] == len(rows)
    if is_cut or len(malformed) > task.malformed_rows:
        line, found = malformed[-1 if len(malformed) <= task.malformed_rows else 0]
        wrong = f"has {found} columns instead of {len(names)}: the file is truncated or not tab-separated"
        raise fault(wrong, line)
    columns: dict[str, list[Any]] = {key: [] for key in (*task.text_keys, "label")}
    for line, row in lines:
        if len(row) != len(names):
            continue
        *texts, label = (row[at] for at in positions)
        try:
            values = [*texts, task.parse_label(label)]
        except ValueError:
            raise fault(f"has the label {label!r}, which is not {task.label_values}", line) from None
        for key, value in zip(columns, values, strict=True):
            columns[key].append(value)
    if not columns["label"]:
        raise fault("holds no rows")
    return Dataset.from_dict(columns, features=task.features)
