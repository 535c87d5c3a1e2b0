"""What a step takes on a CPU: counted in calls, which no other process on the machine changes."""

import pytest
import torch
import torch.nn.functional as F

from rmm_linear import RMMConfig
from rmm_linear.functional import linear


def profiled_calls(config, rows=512, features=128, outputs=128):
    """Calls that torch's profiler sees in a forward and a backward pass, those of F.linear without a configuration."""
    x, g = torch.randn(rows, features, requires_grad=True), torch.randn(rows, outputs)
    weight = torch.randn(outputs, features, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True)

    def step():
        x.grad = weight.grad = bias.grad = None
        output = F.linear(x, weight, bias) if config is None else linear(x, weight, bias, config=config)
        output.backward(g)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.count for event in profile.key_averages())


@pytest.mark.parametrize(
    ("config", "most"),
    [(RMMConfig(), 125), (RMMConfig(center=False), 95), (RMMConfig(sketch="gaussian"), 150)],
    ids=str,
)
def test_a_step_of_a_small_layer_has_few_calls(config, most):
    assert profiled_calls(config) <= most
