"""The private parts of torch that layers use, in one place; `rmm_linear.compiler.torch_private` has the compiler's.

A part that another version of torch lacks costs the feature that needs it: transforms of torch.func are no longer
refused by name, or a layer no longer notices that a checkpoint or a counter of saved bytes is around it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _never(*_: Any) -> bool:
    return False


_FUNCTORCH = getattr(torch._C, "_functorch", None)
_is_wrapped = getattr(_FUNCTORCH, "is_functorch_wrapped_tensor", _never)
_unwrapped = getattr(_FUNCTORCH, "get_unwrapped", None)
_is_batched = getattr(_FUNCTORCH, "is_batchedtensor", _never)
_is_legacy_batched = getattr(_FUNCTORCH, "is_legacy_batchedtensor", _never)
_top_hooks = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", _never)

# checks a condition on the GPU, without a synchronisation
assert_async: Callable[[Tensor], None] | None = getattr(torch, "_assert_async", None)
is_torch_func_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _never)


def is_exporting() -> bool:
    """Tell whether torch.export traces; in compiled code of torch 2.11 the public function is always true."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_batched(x: Tensor) -> bool:
    """Tell whether the innermost transform of a tensor is torch.vmap or `is_grads_batched=True`."""
    return _is_batched(x) or _is_legacy_batched(x)


def is_mapped(x: Tensor) -> bool:
    """Tell whether torch.vmap maps a tensor, under other transforms, too."""
    while _is_wrapped(x) and _unwrapped is not None:
        if _is_batched(x):
            return True
        x = _unwrapped(x)
    return False


def innermost_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the pack and unpack hooks that apply to a tensor that is saved now; None if there are none."""
    hooks: Any = _top_hooks(False)
    return hooks or None
