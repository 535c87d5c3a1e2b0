"""What a step takes is found out without running it: in eager mode, and of losses in more memory than they need."""

import copy

import pytest
import torch
import torch.nn.functional as F
from assert_unchanged import assert_unchanged
from measured_peak import MeasuredPeak
from model_of import ModelOf, linears
from planned_models import mean_square
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert_linears
from rmm_linear.checkpointing import capture, checkpoint_model, checkpoint_step


def _mse(model, x):
    return F.mse_loss(model(x), x)


def _counts():
    def run(it, x):
        it.count.add_(1)
        return F.dropout(it.layer(x), 0.5)

    return ModelOf(run, count=torch.zeros(()), **linears("layer", 32))


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def _mlp():
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))])


STEPS = {
    "mlp": (_mlp, mean_square, (256, 32)),
    "mean squared error": (_mlp, _mse, (256, 32)),
    "sketched": (lambda: convert_linears(_mlp(), ratio=0.2), mean_square, (256, 32)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4)
        ),
        mean_square,
        (4, 3, 12, 12),
    ),
    "counts": (_counts, mean_square, (64, 32)),
    "checkpointed": (lambda: Checkpointed(*_mlp()), mean_square, (64, 32)),
}


def _measured(model, step, x):
    # gradients that arrive at outputs come from outside
    gradient = torch.ones_like(step(model, x))
    with MeasuredPeak() as measured:
        result = step(model, x)
        result.backward(gradient)
    return measured.peak


@pytest.mark.parametrize(("make", "step", "shape"), STEPS.values(), ids=STEPS)
def test_what_eager_mode_takes_is_what_it_took(make, step, shape):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    model(x)
    with assert_unchanged(model):
        found = capture(model, (x,), step=step).eager_peak_bytes
    # the random state that a checkpoint keeps is no part of the step
    kept = torch.get_rng_state().nbytes if isinstance(model, Checkpointed) else 0
    assert found + kept == _measured(model, step, x)


def test_a_plan_tells_both():
    model, x = _mlp(), torch.randn(256, 32)
    plan = checkpoint_step(model, mean_square, x, budget=0.9, strategy="chen2016_sqrt").plans[0]
    assert plan.eager_peak_bytes == _measured(model, mean_square, x) > plan.plain.peak_bytes
    part = 100 * plan.plain.peak_bytes / plan.eager_peak_bytes
    told = f"eager mode takes {plan.eager_peak_bytes / 2**10:.2f} KiB; the captured step takes {part:.1f} % of that"
    assert f"{told} without a plan" in str(plan)


def test_later_shapes_are_planned_without():
    model, x = nn.Linear(32, 32), torch.randn(256, 32)
    plan = checkpoint_model(model, x, budget="100%", strategy="chen2016_sqrt")
    assert plan.eager_peak_bytes == _measured(copy.deepcopy(model), nn.Module.__call__, x)
    model(x[:100]).sum().backward()
    assert model._compiled_call_impl.plans[-1].eager_peak_bytes is None


LOSSES = {
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
def test_the_simulated_peak_of_a_loss_is_the_measured_one(name, reduction):
    model, x, y = nn.Linear(16, 16), torch.randn(17, 16), torch.rand(17, 16)

    def step(model, x, y):
        return LOSSES[name](model(x), y, reduction=reduction)

    planned = checkpoint_step(model, step, (x, y), budget="100%", strategy="chen2016_sqrt")
    tangent = torch.ones_like(step(model, x, y))
    with MeasuredPeak() as measured:
        loss = planned(x, y)
        loss.backward(tangent)
    assert planned.planned_runs == 1
    assert planned.plans[0].peak_bytes == measured.peak
