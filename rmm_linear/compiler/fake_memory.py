"""The memory that a step takes, from fake tensors, which have shapes and no contents."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.autocasting import autocast_as
from rmm_linear.compiler.costs import tensors_in
from rmm_linear.compiler.workspaces import known_workspace_bytes

# With a reduction they return one number in memory as large as that of all numbers, which fake tensors don't tell.
_REDUCED_IN_PLACE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors that stand for a node's value."""
    value = node.meta.get("val")
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def memories_of(node: fx.Node) -> list[int]:
    """Return a key of the memory of each tensor of `tensors_of`."""
    return [tensor.untyped_storage()._cdata for tensor in tensors_of(node)]


def real_bytes(op: Any, sources: Iterable[Tensor], result: Tensor) -> int:
    """Tell the size of the memory that a fake result of an operation on such tensors stands for."""
    size_bytes = result.untyped_storage().nbytes()
    if op not in _REDUCED_IN_PLACE:
        return size_bytes
    return max(size_bytes, torch.broadcast_shapes(*(each.shape for each in sources)).numel() * result.element_size())


def eager_peak(run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> int:
    """Run a step forward and backward, as eager mode would, and tell the most that is in memory at any time.

    A captured step frees each result after its last use. Eager mode also keeps tensors to which a name in Python
    refers, and all that autograd holds for an op until the op's backward pass has run, and adds up gradients in place.
    `run` runs the forward pass on fake tensors, and returns the differentiated tensors. The inputs are not counted:
    parameters, buffers, the batch. Their gradients are set to None.
    """
    # in this thread alone: others' dispatch is not seen
    alive = _Alive(inputs)
    with torch.autograd.set_multithreading_enabled(False):
        with alive:
            roots = run()
        # the gradients of the results come from outside
        gradients = [torch.ones_like(root) for root in roots]
        alive.outside.update(gradient.untyped_storage()._cdata for gradient in gradients)
        with alive, autocast_as((), {tensor.device.type for tensor in inputs}):
            torch.autograd.backward(list(roots), gradients)
    for tensor in inputs:
        if tensor.is_leaf:
            tensor.grad = None
    return alive.peak_bytes


class _Alive(TorchDispatchMode):
    """Counts the storages that were made inside and are there still."""

    def __init__(self, outside: Sequence[Tensor]) -> None:
        super().__init__()
        self.outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._now = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.outside and storage._cdata not in self._alive:
                size_bytes = real_bytes(func, tensors_in((args, kwargs)), tensor)
                gone = functools.partial(self._forget, storage._cdata, size_bytes)
                self._alive[storage._cdata] = weakref.ref(storage, gone)
                self._now += size_bytes
        own = known_workspace_bytes(func, args, kwargs or {})
        self.peak_bytes = max(self.peak_bytes, self._now + own)
        return result

    def _forget(self, memory: int, size_bytes: int, _: Any) -> None:
        del self._alive[memory]
        self._now -= size_bytes
