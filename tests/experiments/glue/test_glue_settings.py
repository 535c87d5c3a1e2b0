"""What a run may be: validation, labels, and the named configurations."""

import pytest

from experiments.command_line import HarnessError
from experiments.glue.settings import CHECKPOINTING, EXACT, RunSettings, load_named_config
from rmm_linear import RMMConfig
from rmm_linear.sketches import available_sketches


def test_every_sketch_is_a_method_and_knobs_left_out_are_the_librarys_defaults():
    assert RunSettings(method="hadamard").rmm_config == RMMConfig(sketch="hadamard")
    for sketch in available_sketches():
        settings = RunSettings(method=sketch, ratio=0.3, center=False)
        assert settings.rmm_config == RMMConfig(ratio=0.3, sketch=sketch, center=False)


def test_the_executor_is_told_to_the_callback_and_recorded_where_it_is_not_the_default():
    coded = RunSettings(method="codes", bits="8", executor="exact")
    assert coded.plan_options == {"compile": {"bits": 8, "executor": "exact"}}
    assert RunSettings(method="fit", budget="50%", executor="exact").plan_options == {"fit": "50%", "executor": "exact"}
    assert coded.recorded()["executor"] == "exact"
    by_name = RunSettings(method="codes", bits="8", executor="inductor")
    assert by_name == RunSettings(method="codes", bits="8")
    assert "executor" not in by_name.recorded()


WRONG = {
    "unknown task 'imdb'; choose one of cola": {"task": "imdb"},
    "leave out --ratio, --skip-padding": {"ratio": 0.5, "skip_padding": True},
    "'checkpointing' keeps no sketch": {"method": CHECKPOINTING, "center": True},
    "the method 'exact' has no plan: leave out --executor": {"executor": "exact"},
    "the task 'rte' does not fit --data demo": {"task": "rte"},
    "batch_size=0 is not a finite number above 0": {"batch_size": 0},
    "learning_rate=nan is not a finite number above 0": {"learning_rate": float("nan")},
    "seed=99999999999 is not in [0, 2**32)": {"seed": 99999999999},
    "warmup=1.5 is not in [0, 1]": {"warmup": 1.5},
    "schedule='cosine' is not one of polynomial": {"schedule": "cosine"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_run_is_refused(message):
    with pytest.raises(HarnessError) as raised:
        RunSettings(**WRONG[message])
    assert message in str(raised.value)


def test_a_grid_is_narrowed_by_what_is_asked_for():
    demo = load_named_config("demo")

    def labels(**asked):
        return [run.method_label for run in demo.grid(seed=0, **asked)]

    assert labels(method="exact") == ["exact"]
    assert labels(method="hadamard") == ["hadamard-0.5-centered", "hadamard-0.1-centered", "hadamard-1-centered-int4"]
    assert labels(ratio=0.1) == ["gaussian-0.1", "hadamard-0.1-centered"]
    assert labels(method="fit") == ["fit-50"]
    assert labels(budget="50%") == ["fit-50"]
    assert labels(method="crs", ratio=0.3) == ["crs-0.3-centered"]
    with pytest.raises(HarnessError, match="the grid of 'demo' has no run with ratio=0.7; name one with --method"):
        demo.grid(ratio=0.7)


@pytest.mark.parametrize("name", ["demo", "paper"])
def test_named_configs_spell_out_a_grid_of_different_runs(name):
    config = load_named_config(name)
    runs = config.grid()
    assert len({run.name for run in runs}) == len(runs)
    assert len(runs) == len(config.tasks) * len(config.methods) * len(config.seeds)
    assert {run.method for run in runs} >= {EXACT, "gaussian", "hadamard"}
    assert {run.center for run in runs if run.method == "gaussian"} == {False}


def test_what_is_recorded_says_nothing_about_the_machine(tmp_path):
    model = tmp_path / "some-model"
    model.mkdir()
    recorded = RunSettings(task="rte", data=str(tmp_path), model=str(model)).recorded()
    assert recorded["data"] == "folder"
    assert recorded["model"] == "some-model"
    assert str(tmp_path) not in repr(recorded)
