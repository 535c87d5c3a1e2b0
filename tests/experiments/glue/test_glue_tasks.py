"""Loading the nine tasks from folders in the official layout, and the errors for damaged ones."""

from pathlib import Path

import pytest
from official_layout import OFFICIAL_FILES, write_official_folder

from experiments.glue.errors import HarnessError
from experiments.glue.tasks import TASKS, load_task

NINE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")


def test_there_are_nine_tasks() -> None:
    assert tuple(TASKS) == NINE
    assert set(OFFICIAL_FILES) == set(NINE)


@pytest.mark.parametrize("name", NINE)
def test_a_folder_in_the_official_layout_loads(name: str, tmp_path: Path) -> None:
    write_official_folder(tmp_path, name, train_rows=12, dev_rows=6)
    task = TASKS[name]
    splits = load_task(task, str(tmp_path))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 12, "validation": 6}
    assert splits["train"].column_names == [*task.text_keys, "label"]
    for key in task.text_keys:
        # each row's texts hold its number, so that a wrong column or a shifted row shows
        assert all(str(number) in text for number, text in enumerate(splits["train"][key]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cola", [0, 1, 0]),
        ("mrpc", [0, 1, 0]),
        ("stsb", pytest.approx([0.0, 2.6, 5.0])),
        ("mnli", [0, 1, 2]),
        ("qnli", [0, 1, 0]),
        ("rte", [0, 1, 0]),
    ],
)
def test_labels_are_the_hubs(name: str, expected: list[float], tmp_path: Path) -> None:
    write_official_folder(tmp_path, name)
    assert list(load_task(TASKS[name], str(tmp_path))["train"]["label"])[:3] == expected


def test_pair_columns_are_not_swapped(tmp_path: Path) -> None:
    write_official_folder(tmp_path, "mrpc")
    row = load_task(TASKS["mrpc"], str(tmp_path))["train"][4]
    assert row == {"sentence1": 'He said "4', "sentence2": 'sentence 4 was "odd".', "label": 0}


def test_texts_that_look_like_missing_values_stay_texts(tmp_path: Path) -> None:
    folder = write_official_folder(tmp_path, "sst2")
    (folder / "train.tsv").write_text("sentence\tlabel\nNA\t1\nnull\t0\n", encoding="utf-8")
    assert list(load_task(TASKS["sst2"], str(tmp_path))["train"]["sentence"]) == ["NA", "null"]


def test_a_missing_folder_names_itself_and_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(HarnessError, match="nowhere does not exist; pass --data"):
        load_task(TASKS["rte"], str(missing))
    with pytest.raises(HarnessError, match="has no folder RTE .* expected RTE/train.tsv and RTE/dev.tsv"):
        load_task(TASKS["rte"], str(tmp_path))


# file, what to put into it, what the message must say
DAMAGED = {
    "cut in a row": ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\ta\n", "line 3, has 2 columns"),
    "cut in a text": ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentail", "no line end"),
    "one column too many": ("sst2", "sentence\tlabel\nfine\t1\nfi\tne\t1\n", "line 3, has 3 columns instead of 2"),
    "blank line": ("sst2", "sentence\tlabel\nfine\t1\n\nbad\t0\n", "line 3, has 0 columns"),
    "commas": ("mrpc", "Quality,#1 ID\n1,2\n", "line 1, has no column #1 String, #2 String, Quality"),
    "empty": ("mrpc", "", "line 1, has no column"),
    "only a header": ("sst2", "sentence\tlabel\n", "holds no rows"),
    "no such class": (
        "rte",
        "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tperhaps\n",
        "line 2, has the label 'perhaps'",
    ),
    "label out of range": ("sst2", "sentence\tlabel\nfine\t2\n", "label '2', which is not one of 0, 1"),
    "no number": (
        "stsb",
        "sentence1\tsentence2\tscore\na\tb\tmuch\n",
        "label 'much', which is not a number from 0 to 5",
    ),
    "nan": ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "label 'nan'"),
    "score out of range": ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.5\n", "label '5.5'"),
    "CoLA with a header": ("cola", "source\tlabel\tmark\tsentence\n", "line 1, has the label 'label'"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    name, content, message = DAMAGED[damage]
    folder = write_official_folder(tmp_path, name)
    (folder / "train.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(HarnessError) as raised:
        load_task(TASKS[name], str(tmp_path))
    assert message in str(raised.value)
    assert str(folder / "train.tsv") in str(raised.value)
    assert "download" in str(raised.value)


def test_bytes_that_are_no_text_are_one_clear_error(tmp_path: Path) -> None:
    folder = write_official_folder(tmp_path, "sst2")
    (folder / "dev.tsv").write_bytes(b"sentence\tlabel\nfine\t1\n\xff\xfe\t0\n")
    with pytest.raises(HarnessError, match="dev.tsv is not UTF-8 tab-separated text"):
        load_task(TASKS["sst2"], str(tmp_path))


def _qqp_with(folder: Path, *lines: str) -> None:
    header, row, _ = OFFICIAL_FILES["qqp"]
    good = [row.format(n=n, label=n % 2) for n in range(3)]
    text = "".join(f"{line}\n" for line in (header, *good, *lines))
    (folder / "train.tsv").write_text(text, encoding="utf-8")


def test_qqps_own_malformed_rows_are_left_out_but_not_a_cut_off_end(tmp_path: Path) -> None:
    folder = write_official_folder(tmp_path, "qqp")
    short, whole = '"\tWhat?\t0', "9\t1\t2\tWhy 9?\tHow 9?\t1"
    _qqp_with(folder, short, short, whole)
    assert len(load_task(TASKS["qqp"], str(tmp_path))["train"]) == 4
    _qqp_with(folder, short, whole, "10\t1\t2\tWhy")
    with pytest.raises(HarnessError, match="line 7, has 4 columns instead of 6"):
        load_task(TASKS["qqp"], str(tmp_path))
    _qqp_with(folder, *[short] * 41, whole)
    with pytest.raises(HarnessError, match="line 5, has 3 columns"):
        load_task(TASKS["qqp"], str(tmp_path))


def test_the_hub_out_of_reach_is_one_clear_error() -> None:
    # the suite runs with HF_HUB_OFFLINE=1
    with pytest.raises(HarnessError, match="the task rte could not be loaded from the hub .* or pass --data"):
        load_task(TASKS["rte"], "hub")
