"""Times of ops, from the shapes of their tensors."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from rmm_linear.paging import pager_for

# FLOPs that a device does in the time in which it moves a byte, and the FLOPs of a launch's time.
_FLOPS_PER_BYTE = {"cpu": 8.0, "cuda": 150.0}
# Numbers that a loop computes in that time. On a GPU, loops that write and read codes compute for longer than they move
# bytes: an encoding of 5e7 inputs of GELU, 59 numbers for each, took 141 us, in which an H100 moves 4.7e8 bytes.
_NUMBERS_PER_BYTE = {"cpu": math.inf, "cuda": 6.0}
_LAUNCH_BYTES = {"cpu": 2.0**14, "cuda": 2.0**23}
# matrix products of attention kernels that torch has no formula for, and the place of the query among their arguments
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (2, 0),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (5, 1),
}
# Reads no element of its argument, which says on which device it draws.
_DRAW = "rmm_linear.draw_seed.default"
_UNITS = {"roofline": "bytes moved in the same time", "flops": "flops", "bytes": "bytes", "ms": "ms", "ops": "ops"}
# Namespaces of ops in which other processes take part.
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_REPEATS = 3
_MIB = 2**20
# The time of a byte is measured with so many.
_COPIED_BYTES = 32 * _MIB
# Measured times: an op with arguments of the same shapes takes the same time.
_MEASURED_MS: dict[str, float] = {}


def unit_of(costs: str) -> str:
    """Return the unit of a way of pricing, for `Graph.cost_unit`; see `cost_of`.

    Raises:
        ValueError: If there is no such way.
    """
    if costs not in _UNITS:
        raise ValueError(f"costs={costs!r} is unknown; choose one of {', '.join(_UNITS)}")
    return _UNITS[costs]


def cost_of(loop: Sequence[fx.Node], costs: str, *, is_compiled: bool = False) -> float:
    """Price one op: more than 0, in `unit_of(costs)`.

    Args:
        loop: Nodes that are computed in one loop, with fake tensors as values; only the last one's is written.
        costs: "roofline" (the longest one of moving its bytes, doing its FLOPs and computing its numbers, and a
            launch), "flops" (1 for ops that do none), "bytes" (that it moves), "ms" (it runs here, on zeros and random
            numbers, and is timed; ops alike are timed once; of collectives, of an RNN's backward pass, and of ops that
            fail on such numbers, it is the time in which the device copies the bytes that they move), or "ops" (1).
        is_compiled: Whether Inductor compiles the loop: "ms" is then that time as well, unless it is a matrix product,
            a convolution or an attention.
    """
    unit_of(costs)
    if costs == "ops":
        return 1.0
    arguments = [fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"]) for node in loop]
    name = str(loop[-1].target)
    # the backward pass of an RNN reads the workspace that its forward kernel wrote, and crashes on other contents
    is_safe = not ("rnn" in name and "backward" in name)
    is_timed = is_safe and getattr(loop[-1].target, "namespace", "") not in COLLECTIVES
    if costs == "ms" and is_timed and (is_product(loop[-1]) or not is_compiled):
        with contextlib.suppress(RuntimeError):
            return sum(_measured_ms(node, *each) for node, each in zip(loop, arguments, strict=True))
    result = loop[-1].meta.get("val")
    outside: Any = arguments
    if len(loop) > 1:
        inside = {node.meta["val"].untyped_storage()._cdata for node in loop[:-1]}
        outer = (each for each in tensors_in(arguments) if each.untyped_storage()._cdata not in inside)
        outside = list({id(each): each for each in outer}.values())
    read = () if name == _DRAW else outside
    moved = float(sum(map(_distinct_bytes, tensors_in((read, result)))))
    device = next((tensor.device for tensor in tensors_in((result, outside))), torch.device("cpu"))
    if costs == "ms":
        return max(1.0, moved) * _byte_ms(device)
    if costs == "bytes":
        return max(1.0, moved)
    flops = sum(_flops(node, *each) for node, each in zip(loop, arguments, strict=True))
    if costs == "flops":
        return max(1.0, flops)
    kind = "cpu" if device.type == "cpu" else "cuda"
    computed = sum(node.meta["val"].numel() for node in loop if isinstance(node.meta["val"], Tensor))
    return max(moved, flops / _FLOPS_PER_BYTE[kind], computed / _NUMBERS_PER_BYTE[kind]) + _LAUNCH_BYTES[kind]


@functools.cache
def page_cost(page_to: str | Path, device: torch.device, costs: str) -> float:
    """Measure the time in which a byte is paged out, or back, once in each process.

    Of a file, it is mostly that of the operating system's cache: pages of more than the free memory take longer. Costs
    of "roofline" and "bytes" count it in the time in which the device moves a byte.

    Raises:
        ValueError: If costs are counted in something else than these and "ms".
    """
    if costs not in ("ms", "roofline", "bytes"):
        raise ValueError(f'costs={costs!r} are no times, which paging takes: pass "roofline", "ms" or "bytes"')
    pager, memory = pager_for(page_to, device), _bytes_on(device)
    try:
        both_ms = median_ms(lambda: pager.take(pager.put([memory])), [device])
    finally:
        pager.close()
    paged_ms = both_ms / (2 * _COPIED_BYTES)
    return paged_ms if costs == "ms" else paged_ms / _byte_ms(device)


@functools.cache
def _byte_ms(device: torch.device) -> float:
    read, written = _bytes_on(device), _bytes_on(device)
    return median_ms(lambda: written.copy_(read), [device]) / (2 * _COPIED_BYTES)


def _bytes_on(device: torch.device) -> Tensor:
    return torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)


def median_ms(run: Callable[[], Any], devices: Sequence[torch.device]) -> float:
    """Measure the time of a run on devices, in ms: the median of some, after one that warms up."""
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        run()
        for device in devices:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
        times.append(1000 * (time.perf_counter() - begin))
    # the first run warms up
    return max(1e-6, sorted(times[1:])[_REPEATS // 2])


def forget_times() -> None:
    """Forget the times of ops, bytes and pages: they are measured anew where they are next needed."""
    _MEASURED_MS.clear()
    _byte_ms.cache_clear()
    page_cost.cache_clear()


def _measured_ms(node: fx.Node, args: Any, kwargs: Any) -> float:
    key = f"{node.target} {described((args, kwargs))}"
    if key not in _MEASURED_MS:
        devices = list({tensor.device for tensor in tensors_in((args, kwargs)) if tensor.is_cuda})
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            args, kwargs = with_contents((args, kwargs))
            _MEASURED_MS[key] = median_ms(lambda: node.target(*args, **kwargs), devices)  # type: ignore[operator]
    return _MEASURED_MS[key]


def described(arguments: Any) -> str:
    """Return the key on which the time and the memory of an op depend.

    These are shapes, layouts, dtypes and devices of the tensors, and the other values.
    """
    leaves = pytree.tree_leaves(arguments)
    kinds = [(*x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves]
    return str(kinds)


def with_contents(arguments: Any) -> Any:
    """Replace fake tensors by real tensors of the same shapes and layouts.

    They hold random numbers; zeros where numbers are whole, which are valid as indices and masks.
    """

    def contents(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # filled as a whole: an expanded tensor can't be written into
        span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
        memory = torch.zeros(span if leaf.numel() else 0, dtype=leaf.dtype, device=leaf.device)
        if leaf.is_floating_point():
            memory.normal_()
        return memory.as_strided(leaf.shape, leaf.stride())

    return pytree.tree_map(contents, arguments)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among nested values."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _distinct_bytes(tensor: Tensor) -> int:
    # of an expanded tensor, elements have one place in memory
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def is_product(node: fx.Node) -> bool:
    """Tell whether an op is a matrix product, a convolution or an attention, for which a library has kernels."""
    return getattr(node.target, "_overloadpacket", None) in _ATTENTION or _formula_of(node) is not None


def _formula_of(node: fx.Node) -> Any:
    return flop_registry.get(getattr(node.target, "_overloadpacket", None)) or flop_registry.get(node.target)


def _flops(node: fx.Node, args: Any, kwargs: Any) -> float:
    packet = getattr(node.target, "_overloadpacket", None)
    if packet in _ATTENTION:
        products, first = _ATTENTION[packet]
        query, key = args[first : first + 2]
        return 2.0 * products * query.numel() * key.shape[-2]
    formula = _formula_of(node)
    return float(formula(*args, **kwargs, out_val=node.meta["val"])) if formula else 0.0
