"""Loading the nine tasks from folders in the official layout, and the errors for damaged ones."""

from pathlib import Path

import pytest
from official_layout import OFFICIAL_FILES, write_official_folder

from experiments.command_line import HarnessError
from experiments.glue.tasks import TASKS, load_task


@pytest.mark.parametrize("name", OFFICIAL_FILES)
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
    with pytest.raises(HarnessError, match="nowhere does not exist; pass --data"):
        load_task(TASKS["rte"], str(tmp_path / "nowhere"))
    with pytest.raises(HarnessError, match=r"RTE/train.tsv is no UTF-8 tab-separated text .*; download it again"):
        load_task(TASKS["rte"], str(tmp_path))


_RTE, _SST2 = "index\tsentence1\tsentence2\tlabel\n", "sentence\tlabel\n"
# file, what to put into it, what the message must say
DAMAGED = {
    "cut in a row": ("rte", _RTE + "0\ta\tb\tentailment\n1\ta\n", "1 of 2 rows have other than 4 columns"),
    "cut in a text": ("rte", _RTE + "0\ta\tb\tentailment", "the last line has no end"),
    "one column too many": ("sst2", _SST2 + "fine\t1\nfi\tne\t1\n", "1 of 2 rows have other than 2 columns"),
    "blank line": ("sst2", _SST2 + "fine\t1\n\nbad\t0\n", "1 of 3 rows"),
    "commas": ("mrpc", "Quality,#1 ID\n1,2\n", "has no column #1 String, #2 String, Quality"),
    "empty": ("mrpc", "", "has no column"),
    "only a header": ("sst2", _SST2, "0 of 0 rows"),
    "no such class": ("rte", _RTE + "0\ta\tb\tperhaps\n", "'perhaps'"),
    "label out of range": ("sst2", _SST2 + "fine\t2\n", "'2'"),
    "no number": ("stsb", "sentence1\tsentence2\tscore\na\tb\tmuch\n", "'much'"),
    "nan": ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "nan"),
    "score out of range": ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.5\n", "5.5"),
    "no text": ("sst2", "sentence\tlabel\nfine\t1\n\udcff\t0\n", "is no UTF-8 tab-separated text"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    name, content, message = DAMAGED[damage]
    path = write_official_folder(tmp_path, name) / "train.tsv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(HarnessError) as raised:
        load_task(TASKS[name], str(tmp_path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "download it again" in str(raised.value)


def test_qqps_own_malformed_rows_are_left_out_but_not_a_cut_off_end(tmp_path: Path) -> None:
    path = write_official_folder(tmp_path, "qqp") / "train.tsv"
    header, row, _ = OFFICIAL_FILES["qqp"]
    good = [row.format(n=n, label=n % 2) for n in range(3)]
    short, whole = '"\tWhat?\t0', "9\t1\t2\tWhy 9?\tHow 9?\t1"
    for lines, problem in (
        ([short, short, whole], None),
        ([short, whole, "10\t1\t2\tWhy"], "2 of 6 rows have other than 6 columns"),
        ([*[short] * 41, whole], "41 of 45 rows"),
    ):
        path.write_text("".join(f"{line}\n" for line in (header, *good, *lines)), encoding="utf-8")
        if problem is None:
            assert len(load_task(TASKS["qqp"], str(tmp_path))["train"]) == 4
            continue
        with pytest.raises(HarnessError, match=problem):
            load_task(TASKS["qqp"], str(tmp_path))


def test_the_hub_out_of_reach_is_one_clear_error() -> None:
    # the suite runs with HF_HUB_OFFLINE=1
    with pytest.raises(HarnessError, match="the task rte could not be loaded from the hub .* or pass --data"):
        load_task(TASKS["rte"], "hub")
