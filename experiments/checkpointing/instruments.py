"""Instruments for a training step's peak, FLOPs and time, which share no code with the simulator."""

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
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


class _Flops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch that programs which are compiled already may run under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := _FORMULAS.get(getattr(func, "_overloadpacket", None)):
            self.count += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def flops_of(step: Callable[[], Any]) -> int:
    """Count the FLOPs of a step's matrix products, convolutions and attention."""
    with _Flops() as flops:
        step()
    return flops.count


def gpu_peak(step: Callable[[], Any]) -> int:
    """Measure the bytes that CUDA's allocator has given out at the peak of a step, beyond the bytes before it."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def kernel_seconds(step: Callable[[], Any], *, steps: int = 3) -> float:
    """Measure the time that a GPU computes or copies in a step, without the time that it waits for the host."""
    with profile(activities=[ProfilerActivity.CUDA]) as log:
        for _ in range(steps):
            step()
    kernels = (event for event in log.key_averages() if event.device_type == DeviceType.CUDA)
    return sum(event.self_device_time_total for event in kernels) / steps / 1e6


def allocator_peaks(step: Callable[[], Any]) -> tuple[int, int]:
    """Measure the peak of a step by the log of the CPU allocator, beyond the bytes before it.

    The second number leaves out workspaces: it counts memory that outlives the op that allocates it, as plans do.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        step()
    changes: list[tuple[int, int, int, int | None]] = []
    waiting: list[tuple[Any, int | None]]
    waiting = [(root, None) for root in log.profiler.kineto_results.experimental_event_tree()]
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


def interleaved(steps: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Return the seconds of steps that run by turns, every second round in the reverse order."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        order = range(len(steps))
        for place in reversed(order) if number % 2 else order:
            start = time.perf_counter()
            steps[place]()
            times[place].append(time.perf_counter() - start)
    return times
