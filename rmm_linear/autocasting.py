"""Autocast, as the two passes of a step meet it: each in a state of its own, with casts of weights that are shared."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

# Kinds of devices for which autocast is enabled, each with its dtype.
Autocast = tuple[tuple[str, torch.dtype], ...]


def present_autocast(kinds: Iterable[str]) -> Autocast:
    """Tell for which kinds of devices, such as "cpu", autocast is enabled in this thread, and in which dtypes."""
    enabled = (kind for kind in sorted(_with_autocast(kinds)) if torch.is_autocast_enabled(kind))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled)


@contextlib.contextmanager
def autocast_as(autocast: Autocast, kinds: Iterable[str]) -> Iterator[None]:
    """Put autocast into a state; autocast is off for kinds of devices that the state does not name."""
    dtypes = dict(autocast)
    with contextlib.ExitStack() as stack:
        for kind in sorted({*_with_autocast(kinds), *dtypes}):
            if kind in dtypes or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtypes.get(kind), enabled=kind in dtypes))
        yield


def _with_autocast(kinds: Iterable[str]) -> set[str]:
    # arguments without a device are captured as if they were on the CPU
    return {"cpu" if kind == "meta" else kind for kind in kinds}


@contextlib.contextmanager
def weights_cast_once(enabled: bool) -> Iterator[None]:
    """Cast each weight once while a step is traced, if autocast's cache was enabled where the step was called.

    A weight that is used several times has one cast then, whose gradients are added up in the lower precision; torch
    traces with a cast for each use.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        # tensors of the trace must not meet those of a step
        torch.clear_autocast_cache()
