"""`rmm-linear doctor`: versions, GPU, and each kernel against its reference: what will run on this machine."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import rmm_linear
from rmm_linear import backend
from rmm_linear.backend import ENVIRONMENT, chosen, kernel_status, use_kernels

HELP = "show what runs on this machine: Triton kernels or plain torch, whether they agree, and how fast they are"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Largest difference from plain torch, relative to the largest value, that rounding explains: two steps of the dtype.
_TOLERANCES = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-4}
_LONGEST_REASON = 200
# A broken compiler may tell every kernel something else.
_MOST_REASONS = 3
_WIDTH = 120
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
    """The result of one kernel's check."""

    name: str
    # the implementation that models run here: "triton" or "torch"
    runs: str
    # why the reference runs instead
    reason: str | None
    # whether the kernel should run here, and raised an error
    failed: bool
    # largest difference from the reference over the reference's largest value
    error: float | None
    # median times, the device's own, with inputs that its cache may hold
    milliseconds: float | None
    torch_milliseconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of the activations")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Check this machine.

    Returns:
        One screen of text, and the exit status: 1 if a kernel fails, differs from plain torch by more than rounding, or
        is asked for by force and cannot run.

    Raises:
        ValueError: If there is no such device.
    """
    device = _device(options.device)
    checks = check_kernels(device, dtype=_DTYPES[options.dtype])
    facts = _facts(device)
    is_refused = chosen() == "triton" and any(check.reason is not None for check in checks)
    status = int(bool(_wrong(options.dtype, checks)) or is_refused or any(check.failed for check in checks))
    if options.json:
        found = {**facts, "dtype": options.dtype, "kernels": [asdict(check) for check in checks]}
        return json.dumps(found, indent=2), status
    return _screen(facts, options.dtype, checks), status


def _wrong(dtype: str, checks: list[KernelCheck]) -> list[str]:
    return [check.name for check in checks if check.error is not None and check.error > _TOLERANCES[dtype]]


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: no such device; use cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: the kernels are for CUDA, and plain torch is checked on cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return device


def _facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "rmm_linear": rmm_linear.__version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": platform.system(),
        "device": str(device),
        "kernels_chosen": chosen(),
        ENVIRONMENT: os.environ.get(ENVIRONMENT),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _screen(facts: dict[str, Any], dtype: str, checks: list[KernelCheck]) -> str:
    triton = facts["triton"] or "not installed"
    versions = f"rmm_linear {facts['rmm_linear']}, torch {facts['torch']}, triton {triton}"
    lines = [f"{versions}, Python {facts['python']}, {facts['system']}"]
    if "gpu" in facts:
        lines.append(
            f"{facts['gpu']} ({facts['device']}), compute capability {facts['capability']},"
            f" {facts['memory_bytes'] / 2**30:.0f} GiB, CUDA {facts['cuda']}"
        )
    else:
        lines.append(f"device {facts['device']}: no GPU is used")
    lines.append(f"kernels: {facts['kernels_chosen']} ({ENVIRONMENT} {facts[ENVIRONMENT] or 'is not set'})")
    lines.append(f"{'kernel, ' + dtype:28}{'runs':>8}{'ms':>10}{'torch ms':>10}{'difference':>12}")
    for check in checks:
        time = "-" if check.milliseconds is None else f"{check.milliseconds:.3f}"
        error = "-" if check.error is None else f"{check.error:.1e}"
        lines.append(f"{check.name:28}{check.runs:>8}{time:>10}{check.torch_milliseconds:>10.3f}{error:>12}")
    wrong = _wrong(dtype, checks)
    if wrong:
        names = ", ".join(wrong)
        lines.append(f"WRONG: {names} differ from plain torch by more than rounding. Set {ENVIRONMENT}=torch")
    by_reason: dict[str, list[str]] = {}
    for check in checks:
        if check.reason is not None:
            by_reason.setdefault(_in_one_line(check.reason), []).append(check.name)
    is_forced = facts["kernels_chosen"] == "triton"
    told = list(by_reason.items())[:_MOST_REASONS]
    for reason, affected in told:
        which = "all" if len(affected) == len(checks) else ", ".join(affected)
        lines.append(textwrap.fill(f"{'an error' if is_forced else 'plain torch'} for {which}: {reason}", _WIDTH))
    others = sum(map(len, by_reason.values())) - sum(len(affected) for _, affected in told)
    if others:
        lines.append(f"and for {others} more kernels, for other reasons: --json has them")
    if is_forced and by_reason:
        lines.append(f"Kernels are asked for by force, and layers raise where they cannot run. Set {ENVIRONMENT}=auto")
    return "\n".join(lines)


def _in_one_line(reason: str) -> str:
    """What an error says first: compilers say a page."""
    said = " ".join(reason.split())
    return said if len(said) <= _LONGEST_REASON else said[: _LONGEST_REASON - 3] + "..."


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
        codes = backend.run("quantize", x, seed, None, **_STORAGE)
    read = _STORAGE | {"features": features, "dtype": dtype}
    return {
        "hadamard_sketch": lambda: (
            backend.run("hadamard_sketch", x, seed, mean, blocks=blocks, kept=_KEPT, **options),
        ),
        "random_projection": lambda: (
            backend.run("random_projection", x, seed, mean, rank=blocks * _KEPT, gaussian=False, **options),
        ),
        "quantize": lambda: backend.run("quantize", x, seed, None, **_STORAGE),
        "dequantize": lambda: (backend.run("dequantize", *codes, seed, **read),),
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
