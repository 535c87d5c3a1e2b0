"""Memory that a kernel takes for itself while it runs. torch does not tell it, so it is measured on random numbers.

On a CPU these are convolutions, which oneDNN computes in another layout, and the fused attention, whose workspace
depends on the number of threads.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from rmm_linear.compiler.costs import described, with_contents
from rmm_linear.compiler.torch_private import is_profiled

_aten = torch.ops.aten
_TAKE_WORKSPACE = {
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
_MARK = "rmm_linear workspace "
# By op, arguments and threads: a kernel takes the same each time.
_MEASURED: dict[str, int] = {}


def workspace_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Measure the workspaces of ops on CPUs.

    Args:
        nodes: Their nodes, with fake tensors as values.

    Returns:
        Bytes that each takes beside its results while it runs; 0 for ops that are not measured, as all new ones are
        while the user's own profiler runs, which another one would end.
    """
    keys = [_key(node) for node in nodes]
    missing = {key: node for key, node in zip(keys, nodes, strict=True) if key and key not in _MEASURED}
    if missing and not is_profiled():
        _MEASURED.update(zip(missing, _measured(list(missing.values())), strict=True))
    return [_MEASURED.get(key, 0) for key in keys]


def _key(node: fx.Node) -> str:
    if node.target not in _TAKE_WORKSPACE:
        return ""
    args = _arguments(node)
    if any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in pytree.tree_leaves(args)):
        return ""
    return f"{node.target} {described(args)} {torch.get_num_threads()}"


def _arguments(node: fx.Node) -> Any:
    return fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])


def _measured(nodes: Sequence[fx.Node]) -> list[int]:
    results = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        for number, node in enumerate(nodes):
            args, kwargs = with_contents(_arguments(node))
            with torch.profiler.record_function(f"{_MARK}{number}"):
                made = node.target(*args, **kwargs)  # type: ignore[operator]
            tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
            results.append(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()))
            del made, tensors, args, kwargs
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith(_MARK)}
    found = []
    for number, size_bytes in enumerate(results):
        begin, end = spans[f"{_MARK}{number}"]
        now = peak = 0
        for event in events:
            if event.name() == "[memory]" and begin <= event.start_ns() <= end:
                now += event.nbytes()
                peak = max(peak, now)
        found.append(max(0, peak - size_bytes))
    return found
