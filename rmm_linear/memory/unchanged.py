"""Look at a model without a trace: gradients, buffers and the random state as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def drop_gradients(model: nn.Module) -> None:
    """Set all gradients to None.

    Args:
        model: Any module.
    """
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a model without a trace.

    Gradients are put aside, and given back at the end with the contents of the buffers; what is drawn inside comes from
    a copy of the random state.

    Args:
        model: Any module.

    Yields:
        Nothing.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {parameter.device for parameter in model.parameters()}
    drop_gradients(model)
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices if device.type == "cuda"]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer
                # only what a forward pass has changed: a copy would be noticed by graphs that use the buffer
                if not buffer.is_meta and not torch.equal(buffer, content):
                    buffer.copy_(content)
