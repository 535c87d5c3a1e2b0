"""Budgets that `auto` meets, and how it refuses one."""

import pytest
import torch
from torch import nn

from experiments.checkpointing.generators import chain, with_backward
from rmm_linear.checkpointing import checkpoint_step, get_strategy
from rmm_linear.errors import InfeasibleBudgetError


def _step(model, x):
    return model(x).square().mean()


def test_a_budget_that_revolve_can_meet_is_met():
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())])
    plan = checkpoint_step(model, _step, torch.randn(256, 16), budget="35%").plans[0]
    assert plan.peak_bytes <= 0.35 * plan.plain.peak_bytes


def test_the_error_speaks_of_what_was_found():
    with pytest.raises(InfeasibleBudgetError, match="the least that was found"):
        get_strategy("auto").plan(with_backward(chain([4] * 5)), 1)
