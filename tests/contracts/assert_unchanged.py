"""Asserts that a measurement changes neither the model nor the random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def _tensors(model: nn.Module) -> dict[str, Tensor | None]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {f"{name}.grad": parameter.grad for name, parameter in parameters.items()}
    return parameters | gradients | dict(model.named_buffers(remove_duplicate=False))


def _state(model: nn.Module) -> list[object]:
    names = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [(module.training, *(list(getattr(module, name)) for name in names)) for module in model.modules()]


@contextmanager
def assert_unchanged(model: nn.Module) -> Iterator[None]:
    """Assert that a model has its tensors and gradients, with their contents, its modes and hooks; torch its draws."""
    before, state, draws = _tensors(model), _state(model), torch.get_rng_state()
    contents = {name: tensor.clone() for name, tensor in before.items() if tensor is not None}
    yield
    assert torch.equal(torch.get_rng_state(), draws)
    assert _state(model) == state
    after = _tensors(model)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor is before[name], name
        if tensor is not None:
            torch.testing.assert_close(tensor, contents[name], rtol=0, atol=0, equal_nan=True)
