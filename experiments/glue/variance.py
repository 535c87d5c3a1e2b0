"""Measure the noise of sketched weight gradients on real batches.

    python -m experiments.glue.variance against-bytes --model MODEL --data GLUE    # the grid, in closed form
    python -m experiments.glue.variance headline --model MODEL --data GLUE         # its best cells, measured
    python -m experiments.glue.variance over-training --model MODEL --data GLUE    # noise while a model trains
    python -m experiments.glue.variance equal-bytes --model MODEL --data GLUE      # ratios of their own against one
    python -m experiments.glue.variance allocated --model MODEL --data GLUE        # every lever together

`sketch_noise` says what the first two measure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command_line import Parser, exit_status
from .errors import HarnessError
from .sketch_noise import (
    DEFAULT_OUTPUT,
    GRID_FILE,
    HEADLINE_FILE,
    TASKS,
    TRAINING_STEPS,
    against_bytes,
    headline,
    read_records,
    write_records,
)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.glue.variance",
        description="Measure how noisy sketched weight gradients are, on real batches.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("against-bytes", "relative variance against bytes: the grid, in closed form"),
        ("headline", "the grid's best cells and the Gaussian sketch, with real sketches"),
        ("over-training", "the sketches' noise next to the minibatches', while the model trains"),
        ("equal-bytes", "a ratio for every layer against one for all, at equal bytes"),
        ("allocated", "every lever together: low bits, the first token kept, a configuration for every layer"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--model", required=True, help="a folder that from_pretrained reads, a hub name, or demo")
        command.add_argument("--data", required=True, help="a folder in the official GLUE layout, hub or demo")
        command.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="results folder")
        command.add_argument("--batch-size", type=int, default=32, help="sequences of a batch (default: 32)")
        if name == "against-bytes":
            command.add_argument("--tasks", nargs="+", default=list(TASKS), help=f"(default: {' '.join(TASKS)})")
            command.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
            command.add_argument("--seed", type=int, default=0, help="seed of head, order and dropout")
            continue
        command.add_argument("--task", default=TASKS[0], help=f"whose batches (default: {TASKS[0]})")
        if name == "headline":
            command.add_argument("--draws", type=int, default=2500, help="sketches a cell (default: 2500)")
            command.add_argument(
                "--gaussian",
                action=argparse.BooleanOptionalAction,
                default=True,
                help="measure the Gaussian as well, which takes most of the time",
            )
        else:
            default = TRAINING_STEPS[name]
            command.add_argument("--steps", type=int, default=default, help=f"training steps (default: {default})")
            command.add_argument("--seed", type=int, default=0, help="seed of head, order and dropout")
        if name == "over-training":
            command.add_argument("--every", type=int, default=10, help="steps between measurements (default: 10)")
        if name == "equal-bytes":
            command.add_argument("--batches", type=int, default=4, help="to choose by, and to compare on (default: 4)")
        if name == "allocated":
            command.add_argument("--batches", type=int, default=2, help="to choose by (default: 2)")
            command.add_argument("--draws", type=int, default=2500, help="sketches a cell (default: 2500)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the user has something to put right.
    """
    return exit_status(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    _check(options)
    commands = {
        "against-bytes": _against_bytes,
        "headline": _headline,
        "over-training": _over_training,
        "equal-bytes": _equal_bytes,
        "allocated": _allocated,
    }
    commands[options.command](options)

    from .variance_report import write_report

    print(write_report(options.output))
    return 0


def _check(options: argparse.Namespace) -> None:
    from .result_file import check_writable

    least = {"batch_size": 1, "steps": 0, "draws": 2, "seed": 0, "every": 1, "batches": 1}
    for name, bound in least.items():
        if getattr(options, name, bound) < bound:
            raise HarnessError(f"--{name.replace('_', '-')} {getattr(options, name)} is below {bound}")
    check_writable(options.output)


def _against_bytes(options: argparse.Namespace) -> None:
    records: list[dict[str, Any]] = []
    panels = against_bytes(
        options.tasks,
        model=options.model,
        data=options.data,
        steps=options.steps,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    began = time.perf_counter()
    for rows in panels:
        records += rows
        if rows:
            of = rows[0]
            where = f"{of['task']}, step {of['step']}, padded {of['padding']}, {of['rows']} rows"
            print(f"{where}: {len(rows)} cells, {time.perf_counter() - began:.0f} s so far", flush=True)
    if not records:
        raise HarnessError("no cell fits any budget of bytes; pass a larger --batch-size")
    write_records(options.output / GRID_FILE, records)


def _headline(options: argparse.Namespace) -> None:
    records: list[dict[str, Any]] = []
    cells = headline(
        read_records(options.output / GRID_FILE),
        task=options.task,
        model=options.model,
        data=options.data,
        draws=options.draws,
        gaussian=options.gaussian,
        batch_size=options.batch_size,
    )
    for record in cells:
        records.append(record)
        # after each: a cell takes minutes
        write_records(options.output / HEADLINE_FILE, records)
        print(
            f"padded {record['padding']}, {record['rows']} rows, budget {record['budget']}, {record['which']}:"
            f" {record['measured']:.4g} ± {record['standard_error']:.2g} (closed form {record['closed_form']:.4g},"
            f" z {record['z']:+.1f}), {record['seconds']} s",
            flush=True,
        )


def _over_training(options: argparse.Namespace) -> None:
    from .over_training import FILE, over_training

    began = time.perf_counter()
    records = over_training(
        options.task,
        model=options.model,
        data=options.data,
        steps=options.steps,
        every=options.every,
        seed=options.seed,
        batch_size=options.batch_size,
        on_step=lambda step: print(f"step {step}, {time.perf_counter() - began:.0f} s so far", flush=True),
    )
    write_records(options.output / FILE, records)


def _equal_bytes(options: argparse.Namespace) -> None:
    from .equal_bytes import FILE, equal_bytes

    records = equal_bytes(
        options.task,
        model=options.model,
        data=options.data,
        steps=options.steps,
        batches=options.batches,
        seed=options.seed,
        batch_size=options.batch_size,
        on_done=lambda row: print(
            f"{row['storage'] or 'no storage'}, ratio {row['ratio']:g}, {row['objective']}: relative variance"
            f" {row['held_out_uniform_total']:.4g} -> {row['held_out_allocated_total']:.4g} (mean over layers"
            f" {row['held_out_uniform_mean']:.4g} -> {row['held_out_allocated_mean']:.4g})",
            flush=True,
        ),
    )
    write_records(options.output / FILE, records)


def _allocated(options: argparse.Namespace) -> None:
    from .allocated import FILE, allocated

    records = allocated(
        options.task,
        model=options.model,
        data=options.data,
        steps=options.steps,
        batches=options.batches,
        draws=options.draws,
        seed=options.seed,
        batch_size=options.batch_size,
        on_done=lambda row: print(
            f"padded {row['padding']}, {row['rows']} rows, budget {row['budget']}, {row['way']}:"
            f" {row['closed_form']:.4g} at {row['bytes']:.4f} ({row['configs']}), {row['seconds']} s",
            flush=True,
        ),
    )
    write_records(options.output / FILE, records)


if __name__ == "__main__":
    sys.exit(main())
