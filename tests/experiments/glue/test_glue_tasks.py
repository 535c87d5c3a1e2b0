"""Loading the nine tasks from folders in the official layout, and the errors for damaged ones."""

import pytest
from official_layout import OFFICIAL_FILES, write_official_folder

from experiments.command_line import HarnessError
from experiments.glue.tasks import TASKS, load_task


@pytest.mark.parametrize("name", OFFICIAL_FILES)
def test_a_folder_in_the_official_layout_loads_with_the_hubs_labels(name, tmp_path):
    write_official_folder(tmp_path, name, train_rows=12, dev_rows=6)
    task = TASKS[name]
    splits = load_task(task, str(tmp_path))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 12, "validation": 6}
    assert splits["train"].column_names == [*task.text_keys, "label"]
    for key in task.text_keys:
        # each row's texts hold its number, so that a wrong column or a shifted row shows
        assert all(str(number) in text for number, text in enumerate(splits["train"][key]))
    labels = {"stsb": [0.0, 2.6, 5.0], "mnli": [0, 1, 2]}.get(name, [0, 1, 0])
    assert splits["train"]["label"][:3] == pytest.approx(labels)
    if name == "mrpc":
        row = splits["train"][4]
        assert row == {"sentence1": 'He said "4', "sentence2": 'sentence 4 was "odd".', "label": 0}


# task, content of its file, part of the message
DAMAGED = {
    "cut in a text": ("sst2", "sentence\tlabel\nfine\t1", "the last line has no end"),
    "too many columns": ("sst2", "sentence\tlabel\nfine\t1\nfi\tne\t1\n", "1 of 2 rows have other than 2 columns"),
    "commas": ("mrpc", "Quality,#1 ID\n1,2\n", "has no column #1 String, #2 String, Quality"),
    "only a header": ("sst2", "sentence\tlabel\n", "0 of 0 rows"),
    "no such class": ("sst2", "sentence\tlabel\nfine\t2\n", "'2'"),
    "score out of range": ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.5\n", "5.5"),
    "no score": ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "nan"),
    "no text": ("sst2", "sentence\tlabel\nfine\t1\n\udcff\t0\n", "is no UTF-8 tab-separated text"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_clear_error(damage, tmp_path):
    name, content, message = DAMAGED[damage]
    path = write_official_folder(tmp_path, name) / "train.tsv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(HarnessError) as raised:
        load_task(TASKS[name], str(tmp_path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "download it again" in str(raised.value)


def test_qqps_own_malformed_rows_are_left_out_but_not_a_cut_off_end(tmp_path):
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


def test_a_missing_folder_and_the_hub_out_of_reach_are_one_clear_error_each(tmp_path):
    with pytest.raises(HarnessError, match="nowhere does not exist; pass --data"):
        load_task(TASKS["rte"], str(tmp_path / "nowhere"))
    # the suite runs with HF_HUB_OFFLINE=1
    with pytest.raises(HarnessError, match="the task rte could not be loaded from the hub .* or pass --data"):
        load_task(TASKS["rte"], "hub")


def test_texts_that_look_like_missing_values_stay_texts(tmp_path):
    folder = write_official_folder(tmp_path, "sst2")
    (folder / "train.tsv").write_text("sentence\tlabel\nNA\t1\nnull\t0\n", encoding="utf-8")
    assert list(load_task(TASKS["sst2"], str(tmp_path))["train"]["sentence"]) == ["NA", "null"]
