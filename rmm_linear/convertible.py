"""Which linear layers can be sketched, and why the others can't."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from rmm_linear.layer_classes import convertible_classes, is_linear_layer
from rmm_linear.linear import SketchedLayer

_TENSOR_PARALLEL = "its weight is distributed over devices (tensor parallel)"
_BESIDE_TENSOR_PARALLEL = (
    "other layers of the model are distributed over devices (tensor parallel): ranks that hold the same weight would"
    " give it different gradients"
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def why_not(module: nn.Module, model: nn.Module | None = None) -> str | None:
    """Say why a linear layer cannot be converted.

    Args:
        module: The layer.
        model: The model that it is a part of, which tells sharded weights from tensor-parallel ones.

    Returns:
        The reason, or None if it can be converted (or is already).
    """
    kind = type(module)
    if not is_linear_layer(module):
        return wrong_class(module)
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
        return wrong_class(module)
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
    if model is not None and _has_tensor_parallel_layers(model):
        return _BESIDE_TENSOR_PARALLEL
    return None


def has_foreign_forward(module: nn.Module) -> bool:
    """Tell whether an instance has a forward that is not just its class's.

    Returns:
        True if what runs is not what the class says.
    """
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def is_sharded_class(kind: type) -> bool:
    """Tell whether FSDP2 made this class of a layer's: (FSDPModule, nn.Linear), say."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule") or len(kind.__bases__) != 2:
        return False
    base = kind.__bases__[1]
    is_layer = base in convertible_classes() or issubclass(base, SketchedLayer)
    return issubclass(kind.__bases__[0], fsdp.FSDPModule) and is_layer


def _is_tensor_parallel(module: nn.Module, model: nn.Module | None) -> bool:
    """Tell whether the weight is a DTensor that stays distributed while the layer runs."""
    placements = getattr(module.weight, "placements", None)
    if placements is None:
        return False
    # FSDP2 gathers a weight that it sharded before the layer runs. A second mesh dimension that shards is not its own.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    gathers = fsdp is not None and any(
        isinstance(outer, fsdp.FSDPModule) and any(inner is module for inner in outer.modules())
        for outer in (model if model is not None else module).modules()
    )
    return not gathers or sum(not placement.is_replicate() for placement in placements) > 1


def _has_tensor_parallel_layers(model: nn.Module) -> bool:
    """Tell whether any parameter stays distributed while the model runs: its ranks are not data-parallel ones then."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    outer = [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    gathered = {id(parameter) for module in outer for parameter in module.parameters()}
    for parameter in model.parameters():
        sharded = sum(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))
        if sharded > (id(parameter) in gathered):
            return True
    return False


def wrong_class(module: nn.Module) -> str:
    """Say that a module's class is not one of those that can be converted."""
    kind = type(module)
    wanted = next((each for each in convertible_classes() if isinstance(module, each)), nn.Linear)
    name = "nn.Linear" if wanted is nn.Linear else wanted.__name__
    return f"its class is {kind.__module__}.{kind.__qualname__}, not {name}"
