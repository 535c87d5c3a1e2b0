"""What a plan depends on beside the contents of tensors: a plan is used again where all of it is as it was."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.checkpointing.autocasting import present_autocast
from rmm_linear.checkpointing.tracing import Arguments

# Entries of a module's lists and dicts that are looked at.
_FEW = 16


def state_of(model: nn.Module) -> tuple[list[Tensor], Any]:
    """Take what a model is made of apart.

    Args:
        model: The model.

    Returns:
        Parameters and buffers, each once, in the order of `named_parameters` and `named_buffers`; and a key of the
        rest, equal where a plan of the model holds.
    """
    # A plan is of the modules as they were: replaced, converted or reconfigured ones, other hooks, tied or frozen
    # weights give another key, and are planned anew.
    places: tuple[dict[int, int], dict[int, int]] = ({}, {})
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    key: list[Any] = []
    for module in model.modules():
        own = vars(module)
        key.append((id(module), type(module), *filter(None, map(_plain, own.items()))))
        for kind, seen, tensors in zip(("_parameters", "_buffers"), places, found, strict=True):
            for name, tensor in own[kind].items():
                if tensor is not None:
                    # the same number for the same tensor: weights that are tied later make another key
                    key.append((name, seen.setdefault(id(tensor), len(seen))))
                    if len(seen) > len(tensors):
                        tensors.append(tensor)
    return [*found[0], *found[1]], tuple(key)


def key_of_call(modules: Any, arguments: Arguments, inputs: Sequence[Tensor]) -> Any:
    """Tell calls apart that need a plan each.

    Args:
        modules: The model's key, see `state_of`.
        arguments: How the step is called.
        inputs: Parameters, buffers and the tensors among the arguments.

    Returns:
        A key.
    """
    autocast = present_autocast(tensor.device.type for tensor in inputs)
    # autocast keeps the casts of leaves alone, and those only if it is told to
    casts = (torch.is_autocast_cache_enabled(), *(tensor.is_leaf for tensor in inputs)) if autocast else ()
    return (
        modules,
        str(arguments.spec),
        repr(arguments.constants),
        tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs),
        autocast,
        casts,
    )


def _plain(attribute: tuple[str, Any]) -> tuple[str, Any] | None:
    """What of a module's attribute a plan depends on: plain values, and which hooks there are."""
    name, value = attribute
    if isinstance(value, (bool, int, float, str, type(None))):
        return attribute
    if isinstance(value, dict) and name.endswith("_hooks"):
        return name, tuple(value)
    if isinstance(value, (list, tuple, set, dict)) and 0 < len(value) <= _FEW:
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        return (name, repr(value)) if all(isinstance(part, (bool, int, float, str)) for part in parts) else None
    return None
