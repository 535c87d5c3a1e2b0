"""Functions of all timing benchmarks: the name of the hardware, and a clock for its device."""

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Cycles, about a millisecond, that the device idles while the host enqueues the timed work.
_HEAD_START = 2_000_000


@cache
def hardware_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


def device_of(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """Return the device of a `--device` option, or end the program with an error message."""
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device {name}: no such device; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {name}: this machine has no CUDA device; use --device cpu")
    return device


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time one call.

    On CUDA the device idles while the host enqueues the call, so that late launches do not count in the time.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HEAD_START)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def quantiles(values: Tensor) -> tuple[float, float, float]:
    """Return the 20 % quantile, the median and the 80 % quantile of a vector."""
    low, middle, high = values.double().quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return low, middle, high


def rotating_count(size_bytes: int, device: torch.device) -> int:
    """Return the number of inputs, 3 to 64, that must rotate so that no input stays in the device's cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return max(3, min(64, -(-3 * cache // max(1, size_bytes))))
