"""Models that can't be planned as they are: what the user is told, before anything is captured."""

import copy

import pytest
import torch
from planned_models import mean_square, planned, planned_runs
from torch import nn

from rmm_linear.checkpointing import (
    PlannedStep,
    Schedule,
    apply_schedule,
    capture,
    checkpoint_model,
    checkpoint_step,
    remove_checkpointing,
)
from rmm_linear.errors import ScheduleError

X = torch.randn(32, 8)


def _model():
    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    return nn.Sequential(block(), block(), nn.Linear(8, 8))


@pytest.fixture
def nothing_is_captured(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a capture was begun")

    monkeypatch.setattr(PlannedStep, "capture", refuse)


_DOORS = {
    "checkpoint_model": lambda model: planned(model, X),
    "checkpoint_step": lambda model: checkpoint_step(model, mean_square, X, budget="100%", strategy="chen2016_sqrt"),
    "apply_schedule": lambda model: apply_schedule(model, mean_square, X, Schedule((), "0" * 16)),
}


@pytest.mark.parametrize(
    ("kind", "door"),
    [
        *(("planned", door) for door in _DOORS),
        ("compiled in place", "checkpoint_model"),
        ("compiled", "checkpoint_model"),
    ],
)
def test_a_model_that_holds_a_planned_or_compiled_module_is_refused_by_name(kind, door, monkeypatch):
    door = _DOORS[door]
    model, told = _model(), r"'1' \(Sequential\) is compiled already"
    if kind == "planned":
        planned(model[1], X)
        told = r"'1' \(Sequential\) is checkpointed already.*remove_checkpointing"
    elif kind == "compiled in place":
        model[1].compile(backend="eager")
    else:
        model[1], told = torch.compile(model[1], backend="eager"), r"'1' \(OptimizedModule\) is compiled already"
    with monkeypatch.context() as patched:
        patched.setattr(PlannedStep, "capture", lambda *_, **__: pytest.fail("a capture was begun"))
        with pytest.raises(ValueError, match=told):
            door(model)
    assert model._compiled_call_impl is None
    if kind == "planned":
        planned(remove_checkpointing(model), X)


def test_a_module_planned_after_the_whole_is_part_of_the_whole():
    model = planned(_model(), X)
    planned(model[1], X)
    for x in (X, X[:7]):
        assert torch.equal(model(x), copy.deepcopy(model)(x))
    assert (planned_runs(model), planned_runs(model[1])) == (2, 0)


@pytest.mark.parametrize("door", _DOORS.values(), ids=_DOORS)
@pytest.mark.usefixtures("nothing_is_captured", "process_group")
def test_a_wrapper_of_distributed_training_is_refused_with_what_to_plan(door):
    model = nn.parallel.DistributedDataParallel(_model())
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*before.*wrap.*checkpoint_model\(model\.module"):
        door(model)
    with pytest.raises(ValueError, match=r"'inner' \(DistributedDataParallel\) is a"):
        door(nn.ModuleDict({"inner": model}))


def test_what_is_no_schedule_is_refused():
    text = Schedule.plain(capture(_model(), (X,), step=mean_square).graph).to_json()
    with pytest.raises(ScheduleError, match=r"str.*Schedule\.from_json"):
        apply_schedule(_model(), mean_square, X, text)
    with pytest.raises(ScheduleError, match=r"str.*Schedule\.from_json"):
        torch.compile(_model(), backend="rmm_linear", options={"schedule": text})(X)


@pytest.mark.parametrize("door", _DOORS.values(), ids=_DOORS)
@pytest.mark.usefixtures("nothing_is_captured")
def test_eval_mode_and_what_is_no_module_are_refused(door):
    with pytest.raises(ValueError, match=r"eval mode.*call model\.train\(\) first"):
        door(_model().eval())
    with pytest.raises(ValueError, match=r"model is a function.*nn\.Module"):
        door(lambda x: x)


@pytest.mark.usefixtures("nothing_is_captured")
def test_a_budget_is_asked_for():
    for plan in (checkpoint_model, lambda *args, **kwargs: checkpoint_step(args[0], mean_square, *args[1:], **kwargs)):
        with pytest.raises(ValueError, match="budget=None is no budget"):
            plan(_model(), X, budget=None)
