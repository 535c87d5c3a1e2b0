"""`auto` is never worse than a strategy that it asks."""

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_step, get_strategy
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.contract import tiny_graphs
from rmm_linear.planning.generators import chain, with_backward

_ASKED = ("cost_per_byte", "gruslys2016_bptt", "kusumoto2019_approximate", "nested_lower_sets")


def _step(model, x):
    return model(x).square().mean()


def _beaten_by(graph, name):
    """Proposals of a strategy that none of auto's is as good as."""
    own = get_strategy("auto").frontier(graph)
    return [
        (proposal.peak_bytes, proposal.cost)
        for proposal in get_strategy(name).frontier(graph)
        if not any(ours.peak_bytes <= proposal.peak_bytes and ours.cost <= proposal.cost * (1 + 1e-9) for ours in own)
    ]


_SMALL = {name: graph for name, graph in tiny_graphs() if "U" in name or "chain of 6" in name or "seed 1" in name}
_SMALL["uniform chain of 10"] = with_backward(chain([8] * 10))


@pytest.mark.parametrize("graph", _SMALL.values(), ids=_SMALL)
def test_none_of_its_strategies_has_a_better_proposal(graph):
    worse = {name: _beaten_by(graph, name) for name in _ASKED}
    assert not any(worse.values()), {name: found for name, found in worse.items() if found}


def test_a_budget_that_revolve_can_meet_is_met():
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())])
    plan = checkpoint_step(model, _step, torch.randn(256, 16), budget="35%").plans[0]
    assert plan.peak_bytes <= 0.35 * plan.plain.peak_bytes


def test_the_error_speaks_of_what_was_found():
    with pytest.raises(InfeasibleBudgetError, match="the least that was found"):
        get_strategy("auto").plan(with_backward(chain([4] * 5)), 1)
