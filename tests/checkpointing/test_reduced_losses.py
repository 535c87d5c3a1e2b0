"""Losses whose result lies in more memory than it needs: what is counted is what is there."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measured_peak import MeasuredPeak
from torch import Tensor, nn

from rmm_linear.checkpointing import checkpoint_step

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": lambda x, y, **options: F.binary_cross_entropy(x.sigmoid(), y, **options),
    "bce, weighted": lambda x, y, **options: F.binary_cross_entropy(x.sigmoid(), y, torch.ones(16), **options),
    "soft_margin": F.soft_margin_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "nll": lambda x, y, **options: F.nll_loss(x, torch.zeros(17, dtype=torch.int64), **options),
}


@pytest.mark.parametrize(
    "reduction", ["mean", *(pytest.param(kind, marks=pytest.mark.grid) for kind in ("sum", "none"))]
)
@pytest.mark.parametrize("name", LOSSES)
def test_the_simulated_peak_of_a_loss_is_the_measured_one(name: str, reduction: str) -> None:
    model, x, y = nn.Linear(16, 16), torch.randn(17, 16), torch.rand(17, 16)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[name](model(x), y, reduction=reduction)

    planned = checkpoint_step(model, step, (x, y), budget="100%", strategy="chen2016_sqrt")
    tangent = torch.ones_like(step(model, x, y))
    with MeasuredPeak() as measured:
        loss = planned(x, y)
        loss.backward(tangent)
    assert planned.planned_runs == 1
    assert planned.plans[0].peak_bytes == measured.peak
