"""Run a model and restore its gradients, its buffers and the random state; and find the buffers that a run changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Attributes of every module.
_INTERNALS = frozenset(vars(nn.Module()))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and the random state at the end of the context.

    Gradients are None at its start. Random numbers inside are drawn from a copy of the random state.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    restorers = [_restorer_of(module) for module in model.modules()]
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
            for restore in restorers:
                restore()


def buffers_of(module: nn.Module) -> dict[str, tuple[Tensor, int, Tensor]]:
    """Return the buffers of a module by name, with their versions and copies of their contents."""
    named = module.named_buffers(remove_duplicate=False)
    return {name: (buffer, buffer._version, buffer.detach().clone()) for name, buffer in named}


def changed_buffers(module: nn.Module, before: dict[str, tuple[Tensor, int, Tensor]]) -> list[str]:
    """Name the buffers that were written into, replaced, removed or added since `buffers_of`."""
    now = dict(module.named_buffers(remove_duplicate=False))
    changed = [name for name in now if name not in before]
    for name, (buffer, version, contents) in before.items():
        # batch norm writes without a new version; a write of equal contents changes only the version
        if now.get(name) is not buffer or buffer._version != version or not _same_bits(buffer, contents):
            changed.append(name)
    return changed


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.is_meta:
        return True
    # compare bytes, since NaN != NaN
    one, other = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (one, other))
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _restorer_of(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores a module's buffers, and its attributes beside parameters, modules and hooks."""
    buffers = dict(module._buffers)
    contents = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}
    non_persistent = set(module._non_persistent_buffers_set)
    attributes = {name: value for name, value in vars(module).items() if name not in _INTERNALS}

    def restore() -> None:
        same = module._buffers.keys() == buffers.keys() and all(
            module._buffers[name] is buffer for name, buffer in buffers.items()
        )
        if not same:
            # attributes may describe the buffers, such as the length that a cache was made for
            for name in [name for name in vars(module) if name not in _INTERNALS and name not in attributes]:
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = non_persistent
        for name, content in contents.items():
            buffer = buffers[name]
            # copy only into changed buffers: each copy raises the version, which graphs that saved the buffer check
            if buffer is not None and not _same_bits(buffer, content):
                buffer.copy_(content)

    return restore
