"""What a training step really takes: bytes at the peak, FLOPs, time. Shares nothing with the simulator.

Two instruments tell the peak. One sees every op that torch dispatches, and follows the storages that ops return until
they are gone: what a plan speaks of, to the byte. The other is the allocator's own log, which also holds what kernels
allocate for themselves, rounded as the allocator rounds.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    # scores again, then gradients of query, key, value and scores
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


# torch counts matrix products, convolutions and the attention of GPUs; this is the CPU's
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Count the FLOPs of one op.

    Args:
        func: The op.
        args: Its arguments, with shapes if not with contents.
        kwargs: Its keyword arguments.
        result: What it returns.

    Returns:
        FLOPs, a multiplication and an addition being two; 0 for what is neither matrix product nor convolution.
    """
    formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


class StorageLifetimes(TorchDispatchMode):
    """Counts the bytes of storages that are made while it is on, from the op that makes them until they are gone.

    Args:
        outside: Tensors whose storages are not counted: parameters, buffers, the batch.

    Attributes:
        bytes: Those that are alive.
        peak_bytes: The most there were.
        flops: What all ops did.
    """

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = self.flops = 0
        self._outside = list(outside)
        self._known: set[int] = {id(tensor.untyped_storage()) for tensor in self._outside}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch that programs which are compiled already may run under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        # torch keeps one Python object a storage for as long as the storage lives
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def peak_and_flops(step: Callable[[], Any], outside: Iterable[Tensor]) -> tuple[int, int]:
    """Measure the peak of a step by the lifetimes of its storages, and count its FLOPs."""
    gc.collect()
    with StorageLifetimes(outside) as lifetimes:
        step()
    return lifetimes.peak_bytes, lifetimes.flops


def allocator_peak(step: Callable[[], Any]) -> int:
    """Measure the peak of a step by the log of the CPU allocator.

    Returns:
        Bytes allocated at the peak, beyond those that were allocated before.
    """
    return allocator_peaks(step)[0]


def allocator_peaks(step: Callable[[], Any]) -> tuple[int, int]:
    """Measure the peak of a step by the log of the CPU allocator, with what kernels hold for themselves and without.

    Returns:
        Bytes allocated at the peak, beyond those that were allocated before; and the same of what outlives the op that
        allocates it, which is what plans know of.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        step()
    changes: list[tuple[int, int, int, int | None]] = []
    waiting: list[tuple[Any, int | None]] = [
        (root, None) for root in log.profiler.kineto_results.experimental_event_tree()
    ]
    while waiting:
        event, op = waiting.pop()
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, op))
        op = event.id if op is None and event.name.startswith("aten::") else op
        waiting += [(child, op) for child in event.children]
    changes.sort(key=lambda change: change[0])
    sizes = [size for _, size, _, _ in changes]
    outlasting = list(sizes)
    allocated: dict[int, tuple[int, int | None]] = {}
    for place, (_, size, address, op) in enumerate(changes):
        if size > 0:
            allocated[address] = place, op
        elif op is not None and allocated.get(address, (0, None))[1] == op:
            outlasting[allocated[address][0]] = outlasting[place] = 0
    return max(itertools.accumulate(sizes), default=0), max(itertools.accumulate(outlasting), default=0)


def time_ratios(step: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> list[float]:
    """Time a step and another one by turns."""
    ratios = []
    for _ in range(repeats):
        start = time.perf_counter()
        reference()
        middle = time.perf_counter()
        step()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return ratios


def interleaved(steps: Sequence[tuple[str, Callable[[], Any]]], rounds: int) -> dict[str, list[float]]:
    """Time steps by turns, every second round in the reverse order: neighbours run under the same conditions.

    Args:
        steps: Names, each another one, and what runs a step, forward and backward.
        rounds: How often each.
    """
    times: dict[str, list[float]] = {name: [] for name, _ in steps}
    for number in range(rounds):
        for name, step in reversed(steps) if number % 2 else steps:
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def all_equal(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Compare tensors bit for bit."""
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    )


def difference(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Tell other roundings from other results.

    Returns:
        The norm of the difference over the norm of the first.
    """
    pairs = [(a.double(), b.double()) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    squares = sum(float((a - b).square().sum()) for a, b in pairs)
    return float(f"{(squares / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5:.2g}")
