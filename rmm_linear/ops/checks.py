"""Whether the kernels of this machine are right, and how fast: each against its plain-torch twin."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import KERNELS, chosen, kernel_status, use_kernels
from rmm_linear.ops.grad_weight import outer_product_of_sums, sketched_grad_weight
from rmm_linear.ops.hadamard_gradient import hadamard_grad_weight
from rmm_linear.ops.projections import (
    hadamard_sketch,
    hadamard_sketch_and_mean,
    hadamard_sketch_and_sums,
    random_projection,
)
from rmm_linear.ops.quantized_sketch import codes_and_mean, hadamard_sketch_quantized
from rmm_linear.ops.storage import Codes, dequantize, quantize

_Call = Callable[[], tuple[Tensor, ...]]
# rows, features, outputs: large enough for a GPU's time to be more than its launches
_ON_GPU = (8192, 1024, 4096)
_ON_CPU = (512, 96, 128)
_FEW_ROWS, _FEW_OUTPUTS = 256, 512
_BLOCK, _KEPT = 64, 16
# Cycles that a GPU idles while the host enqueues what is timed, about a millisecond.
_HEAD_START = 2_000_000
_KIND, _GROUP = "int8", 128


@dataclass(frozen=True)
class KernelCheck:
    """What came of one kernel.

    Attributes:
        name: The kernel.
        runs: What models run here: "triton", "torch", or "cublas" for a product whose kernel has to be asked for.
        reason: Why its twin runs instead; None if the kernel runs.
        failed: Whether the kernel should run here, and raised an error.
        error: Largest difference from the twin over the twin's largest value; None if the twin runs.
        milliseconds: Median time of the kernel, the device's own, with inputs that its cache may hold; None if the
            twin runs.
        torch_milliseconds: Median time of the twin, likewise.
    """

    name: str
    runs: str
    reason: str | None
    failed: bool
    error: float | None
    milliseconds: float | None
    torch_milliseconds: float


def check_kernels(device: torch.device, *, dtype: torch.dtype = torch.bfloat16, repeats: int = 20) -> list[KernelCheck]:
    """Run each kernel beside its twin, on random numbers.

    Args:
        device: Where.
        dtype: Dtype of the activations.
        repeats: Timed runs of each.

    Returns:
        One check a kernel; a kernel that raises is one whose twin runs.
    """
    status = kernel_status(device)
    return [_checked(name, call, status[name], device, repeats) for name, call in _calls(device, dtype)]


def _calls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, _Call]]:
    """An operator that runs each kernel; those without a call of their own are parts of these."""
    rows, features, outputs = _ON_GPU if device.type == "cuda" else _ON_CPU
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    x, g, mean = normal(rows, features), normal(rows, outputs), normal(features, dtype=torch.float32)
    seed = torch.full((), 7, dtype=torch.int64, device=device)
    geometry: dict[str, Any] = {"blocks": rows // _BLOCK, "kept": _KEPT}
    rank = geometry["blocks"] * _KEPT
    options: dict[str, Any] = {"kind": _KIND, "group": _GROUP}
    stored, sketched = normal(rank, features), normal(rank, outputs)
    sums = normal(rows // _BLOCK, outputs, dtype=torch.float32)
    sums_of_x = normal(rank // _GROUP, features, dtype=torch.float32)
    # as few as are done at once
    few, few_g = x[:_FEW_ROWS], g[:_FEW_ROWS, :_FEW_OUTPUTS]
    few_geometry: dict[str, Any] = {"blocks": few.shape[0] // _BLOCK, "kept": _KEPT}
    few_stored = stored[: few.shape[0] // _BLOCK * _KEPT]
    few_options: dict[str, Any] = {"ratio": _KEPT / _BLOCK, "need_bias": True}
    with use_kernels("torch"):
        codes = quantize(stored, seed, None, kind=_KIND, group=_GROUP)
    calls: dict[str, _Call] = {
        "hadamard_sketch": lambda: (hadamard_sketch(x, seed, mean, **geometry, gradient=False),),
        "hadamard_sketch_and_mean": lambda: hadamard_sketch_and_mean(x, seed, **geometry),
        "hadamard_sketch_and_sums": lambda: hadamard_sketch_and_sums(g, seed, **geometry, half=True),
        "sketch_and_mean_at_once": lambda: hadamard_sketch_and_mean(few, seed, **few_geometry),
        "grad_weight_at_once": lambda: hadamard_grad_weight(
            few_g, seed, few_stored, mean, **few_geometry, **few_options
        ),
        "hadamard_sketch_quantized": lambda: _without_edges(
            *hadamard_sketch_quantized(x, seed, mean, **geometry, **options), seed
        ),
        "random_projection": lambda: (random_projection(x, seed, mean, rank=rank, gaussian=False, gradient=False),),
        "quantize": lambda: quantize(stored, seed, None, kind=_KIND, group=_GROUP),
        "dequantize": lambda: (dequantize(*codes, seed, kind=_KIND, group=_GROUP, dtype=dtype),),
        "quantize_and_mean": lambda: codes_and_mean(
            stored, seed, None, sums_of_x, rows=rows, **geometry, scale=8 / _KEPT, **options
        ),
        "outer_product_of_sums": lambda: _both(*outer_product_of_sums(sums, mean, dtype, dtype)),
        "sketched_grad_weight": lambda: sketched_grad_weight(
            sketched, stored, sums, mean, dtype=dtype, bias_dtype=dtype
        ),
        "sketched_grad_weight_low_bit": lambda: sketched_grad_weight(
            sketched, Codes(*codes, seed, **options), sums, mean, dtype=dtype, bias_dtype=dtype
        ),
    }
    yield from ((name, calls[name]) for name in KERNELS if name in calls)


def _both(outer: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
    assert outer is not None
    return outer, bias


def _without_edges(codes: Tensor, steps: Tensor, offsets: Tensor, rest: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Codes but for those that a sum, rounded otherwise, moves to the other side of an edge: sums of squares of all."""
    values = dequantize(codes, steps, offsets, seed, kind=_KIND, group=_GROUP)
    return values.double().square().sum(0).sqrt(), rest


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
        except Exception as raised:  # whatever it is, it is what the user asked about
            reason, failed = f"{type(raised).__name__}: {raised}", True
    if reason is not None or found is None:
        return KernelCheck(name, "torch", reason, failed, None, None, torch_milliseconds)
    error = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
    runs = "cublas" if name.startswith("sketched_grad_weight") and chosen() == "auto" else "triton"
    return KernelCheck(name, runs, None, False, error, milliseconds, torch_milliseconds)


def _difference(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.double().abs().amax()) if expected.numel() else 0.0
    difference = float((found.double() - expected.double()).abs().amax()) if expected.numel() else 0.0
    # the difference of NaN and anything is no number, and no small one either
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
