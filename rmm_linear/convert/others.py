"""What stands in a linear layer's place and is none that can be converted: found, to be reported by name."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from rmm_linear.convert.matching import LinearLayer, linear_layers
from rmm_linear.convertible import wrong_class
from rmm_linear.layer_classes import is_linear_layer

_MATRIX, _DEEP = 2, 3
# modules with such weights that are no linear layers
_KNOWN = (nn.Embedding, nn.EmbeddingBag, _ConvNd)


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
    `in_features` and `out_features`; routers and the like, by a matrix that is called `weight`; and modules that
    multiply by parameters of three dimensions, as mixtures of experts and some attentions do. (Layers whose class
    inherits from `nn.Linear` are linear layers, of which `why_not` says what there is to say.)
    """
    for layer in linear_layers(model, lambda module: _reason(module) is not None):
        parameters = layer.module.parameters(recurse=False)
        trains = any(parameter.requires_grad for parameter in parameters)
        yield OtherModule(layer, _reason(layer.module) or "", trains)


def _reason(module: nn.Module) -> str | None:
    if is_linear_layer(module) or isinstance(module, _KNOWN) or type(module).__module__.startswith("torch.nn"):
        return None
    own = dict(module.named_parameters(recurse=False))
    is_sized = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    # wrappers have neither
    holds_weight = bool(own) or any(True for _ in module.buffers(recurse=False))
    if is_sized and holds_weight and not any(is_linear_layer(inner) for inner in module.modules()):
        return wrong_class(module)
    deep = [name for name, weight in own.items() if weight.dim() >= _DEEP and min(weight.shape) > 1]
    if deep:
        experts = f" of {own[deep[0]].shape[0]} experts" if "expert" in type(module).__name__.lower() else ""
        return (
            f"{type(module).__name__} holds {' and '.join(deep)}{experts} as parameters of {own[deep[0]].dim()}"
            " dimensions, not as nn.Linear; what they are multiplied with is kept as it is"
        )
    weight = own.get("weight")
    return wrong_class(module) if weight is not None and weight.dim() == _MATRIX and min(weight.shape) > 1 else None
