"""How an operator is registered: opaque to compilers, and deaf to autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _autocast_off(device_type: str) -> AbstractContextManager[object]:
    return torch.autocast(device_type=device_type, enabled=False)


def define(schema: str, *, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register the decorated function as the op's implementation for every device, with autocast off.

    Args:
        schema: Name and signature, as `torch.library` writes them; sizes that follow from the rows are SymInt.
        tags: Tags of the op.

    Returns:
        A decorator that returns the function as it is.
    """
    name = "rmm_linear::" + schema.partition("(")[0]
    torch.library.define(name, "(" + schema.partition("(")[2], tags=tags)

    def register(implementation: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(implementation)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = args[0]
            assert isinstance(first, Tensor)
            if first.device.type == "meta" or not torch.is_autocast_enabled(first.device.type):
                return implementation(*args, **kwargs)
            with _autocast_off(first.device.type):
                return implementation(*args, **kwargs)

        torch.library.impl(name, "default")(run)
        return implementation

    return register


def result_dtype(x: Tensor, gradient: bool) -> torch.dtype:
    """Return the dtype of a sketch.

    Args:
        x: What is sketched.
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        The dtype of `x` for the stored sketch; float32 for that of g, float64 for float64.
    """
    if not gradient:
        return x.dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32
