"""What does a VarianceMonitor cost a training run? Steps with and without one, in pairs, on the same batches.

    python -m experiments.glue.monitor_cost --model <folder or demo> --data <GLUE folder> --output cost.json

Each pair is two training steps (forward, backward, optimizer) on one batch, one of them monitored, in the order A B,
B A, A B, and so on, so that a drift of the machine's speed meets both alike. A window is `every` pairs, in which each
layer is measured once: its overhead is the time of its monitored steps over that of the others, less 1.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.variance.monitor import VarianceMonitor

from . import provenance
from .comparison import Quantiles
from .demo import DEMO_TASK
from .result_file import write_result
from .sketch_noise import Subject

_WARM_UP_PAIRS = 3
# what a step takes, on the wall and of this process's processor time
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "process": time.process_time}


def _subject(options: argparse.Namespace) -> tuple[nn.Module, Iterator[dict[str, Any]]]:
    task = DEMO_TASK.name if options.model == "demo" else "mrpc"
    subject = Subject(task, options)
    convert_linears(subject.model, config=RMMConfig(ratio=0.5))
    return subject.model.train(), (batch for _ in itertools.count() for batch in subject.batches(1))


def measure(
    model: nn.Module, batches: Iterator[dict[str, Any]], *, every: int, windows: int
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Return, by clock, the seconds of each pair's step without and with the monitor; and the number of records."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seconds: dict[str, list[tuple[float, float]]] = {clock: [] for clock in _CLOCKS}
    state: dict[str, Any] | None = None

    def step(batch: dict[str, Any], monitor: VarianceMonitor | None) -> list[float]:
        before = [clock() for clock in _CLOCKS.values()]
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        return [clock() - began for clock, began in zip(_CLOCKS.values(), before, strict=True)]

    gc.collect()
    gc.freeze()
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noise.jsonl"
        for pair in range(-_WARM_UP_PAIRS, windows * every):
            batch = next(batches)
            # the garbage of making monitors and batches is not the monitor's cost
            gc.collect()
            times: dict[bool, list[float]] = {}
            for watched in (False, True) if pair % 2 == 0 else (True, False):
                # made in both cases: what runs just before a step decides what the caches hold
                with VarianceMonitor(model, every=every, path=path) as monitor:
                    if state is not None:
                        monitor.load_state_dict(state)
                    if watched:
                        times[True] = step(batch, monitor)
                        state = monitor.state_dict() if pair >= 0 else None
                    else:
                        monitor.close()
                        times[False] = step(batch, None)
            if pair >= 0:
                for clock, without, watched_ in zip(_CLOCKS, times[False], times[True], strict=True):
                    seconds[clock].append((without, watched_))
        records = len(path.read_text(encoding="utf-8").splitlines())
    gc.enable()
    gc.unfreeze()
    return seconds, records


def summarised(pairs: Sequence[tuple[float, float]], every: int) -> dict[str, Any]:
    """Median and 20 and 80 % quantiles of the windows' overheads, in percent, and what they are made of."""
    windows = [pairs[start : start + every] for start in range(0, len(pairs), every)]
    overheads = [100 * (sum(b for _, b in window) / sum(a for a, _ in window) - 1) for window in windows]
    found = Quantiles.of(overheads)
    differences = Quantiles.of([1000 * (b - a) for a, b in pairs])
    return {
        "overhead_percent": {"low": found.low, "median": found.median, "high": found.high},
        "overhead_percent_of_all": 100 * (sum(b for _, b in pairs) / sum(a for a, _ in pairs) - 1),
        "overhead_percent_by_window": overheads,
        "step_ms_without": 1000 * statistics.median(a for a, _ in pairs),
        "difference_ms": {"low": differences.low, "median": differences.median, "high": differences.high},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, or a folder that from_pretrained reads (on MRPC)")
    parser.add_argument("--data", default="demo", help="demo, or a folder in the official GLUE layout")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--every", type=int, default=50, help="the monitor's interval")
    parser.add_argument("--windows", type=int, default=5, help="intervals to time")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, batches = _subject(options)
    seconds, records = measure(model, batches, every=options.every, windows=options.windows)
    result = {
        "what": "cost of VarianceMonitor: steps with it over steps without it, in pairs, per window of `every` steps",
        "model": Path(options.model).name,
        "batch_size": options.batch_size,
        "every": options.every,
        "pairs": options.windows * options.every,
        "records": records,
        **{clock: summarised(pairs, options.every) for clock, pairs in seconds.items()},
        "hardware": provenance.hardware(torch.device("cpu")),
        "versions": provenance.versions(),
        **provenance.commit(),
    }
    write_result(options.output, result)
    for clock in _CLOCKS:
        print(clock, result[clock]["overhead_percent"], "step", round(result[clock]["step_ms_without"], 1), "ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
