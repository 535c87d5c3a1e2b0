"""Segments of modules under torch's own checkpointing."""

import copy
from functools import partial

import pytest
import torch
from measured_peak import MeasuredPeak
from torch import nn

from rmm_linear.checkpointing import capture, checkpoint_sequential, remove_checkpointing, sequential
from rmm_linear.errors import InfeasibleBudgetError


def stack(depth=12, width=16, drop=0.2):
    blocks = (
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(drop), nn.Linear(64, width)
        )
        for _ in range(depth)
    )
    return nn.Sequential(*blocks)


X = torch.randn(2000, 16)
grid = partial(pytest.param, marks=pytest.mark.grid)


@pytest.fixture(scope="module")
def captured():
    return capture(stack(), (X,))


@pytest.fixture
def captured_once(captured, monkeypatch):
    """Every stack of this file has one graph: it need not be captured for each budget."""
    monkeypatch.setattr(sequential, "capture", lambda *_, **__: captured)


def measured_peak(model):
    one = torch.ones(2000, 16)
    with MeasuredPeak() as measured:
        out = model(X)
        out.backward(one)
    return measured.peak


@pytest.mark.parametrize(
    ("strategy", "budget"),
    [
        *(("auto", budget) for budget in ("100%", "60%", "35%")),
        *((strategy, "35%") for strategy in ("chen2016_sqrt", "hong2025_linear")),
        *(grid(strategy, budget) for strategy in ("chen2016_sqrt", "hong2025_linear") for budget in ("100%", "60%")),
    ],
)
@pytest.mark.usefixtures("captured_once")
def test_the_forecast_is_met_and_gradients_are_bitwise_equal(strategy, budget):
    model = stack()
    reference = copy.deepcopy(model)
    plan = checkpoint_sequential(model, X, budget=budget, strategy=strategy)
    torch.manual_seed(0)
    peak = measured_peak(model)
    torch.manual_seed(0)
    plain = measured_peak(reference)
    assert peak == pytest.approx(plan.peak_bytes, rel=0.1)
    assert plain == pytest.approx(plan.plain_peak_bytes, rel=0.1)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert (plan.overhead == 0) == (budget == "100%")
    assert plan.overhead < 0.4


@pytest.mark.usefixtures("captured_once")
def test_a_smaller_budget_never_costs_less():
    overheads = [checkpoint_sequential(stack(), X, budget=f"{percent}%").overhead for percent in range(100, 24, -15)]
    assert overheads == sorted(overheads)
    assert overheads[0] == 0


@pytest.mark.usefixtures("captured_once")
def test_other_shapes_run_and_eval_takes_no_detour():
    model = stack(drop=0.0)
    checkpoint_sequential(model, X, budget="40%")
    assert torch.equal(model(X[:7]), remove_checkpointing(copy.deepcopy(model))(X[:7]))
    model.eval()
    with torch.no_grad():
        model(X)
    assert "forward" not in vars(remove_checkpointing(model))


@pytest.mark.usefixtures("captured_once")
def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match="a ModuleList is no nn.Sequential.*checkpoint_model"):
        checkpoint_sequential(nn.ModuleList([nn.Linear(2, 2)]), X, budget="50%")
    with pytest.raises(ValueError, match="strategy='kusumoto' cuts no sequences"):
        checkpoint_sequential(stack(), X, budget="50%", strategy="kusumoto")
    model = stack()
    with pytest.raises(InfeasibleBudgetError, match="checkpoint_model plans op by op") as caught:
        checkpoint_sequential(model, X, budget="1%")
    checkpoint_sequential(model, X, budget=caught.value.least_bytes)
    with pytest.raises(ValueError, match="checkpointed already"):
        checkpoint_sequential(model, X, budget="50%")


def test_a_sequence_that_updates_buffers_is_refused_and_checkpoint_model_named():
    model = nn.Sequential(*stack(2), nn.Sequential(nn.BatchNorm1d(16)), nn.GELU())
    with pytest.raises(ValueError, match=r"writes into .*2\.0\.running_mean.*twice.*use checkpoint_model"):
        checkpoint_sequential(model, X, budget="80%")
    assert "forward" not in vars(model)
    # in eval mode it updates nothing, until it is trained after all
    model[2].eval()
    checkpoint_sequential(model, X, budget="80%")
    model(X).sum().backward()
    assert not model[2][0].running_mean.any()
    model.train()
    with pytest.raises(ValueError, match="another mode"):
        model(X)
    assert not model[2][0].running_mean.any()


def test_modules_that_were_appended_after_planning_are_not_left_out():
    model = stack(4)
    checkpoint_sequential(model, X, budget="80%")
    model.append(nn.Linear(16, 3))
    with pytest.raises(ValueError, match="has 5 modules, and had 4 when it was planned; plan again"):
        model(X)
    model.eval()
    with pytest.raises(ValueError, match="plan again"):
        model(X)
    remove_checkpointing(model)
    checkpoint_sequential(model.train(), X, budget="100%")
    assert model(X).shape == (2000, 3)
