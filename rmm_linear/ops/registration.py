"""How an operator is registered: opaque to compilers, and deaf to autocast; and how it is called.

A call of an operator goes through torch's dispatcher, which knows who wants to see it: a compiler, a mode that counts
memory or FLOPs, a profiler. Through the dispatcher into Python it takes some microseconds more than the implementation,
and a step of a layer has three of them. Where none of these is there, the implementation is called as a function
instead. What is not asked for, and does not see the operators then: an execution trace that is recorded without a
profiler, and implementations that somebody else has registered for them on a device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler
from torch.compiler import is_compiling

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype})


def _autocast_off(device_type: str) -> AbstractContextManager[object]:
    return torch.autocast(device_type=device_type, enabled=False)


def define(schema: str, *, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register the decorated function as the op's implementation for every device, with autocast off.

    Args:
        schema: Name and signature, as `torch.library` writes them; sizes that follow from the rows are SymInt.
        tags: Tags of the op.

    Returns:
        A decorator that returns what the op is to be called by, with all arguments by place: the function itself where
        nobody is there to tell, and the operator otherwise.
    """
    name, _, signature = schema.partition("(")
    torch.library.define(f"rmm_linear::{name}", "(" + signature, tags=tags)
    operator = getattr(torch.ops.rmm_linear, name).default

    def register(implementation: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(implementation)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not _is_any_autocast_enabled():
                return implementation(*args, **kwargs)
            first = args[0]
            assert isinstance(first, Tensor)
            if first.device.type == "meta" or not torch.is_autocast_enabled(first.device.type):
                return implementation(*args, **kwargs)
            with _autocast_off(first.device.type):
                return implementation(*args, **kwargs)

        @wraps(implementation)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # asked first: all that a compiler traces is the operator
            if is_compiling() or kwargs or _is_watched() or not _are_plain(args):
                return operator(*args, **kwargs)
            if _is_any_autocast_enabled():
                return run(*args, **kwargs)
            return implementation(*args, **kwargs)

        torch.library.impl(f"rmm_linear::{name}", "default")(run)
        return call

    return register


def _is_watched() -> bool:
    """Tell whether somebody follows the operators that run in this thread."""
    return (
        # FLOP counters, selective checkpointing, fake tensors, make_fx
        _len_torch_dispatch_stack() > 0
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or _is_tracing()
        # of this thread, and any that Python has started
        or _profiler_enabled()
        or profiler._is_profiler_enabled
    )


def _are_plain(arguments: tuple[Any, ...]) -> bool:
    """Tell whether the dispatcher would do nothing with these tensors but call the implementation."""
    can_follow = torch.is_grad_enabled()
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is nn.Parameter:
            # autograd makes a node that says that there is no derivative
            if can_follow and argument.requires_grad:
                return False
        # where most arguments end: isinstance takes the longest of what is no tensor
        elif kind not in _NO_TENSORS and isinstance(argument, Tensor):
            return False
    first = arguments[0]
    assert isinstance(first, Tensor)
    return (first.is_cuda or first.is_cpu) and not first.is_neg() and not first._is_zerotensor()


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
