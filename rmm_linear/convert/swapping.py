"""Turn one layer into a sketched one, and back: by its class; and say which layers can't be turned, and why."""

import sys
import warnings

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from rmm_linear.layer_classes import convertible_classes, is_linear_layer, sketched_class
from rmm_linear.linear import SketchedLayer

# Attribute of a layer that `convert_linears(sample=...)` has left exact: why.
LEFT_EXACT = "_rmm_left_exact"
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
    if kind not in convertible_classes() and not _is_sharded_class(kind):
        return wrong_class(module)
    weight = module._parameters.get("weight")
    if not isinstance(weight, Tensor):
        return (
            "its weight is not a parameter but computed by a hook (weight_norm, spectral_norm, pruning), or a part of"
            " FSDP's flat parameter (use_orig_params=False; convert before wrapping)"
        )
    if _has_foreign_forward(module):
        return "its forward is replaced on the instance (accelerate's hooks do that), so that a class's is never called"
    if weight.dtype not in _DTYPES:
        return f"its weight has dtype {weight.dtype}"
    if _is_tensor_parallel(module, model):
        return _TENSOR_PARALLEL
    if model is not None and _has_tensor_parallel_layers(model):
        return _BESIDE_TENSOR_PARALLEL
    return None


def _has_foreign_forward(module: nn.Module) -> bool:
    """Tell whether the instance has a forward that is not just its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _is_sharded_class(kind: type) -> bool:
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


# (FSDP2's class, base, new base) -> the same class with the new base
_SHARDED_CLASSES: dict[tuple[type, type, type], type] = {}


def _with_base(kind: type, old: type, new: type) -> type:
    """Return FSDP2's dynamic class with another base: its unshard and reshard survive."""
    key = (kind, old, new)
    if key not in _SHARDED_CLASSES:
        bases = tuple(new if base is old else base for base in kind.__bases__)
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", "__doc__")}
        made = type(kind.__name__.replace(old.__name__, new.__name__), bases, own)
        _SHARDED_CLASSES[key] = made
        # the way back leads to FSDP2's own class
        _SHARDED_CLASSES[made, new, old] = kind
    return _SHARDED_CLASSES[key]


def to_sketched(module: nn.Module) -> None:
    """Make a layer of which `why_not` says nothing a sketched one; it needs an `rmm_config` then.

    Args:
        module: The layer; one that is sketched already is left as it is.
    """
    for exact in convertible_classes():
        if isinstance(module, exact) and not isinstance(module, SketchedLayer):
            _swap(module, exact, sketched_class(exact))


def _swap(module: nn.Module, old: type, new: type) -> None:
    kind: type = type(module)
    if kind is old:
        module.__class__ = new
    elif _is_sharded_class(kind) and old in kind.__bases__:
        module.__class__ = _with_base(kind, old, new)
    else:
        return
    # what accelerate leaves behind when it takes a hook off: the old class's own forward, bound to the instance
    vars(module).pop("forward", None)


def to_exact(module: nn.Module) -> None:
    """Make a sketched layer what it was before.

    Args:
        module: Any module; others than sketched layers are left as they are.
    """
    if not isinstance(module, SketchedLayer):
        return
    # What replaced an instance's forward holds the class's own, which needs the configuration.
    if not _has_foreign_forward(module):
        for exact in convertible_classes():
            _swap(module, sketched_class(exact), exact)
    if isinstance(module, SketchedLayer):
        module.rmm_config = module.rmm_config.replace(ratio=1.0, storage=None)
        warnings.warn(
            "a sketched layer that was changed after its conversion (a parametrization, or a forward on the instance,"
            " as accelerate's hooks put there) was made exact by ratio=1.0 instead of being reverted; undo the change"
            " first to have the layer's own class again",
            UserWarning,
            stacklevel=3,
        )
    else:
        vars(module).pop("rmm_config", None)
        vars(module).pop("_rows_check", None)


def wrong_class(module: nn.Module) -> str:
    """Say that a module's class is not one of those that can be converted.

    Args:
        module: The module.

    Returns:
        The reason.
    """
    kind = type(module)
    wanted = next((each for each in convertible_classes() if isinstance(module, each)), nn.Linear)
    name = "nn.Linear" if wanted is nn.Linear else wanted.__name__
    return f"its class is {kind.__module__}.{kind.__qualname__}, not {name}"
