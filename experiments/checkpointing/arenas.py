"""Find the least arenas of two online policies: `python -m experiments.checkpointing.arenas`.

Each model is captured at its published size without contents. DTR and Coop evict in one arena in the order of
addresses, for arenas of 1.5 down to .025 of the plain peak: an arena that is met does not mean that larger ones are.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments import results_by_model
from experiments.command_line import Parser, exit_status
from rmm_linear.checkpointing import capture
from rmm_linear.planning.strategies.zhang2023_coop import CoopRun, DtrInArena, least_arena

from .models import WORKLOADS
from .report import ARENAS_FILE
from .run import RESULTS, origin

_POLICIES: dict[str, type[CoopRun]] = {"DTR": DtrInArena, "Coop": CoopRun}


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(description=__doc__)
    # the LSTM has 32,001 ops
    names = [workload.name for workload in WORKLOADS if workload.name != "lstm"]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    options = parser.parse_args(arguments)
    for workload in results_by_model.chosen(WORKLOADS, options.models):
        with workload.without_contents(workload.full) as (model, batch):
            graph = capture(model, batch, step=workload.step).graph
        rows: list[dict[str, Any]] = []
        for policy, kind in _POLICIES.items():
            began = time.perf_counter()
            least, free = least_arena(graph, kind)
            found = {"least_arena": round(least, 4), "free_at_failure": round(free, 4)}
            found["scan_s"] = round(time.perf_counter() - began, 1)
            rows.append({"model": workload.name, "ops": len(graph.ops), "policy": policy} | found | origin(workload))
            print(workload.name, policy, found, flush=True)
        old: list[dict[str, Any]] = []
        if (RESULTS / ARENAS_FILE).exists():
            with (RESULTS / ARENAS_FILE).open(encoding="utf-8", newline="") as file:
                old = list(csv.DictReader(file))
        results_by_model.write_rows(RESULTS / ARENAS_FILE, rows, old=old, names=names)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
