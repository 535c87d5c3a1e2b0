"""Turn one layer into a sketched one, and back: by its class."""

import warnings

from torch import nn

from rmm_linear.convertible import has_foreign_forward, is_sharded_class
from rmm_linear.layer_classes import convertible_classes, sketched_class
from rmm_linear.linear import SketchedLayer

# Attribute of a layer that `convert_linears(sample=...)` has left exact: why.
LEFT_EXACT = "_rmm_left_exact"
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
    elif is_sharded_class(kind) and old in kind.__bases__:
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
    if not has_foreign_forward(module):
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
