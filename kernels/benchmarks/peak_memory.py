"""Peak memory and time of a training step of a stack of linear layers, exact and sketched, on a GPU.

    python kernels/benchmarks/peak_memory.py [--layers 16] [--results DIR]

Each layer keeps its input for the backward pass and nothing else does, so that the peak is what is kept, and what the
kernels need besides. The peak is the allocator's over one step, less what is there before it: parameters and the input.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring import device_of, hardware_name, milliseconds, quantiles
from result_files import RESULTS, check_results_folder, commit_name, slug, write_csv
from torch import nn

from rmm_linear import RMMConfig, convert_linears

ROWS, FEATURES = 16384, 4096
CONFIGS = (
    None,
    *(RMMConfig(ratio=ratio, center=center) for ratio in (0.5, 0.25, 0.1) for center in (False, True)),
    RMMConfig(ratio=0.5, storage="int8"),
    RMMConfig(ratio=1.0, storage="int8", center=False),
    RMMConfig(ratio=0.5, storage="int4"),
)


@dataclass(frozen=True)
class Row:
    """One line of the results file; nn.Linear has an empty sketch."""

    hardware: str
    dtype: str
    layers: int
    rows: int
    features: int
    sketch: str
    center: bool
    storage: str
    ratio: float
    peak_bytes: int
    said_bytes: int
    peak_over_linear: float
    step_ms: float
    step_over_linear: float
    torch: str
    commit: str


def _measured(config: RMMConfig | None, layers: int, device: torch.device, repeats: int) -> tuple[int, float]:
    """Peak bytes beyond what is there before a step, and the step's median milliseconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, device=device, dtype=torch.bfloat16) for _ in range(layers)))
    if config is not None:
        convert_linears(model, config=config)
    x = torch.randn(ROWS, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(ROWS, FEATURES, device=device, dtype=torch.bfloat16)

    def step() -> None:
        model(x).backward(g)

    # The gradients are there before the step that is measured, as they are in training with accumulation.
    step()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak, quantiles(torch.tensor([milliseconds(step, device) for _ in range(repeats)]))[1]


def main(arguments: list[str] | None = None) -> int:
    """Measure every configuration and write one CSV file.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda: a processor's allocator tells no peak")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    device = device_of(parser, options.device)
    if device.type != "cuda":
        parser.error(f"--device {options.device}: the peak is asked of CUDA's allocator; use a machine with a GPU")
    for name in ("layers", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least one is needed")
    check_results_folder(parser, options.results)
    found: list[Row] = []
    path = options.results / f"peak-{slug(hardware_name(device))}-bfloat16.csv"
    for config in CONFIGS:
        peak, time = _measured(config, options.layers, device, options.repeats)
        kept = ROWS * FEATURES * 2 if config is None else config.saved_bytes(ROWS, FEATURES, torch.bfloat16)
        found.append(
            Row(
                hardware=hardware_name(device),
                dtype="bfloat16",
                layers=options.layers,
                rows=ROWS,
                features=FEATURES,
                sketch="" if config is None else config.sketch,
                center=config is not None and config.center,
                storage="" if config is None else config.storage or "",
                ratio=1.0 if config is None else config.ratio,
                peak_bytes=peak,
                said_bytes=options.layers * kept,
                peak_over_linear=round(peak / found[0].peak_bytes, 4) if found else 1.0,
                step_ms=round(time, 3),
                step_over_linear=round(time / found[0].step_ms, 4) if found else 1.0,
                torch=torch.__version__,
                commit=commit_name(),
            )
        )
        row = found[-1]
        name = (row.sketch or "nn.Linear") + (" + center" if row.center else "")
        name += f", {row.storage}" if row.storage else ""
        print(
            f"{name:28}{row.ratio:>6g}  peak {row.peak_bytes / 2**20:8.1f} MiB ({row.peak_over_linear:.3f}), kept"
            f" {row.said_bytes / 2**20:8.1f} MiB, step {row.step_ms:8.3f} ms ({row.step_over_linear:.3f})",
            flush=True,
        )
        write_csv(path, [asdict(row) for row in found])
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
