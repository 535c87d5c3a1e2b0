"""What the benchmarks share: which machine and commit this is, a clock for the device, and files written whole."""

import argparse
import csv
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
# Cycles that the device idles while the host enqueues what is timed, about a millisecond.
_HEAD_START = 2_000_000


@cache
def hardware_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's with its number of cores.

    Args:
        device: Where the benchmark runs.

    Returns:
        A name for people, the same for every run on one machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


@cache
def commit_name() -> str:
    """Return the working tree's commit, with a + when it holds uncommitted changes.

    Returns:
        A short hash, or "unknown" outside a repository.
    """
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changes else "")


def slug(name: str) -> str:
    """Return a name as a part of a file's name.

    Args:
        name: Such as `hardware_name` returns.

    Returns:
        Lower case, with a dash for each character that is no letter and no digit.
    """
    return "".join(character if character.isalnum() else "-" for character in name.lower()).strip("-")


def device_of(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """Return the device of a `--device` option, or end the program with what is wrong with it.

    Args:
        parser: Whose option it is.
        name: What was given.

    Returns:
        A device that this machine has.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device {name}: no such device; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {name}: this machine has no CUDA device; use --device cpu")
    return device


def check_results_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of a `--results` option, or end the program: better now than after the measurement.

    Args:
        parser: Whose option it is.
        folder: Where files will be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        parser.error(f"--results {folder}: {error.strerror}; name a folder that can be written to")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: an interrupted run leaves the former one.

    Args:
        path: The file.
        text: What it will hold.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8", newline="")
    os.replace(partial, path)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table whole or not at all.

    Args:
        path: The file.
        rows: Lines with the same columns, at least one.
    """
    rows = list(rows)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a table that `write_csv` wrote.

    Args:
        path: The file.

    Returns:
        Its lines.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def milliseconds(call: Callable[[], object], device: torch.device, *, with_launches: bool = False) -> float:
    """Time one call.

    On CUDA the device is held up while the host enqueues the call, so that the time is the device's own and not that of
    launches which come late, unless these are what is asked for.

    Args:
        call: What to time.
        device: Where it runs.
        with_launches: Do not give the host a head start, so that a call of many small kernels shows its launches.

    Returns:
        Milliseconds.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    if not with_launches:
        torch.cuda._sleep(_HEAD_START)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def quantiles(values: Tensor) -> tuple[float, float, float]:
    """Return the 20 % quantile, the median and the 80 % quantile.

    Args:
        values: Numbers, shape (repeats,).

    Returns:
        Three numbers in rising order.
    """
    low, middle, high = values.double().quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return low, middle, high


def rotating_count(size_bytes: int, device: torch.device) -> int:
    """Return how many inputs must take turns so that none is found in the cache of the device.

    Args:
        size_bytes: Bytes of one input.
        device: Where it lies.

    Returns:
        At least 3, at most 64.
    """
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return max(3, min(64, -(-3 * cache // max(1, size_bytes))))
