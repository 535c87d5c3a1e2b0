"""Models that can't be planned as they are: what the user is told, before anything is captured."""

import pytest
import torch
from torch import distributed, nn

import rmm_linear.checkpointing.planned as planned_module
from rmm_linear.checkpointing import (
    Schedule,
    apply_schedule,
    capture,
    checkpoint_model,
    checkpoint_sequential,
    checkpoint_step,
    remove_checkpointing,
)
from rmm_linear.errors import ScheduleError

X = torch.randn(32, 8)


def _step(model, x):
    return model(x).square().mean()


def _model():
    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    return nn.Sequential(block(), block(), nn.Linear(8, 8))


@pytest.fixture
def nothing_is_captured(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a capture was begun")

    monkeypatch.setattr(planned_module, "capture", refuse)


@pytest.fixture
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


_DOORS = {
    "checkpoint_model": lambda model: checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt"),
    "checkpoint_step": lambda model: checkpoint_step(model, _step, X, budget="100%", strategy="chen2016_sqrt"),
    "apply_schedule": lambda model: apply_schedule(model, _step, X, Schedule((), "0" * 16)),
}


@pytest.mark.parametrize("door", _DOORS.values(), ids=_DOORS)
def test_a_model_that_holds_a_planned_module_is_refused_by_name(door, monkeypatch):
    model = _model()
    checkpoint_model(model[1], X, budget="100%", strategy="chen2016_sqrt")
    with monkeypatch.context() as patched:
        patched.setattr(planned_module, "capture", lambda *_, **__: pytest.fail("a capture was begun"))
        with pytest.raises(ValueError, match=r"'1' \(Sequential\) is checkpointed already.*remove_checkpointing"):
            door(model)
    assert "forward" not in vars(model)
    remove_checkpointing(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")


def test_a_sequence_that_holds_a_planned_module_is_refused():
    model = _model()
    checkpoint_sequential(model[0], X, budget="100%")
    with pytest.raises(ValueError, match=r"'0' \(Sequential\) is checkpointed already"):
        checkpoint_sequential(model, X, budget="100%")


def test_a_module_planned_after_the_whole_is_told_at_the_next_shape():
    model = _model()
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    checkpoint_model(model[1], X, budget="100%", strategy="chen2016_sqrt")
    with pytest.raises(ValueError, match="'1' .* is checkpointed already"):
        model(X[:7])


@pytest.mark.parametrize("door", _DOORS.values(), ids=_DOORS)
@pytest.mark.usefixtures("nothing_is_captured", "process_group")
def test_a_wrapper_of_distributed_training_is_refused_with_what_to_plan(door):
    model = nn.parallel.DistributedDataParallel(_model())
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*before.*wrap.*checkpoint_model\(model\.module"):
        door(model)
    with pytest.raises(ValueError, match="'inner' is a DistributedDataParallel"):
        door(nn.ModuleDict({"inner": model}))


@pytest.mark.usefixtures("nothing_is_captured")
def test_what_is_no_schedule_is_refused():
    text = Schedule.plain(capture(_model(), (X,), step=_step).graph).to_json()
    with pytest.raises(ScheduleError, match=r"str.*Schedule\.from_json"):
        apply_schedule(_model(), _step, X, text)
