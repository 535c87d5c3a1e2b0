"""The study: tuning before sketches, rows as they come, locks, resuming; grouped lengths and the measured noise."""

import json

import pytest
from official_layout import write_official_folder

from experiments.command_line import HarnessError
from experiments.glue import study as study_module
from experiments.glue import training
from experiments.glue.settings import load_named_config
from experiments.glue.study import ROWS, TUNING, Study, claimed, cut_training_split, work_through
from experiments.rows import append_json_line, read_json_lines

TINY = {"batch_size": 16, "min_rows": 16, "epochs": 1, "group_lengths": True, "monitor": 2, "timing": False}


@pytest.fixture
def tiny_study(tiny_demo, tmp_path):
    content = {
        "about": "A study of the demo task.",
        "settings": {"task": "demo", "data": "demo", "model": "demo", **TINY},
        "tasks": ["demo"],
        "methods": [{"method": "exact"}, {"method": "hadamard", "ratio": 0.2}],
        "seeds": [0, 1],
        "fewer_seeds": {"methods": [{"method": "hadamard", "ratio": 1.0, "storage": "int4"}], "seeds": [0]},
        "tuning": {"learning_rate": [1e-4, 1e-3], "epochs": {"demo": [1]}},
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(content))
    return Study(str(path), tmp_path / "results", tmp_path / "work", data=None, model=None)


@pytest.mark.slow
def test_exact_is_tuned_first_and_nothing_is_run_twice(tiny_study, monkeypatch):
    assert work_through(tiny_study) == 0
    tried, rows = tiny_study.rows(TUNING), tiny_study.rows(ROWS)
    tuned = [(row["config"]["method"], row["config"]["learning_rate"]) for row in tried]
    assert tuned == [("exact", 1e-4), ("exact", 1e-3)]
    best = max(tried, key=lambda row: (row["final"]["score"], -row["config"]["learning_rate"]))["config"]
    chosen = load_named_config(str(tiny_study.path)).task_settings["demo"]
    assert chosen == {"learning_rate": best["learning_rate"], "epochs": 1}
    assert {row["config"]["learning_rate"] for row in rows} == {chosen["learning_rate"]}
    labels = [row["name"].removeprefix("demo-") for row in rows]
    assert set(labels[:3]) == {"exact-seed0", "hadamard-0.2-centered-seed0", "hadamard-1-centered-int4-seed0"}
    assert set(labels[3:]) == {"exact-seed1", "hadamard-0.2-centered-seed1"}
    for row in rows:
        assert {"commit", "versions", "hardware", "kept_bytes", "train_seconds"} <= row.keys()
        assert ("noise_ratio" in row) == (row["config"]["method"] != "exact")
    assert all(row["noise_ratio"] > 0 for row in rows if "noise_ratio" in row)
    monkeypatch.setattr(training, "execute", lambda *_: pytest.fail("a finished run was run again"))
    again = Study(str(tiny_study.path), tiny_study.results, tiny_study.work, data=None, model=None)
    assert work_through(again) == 0
    assert again.rows(ROWS) == rows


def test_a_run_that_another_process_does_is_left_to_it(tiny_study, monkeypatch):
    done = []
    monkeypatch.setattr(training, "execute", lambda run, folder: done.append(f"{folder.name} {run.name}"))
    with claimed(tiny_study.work / "lr0.0001-epochs1" / "demo-exact-seed0.lock") as is_mine:
        assert is_mine

        def sleep(_):
            raise InterruptedError

        monkeypatch.setattr(study_module.time, "sleep", sleep)
        monkeypatch.setattr(tiny_study, "record", lambda file, run, folder: write_row(tiny_study, file, run))
        with pytest.raises(InterruptedError):
            work_through(tiny_study)
        # the task isn't tuned before that run is done
        assert done == ["lr0.001-epochs1 demo-exact-seed0"]
    assert work_through(tiny_study) == 0
    assert len(done) == 2 + 5


def test_a_run_is_done_again_and_its_row_stays(tiny_study, monkeypatch, capsys):
    (run,) = (run for file, run in tiny_study.plan() if run.name == "demo-exact-seed1" and file == ROWS)
    write_row(tiny_study, ROWS, run)
    rows = tiny_study.rows(ROWS)
    forced = []

    def execute(settings, folder, *, force):
        forced.append((settings, force))
        return {"final": {"score": 0.75}}

    monkeypatch.setattr(training, "execute", execute)
    study_module.run_again(tiny_study, "demo-exact-seed1")
    assert capsys.readouterr().out == "demo-exact-seed1: score 0.7500; in the rows 0.5000 on cpu\n"
    assert (forced, tiny_study.rows(ROWS)) == ([(run, False)], rows)
    with pytest.raises(HarnessError, match="no run 'demo-exact'; its runs are demo-exact-seed0, "):
        study_module.run_again(tiny_study, "demo-exact")


def test_a_row_after_half_a_line_is_read(tmp_path):
    append_json_line(tmp_path / "rows", {"seed": 0})
    with (tmp_path / "rows").open("a") as file:
        file.write('{"seed"')
    append_json_line(tmp_path / "rows", {"seed": 2})
    assert read_json_lines(tmp_path / "rows") == [{"seed": 0}, {"seed": 2}]


def write_row(study, file, run):
    row = {"name": run.name, "config": run.recorded(), "status": "complete", "final": {"score": 0.5}, "wall_seconds": 1}
    row["hardware"] = {"device": "cpu"}
    append_json_line(study.results / file, row)


def test_grouped_batches_hold_each_row_once_and_little_padding():
    lengths = [(7 * at) % 90 + 10 for at in range(1003)]
    sampler = training._GroupedByLength(lengths, 8, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(1003))
    assert orders[0] == orders[2] != orders[1]
    batches = [[lengths[row] for row in orders[0][at : at + 8]] for at in range(0, 1003, 8)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)
    # long and short batches are mixed
    longest = [max(batch) for batch in batches[:10]]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_the_cut_training_split_is_always_the_same(tmp_path):
    write_official_folder(tmp_path / "glue", "sst2", train_rows=30)
    files = []
    for name in ("one", "two"):
        folder = cut_training_split("sst2", tmp_path / "glue", tmp_path / name, 10)
        files.append([(folder / "SST-2" / file).read_bytes() for file in ("train.tsv", "dev.tsv")])
    assert files[0] == files[1]
    official = (tmp_path / "glue" / "SST-2" / "train.tsv").read_bytes().splitlines()
    assert len(files[0][0].splitlines()) == 11
    assert set(files[0][0].splitlines()) < set(official)
