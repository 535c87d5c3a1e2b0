"""Time a sketched linear layer against nn.Linear: forward + backward, both in one run, on rotating inputs.

    python kernels/benchmarks/layer.py [--device cuda] [--dtype bfloat16] [--repeats 30] [--results DIR]

Every repetition times nn.Linear and then every variant once, so that a change of the machine's speed during the run
meets all of them; the ratio is taken within the repetition, and its median and 20/80 quantiles are reported. Inputs
rotate through several tensors, so that no variant finds its input in a cache. Kept bytes are counted on the layer's
saved tensors and compared with what `RMMConfig.saved_bytes` says.
"""

import argparse
import csv
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rmm_linear import RMMConfig, RMMLinear, __version__, available_sketches
from rmm_linear.memory import measure_kept_bytes

SHAPES = ((4096, 768, 3072), (4096, 3072, 768), (4096, 768, 768), (8192, 384, 1536))
RATIOS = (0.5, 0.25, 0.1)
# The default without centering, the default, and the paper's.
VARIANTS = (("hadamard", False), ("hadamard", True), ("gaussian", False))
_ROTATING = 3


@dataclass(frozen=True)
class Row:
    """One line of the results file; times in milliseconds, ratios to nn.Linear within a repetition."""

    hardware: str
    threads: int
    dtype: str
    rows: int
    in_features: int
    out_features: int
    sketch: str
    center: bool
    ratio: float
    time_ratio: float
    time_ratio_q20: float
    time_ratio_q80: float
    linear_ms: float
    sketched_ms: float
    kept_bytes: int
    said_bytes: int
    input_bytes: int
    repeats: int
    torch: str
    rmm_linear: str
    commit: str


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


def _step(layer: nn.Module, x: Tensor, g: Tensor) -> float:
    """Milliseconds of one forward and backward pass."""
    x.grad = None
    layer.zero_grad(set_to_none=True)
    if x.is_cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        layer(x).backward(g)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    began = time.perf_counter()
    layer(x).backward(g)
    return (time.perf_counter() - began) * 1e3


def benchmark(
    shape: tuple[int, int, int],
    variants: list[RMMConfig],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> Iterator[Row]:
    """Time all variants of one shape next to nn.Linear.

    Args:
        shape: (rows, in, out).
        variants: Configurations of the sketched layers.
        device: Where to run.
        dtype: Dtype of parameters and inputs.
        repeats: Timed repetitions, after three that are not.

    Yields:
        One row a variant.
    """
    rows, features, out = shape
    exact = nn.Linear(features, out, device=device, dtype=dtype)
    layers = [RMMLinear(features, out, device=device, dtype=dtype, config=config) for config in variants]
    inputs = [
        (
            torch.randn(rows, features, device=device, dtype=dtype, requires_grad=True),
            torch.randn(rows, out, device=device, dtype=dtype),
        )
        for _ in range(_ROTATING)
    ]
    rotating = itertools.cycle(inputs)
    times: list[list[float]] = []
    for repeat in range(repeats + 3):
        measured = [_step(layer, *next(rotating)) for layer in (exact, *layers)]
        if repeat >= 3:
            times.append(measured)
    table = torch.tensor(times, dtype=torch.float64)
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    for index, (config, layer) in enumerate(zip(variants, layers, strict=True), start=1):
        low, middle, high = (table[:, index] / table[:, 0]).quantile(quantiles).tolist()
        x = inputs[0][0]
        # x itself is excluded: an exact layer would keep it, and here it lives as an input anyway.
        kept = measure_kept_bytes(layer, x, exclude=[layer, x])
        yield Row(
            hardware=hardware_name(device),
            threads=torch.get_num_threads(),
            dtype=str(dtype).removeprefix("torch."),
            rows=rows,
            in_features=features,
            out_features=out,
            sketch=config.sketch,
            center=config.center,
            ratio=config.ratio,
            time_ratio=round(middle, 4),
            time_ratio_q20=round(low, 4),
            time_ratio_q80=round(high, 4),
            linear_ms=round(float(table[:, 0].median()), 3),
            sketched_ms=round(float(table[:, index].median()), 3),
            kept_bytes=kept,
            said_bytes=config.saved_bytes(rows, features, dtype),
            input_bytes=x.numel() * x.element_size(),
            repeats=repeats,
            torch=torch.__version__,
            rmm_linear=__version__,
            commit=commit_name(),
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write one CSV file.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--all-sketches", action="store_true", help="every registered sketch, not just the usual three")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least one repetition is needed")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device {options.device}: no such device; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; use --device cpu")
    try:
        options.results.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=options.results, suffix=".csv.part")
        os.close(handle)
        os.unlink(partial)
    except OSError as error:
        parser.error(f"--results {options.results}: {error.strerror}; name a folder that can be written to")
    pairs = [(sketch, False) for sketch in available_sketches()] if options.all_sketches else list(VARIANTS)
    variants = [
        RMMConfig(ratio=ratio, sketch=sketch, center=center, min_rows=1) for sketch, center in pairs for ratio in RATIOS
    ]
    torch.manual_seed(0)
    found: list[Row] = []
    print(f"{hardware_name(device)}, {torch.get_num_threads()} threads, {options.dtype}, torch {torch.__version__}")
    print(f"{'rows x in -> out':24}{'sketch':26}{'ratio':>6}{'time / nn.Linear (20/80)':>28}{'kept / input':>14}")
    for shape in SHAPES:
        for row in benchmark(
            shape, variants, device=device, dtype=getattr(torch, options.dtype), repeats=options.repeats
        ):
            found.append(row)
            name = row.sketch + (" + center" if row.center else "")
            spread = f"{row.time_ratio:.3f} ({row.time_ratio_q20:.3f}/{row.time_ratio_q80:.3f})"
            size = f"{row.rows} x {row.in_features} -> {row.out_features}"
            print(f"{size:24}{name:26}{row.ratio:>6g}{spread:>28}{row.kept_bytes / row.input_bytes:>14.3f}", flush=True)
    slug = "".join(c if c.isalnum() else "-" for c in found[0].hardware.lower()).strip("-")
    path = options.results / f"layer-{slug}-{options.dtype}.csv"
    # Whole or not at all: an interrupted run leaves the former file.
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(found[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in found)
    os.replace(partial, path)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
