"""Runs: resuming to the same result, result files, kept bytes, and mistakes on the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from official_layout import write_official_folder
from transformers import Trainer, TrainerCallback

from experiments.glue import demo, demo_pretraining, result_file, training
from experiments.glue.errors import HarnessError
from experiments.glue.provenance import REPOSITORY
from experiments.glue.report import write_report
from experiments.glue.run import main
from experiments.glue.settings import RunSettings
from experiments.glue.training import PreparedRun, execute, result_path
from rmm_linear import RMMLinear

# 80 sentences in batches of 16 are 5 steps an epoch
# cases alike
slow = partial(pytest.param, marks=pytest.mark.slow)
TWO_EPOCHS = {"epochs": 2, "batch_size": 16, "learning_rate": 1e-3, "save_steps": 2, "min_rows": 16}
# of the machine's moment, not of the settings
MEASURED = {"attempts", "wall_seconds", "train_seconds", "peak_memory", "commit", "modified"}


def _comparable(result: dict[str, Any]) -> dict[str, Any]:
    steps = {name: column for name, column in result["steps"].items() if name != "seconds"}
    return {key: value for key, value in result.items() if key not in MEASURED} | {"steps": steps}


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException]) -> Callable[[], None]:
    """Make the next runs break off before a step; the returned function makes them whole again."""

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                raise error("pulled the plug")

    whole = PreparedRun.train

    def train(self: PreparedRun, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        return whole(self, *arguments, **keywords, callbacks=(Interrupt(),))

    monkeypatch.setattr(PreparedRun, "train", train)
    return lambda: monkeypatch.setattr(PreparedRun, "train", whole)


@pytest.mark.parametrize(
    ("settings", "interrupted_at", "resumes_from"),
    [
        # in the middle of the second epoch, off the last checkpoint
        (RunSettings(method="hadamard", ratio=0.2, **TWO_EPOCHS), 9, 8),
        # between the epochs: the evaluation of the first must survive
        (RunSettings(method="hadamard", ratio=0.2, **TWO_EPOCHS), 5, 5),
        slow(RunSettings(method="gaussian", ratio=0.3, center=False, **TWO_EPOCHS), 3, 2),
        (RunSettings(method="checkpointing", **TWO_EPOCHS), 7, 6),
        # before any checkpoint
        slow(RunSettings(method="wta_crs", ratio=0.3, **TWO_EPOCHS), 1, 0),
        # stopped within an epoch by --max-steps
        slow(RunSettings(**{**TWO_EPOCHS, "max_steps": 8, "method": "hadamard", "ratio": 0.5}), 7, 6),
    ],
    ids=lambda value: value.method_label if isinstance(value, RunSettings) else str(value),
)
@pytest.mark.usefixtures("tiny_demo")
def test_an_interrupted_run_ends_bitwise_like_an_uninterrupted_one(
    settings: RunSettings, interrupted_at: int, resumes_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = execute(settings, tmp_path / "whole")
    mend = _interrupt_at(monkeypatch, interrupted_at, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        execute(settings, tmp_path / "broken")
    left = json.loads(result_path(settings, tmp_path / "broken").read_text())
    assert left["status"] == "running"
    assert "final" not in left
    mend()
    resumed = execute(settings, tmp_path / "broken")
    assert _comparable(resumed) == _comparable(whole)
    assert [attempt["from_step"] for attempt in resumed["attempts"]] == [0, resumes_from]
    assert resumed["wall_seconds"] == pytest.approx(sum(each["wall_seconds"] for each in resumed["attempts"]))
    assert len(resumed["steps"]["seconds"]) == len(resumed["steps"]["step"]) == (settings.max_steps or 10)
    # nothing but the result is left
    assert [path.name for path in (tmp_path / "broken").iterdir()] == [f"{settings.name}.json"]


@pytest.mark.usefixtures("tiny_demo")
def test_a_failed_run_says_so_and_can_be_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(**TWO_EPOCHS)
    mend = _interrupt_at(monkeypatch, 3, RuntimeError)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        execute(settings, tmp_path)
    left = json.loads(result_path(settings, tmp_path).read_text())
    assert (left["status"], left["error"]) == ("failed", "RuntimeError: pulled the plug")
    mend()
    result = execute(settings, tmp_path)
    assert result["status"] == "complete"
    assert "error" not in result
    assert result["attempts"][1]["from_step"] == 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One finished run each of three methods, by method."""
    with pytest.MonkeyPatch.context() as patch:
        splits = demo.demo_splits(80, 40)
        patch.setattr(training, "demo_splits", lambda: splits)
        patch.setattr(demo, "HIDDEN_SIZE", 32)
        patch.setattr(demo_pretraining, "STEPS", 3)
        folder = tmp_path_factory.mktemp("results")
        runs = [
            RunSettings(**TWO_EPOCHS),
            RunSettings(method="checkpointing", **TWO_EPOCHS),
            RunSettings(method="hadamard", ratio=0.1, **TWO_EPOCHS),
        ]
        return {run.method: execute(run, folder) for run in runs}


def test_a_result_holds_what_it_takes_to_know_the_run(results: dict[str, dict[str, Any]]) -> None:
    result = results["hadamard"]
    assert (result["status"], result["name"]) == ("complete", "demo-hadamard-0.1-centered-seed0")
    assert result["config"] == RunSettings(method="hadamard", ratio=0.1, **TWO_EPOCHS).recorded()
    assert result["versions"].keys() >= {"python", "torch", "transformers", "rmm_linear"}
    # the package's version may leave the build ("+cu132") out
    assert torch.__version__.startswith(result["versions"]["torch"])
    assert result["hardware"]["cpu_cores"] == os.cpu_count()
    assert result["data"]["train_rows"] == 80
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1.0, 2.0]
    assert result["final"]["score"] == result["epochs"][-1]["accuracy"]
    assert result["steps"]["step"] == list(range(1, 11))
    assert all(norm > 0 for norm in result["steps"]["grad_norm"])
    assert result["train_seconds"] == pytest.approx(sum(result["steps"]["seconds"]))
    assert 0 < result["train_seconds"] < result["wall_seconds"]


def test_a_result_names_neither_the_machine_nor_its_paths(results: dict[str, dict[str, Any]]) -> None:
    text = json.dumps(results["hadamard"])
    assert str(REPOSITORY) not in text
    assert str(Path.home()) not in text
    assert "/tmp" not in text
    assert os.uname().nodename not in text


def test_the_learning_rate_warms_up_and_falls_to_zero(results: dict[str, dict[str, Any]]) -> None:
    rates = results["exact"]["steps"]["learning_rate"]
    # 6 % of 10 steps, rounded up, are one step of warm-up; then linear down to zero after the last step
    assert rates == pytest.approx([0.0] + [1e-3 * left / 9 for left in range(9, 0, -1)], abs=1e-12)


def test_all_methods_start_from_the_same_weights_and_data(results: dict[str, dict[str, Any]]) -> None:
    assert len({result["model"]["initial_weights_sha256"] for result in results.values()}) == 1
    assert len({result["data"]["sha256"] for result in results.values()}) == 1
    assert len({result["kept_bytes"]["exact_model"] for result in results.values()}) == 1


def test_checkpointing_computes_what_exact_computes(results: dict[str, dict[str, Any]]) -> None:
    assert results["checkpointing"]["steps"]["loss"] == results["exact"]["steps"]["loss"]
    assert results["checkpointing"]["final_weights_sha256"] == results["exact"]["final_weights_sha256"]
    assert results["hadamard"]["final_weights_sha256"] != results["exact"]["final_weights_sha256"]


def test_sketching_and_checkpointing_keep_less(results: dict[str, dict[str, Any]]) -> None:
    kept = {method: result["kept_bytes"] for method, result in results.items()}
    assert kept["exact"]["model"] == kept["exact"]["exact_model"]
    assert kept["hadamard"]["model"] < 0.9 * kept["exact"]["model"]
    assert kept["checkpointing"]["model"] < 0.5 * kept["exact"]["model"]


@pytest.mark.usefixtures("tiny_demo")
def test_a_finished_run_is_not_run_again_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(**{**TWO_EPOCHS, "max_steps": 1})
    first = execute(settings, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training, "PreparedRun", None)
        assert execute(settings, tmp_path) == first
    again = execute(settings, tmp_path, force=True)
    assert again["wall_seconds"] != first["wall_seconds"]
    assert _comparable(again) == _comparable(first)


@pytest.mark.usefixtures("tiny_demo")
def test_a_result_of_other_settings_is_not_mistaken_for_this_run(tmp_path: Path) -> None:
    execute(RunSettings(**{**TWO_EPOCHS, "max_steps": 1}), tmp_path)
    with pytest.raises(HarnessError, match=r"other settings \(batch_size 16 instead of 8\); pass --force"):
        execute(RunSettings(**{**TWO_EPOCHS, "max_steps": 1, "batch_size": 8}), tmp_path)


@pytest.mark.usefixtures("tiny_demo")
def test_a_result_on_other_data_is_not_mistaken_for_this_run(tmp_path: Path) -> None:
    for folder, rows in (("a", 8), ("b", 12)):
        write_official_folder(tmp_path / folder, "mrpc", train_rows=rows, dev_rows=6)
    first, second = (
        RunSettings(task="mrpc", data=str(tmp_path / folder), epochs=1, batch_size=4) for folder in ("a", "b")
    )
    execute(first, tmp_path / "results")
    assert execute(first, tmp_path / "results")["data"]["train_rows"] == 8
    with pytest.raises(HarnessError, match=r"other settings \(data files '\w{12}' instead of '\w{12}'\); pass --force"):
        execute(second, tmp_path / "results")
    assert execute(second, tmp_path / "results", force=True)["data"]["train_rows"] == 12


@pytest.mark.usefixtures("tiny_demo")
def test_a_result_of_another_model_of_that_name_is_not_mistaken_for_this_run(tmp_path: Path) -> None:
    splits = demo.demo_splits(80, 40)
    tokenizer = demo.demo_tokenizer(list(splits["train"]["sentence"]))
    for folder, seed in (("v1", 1), ("v2", 2)):
        torch.manual_seed(seed)
        model = demo.demo_model(len(tokenizer), num_outputs=2, is_regression=False)
        model.save_pretrained(tmp_path / folder / "checkpoint")
        tokenizer.save_pretrained(tmp_path / folder / "checkpoint")
    first, second = (
        RunSettings(**TWO_EPOCHS, max_steps=1, model=str(tmp_path / folder / "checkpoint")) for folder in ("v1", "v2")
    )
    execute(first, tmp_path / "results")
    with pytest.raises(HarnessError, match=r"other settings \(model files '\w{12}' instead of '\w{12}'\)"):
        execute(second, tmp_path / "results")


@pytest.mark.usefixtures("tiny_demo")
def test_a_run_is_not_taken_up_on_other_data_or_by_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(**TWO_EPOCHS)
    mend = _interrupt_at(monkeypatch, 3, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        execute(settings, tmp_path)
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
    assert execute(settings, tmp_path)["attempts"][1]["from_step"] == 2


@pytest.mark.usefixtures("tiny_demo")
@pytest.mark.parametrize("broken_off_in", ["_save_optimizer_and_scheduler", slow("_save_rng_state")])
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    broken_off_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(**TWO_EPOCHS)
    whole = execute(settings, tmp_path / "whole")
    save, calls = getattr(Trainer, broken_off_in), []

    def third_time_lucky(self: Trainer, *arguments: Any) -> None:
        calls.append(self.state.global_step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, broken_off_in, third_time_lucky)
        with pytest.raises(KeyboardInterrupt):
            execute(settings, tmp_path / "broken")
    resumed = execute(settings, tmp_path / "broken")
    assert [attempt["from_step"] for attempt in resumed["attempts"]] == [0, calls[1]]
    assert _comparable(resumed) == _comparable(whole)


@pytest.mark.usefixtures("tiny_demo")
def test_a_diverged_run_says_so_and_is_in_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "results")
    assert main(["--max-steps", "2", "--batch-size", "16", "--results", folder]) == 0
    diverging = ["--max-steps", "2", "--batch-size", "16", "--method", "hadamard", "--results", folder]
    diverging += ["--learning-rate", "1e38", "--warmup", "0", "--max-grad-norm", "0"]
    assert main([*diverging, "--results", str(tmp_path / "other")]) == 0
    assert "diverged (the " in capsys.readouterr().out
    path = tmp_path / "other" / "demo-hadamard-0.5-centered-seed0.json"
    left = json.loads(path.read_text())
    assert left["status"] == "diverged"
    assert "is not finite at the end" in left["error"]
    # not run again, and no obstacle to the report of the others
    assert main([*diverging, "--results", str(tmp_path / "other")]) == 0
    assert "(finished before)" in capsys.readouterr().out
    path.rename(tmp_path / "results" / path.name)
    assert "not complete: demo-hadamard-0.5-centered-seed0 (diverged)" in write_report(tmp_path / "results")


@pytest.mark.usefixtures("tiny_demo")
def test_what_stands_in_the_way_of_the_report_is_known_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path)]
    assert main(["--method", "crs", "--max-steps", "2", "--batch-size", "16", *results]) == 0
    capsys.readouterr()
    error = _error_of(["--grid", "--max-steps", "1", "--batch-size", "16", *results], capsys)
    assert "can't share a table: max_steps is 2 in one and 1 in the other" in error
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_model_without_layers_to_sketch_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = demo.demo_tokenizer(["we laugh ."])
    config = transformers.GPT2Config(vocab_size=600, n_embd=16, n_layer=0, n_head=2, n_positions=64, pad_token_id=1)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    arguments = ["--model", str(tmp_path / "gpt2"), "--results", str(tmp_path / "results")]
    # progress bars of the saving
    capsys.readouterr()
    assert "can't have sketched layers" in _error_of([*arguments, "--method", "hadamard"], capsys)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "gpt2")
    assert "has no padding token" in _error_of(arguments, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_excluded_layers_stay_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "HIDDEN_SIZE", 32)
    monkeypatch.setattr(demo_pretraining, "STEPS", 1)
    settings = RunSettings(method="hadamard", ratio=0.2, exclude_modules=("attention.output.dense",))
    prepared = PreparedRun(settings)
    prepared._trainer(tmp_path, lambda: None, ())
    sketched = {name for name, module in prepared.model.named_modules() if isinstance(module, RMMLinear)}
    assert len(sketched) == 2 * 5
    assert not any(name.endswith("attention.output.dense") for name in sketched)


def test_tokenizing_does_not_depend_on_the_run(tmp_path: Path) -> None:
    # what `datasets` caches by must be equal for runs that differ in method and seed only
    fingerprints = set()
    for settings in (RunSettings(**TWO_EPOCHS), RunSettings(method="hadamard", seed=3, **TWO_EPOCHS)):
        prepared = PreparedRun.__new__(PreparedRun)
        prepared.settings, prepared.task = settings, settings.task_description
        splits = demo.demo_splits(40, 20)
        prepared.tokenizer = demo.demo_tokenizer(list(splits["train"]["sentence"]))
        fingerprints.add(prepared._tokenize(splits)["train"]._fingerprint)
    assert len(fingerprints) == 1


def test_a_result_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    result_file.write_result(path, {"format": result_file.FORMAT, "value": 1})

    def fail(*_: Any) -> None:
        # at this point the new content must be complete in a file of its own, and the old one untouched
        others = [other for other in tmp_path.iterdir() if other != path]
        assert [json.loads(other.read_text())["value"] for other in others] == [2]
        assert result_file.read_result(path) == {"format": result_file.FORMAT, "value": 1}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(HarnessError, match=r"run\.json can't be written \(No space left on device\); pass --results"):
        result_file.write_result(path, {"format": result_file.FORMAT, "value": 2})
    assert [other.name for other in tmp_path.iterdir()] == ["run.json"]
    assert result_file.read_result(path) == {"format": result_file.FORMAT, "value": 1}


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    result_file.write_result(path, {"format": result_file.FORMAT, "values": [1.5, float("nan"), float("inf")]})
    assert json.loads(path.read_text())["values"] == [1.5, None, None]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', "{}"])
def test_a_foreign_file_in_the_place_of_a_result_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(HarnessError, match="is not a result file of this harness; move it away"):
        result_file.read_result(tmp_path / "run.json")


def _error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


MISTAKES = {
    "unknown task 'imdb'; choose one of cola, sst2": ["--task", "imdb", "--data", "hub"],
    "unknown method 'magic'; choose one of exact": ["--method", "magic"],
    "unknown config 'fast'; choose one of demo": ["--config", "fast"],
    "epochs=inf is not a finite number": ["--epochs", "inf"],
    "seed=99999999999 is not in [0, 2**32)": ["--seed", "99999999999"],
    "can't have sketched layers (target_modules": [
        "--method",
        "hadamard",
        "--exclude-modules",
        "query",
        "key",
        "value",
        "dense",
    ],
    "ratio=1.5": ["--method", "hadamard", "--ratio", "1.5"],
    "ratio=nan": ["--method", "hadamard", "--ratio", "nan"],
    "invalid float value: 'half'": ["--method", "hadamard", "--ratio", "half"],
    "unrecognized arguments: --speed": ["--speed", "9"],
    "the data folder nowhere does not exist; pass --data": ["--task", "rte", "--data", "nowhere"],
    "the model 'nowhere' could not be loaded": ["--model", "nowhere"],
    "does not fit --data demo": ["--task", "rte"],
}


@pytest.mark.usefixtures("tiny_demo")
@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = _error_of([*MISTAKES[message], "--results", str(tmp_path / "results")], capsys)
    assert message in error
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_official_folder(tmp_path / "glue", "mrpc")
    text = (data / "train.tsv").read_text()
    (data / "train.tsv").write_text(text[: len(text) // 2])
    error = _error_of(
        ["--task", "mrpc", "--data", str(tmp_path / "glue"), "--results", str(tmp_path / "results")], capsys
    )
    assert f"{data / 'train.tsv'} is truncated" in error
    assert [path.name for path in tmp_path.iterdir()] == ["glue"]


@pytest.mark.usefixtures("tiny_demo")
def test_an_unwritable_results_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    for results in (file, file / "below"):
        error = _error_of(["--results", str(results)], capsys)
        assert f"the results folder {results} can't be written to" in error
        assert "pass --results" in error
    assert file.read_text() == "in the way"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="only a plain user can be refused by permissions")
def test_a_read_only_results_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    error = _error_of(["--results", str(tmp_path / "results")], capsys)
    tmp_path.chmod(0o700)
    assert "is read-only" in error


@pytest.mark.slow
def test_the_program_itself_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.glue.run", "--task", "imdb", "--results", str(tmp_path / "results")],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: unknown task 'imdb'")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny_demo")
def test_a_pair_task_and_a_regression_task_run_from_a_folder(tmp_path: Path) -> None:
    for task in ("mrpc", "stsb"):
        write_official_folder(tmp_path, task, train_rows=8, dev_rows=6)
        settings = RunSettings(task=task, data=str(tmp_path), epochs=1, batch_size=4)
        result = execute(settings, tmp_path / "results")
        assert result["final"].keys() == {"score", *settings.task_description.metrics}
        mean = sum(result["final"][name] for name in result["metrics"]) / len(result["metrics"])
        assert result["final"]["score"] == pytest.approx(mean)


@pytest.mark.usefixtures("tiny_demo")
def test_a_grid_runs_what_is_missing_and_ends_with_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--grid", "--max-steps", "1", "--seed", "0", "--results", str(tmp_path)]
    assert main(arguments) == 0
    assert "(finished before)" not in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.json"))) == 8
    (tmp_path / "demo-gaussian-0.5-seed0.json").unlink()
    assert main([*arguments, "--report"]) == 0
    output = capsys.readouterr().out
    assert output.count("(finished before)") == 7
    assert f"figure: {tmp_path / 'report.png'}" in output
    assert output.rstrip().endswith("one seed supports no claim of equal accuracy.")


def test_the_hubs_client_is_put_offline_where_nothing_is_wanted_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: str) -> bool:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        main([*arguments, "--method", "magic"])
        return "HF_HUB_OFFLINE" in os.environ

    assert offline()
    assert offline("--config", "paper", "--data", str(tmp_path), "--model", str(tmp_path))
    assert not offline("--config", "paper")
    assert not offline("--config", "paper", "--data", str(tmp_path))
    # put back what the rest of the suite runs with
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
