"""Runs: resuming to the same result, result files, kept bytes, and mistakes on the command line."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from official_layout import write_official_folder
from transformers import Trainer, TrainerCallback

from experiments.command_line import HarnessError
from experiments.glue import demo, result_file, training
from experiments.glue.report import write_report
from experiments.glue.run import main
from experiments.glue.settings import CONFIG_FOLDER, RunSettings
from experiments.glue.training import PreparedRun, execute, result_path
from experiments.provenance import REPOSITORY

slow = partial(pytest.param, marks=pytest.mark.slow)
# 80 sentences in batches of 16 are 5 steps an epoch
TWO_EPOCHS = {"epochs": 2, "batch_size": 16, "learning_rate": 1e-3, "save_steps": 2, "min_rows": 16}
HADAMARD = RunSettings(method="hadamard", ratio=0.2, **TWO_EPOCHS)
# of the machine's moment, not of the settings
MEASURED = {"attempts", "wall_seconds", "train_seconds", "peak_memory", "commit", "modified"}


def _comparable(result):
    steps = {name: column for name, column in result["steps"].items() if name != "seconds"}
    return {key: value for key, value in result.items() if key not in MEASURED} | {"steps": steps}


def _interrupt_at(monkeypatch, step, error):
    """Make the next runs break off before a step; the returned function makes them whole, and returns their steps."""
    whole = PreparedRun.train

    def watch(call):
        class AtEachStep(TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                call(state.global_step)

        def train(self, *arguments, **keywords):
            return whole(self, *arguments, **keywords, callbacks=(AtEachStep(),))

        monkeypatch.setattr(PreparedRun, "train", train)

    def interrupt(at):
        if at == step:
            raise error("pulled the plug")

    def mend():
        steps = []
        watch(steps.append)
        return steps

    watch(interrupt)
    return mend


@pytest.mark.parametrize(
    ("settings", "interrupted_at", "resumes_from"),
    [
        # in the middle of the second epoch, off the last checkpoint
        (HADAMARD, 9, 8),
        # between the epochs: the evaluation of the first must survive
        slow(HADAMARD, 5, 5),
        slow(RunSettings(method="checkpointing", **TWO_EPOCHS), 7, 6),
        # before any checkpoint
        slow(RunSettings(method="wta_crs", ratio=0.3, **TWO_EPOCHS), 1, 0),
        slow(RunSettings(method="hadamard", group_lengths=True, monitor=2, **TWO_EPOCHS), 9, 8),
        # before no step, but while the checkpoint of step 4 is written
        slow(RunSettings(**TWO_EPOCHS), -1, 2),
    ],
    ids=lambda value: value.method_label if isinstance(value, RunSettings) else str(value),
)
@pytest.mark.usefixtures("tiny_demo")
def test_an_interrupted_run_ends_bitwise_like_an_uninterrupted_one(
    settings, interrupted_at, resumes_from, tmp_path, monkeypatch
):
    whole = execute(settings, tmp_path / "whole")
    mend, save = _interrupt_at(monkeypatch, interrupted_at, KeyboardInterrupt), Trainer._save_optimizer_and_scheduler

    def killed(trainer, *arguments):
        if interrupted_at < 0 and trainer.state.global_step == 4:
            raise KeyboardInterrupt
        save(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_optimizer_and_scheduler", killed)
        with pytest.raises(KeyboardInterrupt):
            execute(settings, tmp_path / "broken")
    left = json.loads(result_path(settings, tmp_path / "broken").read_text())
    assert left["status"] == "running"
    assert "final" not in left
    steps = mend()
    resumed = execute(settings, tmp_path / "broken")
    assert _comparable(resumed) == _comparable(whole)
    assert [attempt["from_step"] for attempt in resumed["attempts"]] == [0, resumes_from]
    assert steps == list(range(resumes_from, 10))
    assert resumed["wall_seconds"] == pytest.approx(sum(each["wall_seconds"] for each in resumed["attempts"]))
    assert len(resumed["steps"]["seconds"]) == len(resumed["steps"]["step"]) == 10
    # nothing but the result is left
    assert [path.name for path in (tmp_path / "broken").iterdir()] == [f"{settings.name}.json"]


@pytest.mark.usefixtures("tiny_demo")
def test_a_failed_run_says_so_and_is_taken_up_by_the_same_data_and_version_alone(tmp_path, monkeypatch):
    settings = RunSettings(**TWO_EPOCHS)
    mend = _interrupt_at(monkeypatch, 3, RuntimeError)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        execute(settings, tmp_path)
    left = json.loads(result_path(settings, tmp_path).read_text())
    assert (left["status"], left["error"]) == ("failed", "RuntimeError: pulled the plug")
    mend()
    with monkeypatch.context() as patch:
        others = demo.demo_splits(96, 40)
        patch.setattr(training, "demo_splits", lambda: others)
        with pytest.raises(HarnessError, match=r"other settings \(data sha256 '\w{12}' instead"):
            execute(settings, tmp_path)
    with monkeypatch.context() as patch:
        versions = training.provenance.versions()
        patch.setattr(training.provenance, "versions", lambda: versions | {"torch": "0.0"})
        with pytest.raises(HarnessError, match="versions torch '.*' instead of '0.0'"):
            execute(settings, tmp_path)
    result = execute(settings, tmp_path)
    assert result["status"] == "complete"
    assert "error" not in result
    assert result["attempts"][1]["from_step"] == 2


@pytest.fixture(scope="module")
def results(tiny_demo, tmp_path_factory):
    """One finished run each of three methods, by method."""
    knobs = ({}, {"method": "checkpointing"}, {"method": "hadamard", "ratio": 0.1})
    runs = [RunSettings(**each, **TWO_EPOCHS) for each in knobs]
    return {run.method: execute(run, tmp_path_factory.mktemp("results")) for run in runs}


def test_a_result_holds_all_that_describes_the_run_and_nothing_of_the_machine(results):
    result = results["hadamard"]
    assert (result["status"], result["name"]) == ("complete", "demo-hadamard-0.1-centered-seed0")
    assert result["config"] == RunSettings(method="hadamard", ratio=0.1, **TWO_EPOCHS).recorded()
    assert result["versions"].keys() >= {"python", "torch", "transformers", "rmm_linear"}
    # the package's version may leave the build ("+cu132") out
    assert torch.__version__.startswith(result["versions"]["torch"])
    assert result["data"]["train_rows"] == 80
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1.0, 2.0]
    assert result["final"]["score"] == result["epochs"][-1]["accuracy"]
    assert result["steps"]["step"] == list(range(1, 11))
    assert all(norm > 0 for norm in result["steps"]["grad_norm"])
    assert result["train_seconds"] == pytest.approx(sum(result["steps"]["seconds"]))
    text = json.dumps(result)
    assert not any(each in text for each in (str(REPOSITORY), str(Path.home()), "/tmp", os.uname().nodename))
    # 6 % of 10 steps, rounded up, are one step of warm-up; then linear down to zero after the last step
    rates = results["exact"]["steps"]["learning_rate"]
    assert rates == pytest.approx([0.0] + [1e-3 * left / 9 for left in range(9, 0, -1)], abs=1e-12)


def test_methods_start_alike_checkpointing_is_exact_and_both_keep_less(results):
    for part, key in (("model", "initial_weights_sha256"), ("data", "sha256"), ("kept_bytes", "exact_model")):
        assert len({result[part][key] for result in results.values()}) == 1
    assert results["checkpointing"]["steps"]["loss"] == results["exact"]["steps"]["loss"]
    assert results["checkpointing"]["final_weights_sha256"] == results["exact"]["final_weights_sha256"]
    assert results["hadamard"]["final_weights_sha256"] != results["exact"]["final_weights_sha256"]
    kept = {method: result["kept_bytes"] for method, result in results.items()}
    assert kept["exact"]["model"] == kept["exact"]["exact_model"]
    assert kept["hadamard"]["model"] < 0.9 * kept["exact"]["model"]
    assert kept["checkpointing"]["model"] < 0.5 * kept["exact"]["model"]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_demo")
def test_a_compiled_run_measures_and_trains_by_one_plan(tmp_path, monkeypatch):
    made = []

    class Recorded(training.RMMCallback):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(training, "RMMCallback", Recorded)
    knobs = {"epochs": 1, "batch_size": 10, "pad_multiple": 16}
    exact = execute(RunSettings(**knobs), tmp_path)
    coded = execute(RunSettings(method="codes", bits="8", **knobs), tmp_path)
    assert [len(callback.planned.plans) for callback in made] == [1]
    # 8 steps, two gradients each of 8 batches, and the step whose bytes are told
    assert made[0].planned.planned_runs == 8 + 16 + 1
    assert coded["kept_bytes"]["model"] < 0.5 * coded["kept_bytes"]["exact_model"]
    assert coded["gradient_noise"]["step_variance"] > exact["gradient_noise"]["step_variance"] == 0.0
    assert coded["steps"]["loss"] == pytest.approx(exact["steps"]["loss"], rel=0.05)
    fitted = execute(RunSettings(method="fit", budget="100%", **knobs), tmp_path)
    # the same, by what the first batch of all was fitted with
    assert [len(callback.planned.plans) for callback in made] == [1, 1]
    assert made[1].planned.planned_runs == 8 + 16 + 1
    assert fitted["fitted"]["chosen"] == "exact"
    assert fitted["steps"]["loss"] == pytest.approx(exact["steps"]["loss"], rel=1e-4)
    assert "Fit chose, with noise of at most 1 %: exact (measured peak " in write_report(tmp_path)


@pytest.mark.usefixtures("tiny_demo")
def test_a_finished_run_is_not_run_again_unless_forced_nor_mistaken_for_another(tmp_path, monkeypatch):
    for folder, rows in (("a", 8), ("b", 12)):
        write_official_folder(tmp_path / folder, "mrpc", train_rows=rows, dev_rows=6)
    first, second = (
        RunSettings(task="mrpc", data=str(tmp_path / folder), max_steps=1, batch_size=4) for folder in ("a", "b")
    )
    result = execute(first, tmp_path)
    assert result["final"].keys() == {"score", "accuracy", "f1"}
    with monkeypatch.context() as patch:
        patch.setattr(training, "PreparedRun", None)
        assert execute(first, tmp_path) == result
        with pytest.raises(HarnessError, match=r"\(data files '\w{12}' instead of '\w{12}'\); pass --force"):
            execute(second, tmp_path)
        with pytest.raises(HarnessError, match=r"other settings \(batch_size 4 instead of 8\); pass --force"):
            execute(RunSettings(task="mrpc", data=str(tmp_path / "a"), max_steps=1, batch_size=8), tmp_path)
    again = execute(first, tmp_path, force=True)
    assert again["wall_seconds"] != result["wall_seconds"]
    assert _comparable(again) == _comparable(result)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_demo")
def test_a_diverged_run_says_so_and_is_in_no_table(tmp_path, capsys):
    few, folder = ["--max-steps", "2", "--batch-size", "16"], str(tmp_path / "results")
    assert main([*few, "--results", folder]) == 0
    diverging = [*few, "--method", "hadamard", "--learning-rate", "1e38", "--warmup", "0", "--max-grad-norm", "0"]
    diverging += ["--results", str(tmp_path / "other")]
    assert main(diverging) == 0
    assert "diverged (the " in capsys.readouterr().out
    path = tmp_path / "other" / "demo-hadamard-0.5-centered-seed0.json"
    left = json.loads(path.read_text())
    assert left["status"] == "diverged"
    assert "is not finite at the end" in left["error"]
    # not run again, and no obstacle to the report of the others
    assert main(diverging) == 0
    assert "(finished before)" in capsys.readouterr().out
    path.rename(tmp_path / "results" / path.name)
    assert "not complete: demo-hadamard-0.5-centered-seed0 (diverged)" in write_report(tmp_path / "results")


def test_a_result_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    # numbers that JSON lacks become null
    result_file.write_result(path, {"format": result_file.FORMAT, "value": float("nan")})

    def fail(*_):
        # at this point the new content must be complete in a file of its own, and the old one untouched
        others = [other for other in tmp_path.iterdir() if other != path]
        assert [json.loads(other.read_text())["value"] for other in others] == [2]
        assert result_file.read_result(path) == {"format": result_file.FORMAT, "value": None}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(HarnessError, match=r"run\.json can't be written \(No space left on device\); name a folder"):
        result_file.write_result(path, {"format": result_file.FORMAT, "value": 2})
    assert [other.name for other in tmp_path.iterdir()] == ["run.json"]
    assert result_file.read_result(path) == {"format": result_file.FORMAT, "value": None}


def _error_of(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


# settings that can't be are in test_glue_settings.py, damaged files in test_glue_tasks.py
MISTAKES = {
    "unknown config 'fast'; choose one of demo": ["--config", "fast"],
    "can't have sketched layers (target_modules": [
        *("--method", "hadamard", "--exclude-modules", "query", "key", "value", "dense"),
    ],
    "invalid float value: 'half'": ["--method", "hadamard", "--ratio", "half"],
    "the model 'nowhere' could not be loaded": ["--model", "nowhere"],
}


@pytest.mark.usefixtures("tiny_demo")
@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(message, tmp_path, capsys):
    assert message in _error_of([*MISTAKES[message], "--results", str(tmp_path / "results")], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_demo")
def test_a_grid_runs_the_missing_ones_and_ends_with_the_report(tmp_path, capsys, monkeypatch):
    content = json.loads((CONFIG_FOLDER / "demo.json").read_text())
    # which are compiled for half a minute each
    content["methods"] = [each for each in content["methods"] if each["method"] not in ("budget", "fit")]
    config, results = tmp_path / "eager.json", tmp_path / "results"
    config.write_text(json.dumps(content))
    grid = ["--grid", "--config", str(config), "--results", str(results)]
    arguments = [*grid, "--max-steps", "1", "--seed", "0"]
    assert main([*arguments, "--report"]) == 0
    output = capsys.readouterr().out
    assert len(list(results.glob("*.json"))) == 6
    assert f"figure: {results / 'report.png'}" in output
    assert "One seed supports no claim of equal accuracy" in output
    (results / "demo-gaussian-0.1-seed0.json").unlink()
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("(finished before)") == 5
    assert "max_steps" in _error_of([*grid, "--max-steps", "2", "--ratio", "0.1"], capsys)
    # the hub's client is offline where nothing is wanted of it
    for arguments, is_offline in (([], True), (["--config", "paper", "--method", "exact"], False)):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        main([*arguments, "--results", __file__])
        assert ("HF_HUB_OFFLINE" in os.environ) == is_offline
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
