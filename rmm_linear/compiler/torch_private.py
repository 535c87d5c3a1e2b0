"""The private parts of torch that the backend uses, in one place: a rename in torch is mended here.

Supported are torch 2.11 and later; `require` says by name which part a version lacks.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad

from rmm_linear.errors import CaptureError


def require(owner: Any, name: str) -> Any:
    """Return a private part of torch.

    Args:
        owner: A module or class.
        name: The attribute.

    Returns:
        It.

    Raises:
        CaptureError: If this version of torch has none.
    """
    if not hasattr(owner, name):
        raise CaptureError(
            f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which planned steps need:"
            " install a version between 2.11 and 2.13"
        )
    return getattr(owner, name)


def frame_of(module: fx.GraphModule) -> Any:
    """Tell which frame of Python a graph of Dynamo is of: the same for all its versions.

    Args:
        module: The graph.

    Returns:
        The frame's number; the graph itself where it is unknown.
    """
    return getattr(module.meta.get("dynamo_compile_id"), "frame_id", module)


def is_transformed(tensors: Any) -> bool:
    """Tell whether torch.func or forward-mode differentiation is active, which a planned program knows nothing of.

    Args:
        tensors: The tensors that are computed with.

    Returns:
        Whether it is.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def compiled(function: Callable[..., Any], backend: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
    """Compile a function with a frame of its own, and with recompilations that count for it alone.

    Args:
        function: What runs; a module's `_call_impl` too, which torch.compile by itself skips for torch's own modules.
        backend: The backend.
        fullgraph: Whether a graph break is an error.

    Returns:
        The compiled function.
    """
    from torch._dynamo.external_utils import wrap_inline

    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"recompile_limit": 64, "isolate_recompiles": True}
    options = {name: value for name, value in options.items() if name in known}
    return torch.compile(wrap_inline(function), backend=backend, fullgraph=fullgraph, **options)


def dynamo_options() -> AbstractContextManager[None]:
    """Set how Dynamo traces a planned model: whole under DistributedDataParallel, with its floats and RNNs.

    Returns:
        A context manager.
    """
    import torch._dynamo

    wanted: dict[str, Any] = {"optimize_ddp": False, "specialize_float": True, "allow_rnn": True}
    options = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    return torch._dynamo.config.patch(**options)


def reasons_of_breaks() -> dict[str, int]:
    """Return why Dynamo broke graphs or skipped frames so far.

    Returns:
        Reasons with their counts.
    """
    from torch._dynamo.utils import counters

    return {**counters["unimplemented"], **counters["graph_break"]}
