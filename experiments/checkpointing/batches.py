"""Find the largest batch that trains within a GPU's memory: `python -m experiments.checkpointing.batches`.

A step is forward pass, backward pass and AdamW, under autocast to bfloat16. The peaks of two small batches give a line;
from where it meets the limit, batches get smaller by 3 % until three steps run. The limit is one of the process: what
torch reserves counts, fragments included, and what CUDA itself takes does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.command_line import Parser, exit_status
from experiments.provenance import origin
from experiments.rows import write_rows

from .models import Workload, of_shape
from .report import BATCHES_FILE, EAGER, RESULTS
from .steps import CODE_WAYS, Comparison, Way

_SMALLER = 0.97


def _trained(workload: Workload, way: Way, batch: int) -> int:
    shape = dataclasses.replace(workload.shapes["codes, cuda"], batch=batch)
    with Comparison(workload, shape, "cuda") as comparison:
        running = comparison.prepare(way)
        assert running is not None
        optimizer = torch.optim.AdamW(running.model.parameters())
        for _ in range(3):
            running()
            optimizer.step()
        return torch.cuda.max_memory_allocated()


def peak_of(workload: Workload, way: Way, batch: int) -> int | None:
    """Return the bytes at the peak of three training steps, all state included; None if they are out of memory."""
    peak = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        peak = _trained(workload, way, batch)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def largest_batch(workload: Workload, way: Way, limit: int) -> dict[str, Any]:
    """Return a row: the largest batch that runs within `limit` bytes, and the last one that did not."""
    small = workload.shapes["codes, cuda"].batch // 8
    one, two = (peak_of(workload, way, batch) for batch in (small, 2 * small))
    assert one is not None
    assert two is not None
    batch, too_large = int(small + (limit - one) / (two - one) * small), None
    while (peak := peak_of(workload, way, batch)) is None:
        batch, too_large = int(batch * _SMALLER), batch
    row = {"method": way.method, "batch": batch, "too_large": too_large, "peak_bytes": peak, "limit_bytes": limit}
    print(f"{workload.name}: {row}", flush=True)
    return row


def _run(gibibytes: float, model: str, methods: Sequence[str], folder: Path) -> int:
    torch.cuda.set_per_process_memory_fraction(gibibytes * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    (workload,) = (each for each in of_shape("codes, cuda") if each.name == model)
    size = {"model": model, "size": workload.shapes["codes, cuda"].size}
    rows = [
        size | largest_batch(workload, way, int(gibibytes * 2**30)) | origin("cuda")
        for way in (Way(EAGER), *CODE_WAYS)
        if way.method in methods
    ]
    write_rows(folder / BATCHES_FILE, rows)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = Parser(prog="python -m experiments.checkpointing.batches", description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=8, help="the limit (default: 8)")
    parser.add_argument("--model", default="roberta-base", choices=[each.name for each in of_shape("codes, cuda")])
    ways = (EAGER, "checkpointing in each block", "torch.compile", "both", "8 bits")
    parser.add_argument("--ways", nargs="*", default=ways, choices=[EAGER, *(way.method for way in CODE_WAYS)])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    return exit_status(lambda: _run(options.gib, options.model, options.ways, options.results))


if __name__ == "__main__":
    sys.exit(main())
