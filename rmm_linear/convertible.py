"""Why a layer is left exact: which linear layers can't be sketched, and what stands in the place of one and is none."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
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
_KNOWN = (nn.Embedding, nn.EmbeddingBag, _ConvNd)


def why_not(module: nn.Module, model: nn.Module | None = None) -> str | None:
    """Say why a linear layer cannot be converted; None if it can be (or is already).

    The model that it is a part of tells sharded weights from tensor-parallel ones.
    """
    kind = type(module)
    if not is_linear_layer(module):
        return _wrong_class(module)
    if isinstance(module, SketchedLayer):
        # Converted already, whatever was done to it since: it can be re-configured.
        return _TENSOR_PARALLEL if _is_tensor_parallel(module, model) else None
    if parametrize.is_parametrized(module):
        return f"its {', '.join(module.parametrizations)} is parametrized"  # type: ignore[arg-type]
    if isinstance(module, nn.LazyLinear):
        return "its shape is not known yet (LazyLinear); run a batch through the model first"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it (nor is its in_proj_weight a layer)"
    if kind not in convertible_classes() and not is_sharded_class(kind):
        return _wrong_class(module)
    weight = module._parameters.get("weight")
    if not isinstance(weight, Tensor):
        return (
            "its weight is not a parameter but computed by a hook (weight_norm, spectral_norm, pruning), or a part of"
            " FSDP's flat parameter (use_orig_params=False; convert before wrapping)"
        )
    if has_foreign_forward(module):
        return "its forward is replaced on the instance (accelerate's hooks do that), so that a class's is never called"
    if weight.dtype not in _DTYPES:
        return f"its weight has dtype {weight.dtype}"
    if hasattr(weight, "_forward_counter"):
        return "Opacus takes a gradient for each sample of it (GradSampleModule), and a sketch has none"
    if _is_tensor_parallel(module, model):
        return _TENSOR_PARALLEL
    return _BESIDE_TENSOR_PARALLEL if model is not None and _has_tensor_parallel_layers(model) else None


def why_no_layer(module: nn.Module) -> str | None:
    """Say of a module that a user might expect to be converted why it is none of the linear layers; None of others.

    They are: linear layers of other classes (quantized ones, and fused ones of other libraries), by their
    `in_features` and `out_features`; routers and the like, by a matrix that is called `weight`; and modules that
    multiply by parameters of three dimensions, as mixtures of experts and some attentions do. (Layers whose class
    inherits from `nn.Linear` are linear layers, of which `why_not` says what there is to say.)
    """
    if is_linear_layer(module) or isinstance(module, _KNOWN) or type(module).__module__.startswith("torch.nn"):
        return None
    own = dict(module.named_parameters(recurse=False))
    is_sized = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    # wrappers have neither
    holds_weight = bool(own) or any(True for _ in module.buffers(recurse=False))
    if is_sized and holds_weight and not any(is_linear_layer(inner) for inner in module.modules()):
        return _wrong_class(module)
    deep = [name for name, weight in own.items() if weight.dim() >= _DEEP and min(weight.shape) > 1]
    if deep:
        experts = f" of {own[deep[0]].shape[0]} experts" if "expert" in type(module).__name__.lower() else ""
        return (
            f"{type(module).__name__} holds {' and '.join(deep)}{experts} as parameters of {own[deep[0]].dim()}"
            " dimensions, not as nn.Linear; what they are multiplied with is kept as it is"
        )
    weight = own.get("weight")
    return _wrong_class(module) if weight is not None and weight.dim() == _MATRIX and min(weight.shape) > 1 else None


def has_foreign_forward(module: nn.Module) -> bool:
    """Tell whether an instance has a forward that is not just its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def is_sharded_class(kind: type) -> bool:
    """Tell whether FSDP2 made this class of a layer's: (FSDPModule, nn.Linear), say."""
    if len(kind.__bases__) != 2 or not issubclass(kind.__bases__[0], _fsdp_module()):
        return False
    return kind.__bases__[1] in convertible_classes() or issubclass(kind.__bases__[1], SketchedLayer)


def _fsdp_module() -> Any:
    """Return FSDP2's class, or () as long as nobody has imported it: then no module is one."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def _sharded_dimensions(parameter: Any) -> int:
    return sum(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def _is_tensor_parallel(module: nn.Module, model: nn.Module | None) -> bool:
    """Tell whether the weight is a DTensor that stays distributed while the layer runs."""
    if getattr(module.weight, "placements", None) is None:
        return False
    # FSDP2 gathers the weights of its modules before they run
    inside = module if model is None else model
    outer = (each for each in inside.modules() if isinstance(each, _fsdp_module()))
    gathers = any(inner is module for each in outer for inner in each.modules())
    # A second mesh dimension that shards is not FSDP2's own.
    return not gathers or _sharded_dimensions(module.weight) > 1


def _has_tensor_parallel_layers(model: nn.Module) -> bool:
    """Tell whether any parameter stays distributed while the model runs: its ranks are not data-parallel ones then."""
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
