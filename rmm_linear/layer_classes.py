"""The classes of linear layers that can be converted: `nn.Linear`, and the `Conv1D` of transformers."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from rmm_linear import conv1d
from rmm_linear.linear import RMMLinear, SketchedLayer


def convertible_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes of exact layers that have a sketched one."""
    other = conv1d.conv1d_class()
    return (nn.Linear,) if other is None else (nn.Linear, other)


def sketched_class(exact: type[nn.Module]) -> type[SketchedLayer]:
    """Return what layers of a class become.

    Args:
        exact: One of `convertible_classes()`.
    """
    return RMMLinear if exact is nn.Linear else conv1d.RMMConv1D


def is_linear_layer(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer, converted or not.

    Returns:
        True for `nn.Linear`, the `Conv1D` of transformers, and classes that inherit from them.
    """
    return isinstance(module, convertible_classes())


def features(layer: nn.Module) -> tuple[int, int]:
    """Return the size of a linear layer.

    Args:
        layer: A module of which `is_linear_layer` is true.
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    values: Any = layer
    return values.nx, values.nf


def layer_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a linear layer is called with, by place or by name.

    Returns:
        The input, or None where there is none.
    """
    return args[0] if args else kwargs.get("input", kwargs.get("x"))
