"""What a step takes on a CPU: counted in calls, which no other process on the machine changes."""

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear.functional import linear


def profiled_calls(config):
    """Calls that torch's profiler sees in a forward and a backward pass."""
    g, shapes = torch.randn(512, 128), ((512, 128), (128, 128), (128,))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def step():
        for leaf in leaves:
            leaf.grad = None
        linear(*leaves, config=config).backward(g)

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
