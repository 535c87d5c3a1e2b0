"""Look at a model without a trace: gradients, buffers and the random state as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# What every module has.
_INTERNALS = frozenset(vars(nn.Module()))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a model without a trace.

    Gradients are put aside, and given back at the end with the contents of the buffers; what is drawn inside comes from
    a copy of the random state.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = [_State(module) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters()}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices if device.type == "cuda"]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for state in states:
                state.restore()


class _State:
    """A module's buffers, and what else it holds beside parameters, modules and hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._contents = {name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None}
        self._non_persistent = set(module._non_persistent_buffers_set)
        self._attributes = {name: value for name, value in vars(module).items() if name not in _INTERNALS}

    def restore(self) -> None:
        module = self._module
        same = module._buffers.keys() == self._buffers.keys() and all(
            module._buffers[name] is buffer for name, buffer in self._buffers.items()
        )
        if not same:
            # what it says about its buffers goes back with them: the length that a cache was made for
            for name in [name for name in vars(module) if name not in _INTERNALS and name not in self._attributes]:
                del vars(module)[name]
            vars(module).update(self._attributes)
            module._buffers.clear()
            module._buffers.update(self._buffers)
            module._non_persistent_buffers_set = self._non_persistent
        for name, content in self._contents.items():
            buffer = self._buffers[name]
            # only what a forward pass has changed: a copy would be noticed by graphs that use the buffer
            if buffer is not None and not buffer.is_meta and not torch.equal(buffer, content):
                buffer.copy_(content)
