"""Whether the kernels of this machine are right, and how fast: each against its plain-torch reference."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmm_linear.backend import kernel_status, run, use_kernels

_Call = Callable[[], tuple[Tensor, ...]]
# rows, features: large enough for a GPU's time to be more than its launches
_ON_GPU = (8192, 1024)
_ON_CPU = (512, 96)
_BLOCK, _KEPT = 64, 16
# Cycles that a GPU idles while the host enqueues the timed call, about a millisecond.
_HEAD_START = 2_000_000
_STORAGE: dict[str, Any] = {"kind": "int8", "group": 128}


@dataclass(frozen=True)
class KernelCheck:
    """The result of one kernel's check.

    Attributes:
        name: The kernel.
        runs: The implementation that models run here: "triton" or "torch".
        reason: Why its reference runs instead; None if the kernel runs.
        failed: Whether the kernel should run here, and raised an error.
        error: Largest difference from the reference over the reference's largest value; None if the reference runs.
        milliseconds: Median time of the kernel, the device's own, with inputs that its cache may hold; None if the
            reference runs.
        torch_milliseconds: Median time of the reference, likewise.
    """

    name: str
    runs: str
    reason: str | None
    failed: bool
    error: float | None
    milliseconds: float | None
    torch_milliseconds: float


def check_kernels(device: torch.device, *, dtype: torch.dtype = torch.bfloat16, repeats: int = 20) -> list[KernelCheck]:
    """Run each kernel beside its reference, on random activations of a dtype, `repeats` times for its time.

    Of a kernel that raises, models run the reference.
    """
    status = kernel_status(device)
    return [_checked(name, call, status[name], device, repeats) for name, call in _calls(device, dtype).items()]


def _calls(device: torch.device, dtype: torch.dtype) -> dict[str, _Call]:
    rows, features = _ON_GPU if device.type == "cuda" else _ON_CPU
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((rows, features), generator=generator, device=device, dtype=dtype)
    mean = torch.randn(features, generator=generator, device=device)
    seed = torch.full((), 7, dtype=torch.int64, device=device)
    blocks = rows // _BLOCK
    options: dict[str, Any] = {"scale": 0.125, "dtype": dtype}
    with use_kernels("torch"):
        codes = run("quantize", x, seed, None, **_STORAGE)
    read = _STORAGE | {"features": features, "dtype": dtype}
    return {
        "hadamard_sketch": lambda: (run("hadamard_sketch", x, seed, mean, blocks=blocks, kept=_KEPT, **options),),
        "random_projection": lambda: (
            run("random_projection", x, seed, mean, rank=blocks * _KEPT, gaussian=False, **options),
        ),
        "quantize": lambda: run("quantize", x, seed, None, **_STORAGE),
        "dequantize": lambda: (run("dequantize", *codes, seed, **read),),
    }


def _checked(name: str, call: _Call, reason: str | None, device: torch.device, repeats: int) -> KernelCheck:
    with use_kernels("torch"):
        expected = call()
        torch_milliseconds = _milliseconds(call, device, repeats)
    found, failed = None, False
    if reason is None:
        try:
            with use_kernels("triton"):
                found = call()
                milliseconds = _milliseconds(call, device, repeats)
        except Exception as raised:  # any kind of error answers the user's question
            reason, failed = f"{type(raised).__name__}: {raised}", True
    if reason is not None or found is None:
        return KernelCheck(name, "torch", reason, failed, None, None, torch_milliseconds)
    error = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
    return KernelCheck(name, "triton", None, False, error, milliseconds, torch_milliseconds)


def _difference(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    largest = float(expected.double().abs().amax())
    difference = float((found.double() - expected.double()).abs().amax())
    # NaN compares as small
    return math.inf if math.isnan(difference) else difference / max(largest, torch.finfo(torch.float64).tiny)


def _milliseconds(call: _Call, device: torch.device, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # so that the time is the GPU's, and not that of launches which come late
            torch.cuda._sleep(_HEAD_START)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[len(times) // 2]
