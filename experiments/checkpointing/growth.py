"""Measure how long planning takes for small and large graphs: `python -m experiments.checkpointing.growth`.

Chains of random costs have 100 to 100,000 ops, U-shapes 100 to 10,000 (100,000 take minutes), and RoBERTa has 12 and 48
layers. Seconds are the process's own on the processor; the bound is computed in them, and captures are not.
"""

from __future__ import annotations

import csv
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.blocks import table
from experiments.command_line import Parser, exit_status
from rmm_linear.checkpointing import Graph, capture, get_strategy
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.generators import chain, u_shape, with_backward
from rmm_linear.planning.simulate import peak_and_cost

from .models import WORKLOADS
from .run import RESULTS, origin

FILE = "growth.csv"
PERCENTS = (75, 50, 25)
_SIZES = (100, 1000, 10_000, 100_000)
_MOST_OF_U = 10_000
_LAYERS = (12, 48)
_ROBERTA = next(workload for workload in WORKLOADS if workload.name == "roberta-base")


def graphs() -> Iterator[tuple[str, Graph]]:
    """Yield graphs with their names, the small ones first."""
    for ops in _SIZES:
        draw = random.Random(0)
        sizes, costs = zip(*((draw.randint(1, 100), float(draw.randint(1, 9))) for _ in range(ops // 2)), strict=True)
        yield "chain", with_backward(chain(sizes, costs))
        if ops <= _MOST_OF_U:
            yield "U", with_backward(u_shape(ops // 4, size=1 << 20))
    for layers in _LAYERS:
        shape = replace(_ROBERTA.full, options={**_ROBERTA.full.options, "num_hidden_layers": layers})
        with _ROBERTA.without_contents(shape) as (model, batch):
            yield f"RoBERTa, {layers} layers", capture(model, batch, step=_ROBERTA.step).graph


def row_of(graph: Graph, percent: int) -> dict[str, Any]:
    """Plan a graph within a part of its peak.

    Returns:
        Seconds, and the extra cost as a part of the plain step's; None if no plan is found.
    """
    plain_bytes = peak_and_cost(graph, range(len(graph.ops)))[0]
    began = time.process_time()
    try:
        order = get_strategy("auto").plan(graph, plain_bytes * percent // 100).order
        extra: float | None = peak_and_cost(graph, order)[1] / graph.cost - 1
    except InfeasibleBudgetError:
        extra = None
    seconds = time.process_time() - began
    return {
        "ops": len(graph.ops),
        "budget_percent": percent,
        "seconds": round(seconds, 2),
        "extra_cost": None if extra is None else round(extra, 4),
    }


def growth_table(folder: Path) -> str:
    """Write the table of the committed rows, in Markdown.

    Args:
        folder: Where the rows are.
    """
    with (folder / FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        extra = f"{100 * float(row['extra_cost']):.1f} %" if row["extra_cost"] else "no plan found"
        cells = lines.setdefault((row["model"], row["ops"]), [row["model"], f"{int(row['ops']):,}"])
        cells.append(f"{float(row['seconds']):.1f} s ({extra})")
    return table(["graph", "ops", *(f"budget {percent} %" for percent in PERCENTS)], list(lines.values()))


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name, graph in graphs():
        for percent in PERCENTS:
            rows.append({"model": name} | row_of(graph, percent) | origin(_ROBERTA))
            print(rows[-1], flush=True)
            with (options.results / FILE).open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
