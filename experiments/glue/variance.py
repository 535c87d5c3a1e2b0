"""Measure how noisy sketched weight gradients are on real batches, and write the report.

python -m experiments.glue.variance against-bytes --model MODEL --data GLUE    # the grid, in closed form
python -m experiments.glue.variance headline --model MODEL --data GLUE         # its best cells, measured
python -m experiments.glue.variance over-training --model MODEL --data GLUE    # noise while a model trains
python -m experiments.glue.variance equal-bytes --model MODEL --data GLUE      # a ratio for each layer, and one for all
python -m experiments.glue.variance allocated --model MODEL --data GLUE        # every lever together
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import allocated, equal_bytes, over_training, sketch_noise
from .command_line import Parser, exit_status
from .errors import HarnessError
from .result_file import check_writable
from .sketch_noise import DEFAULT_OUTPUT, TASKS, Subject, read_records, write_records
from .variance_report import write_report


class _Command(NamedTuple):
    rows: Callable[[Subject, argparse.Namespace], Iterator[dict[str, Any]]]
    file: str
    help: str
    tasks: Sequence[str] = TASKS[:1]
    steps: int = 30


_COMMANDS = {
    "against-bytes": _Command(
        sketch_noise.against_bytes, sketch_noise.GRID_FILE, "relative variance against bytes, in closed form", TASKS
    ),
    "headline": _Command(
        sketch_noise.headline, sketch_noise.HEADLINE_FILE, "the grid's best cells and the Gaussian, with real sketches"
    ),
    "over-training": _Command(
        over_training.over_training, over_training.FILE, "noise while the model trains", steps=345
    ),
    "equal-bytes": _Command(
        equal_bytes.equal_bytes, equal_bytes.FILE, "a ratio for every layer against one for all, at equal bytes"
    ),
    "allocated": _Command(
        allocated.allocated, allocated.FILE, "every lever: low bits, the first token kept, a configuration a layer"
    ),
}
_LEAST = {"batch_size": 1, "steps": 0, "draws": 2, "every": 1, "batches": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    parser = Parser(prog="python -m experiments.glue.variance", description=__doc__.partition("\n")[0])
    words = "; ".join(f"{name}: {command.help}" for name, command in _COMMANDS.items())
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=words)
    parser.add_argument("--model", required=True, help="a folder that from_pretrained reads, a hub name, or demo")
    parser.add_argument("--data", required=True, help="a folder in the official GLUE layout, hub or demo")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="results folder")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of a batch (default: 32)")
    parser.add_argument("--tasks", nargs="+", help="whose batches (default: mrpc; of against-bytes also stsb and sst2)")
    parser.add_argument("--steps", type=int, help="training steps (default: 30; of over-training 345)")
    parser.add_argument("--every", type=int, default=10, help="of over-training: steps between measurements")
    parser.add_argument("--batches", type=int, help="to choose by (default: of equal-bytes 4, of allocated 2)")
    parser.add_argument("--draws", type=int, default=2500, help="of headline and allocated: sketches a cell")
    return exit_status(lambda: _run(parser.parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    command = _COMMANDS[options.command]
    options.steps = command.steps if options.steps is None else options.steps
    for name, bound in _LEAST.items():
        if (value := getattr(options, name)) is not None and value < bound:
            raise HarnessError(f"--{name.replace('_', '-')} {value} is below {bound}")
    check_writable(options.output)
    if options.command == "headline":
        # what is missing is better known before anything is loaded
        read_records(options.output / sketch_noise.GRID_FILE)
    records: list[dict[str, Any]] = []
    began, panel = time.perf_counter(), ""
    for task in options.tasks or command.tasks:
        for row in command.rows(Subject(task, options), options):
            records.append({"task": task, **row})
            # after each, for some take minutes
            write_records(options.output / command.file, records)
            last, panel = panel, ", ".join(f"{name} {row[name]}" for name in ("step", "padding", "rows") if name in row)
            if panel != last:
                print(f"{task}, {panel}: {time.perf_counter() - began:.0f} s so far", flush=True)
    if not records:
        raise HarnessError("no cell fits any budget of bytes; pass a larger --batch-size")
    print(write_report(options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
