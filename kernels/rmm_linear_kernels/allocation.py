"""Memory for results with little time of the host's.

`Tensor.new_empty` and `torch.empty` read their arguments, choose a device and go through torch's dispatcher: some
microseconds each in a step that runs other code in between. What torch's compiler writes asks for memory by a function
that does none of that, and so does this module where nobody looks on.
"""

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms, _len_torch_dispatch_stack

# None where a version or a build of torch has no such function
_guards = getattr(torch._C._dynamo, "guards", None)
_on_cpu = getattr(_guards, "_empty_strided_cpu", None)
_on_cuda = getattr(_guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def empty(like: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor that nothing has been written to, as `like.new_empty(sizes, dtype=dtype)` does.

    It is that call where somebody is to see it: a mode that follows torch's operators, or
    `torch.use_deterministic_algorithms`, which fills the memory. A profiler sees the allocation without an operator.

    Args:
        like: A tensor on the device that the result is to be on.
        sizes: Shape, as a tuple.
        dtype: Dtype.
    """
    if like.is_cuda:
        # asks for the memory of the current GPU
        make = _on_cuda if _current_device is not None and like.get_device() == _current_device() else None
    else:
        make = _on_cpu if like.is_cpu else None
    if make is None or len(sizes) > 2 or _len_torch_dispatch_stack() or _get_deterministic_algorithms():
        return like.new_empty(sizes, dtype=dtype)
    strides = (sizes[1] or 1, 1) if len(sizes) == 2 else (1,) * len(sizes)
    found: Tensor = make(sizes, strides, dtype)
    return found
