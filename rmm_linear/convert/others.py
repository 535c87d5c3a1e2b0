"""What stands in a linear layer's place and is none that can be converted: found, to be reported by name."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmm_linear.convert.matching import LinearLayer, linear_layers
from rmm_linear.convert.swapping import wrong_class
from rmm_linear.layer_classes import is_linear_layer


@dataclass(frozen=True)
class OtherModule:
    """A module that multiplies by a weight of its own, and is no linear layer.

    Attributes:
        layer: The module, with its names.
        reason: Why it is left as it is.
        trains: Whether it has a parameter that gets a gradient, so that it keeps its input.
    """

    layer: LinearLayer
    reason: str
    trains: bool


def other_modules(model: nn.Module) -> Iterator[OtherModule]:
    """Find the modules that a user might expect to be converted, and that can't be.

    They are: linear layers of other classes (quantized ones, and fused ones of other libraries), by their
    `in_features` and `out_features`, and mixtures of experts whose weights are parameters of three dimensions. (Layers
    whose class inherits from `nn.Linear` are linear layers, of which `why_not` says what there is to say.)

    Args:
        model: Any module.

    Yields:
        The modules, in the model's order.
    """
    for layer in linear_layers(model, lambda module: _reason(module) is not None):
        parameters = layer.module.parameters(recurse=False)
        trains = any(parameter.requires_grad for parameter in parameters)
        yield OtherModule(layer, _reason(layer.module) or "", trains)


def _reason(module: nn.Module) -> str | None:
    if is_linear_layer(module):
        return None
    is_sized = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    # wrappers have neither
    holds_weight = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if is_sized and holds_weight and not any(is_linear_layer(inner) for inner in module.modules()):
        return wrong_class(module)
    experts = _experts(module)
    if experts:
        return (
            f"{type(module).__name__} holds the weights of {experts[0].shape[0]} experts as parameters of three"
            " dimensions, not as nn.Linear; the tokens that reach each expert are kept as they are"
        )
    return None


def _experts(module: nn.Module) -> list[Tensor]:
    """The weights of a mixture of experts: (experts, in, out) or (experts, out, in)."""
    if type(module).__module__.startswith("torch.nn") or "expert" not in type(module).__name__.lower():
        return []
    return [
        parameter
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and parameter.dtype != torch.bool and min(parameter.shape) > 1
    ]
