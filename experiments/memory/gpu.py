"""Measure training steps on a GPU, each method in turn: `python -m experiments.memory.gpu`.

The peak is what CUDA's allocator has given out during a step, parameters and gradients included, the optimizer's states
not. The largest batch is the one whose step still runs, AdamW's states included, where the allocator may give out no
more than a limit.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from experiments.command_line import HarnessError, Parser, add_models, chosen, exit_status
from experiments.provenance import origin
from experiments.rows import write_rows
from rmm_linear import RMMConfig

from .models import GPU_WORKLOADS, Workload
from .report import ALONE, CHECKPOINTING, EXACT, GPU_FILE, OURS, RESULTS, gpu_table
from .run import Method

PAPER = (0.5, 0.1)
METHODS = (
    Method(EXACT),
    Method(CHECKPOINTING),
    *(Method(ALONE, RMMConfig.from_recipe("paper", ratio=ratio, share_sketch=False)) for ratio in PAPER),
    *(Method(OURS, RMMConfig(ratio=ratio)) for ratio in PAPER),
    Method(OURS, RMMConfig(ratio=1.0, storage="int4")),
)
_STEPS, _GRANULE = 10, 16


def measured_rows(
    workload: Workload, *, is_autocast: bool, limit_gib: float, steps: int = _STEPS
) -> Iterator[dict[str, Any]]:
    """Measure one model with every method.

    Args:
        workload: The model and its batch.
        is_autocast: Whether the step runs under autocast to bfloat16.
        limit_gib: What the allocator may give out where the largest batch is looked for, in GiB.
        steps: Timed steps.
    """
    for method in METHODS:
        torch.manual_seed(0)
        model = workload.build().to("cuda")
        batch = _on_gpu(workload, workload.batch, model)
        # layers are chosen by what the step keeps, under its autocast
        with ExitStack() as stack:
            with _autocast(is_autocast):
                sketched = stack.enter_context(method.applied(model, batch))
            step = _step(model, batch, is_autocast=is_autocast)
            # kernels are compiled, and libraries take their workspaces
            step()
            peak = _peak_bytes(step)
            times = [_timed(step) for _ in range(steps)]
            largest = _largest_batch(workload, model, is_autocast=is_autocast, limit_gib=limit_gib)
        knobs = ("ratio", "sketch", "storage")
        yield {
            "model": workload.name,
            "batch": workload.batch,
            "seq": workload.length,
            "precision": "autocast to bfloat16" if is_autocast else "float32",
            "method": method.family,
            **{name: None if method.config is None else getattr(method.config, name) for name in knobs},
            "sketched_layers": len(sketched),
            "step_s": round(median(times), 6),
            "peak_bytes": peak,
            "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "limit_gib": limit_gib,
            "largest_batch": largest,
        } | origin("cuda")
        del model, batch, step
        _free()


def _on_gpu(workload: Workload, count: int, model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.to("cuda") for name, value in replace(workload, batch=count).sample(model).items()}


def _step(model: torch.nn.Module, batch: dict[str, Any], *, is_autocast: bool) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with _autocast(is_autocast):
            loss = model(**batch).loss
        loss.backward()

    return step


def _autocast(is_enabled: bool) -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, enabled=is_enabled)


def _timed(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _peak_bytes(step: Callable[[], None]) -> int:
    _free()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _largest_batch(workload: Workload, model: torch.nn.Module, *, is_autocast: bool, limit_gib: float) -> int:
    """Find the largest multiple of 16 sequences whose step runs within a limit; 0 if there is none."""
    # AdamW's states are as large as two copies of the parameters
    states = [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total))

    def runs(count: int) -> bool:
        _free()
        try:
            _step(model, _on_gpu(workload, count, model), is_autocast=is_autocast)()
        except torch.cuda.OutOfMemoryError:
            return False
        return True

    try:
        low, high = 0, 1
        while runs(high * _GRANULE):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if runs(middle * _GRANULE) else (low, middle)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del states
        model.zero_grad(set_to_none=True)
        _free()
    return low * _GRANULE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    parser = Parser(prog="python -m experiments.memory.gpu", description=__doc__.partition("\n")[0])
    add_models(parser, GPU_WORKLOADS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--limit", type=float, default=16.0, help="GiB for the largest batch (default: 16)")

    def work() -> int:
        options = parser.parse_args(arguments)
        if not torch.cuda.is_available():
            raise HarnessError(f"torch {torch.__version__} finds no GPU here; experiments.memory.run needs none")
        transformers.logging.set_verbosity_error()
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
        for workload in chosen(GPU_WORKLOADS, options.models):
            rows: list[dict[str, Any]] = []
            for is_autocast in (False, True):
                for row in measured_rows(workload, is_autocast=is_autocast, limit_gib=options.limit):
                    # an interrupted run keeps its rows
                    rows.append(row)
                    write_rows(options.results / GPU_FILE, rows, order=[each.name for each in GPU_WORKLOADS])
            print(f"{workload.name}: {len(rows)} rows", flush=True)
        print(gpu_table(options.results))
        return 0

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
