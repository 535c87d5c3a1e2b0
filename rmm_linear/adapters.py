"""Adapted layers of PEFT: a base layer, and adapters that are called with its input, or with a copy in another dtype.

Hooks on adapted layers tell `sharing.py` their input tensor, so that it recognises the copies.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rmm_linear.layer import SketchedLayer, layer_input
from rmm_linear.padding import take_off_hooks
from rmm_linear.sharing import current_groups


def is_adapted(module: nn.Module) -> bool:
    """Tell whether a module is a layer with adapters: it has a base layer, as PEFT's layers do."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def adapters_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the adapters of an adapted layer: the modules in its `ModuleDict`s, one per adapter name."""
    for child in module.children():
        if isinstance(child, nn.ModuleDict):
            yield from child.values()


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        current_groups.enter(layer_input(args, kwargs))


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
    if not torch.compiler.is_compiling():
        current_groups.leave(layer_input(args, kwargs))


def watch_adapted_layers(model: nn.Module) -> None:
    """Hook the adapted layers whose adapters are sketched, and unhook other adapted layers."""
    for module in model.modules():
        is_wanted = is_adapted(module) and any(isinstance(adapter, SketchedLayer) for adapter in adapters_of(module))
        is_watched = _enter in module._forward_pre_hooks.values()
        if is_wanted and not is_watched:
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, with_kwargs=True, always_call=True)
        elif is_watched and not is_wanted:
            take_off_hooks(module, (_enter, _leave).__contains__)
