"""Measure the peak memory of a run with torch's profiler."""

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def measure_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the largest number of bytes that a run has allocated on a device at one time."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # garbage of an earlier run that is collected during the measured run would be subtracted from its peak
    collects = gc.isenabled()
    gc.disable()
    try:
        # a warm-up run: libraries allocate workspaces at the first call, and models fill their caches
        run()
        # the youngest generation alone: a full collection takes a second
        gc.collect(0)
        with profile(activities=activities, profile_memory=True) as log:
            run()
    finally:
        if collects:
            gc.enable()
    assert log.profiler is not None
    changes = [
        event.nbytes()
        for event in sorted(log.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        if event.name() == "[memory]" and str(event.device_type()).lower().endswith(device.type)
    ]
    return max(accumulate(changes, initial=0))
