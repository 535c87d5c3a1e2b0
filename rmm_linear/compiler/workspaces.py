"""Memory that a kernel takes for itself while it runs. torch does not tell it, so it is measured on random numbers.

Each op of a CPU is measured once for each kind of its arguments. Convolutions, which oneDNN computes in another layout,
and fused attention, whose workspace depends on the number of threads, take much; many reductions take a few bytes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rmm_linear.compiler.costs import described, tensors_in, with_contents
from rmm_linear.compiler.torch_private import is_profiled

# Ops of other namespaces may wait for other processes.
_NAMESPACES = ("aten", "rmm_linear")
# They read memory of their own in an argument of bytes, and crash on other contents.
_OPAQUE = ("rnn", "lstm", "gru", "mkldnn")
_MARK = "rmm_linear workspace "
# By op, arguments and threads: a kernel takes the same each time.
_MEASURED: dict[str, int] = {}


def workspace_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Measure the bytes that ops on CPUs take beside their results while they run; 0 for ops that are not measured.

    The nodes have fake tensors as values. While the user's own profiler runs none is measured, for another profile
    would end the user's.
    """
    keys = [_key(node.target, *_arguments(node)) for node in nodes]
    missing = {key: node for key, node in zip(keys, nodes, strict=True) if key and key not in _MEASURED}
    if missing and not is_profiled():
        _MEASURED.update(zip(missing, _measured(list(missing.values())), strict=True))
    return [_MEASURED.get(key, 0) for key in keys]


def known_workspace_bytes(op: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes measured of an op with such arguments; 0 without a measurement."""
    return _MEASURED.get(_key(op, args, kwargs), 0)


def _key(op: Any, args: Any, kwargs: Any) -> str:
    is_safe = all(tensor.device.type == "cpu" and tensor.dtype != torch.uint8 for tensor in tensors_in((args, kwargs)))
    if not is_safe or getattr(op, "namespace", "") not in _NAMESPACES or any(part in str(op) for part in _OPAQUE):
        return ""
    return f"{op} {described((args, kwargs))} {torch.get_num_threads()}"


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
            made: Any = ()
            args, kwargs = (), {}
            # random numbers may be no valid argument (an assertion, a probability)
            with contextlib.suppress(Exception):
                args, kwargs = with_contents(_arguments(node))
                # the first call fills caches
                made = node.target(*args, **kwargs)  # type: ignore[operator]
                made = ()
                with torch.profiler.record_function(f"{_MARK}{number}"):
                    made = node.target(*args, **kwargs)  # type: ignore[operator]
            tensors = tensors_in(made)
            results.append(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()))
            del made, tensors, args, kwargs
    peaks = [0] * len(nodes)
    number, end, now = 0, 0, 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith(_MARK):
            number, end, now = int(event.name().removeprefix(_MARK)), event.start_ns() + event.duration_ns(), 0
        elif event.name() == "[memory]" and event.start_ns() <= end:
            now += event.nbytes()
            peaks[number] = max(peaks[number], now)
    return [max(0, peak - size_bytes) for peak, size_bytes in zip(peaks, results, strict=True)]
