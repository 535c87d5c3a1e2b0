"""`rmm-linear doctor`: versions, GPU, and a comparison of each kernel that runs here with its reference."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import rmm_linear
from rmm_linear import backend
from rmm_linear.backend import ENVIRONMENT, chosen, kernel_status, use_kernels

HELP = "show whether Triton kernels or plain torch run on this machine, whether both agree, and their times"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Largest difference from plain torch by rounding, relative to the largest value: two steps of the dtype.
_TOLERANCES = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-4}
_WIDTH = 120
_Call = Callable[[], tuple[Tensor, ...]]
# rows, features: large enough for a GPU's time to exceed the launch times
_ON_GPU = (8192, 1024)
_ON_CPU = (512, 96)
_BLOCK, _KEPT = 64, 16
_SECONDS = 0.05
_STORAGE: dict[str, Any] = {"kind": "int8", "group": 128}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of the activations")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Return a screen of text, and 1 if a kernel fails, differs by more than rounding, or is forced and cannot run."""
    device = _device(options.device)
    status, calls = kernel_status(device), _calls(device, _DTYPES[options.dtype])
    checks = [_checked(name, call, status[name]) for name, call in calls.items()]
    wrong = [each["name"] for each in checks if (each["error"] or 0) > _TOLERANCES[options.dtype]]
    is_refused = chosen() == "triton" and any(check["reason"] is not None for check in checks)
    facts = _facts(device)
    if options.json:
        text = json.dumps({**facts, "dtype": options.dtype, "kernels": checks}, indent=2)
    else:
        text = "\n".join(_screen(facts, options.dtype, checks))
        if wrong:
            names = ", ".join(wrong)
            text += f"\nWRONG: {names} differ from plain torch by more than rounding. Set {ENVIRONMENT}=torch"
        if is_refused:
            text += f"\nKernels are forced, and layers raise where they cannot run. Set {ENVIRONMENT}=auto"
    return text, int(bool(wrong) or is_refused or any(check["failed"] for check in checks))


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
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    facts: dict[str, Any] = {
        "rmm_linear": rmm_linear.__version__,
        "torch": torch.__version__,
        "triton": triton,
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


def _screen(facts: dict[str, Any], dtype: str, checks: list[dict[str, Any]]) -> list[str]:
    versions = f"rmm_linear {facts['rmm_linear']}, torch {facts['torch']}, triton {facts['triton'] or 'not installed'}"
    machine = f"device {facts['device']}: no GPU is used"
    if "gpu" in facts:
        machine = (
            f"{facts['gpu']} ({facts['device']}), compute capability {facts['capability']},"
            f" {facts['memory_bytes'] / 2**30:.0f} GiB, CUDA {facts['cuda']}"
        )
    lines = [
        f"{versions}, Python {facts['python']}, {facts['system']}",
        machine,
        f"kernels: {facts['kernels_chosen']} ({ENVIRONMENT} {facts[ENVIRONMENT] or 'is not set'})",
        f"{'kernel, ' + dtype:28}{'runs':>8}{'ms':>10}{'torch ms':>10}{'difference':>12}",
    ]
    for check in checks:
        time = "-" if check["milliseconds"] is None else f"{check['milliseconds']:.3f}"
        error = "-" if check["error"] is None else f"{check['error']:.1e}"
        lines.append(f"{check['name']:28}{check['runs']:>8}{time:>10}{check['torch_milliseconds']:>10.3f}{error:>12}")
    for reason in dict.fromkeys(check["reason"] for check in checks if check["reason"] is not None):
        names = [check["name"] for check in checks if check["reason"] == reason]
        # a compiler's message may take a page, which only --json prints
        line = f"no kernel for {'any' if len(names) == len(checks) else ', '.join(names)}: {' '.join(reason.split())}"
        lines.append(line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "...")
    return lines


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


def _checked(name: str, call: _Call, reason: str | None) -> dict[str, Any]:
    """Compare a kernel with its reference; if the kernel raises, models run the reference."""
    check: dict[str, Any] = {"name": name, "runs": "torch", "reason": reason, "failed": False}
    check |= {"error": None, "milliseconds": None}
    with use_kernels("torch"):
        expected = call()
        check["torch_milliseconds"] = _milliseconds(call)
    if reason is None:
        try:
            with use_kernels("triton"):
                found = call()
                milliseconds = _milliseconds(call)
        except Exception as raised:  # an error of any class is a result to report
            return check | {"reason": f"{type(raised).__name__}: {raised}", "failed": True}
        # largest difference, relative to the reference's largest value
        error = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
        check |= {"runs": "triton", "error": error, "milliseconds": milliseconds}
    return check


def _difference(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.double().abs().amax())
    difference = float((found.double() - expected.double()).abs().amax())
    # a comparison with NaN is False, which would count as a small difference
    return math.inf if math.isnan(difference) else difference / max(largest, torch.finfo(torch.float64).tiny)


def _milliseconds(call: _Call) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=_SECONDS).median
