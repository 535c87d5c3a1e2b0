"""LayerProbe: capture a layer's input x and its output's gradient g from a model in training.

The backward pass of a sketched layer has g but no x. A probe keeps the x of the watched layers alone until their g is
computed.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rmm_linear.functional import compute_dtype
from rmm_linear.layer import SketchedLayer, layer_input
from rmm_linear.names import strip_wrappers
from rmm_linear.padding import current_valid_rows
from rmm_linear.producers import is_free_to_keep
from rmm_linear.sharing import current_groups

Measure = Callable[[str, SketchedLayer, Tensor, Tensor, Tensor | None], object]


def is_compiled(model: nn.Module) -> bool:
    """Tell whether torch.compile, or module.compile, was applied to any part of the model."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


class _Hook:
    """Calls a probe's method through a weak reference. A copy of the hook, in a copy of the model, does nothing."""

    def __init__(self, method: Callable[..., None] | None, name: str) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self._name)

    def __call__(self, *args: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(self._name, *args)


class LayerProbe:
    """Calls back with (x, g) of chosen sketched layers during training steps.

    `watch(names)` begins a step: each named layer is measured at most once, in the backward pass of its first call in
    training mode with gradients enabled: the first micro-batch under gradient accumulation. A layer is left out if its
    input was changed in place before its backward pass, if it gets no gradient, or if its input is kept anyway, so that
    the layer is exact (see `rmm_linear.producers`). The random state is unchanged.

    `measure(name, layer, x, g, index)` gets the layer's name without wrappers' prefixes; the input (..., in); the
    gradient of the output (..., out); and the numbers of the rows that the layer sketched, or None for all.

    Attributes:
        layers: The sketched layers by name.
        groups: Name of each watched layer that shares sketches -> name of the first layer with its input.
    """

    def __init__(self, model: nn.Module, measure: Measure) -> None:
        if is_compiled(model):
            raise ValueError(
                "the model, or a part of it, is compiled, and a compiled forward hides the layers' inputs; measure the"
                " eager model, before torch.compile"
            )
        found = {
            strip_wrappers(name): module for name, module in model.named_modules() if isinstance(module, SketchedLayer)
        }
        if not found:
            raise ValueError(
                f"the {type(model).__name__} has no sketched layer to measure: it is an unconverted model; call"
                " convert_linears(model) first"
            )
        self.layers: Mapping[str, SketchedLayer] = MappingProxyType(found)
        self.groups: dict[str, str] = {}
        self._names = {module: name for name, module in found.items()}
        self._measure = measure
        self._handles: list[RemovableHandle] = []
        self._seen: set[str] = set()
        # by name, from forward to backward pass: input, its version (None for inference tensors), and rows
        self._held: dict[str, tuple[Tensor, int | None, Tensor | None]] = {}

    def watch(self, names: Iterable[str]) -> None:
        """Begin a step in which only the layers of these names (keys of `layers`) are measured."""
        self.close()
        for name in names:
            # before other hooks, which may replace the layer's output
            hook = _Hook(self._after_forward, name)
            self._handles.append(self.layers[name].register_forward_hook(hook, with_kwargs=True, prepend=True))

    def close(self) -> None:
        """Remove all hooks and free all kept inputs; `watch` may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self._held.clear()

    def _after_forward(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        # `layer` may be a layer of a DataParallel replica
        if name in self._seen or layer is not self.layers[name] or torch.compiler.is_compiling():
            return
        assert isinstance(layer, SketchedLayer)
        assert isinstance(output, Tensor)
        x = layer_input(args, kwargs)
        trains = layer.training and layer.weight.requires_grad and torch.is_grad_enabled() and output.requires_grad
        if not trains or x.is_nested or x.layout != torch.strided or is_free_to_keep(x, compute_dtype(x)):
            return
        self._seen.add(name)
        first = current_groups.first_reader(x, compute_dtype(x)) if layer.rmm_config.share_sketch else None
        if isinstance(first, SketchedLayer) and first in self._names:
            self.groups[name] = self._names[first]
        rows = current_valid_rows(x) if layer.rmm_config.skip_padding else None
        index = None if rows is None else rows.index_on(x.device)
        self._held[name] = x.detach(), None if x.is_inference() else x._version, index
        # The hook refers to no tensor, since a graph may outlive the step and keep the hook alive.
        self._handles.append(output.register_hook(_Hook(self._with_gradient, name)))

    def _with_gradient(self, name: str, g: Tensor) -> None:
        if name not in self._held:
            return
        x, version, index = self._held.pop(name)
        # the input was changed in place since the forward pass
        if version is not None and x._version != version:
            return
        with torch.no_grad():
            self._measure(name, self.layers[name], x, g.detach(), index)
