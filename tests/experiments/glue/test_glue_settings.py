"""What a run may be: validation, labels, and the named configurations."""

from pathlib import Path

import pytest

from experiments.glue.errors import HarnessError
from experiments.glue.settings import CHECKPOINTING, EXACT, RunSettings, load_named_config, named_configs
from experiments.glue.tasks import TASKS
from rmm_linear import RMMConfig
from rmm_linear.sketches import available_sketches


def test_every_sketch_is_a_method() -> None:
    for sketch in available_sketches():
        settings = RunSettings(method=sketch, ratio=0.3, center=False)
        assert settings.rmm_config == RMMConfig(ratio=0.3, sketch=sketch, center=False)


def test_knobs_left_out_are_the_librarys_defaults() -> None:
    settings = RunSettings(method="hadamard")
    default = RMMConfig(sketch="hadamard")
    assert (settings.ratio, settings.center) == (default.ratio, default.center)
    assert settings.rmm_config == default


def test_names_tell_runs_apart() -> None:
    runs = [
        RunSettings(),
        RunSettings(seed=1),
        RunSettings(method=CHECKPOINTING),
        RunSettings(method="hadamard", ratio=0.1, center=True),
        RunSettings(method="hadamard", ratio=0.1, center=False),
        RunSettings(method="hadamard", ratio=0.15, center=False),
        RunSettings(method="gaussian", ratio=0.1, center=False),
    ]
    assert len({run.name for run in runs}) == len(runs)
    assert runs[3].name == "demo-hadamard-0.1-centered-seed0"


WRONG = {
    "unknown task 'imdb'; choose one of cola": {"task": "imdb"},
    "unknown method 'magic'; choose one of exact, checkpointing": {"method": "magic"},
    "ratio=0": {"method": "hadamard", "ratio": 0.0},
    "ratio=-0.5": {"method": "hadamard", "ratio": -0.5},
    "ratio=1.5": {"method": "hadamard", "ratio": 1.5},
    "ratio=nan": {"method": "hadamard", "ratio": float("nan")},
    "'exact' keeps no sketch: leave out --ratio": {"ratio": 0.5},
    "'checkpointing' keeps no sketch": {"method": CHECKPOINTING, "center": True},
    "the task 'rte' does not fit --data demo": {"task": "rte"},
    "the task 'demo' does not fit --data hub": {"data": "hub"},
    "batch_size=0 is not above 0": {"batch_size": 0},
    "learning_rate=nan is not above 0": {"learning_rate": float("nan")},
    "max_steps=-1 is negative": {"max_steps": -1},
    "schedule='cosine' is not one of polynomial": {"schedule": "cosine"},
    "precision='float8' is not one of float32": {"precision": "float8"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_run_is_refused(message: str) -> None:
    with pytest.raises(HarnessError) as raised:
        RunSettings(**WRONG[message])
    assert message in str(raised.value)


def test_what_is_recorded_says_nothing_about_the_machine(tmp_path: Path) -> None:
    model = tmp_path / "some-model"
    model.mkdir()
    recorded = RunSettings(task="rte", data=str(tmp_path), model=str(model)).recorded()
    assert recorded["data"] == "folder"
    assert recorded["model"] == "some-model"
    assert str(tmp_path) not in repr(recorded)


def test_the_papers_recipe() -> None:
    paper = load_named_config("paper")
    for task, batch_size, learning_rate in (("cola", 16, 1e-5), ("rte", 16, 2e-5), ("sst2", 32, 2e-5)):
        run = paper.run(task=task)
        assert (run.batch_size, run.learning_rate, run.epochs) == (batch_size, learning_rate, 10)
        assert (run.beta1, run.beta2, run.epsilon, run.weight_decay) == (0.9, 0.98, 1e-6, 0.1)
        assert (run.schedule, run.warmup) == ("polynomial", 0.06)


def test_what_is_asked_for_wins_over_the_file() -> None:
    paper = load_named_config("paper")
    assert paper.run(task="rte", learning_rate=3e-5).learning_rate == 3e-5


@pytest.mark.parametrize("name", ["demo", "minilm", "paper"])
def test_named_configs_spell_out_a_grid_of_different_runs(name: str) -> None:
    config = load_named_config(name)
    runs = config.grid()
    assert len({run.name for run in runs}) == len(runs)
    assert len(runs) == len(config.tasks) * len(config.methods) * len(config.seeds)
    assert {run.method for run in runs} >= {EXACT, "gaussian", "hadamard"}
    assert {run.center for run in runs if run.method == "gaussian"} == {False}


def test_the_demo_grid_is_what_make_glue_promises() -> None:
    runs = load_named_config("demo").grid(seed=0)
    labels = {run.method_label for run in runs}
    sketched = {f"{name}-{ratio}" for name in ("gaussian", "hadamard") for ratio in ("0.5", "0.2", "0.1")}
    assert {label.removesuffix("-centered") for label in labels} == {EXACT, CHECKPOINTING} | sketched


def test_the_papers_grid_covers_all_tasks() -> None:
    assert load_named_config("paper").tasks == tuple(TASKS)


def test_an_unknown_config_names_the_known_ones() -> None:
    with pytest.raises(HarnessError, match="unknown config 'fast'; choose one of demo, minilm, paper"):
        load_named_config("fast")
    assert named_configs() == ("demo", "minilm", "paper")
