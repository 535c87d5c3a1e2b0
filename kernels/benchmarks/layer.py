"""Time a sketched linear layer against nn.Linear: forward + backward, both in one run, on rotating inputs.

    python kernels/benchmarks/layer.py [--device cuda] [--dtype bfloat16] [--repeats 30] [--results DIR]

Every repetition times nn.Linear and then every variant once, so that a change of the machine's speed during the run
affects all variants; the ratio is taken within the repetition, and its median and 20/80 quantiles are reported. Inputs
rotate through several tensors, so that no variant finds its input in a cache. Kept bytes are counted on the layer's
saved tensors and compared with `RMMConfig.saved_bytes`.

On CUDA the times are the device's own: the host enqueues in advance, as in training. Transient memory is the peak of a
step beyond its results: the output in the forward pass, the gradients in the backward pass.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import device_of, hardware_name, milliseconds, quantiles
from result_files import RESULTS, check_results_folder, commit_name, slug, write_csv
from torch import Tensor, nn

from rmm_linear import RMMConfig, RMMLinear, __version__, available_sketches
from rmm_linear.memory import measure_kept_bytes

RATIOS = (0.5, 0.25, 0.1)
# (rows, in, out); on a CPU small enough for a few cores.
GPU_SHAPES = ((8192, 768, 3072), (16384, 1024, 4096), (8192, 4096, 14336))
SHAPES = ((4096, 768, 3072), (4096, 3072, 768), (4096, 768, 768), (8192, 384, 1536))
# The default without centering, the default, and the paper's sketch; and the storage.
VARIANTS = (("hadamard", False, None), ("hadamard", True, None), ("gaussian", False, None))
GPU_VARIANTS = tuple(("hadamard", center, storage) for storage in (None, "int8") for center in (False, True))
_ROTATING = 3


def _forget_gradients(layer: nn.Module, x: Tensor) -> None:
    x.grad = None
    layer.zero_grad(set_to_none=True)


def _step(layer: nn.Module, x: Tensor, g: Tensor) -> float:
    """Run one forward and backward pass, and return its milliseconds."""
    _forget_gradients(layer, x)
    return milliseconds(lambda: layer(x).backward(g), x.device)


def _transient_bytes(layer: nn.Module, x: Tensor, g: Tensor) -> int | str:
    """The peak of a step's memory beyond its results: the output, and after the backward pass the gradients."""
    if not x.is_cuda:
        return ""
    _forget_gradients(layer, x)
    torch.cuda.synchronize(x.device)
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    output = layer(x)
    torch.cuda.synchronize(x.device)
    # the forward pass is measured separately: the gradients' memory would hide its freed temporaries
    forward = torch.cuda.max_memory_allocated(x.device) - before - output.untyped_storage().nbytes()
    torch.cuda.reset_peak_memory_stats(x.device)
    output.backward(g)
    torch.cuda.synchronize(x.device)
    left = torch.cuda.memory_allocated(x.device) - before
    return max(forward, torch.cuda.max_memory_allocated(x.device) - before - left)


def benchmark(
    shape: tuple[int, int, int],
    variants: list[RMMConfig],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Time nn.Linear and all variants for one shape.

    Args:
        shape: (rows, in, out).
        variants: Configurations of the sketched layers.
        device: Device of the layers.
        dtype: Dtype of parameters and inputs.
        repeats: Timed repetitions, after three untimed repetitions.

    Yields:
        Lines of the results file: times in milliseconds, ratios to nn.Linear within a repetition. The transient bytes
        are empty on a CPU.
    """
    rows, features, out = shape
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    exact = nn.Linear(features, out, **kind)
    layers = [RMMLinear(features, out, **kind, config=config) for config in variants]
    inputs = [
        (torch.randn(rows, features, **kind, requires_grad=True), torch.randn(rows, out, **kind))
        for _ in range(_ROTATING)
    ]
    rotating = itertools.cycle(inputs)
    times: list[list[float]] = []
    for repeat in range(repeats + 3):
        measured = [_step(layer, *next(rotating)) for layer in (exact, *layers)]
        if repeat >= 3:
            times.append(measured)
    table = torch.tensor(times, dtype=torch.float64)
    linear_transient = _transient_bytes(exact, *inputs[0])
    for index, (config, layer) in enumerate(zip(variants, layers, strict=True), start=1):
        low, middle, high = quantiles(table[:, index] / table[:, 0])
        x = inputs[0][0]
        # x itself is excluded: x lives as an input anyway.
        kept = measure_kept_bytes(layer, x, exclude=[layer, x])
        yield {
            "hardware": hardware_name(device),
            "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "rows": rows,
            "in_features": features,
            "out_features": out,
            "sketch": config.sketch,
            "center": config.center,
            "storage": config.storage or "",
            "ratio": config.ratio,
            "time_ratio": round(middle, 4),
            "time_ratio_q20": round(low, 4),
            "time_ratio_q80": round(high, 4),
            "linear_ms": round(float(table[:, 0].median()), 3),
            "sketched_ms": round(float(table[:, index].median()), 3),
            "kept_bytes": kept,
            "said_bytes": config.saved_bytes(rows, features, dtype),
            "input_bytes": x.numel() * x.element_size(),
            "linear_transient_bytes": linear_transient,
            "transient_bytes": _transient_bytes(layer, *inputs[0]),
            "repeats": repeats,
            "kernels": os.environ.get("RMM_LINEAR_KERNELS", "auto"),
            "torch": torch.__version__,
            "rmm_linear": __version__,
            "commit": commit_name(),
        }


def _print_row(row: dict[str, Any]) -> None:
    name = row["sketch"] + (" + center" if row["center"] else "") + (f", {row['storage']}" if row["storage"] else "")
    spread = "{time_ratio:.3f} ({time_ratio_q20:.3f}/{time_ratio_q80:.3f})".format_map(row)
    size = "{rows} x {in_features} -> {out_features}".format_map(row)
    kept, transient_bytes = row["kept_bytes"] / row["input_bytes"], row["transient_bytes"]
    transient = f"{transient_bytes / 2**20:.1f} MiB" if isinstance(transient_bytes, int) else ""
    print(f"{size:24}{name:26}{row['ratio']:>6g}{spread:>28}{kept:>14.3f}{transient:>12}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write one CSV file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on CUDA and float32 elsewhere by default"
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--all-sketches", action="store_true", help="time every registered sketch")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least one repetition is needed")
    device = device_of(parser, options.device)
    on_gpu = device.type == "cuda"
    dtype_name = options.dtype or ("bfloat16" if on_gpu else "float32")
    dtype = getattr(torch, dtype_name)
    check_results_folder(parser, options.results)
    triples = list(GPU_VARIANTS if on_gpu else VARIANTS)
    if options.all_sketches:
        triples = [(sketch, False, None) for sketch in available_sketches()]
    variants = [
        RMMConfig(ratio=ratio, sketch=sketch, center=center, storage=storage, min_rows=1)
        for sketch, center, storage in triples
        for ratio in RATIOS
    ]
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    hardware = hardware_name(device)
    print(f"{hardware}, {torch.get_num_threads()} threads, {dtype_name}, torch {torch.__version__}")
    print(
        f"{'rows x in -> out':24}{'sketch':26}{'ratio':>6}{'time / nn.Linear (20/80)':>28}"
        f"{'kept / input':>14}{'transient':>12}"
    )
    path = options.results / f"layer-{slug(hardware)}-{dtype_name}.csv"
    for shape in GPU_SHAPES if on_gpu else SHAPES:
        for row in benchmark(shape, variants, device=device, dtype=dtype, repeats=options.repeats):
            found.append(row)
            _print_row(row)
        # Written after each shape, so that an interrupted run has results.
        write_csv(path, found)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
