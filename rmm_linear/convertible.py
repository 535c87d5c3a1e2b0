"""Reasons why a linear layer cannot be sketched, and why a module that multiplies by weights is no linear layer."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from rmm_linear.layer import SketchedLayer, convertible_classes, is_linear_layer

_TENSOR_PARALLEL = "its weight is distributed over devices (tensor parallel)"
_BESIDE_TENSOR_PARALLEL = (
    "other layers of the model are distributed over devices (tensor parallel): ranks that hold the same weight would"
    " give it different gradients"
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MATRIX, _DEEP = 2, 3
# modules with weights of two dimensions and more that are no linear layers
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KNOWN = (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS)


def why_not(module: nn.Module, model: nn.Module | None = None) -> str | None:
    """Return the reason why a linear layer cannot be converted; None if it can be (or is already).

    The layer's model is needed to tell sharded from tensor-parallel weights.
    """
    kind = type(module)
    if not is_linear_layer(module):
        return _wrong_class(module)
    if isinstance(module, SketchedLayer):
        # A converted layer can always be re-configured, even if it was changed since.
        return _TENSOR_PARALLEL if _is_tensor_parallel(module, model) else None
    if parametrize.is_parametrized(module):
        return f"its {', '.join(module.parametrizations)} is parametrized"  # type: ignore[arg-type]
    if isinstance(module, nn.LazyLinear):
        return "its shape is not known yet (LazyLinear); run a batch through the model first"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it (and its in_proj_weight is no layer)"
    if kind not in convertible_classes() and not is_sharded_class(kind):
        return _wrong_class(module)
    weight = module._parameters.get("weight")
    if not isinstance(weight, Tensor):
        return (
            "its weight is not a parameter but computed by a hook (weight_norm, spectral_norm, pruning), or a part of"
            " FSDP's flat parameter (use_orig_params=False; convert before wrapping)"
        )
    if has_foreign_forward(module):
        return "its forward is replaced on the instance (as by accelerate's hooks), so that its class's is never called"
    if weight.dtype not in _DTYPES:
        return f"its weight has dtype {weight.dtype}"
    if hasattr(weight, "_forward_counter"):
        return "Opacus needs a gradient for each sample (GradSampleModule), which a sketch cannot give"
    if _is_tensor_parallel(module, model):
        return _TENSOR_PARALLEL
    return _BESIDE_TENSOR_PARALLEL if model is not None and _has_tensor_parallel_layers(model) else None


def why_no_layer(module: nn.Module) -> str | None:
    """Return why a module that a user might expect to be converted is no linear layer; None for other modules.

    Such modules are: linear layers of other classes (quantized layers, and fused layers of other libraries), by their
    `in_features` and `out_features`; routers and the like, by a matrix that is called `weight`; and modules that
    multiply by parameters of three dimensions, as mixtures of experts and some attentions do. (`why_not` handles
    subclasses of `nn.Linear`.)
    """
    if is_linear_layer(module) or isinstance(module, _KNOWN) or type(module).__module__.startswith("torch.nn"):
        return None
    own = dict(module.named_parameters(recurse=False))
    is_sized = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    # wrappers (PEFT's, for example) have neither own parameters nor own buffers
    holds_weight = bool(own) or any(True for _ in module.buffers(recurse=False))
    if is_sized and holds_weight and not any(is_linear_layer(inner) for inner in module.modules()):
        return _wrong_class(module)
    deep = [name for name, weight in own.items() if weight.dim() >= _DEEP and min(weight.shape) > 1]
    if deep:
        experts = f" of {own[deep[0]].shape[0]} experts" if "expert" in type(module).__name__.lower() else ""
        return (
            f"{type(module).__name__} holds {' and '.join(deep)}{experts} as parameters of {own[deep[0]].dim()}"
            " dimensions, not as nn.Linear; its input is kept exactly"
        )
    weight = own.get("weight")
    return _wrong_class(module) if weight is not None and weight.dim() == _MATRIX and min(weight.shape) > 1 else None


def has_foreign_forward(module: nn.Module) -> bool:
    """Tell whether the forward of an instance is not its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def is_sharded_class(kind: type) -> bool:
    """Tell whether FSDP2 derived this class from a layer's class, such as (FSDPModule, nn.Linear)."""
    if len(kind.__bases__) != 2 or not issubclass(kind.__bases__[0], _fsdp_module()):
        return False
    return kind.__bases__[1] in convertible_classes() or issubclass(kind.__bases__[1], SketchedLayer)


def _fsdp_module() -> Any:
    """Return FSDP2's class, or () if it is not imported, so that no module can be an instance."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def _sharded_dimensions(parameter: Any) -> int:
    return sum(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def _is_tensor_parallel(module: nn.Module, model: nn.Module | None) -> bool:
    """Tell whether the weight is a DTensor that stays distributed while the layer runs."""
    if getattr(module.weight, "placements", None) is None:
        return False
    # FSDP2 gathers the weights of its modules before their forward
    inside = module if model is None else model
    outer = (each for each in inside.modules() if isinstance(each, _fsdp_module()))
    gathers = any(inner is module for each in outer for inner in each.modules())
    # FSDP2 shards one mesh dimension: a second sharded dimension is tensor-parallel.
    return not gathers or _sharded_dimensions(module.weight) > 1


def _has_tensor_parallel_layers(model: nn.Module) -> bool:
    """Tell whether any parameter stays distributed while the model runs, so that its ranks are not data-parallel."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    outer = (module for module in model.modules() if isinstance(module, _fsdp_module()))
    gathered = {id(parameter) for module in outer for parameter in module.parameters()}
    return any(_sharded_dimensions(parameter) > (id(parameter) in gathered) for parameter in model.parameters())


def _wrong_class(module: nn.Module) -> str:
    kind = type(module)
    wanted = next((each for each in convertible_classes() if isinstance(module, each)), nn.Linear)
    name = "nn.Linear" if wanted is nn.Linear else wanted.__name__
    return f"its class is {kind.__module__}.{kind.__qualname__}, not {name}"
