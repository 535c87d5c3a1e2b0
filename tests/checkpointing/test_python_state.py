"""What a planned step depends on beside its tensors: a change is followed, planned anew, refused or warned of."""

import copy

import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model

X = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
PLAN = {"budget": "100%", "strategy": "chen2016_sqrt"}


# Hooks


def test_a_models_own_hooks_run_once_a_step():
    model, seen = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), []

    def twice(module, args, output):
        seen.append(type(output))
        return output * 2

    model.register_forward_hook(twice)
    plain = copy.deepcopy(model)
    checkpoint_model(model, X, **PLAN)
    seen.clear()
    assert torch.equal(model(X), plain(X))
    assert seen == [torch.Tensor] * 2
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    assert seen == [torch.Tensor] * 4
