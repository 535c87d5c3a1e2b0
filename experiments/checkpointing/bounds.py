"""Compare plans with the bound of any plan: `python -m experiments.checkpointing.bounds`.

Each model is captured at its published size without contents. At each budget `auto` plans it, the linear program bounds
the extra cost of any schedule, and the four published strategies that `auto` asks say what they do without it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.command_line import Parser, exit_status
from rmm_linear.checkpointing import Graph, capture, get_strategy
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.relaxation import least_extra_cost, relaxations
from rmm_linear.planning.simulate import peak_and_cost

from .models import WORKLOADS
from .run import RESULTS, origin

FILE = "bounds.csv"
PERCENTS = (80, 60, 40, 25, 15)
# The published strategies take too long for graphs of more ops.
_MOST_OPS = 2000


def rows_of(graph: Graph) -> Iterator[dict[str, Any]]:
    """Plan a graph for each budget.

    Yields:
        Parts of the plain step's cost: of `auto`'s plan, of the bound, of the published strategies; None if none fits,
        and of these for graphs of more than 2,000 ops.
    """
    auto, programs = get_strategy("auto"), relaxations(graph)
    frontier = auto.frontier(graph) if len(graph.ops) <= _MOST_OPS else ()
    plain_bytes = peak_and_cost(graph, range(len(graph.ops)))[0]
    for percent in PERCENTS:
        budget = plain_bytes * percent // 100
        try:
            cost: float | None = peak_and_cost(graph, auto.plan(graph, budget).order)[1]
        except InfeasibleBudgetError:
            cost = None
        fitting = [proposal.cost for proposal in frontier if proposal.peak_bytes <= budget]
        bound = least_extra_cost(programs, budget)
        yield {
            "ops": len(graph.ops),
            "plain_peak_bytes": plain_bytes,
            "budget_percent": percent,
            "extra_cost": None if cost is None else round(cost / graph.cost - 1, 4),
            "bound": round(bound / graph.cost, 4) if bound < float("inf") else None,
            "extra_cost_published": round(min(fitting) / graph.cost - 1, 4) if fitting else None,
        }


def bounds_table(folder: Path) -> str:
    """Write the table of the committed rows, in Markdown.

    Args:
        folder: Where the rows are.
    """
    with (folder / FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        f"| model | {' | '.join(f'{percent} %' for percent in PERCENTS)} |",
        f"|---|{'---|' * len(PERCENTS)}",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [_cell(row) for row in rows if row["model"] == model]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, str]) -> str:
    parts = [_percent(row[name]) for name in ("extra_cost", "bound", "extra_cost_published")]
    return " / ".join(parts)


def _percent(share: str) -> str:
    return f"{100 * float(share):.1f}" if share else "-"


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(description=__doc__)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    options = parser.parse_args(arguments)
    path = options.results / FILE
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] not in options.models]
    for workload in WORKLOADS:
        if workload.name not in options.models:
            continue
        with workload.without_contents(workload.full) as (model, batch):
            graph = capture(model, batch, step=workload.step).graph
        for row in rows_of(graph):
            rows.append({"model": workload.name} | row | origin(workload))
            print(workload.name, row, flush=True)
        order = {name: place for place, name in enumerate(names)}
        rows.sort(key=lambda row: (order[row["model"]], -int(row["budget_percent"])))
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
