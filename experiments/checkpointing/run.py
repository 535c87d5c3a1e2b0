"""Compare checkpointing strategies on real models: `python -m experiments.checkpointing.run`.

Every model is captured at several sizes. At its published one without contents: what each strategy plans is simulated,
with the gradients among the bytes and without. At a small one in earnest: schedules run, and what instruments of this
experiment's own measure stands beside what the simulator says and beside what users have without a planner. So they do
at published widths, on few examples: bytes, FLOPs and bits are compared, and nothing is timed.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
import transformers
from torch import Tensor, fx

import rmm_linear
from experiments import provenance, results_by_model
from experiments.command_line import HarnessError, Parser, exit_status
from rmm_linear.checkpointing import Capture, Graph, Schedule, available_strategies, capture, get_strategy, simulate
from rmm_linear.compiler.backend import Group, Options
from rmm_linear.planning.strategies import Proposal, choose

from .baselines import BLOCKS, BUDGET, BUDGETS, EAGER, checkpointed_blocks, memory_budget
from .instruments import all_equal, allocator_peak, difference, flops_of, peak_and_flops, time_ratios
from .models import WORKLOADS, Shape, Workload
from .report import FRONTIERS_FILE, MEASURED_FILE, PLANNED, read_rows, summary, write_report

RESULTS = Path(__file__).parent / "results"
# it proposes what all others propose
_ALL_OTHERS = "auto"
# of the plain peak, in percent; 0 stands for the least that a strategy can do
PERCENTS = (*range(100, 0, -1), 0)
EXECUTED = (80, 60, 40, 20, 0)
# a schedule that computes everything so many times more is simulated, and not run
_MOST_OVERHEAD = 4.0
_REPEATS = 5
Frontiers = dict[str, tuple[Proposal, ...]]


def op_flops(captured: Capture) -> list[int]:
    """Count the FLOPs of each op of a captured step."""

    def fake(argument: Any) -> Any:
        return pytree.tree_map_only(fx.Node, lambda source: source.meta["val"], argument)

    return [
        flops_of(node.target, fake(tuple(node.args)), fake(dict(node.kwargs)), node.meta["val"])
        for node in captured.nodes
    ]


def frontiers(graph: Graph, names: Sequence[str]) -> tuple[Frontiers, dict[str, float]]:
    """Plan a graph with every strategy.

    Returns:
        What each can do, and the seconds that it took; nothing of a strategy that refuses the graph.
    """
    found, seconds = {}, {}
    for name in names:
        start = time.perf_counter()
        try:
            found[name] = get_strategy(name).frontier(graph)
        except ValueError as error:
            print(f"{name} refuses a graph of {len(graph.ops)} ops: {error}", flush=True)
            continue
        seconds[name] = time.perf_counter() - start
    return found, seconds


def fitting(frontier: Sequence[Proposal], plain_peak: int, percent: int) -> Proposal | None:
    """Return the cheapest proposal within a budget.

    Args:
        frontier: Proposals.
        plain_peak: Peak of the plain program.
        percent: The budget in percent of it; 0 for the least that any proposal needs.

    Returns:
        The proposal, or None if none fits.
    """
    least = min(proposal.peak_bytes for proposal in frontier)
    budget = plain_peak * percent // 100 if percent else least
    fitting = [proposal for proposal in frontier if proposal.peak_bytes <= budget]
    return min(fitting, key=lambda proposal: (proposal.cost, proposal.peak_bytes), default=None)


def frontier_rows(
    captured: Capture, names: Sequence[str], *, with_freed: bool = False
) -> tuple[list[dict[str, Any]], Frontiers]:
    """Simulate what every strategy plans, for a range of budgets.

    Args:
        captured: The captured step.
        names: The strategies.
        with_freed: Whether to plan with the gradients freed as well.

    Returns:
        A row for each proposal that some budget chooses; and what each strategy can do, gradients kept.
    """
    flops = op_flops(captured)
    rows = []
    every: list[Frontiers] = []
    graphs = {"kept": captured.graph}
    if with_freed:
        graphs["freed"] = captured.graph.with_gradients_freed()
    for gradients, graph in graphs.items():
        plain = simulate(graph, Schedule.plain(graph))
        found, seconds = frontiers(graph, names)
        every.append(found)
        for name, frontier in found.items():
            last: Proposal | None = None
            for percent in PERCENTS:
                proposal = fitting(frontier, plain.peak_bytes, percent)
                if proposal is None or proposal is last:
                    continue
                last = proposal
                rows.append(
                    {
                        "gradients": gradients,
                        "ops": len(graph.ops),
                        "plain_peak_bytes": plain.peak_bytes,
                        "strategy": name,
                        "planning_s": round(seconds[name], 2),
                        "budget_percent": percent,
                        "peak_bytes": proposal.peak_bytes,
                        "extra_cost": round(proposal.cost / graph.cost - 1, 4),
                        "extra_flops": round(sum(flops[op] for op in proposal.order) / sum(flops) - 1, 4),
                    }
                )
    return rows, every[0]


class Measuring:
    """A model with its batch, and the plain step's gradients to compare with.

    Args:
        workload: The model.
        shape: Its size.
        repeats: How often each method is timed; 0 leaves times and the allocator's log out.
    """

    def __init__(self, workload: Workload, shape: Shape, repeats: int = _REPEATS) -> None:
        self.workload, self.repeats = workload, repeats
        self.model, self.batch = workload.at(shape)
        # what is timed against: what is done to the model, such as checkpointing its blocks, is not done to this one
        self._untouched = copy.deepcopy(self.model) if repeats else self.model
        self.inputs = [*self.model.parameters(), *self.model.buffers(), *self.batch]
        # given, and not made by `backward`: it would count
        self._tangent = torch.ones(())
        self._buffers = [buffer.clone() for buffer in self.model.buffers()]
        self._run(self.plain)
        self._reference = self._left_behind()
        self._plain_flops = self._measure(self.plain)[1]
        self._plain_allocated = allocator_peak(lambda: self._run(self.plain)) if repeats else None

    def plain(self) -> Tensor:
        """Run the step as it is written."""
        return self.workload.step(self.model, *self.batch)

    def _untouched_plain(self) -> Tensor:
        return self.workload.step(self._untouched, *self.batch)

    def _run(self, step: Callable[[], Tensor]) -> None:
        torch.manual_seed(1)
        step().backward(self._tangent)

    def _reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, content in zip(self.model.buffers(), self._buffers, strict=True):
                buffer.copy_(content)

    def _left_behind(self) -> tuple[list[Tensor | None], list[Tensor]]:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return gradients, [buffer.clone() for buffer in self.model.buffers()]

    def _measure(self, step: Callable[[], Tensor]) -> tuple[int, int]:
        self._reset()
        return peak_and_flops(lambda: self._run(step), [*self.inputs, self._tangent])

    def row(self, method: str, setting: str, step: Callable[[], Tensor], *, timed: bool = True) -> dict[str, Any]:
        """Measure a way of running the step.

        Args:
            method: Its name.
            setting: Its knob.
            step: Runs the forward pass, returns the loss.
            timed: Whether to time it as well, and to read the allocator's log.
        """
        peak, flops = self._measure(step)
        gradients, buffers = self._left_behind()
        row: dict[str, Any] = {
            "method": method,
            "setting": setting,
            "strategy": None,
            "simulated_peak_bytes": None,
            "peak_bytes": peak,
            "allocator_peak_bytes": None,
            "flops": flops,
            "extra_flops": round(flops / self._plain_flops - 1, 4),
            "extra_cost": None,
            **dict.fromkeys(("time_ratio", "time_ratio_q20", "time_ratio_q80", "repeats")),
            "same_gradients": all_equal(self._reference[0], gradients),
            "gradient_difference": difference(self._reference[0], gradients),
            "same_buffers": all_equal(self._reference[1], buffers),
            "note": None,
        }
        if timed and self.repeats:
            self._reset()
            row["allocator_peak_bytes"] = allocator_peak(lambda: self._run(step))
            del gradients
            self._reset()
            ratios = time_ratios(lambda: self._run(step), lambda: self._run(self._untouched_plain), self.repeats)
            row["time_ratio"] = round(statistics.median(ratios), 3)
            low, *_, high = statistics.quantiles(ratios, n=5, method="inclusive") if len(ratios) > 1 else ratios * 2
            row |= {"time_ratio_q20": round(low, 3), "time_ratio_q80": round(high, 3), "repeats": self.repeats}
        self._reset()
        return row


def measured_rows(
    measuring: Measuring, captured: Capture, found: Frontiers, *, budgets: Sequence[float] = BUDGETS
) -> Iterator[dict[str, Any]]:
    """Run the step in every way."""
    yield measuring.row(EAGER, "", measuring.plain)
    workload, model = measuring.workload, measuring.model
    blocks: dict[str, str | None] = dict(workload.blocks)
    if hasattr(model, "gradient_checkpointing_enable"):
        blocks = {"each block": None}
    for name, pattern in blocks.items():
        with checkpointed_blocks(model, pattern) as count:
            yield measuring.row(BLOCKS, name, measuring.plain) | {"note": f"{count} blocks"}
    for budget in (budget for budget in budgets if budget in workload.budgets):
        with memory_budget(workload.step, budget) as compiled:
            # compiles
            torch.manual_seed(1)
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            compiled(model, *measuring.batch).backward()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
            row = measuring.row(BUDGET, f"{budget:g}", lambda compiled=compiled: compiled(model, *measuring.batch))
            yield row | {"note": f"{graphs} graphs"}
    graph = captured.graph
    plain = simulate(graph, Schedule.plain(graph))
    every = [(name, proposal) for name, frontier in found.items() for proposal in frontier]
    done: set[tuple[int, ...]] = set()
    for percent in (100, *EXECUTED):
        # the cheapest of all strategies
        best = fitting([proposal for _, proposal in every], plain.peak_bytes, percent)
        if best is not None and best.order not in done:
            done.add(best.order)
            name = next(name for name, proposal in every if proposal is best)
            yield _planned_row(measuring, captured, name, best, percent, timed=True)
    for name, frontier in found.items():
        for percent in (50, 0):
            proposal = fitting(frontier, plain.peak_bytes, percent)
            if proposal is not None and proposal.order not in done:
                done.add(proposal.order)
                if proposal.cost <= (1 + _MOST_OVERHEAD) * graph.cost:
                    yield _planned_row(measuring, captured, name, proposal, percent, timed=False)


def _planned_row(
    measuring: Measuring, captured: Capture, name: str, proposal: Proposal, percent: int, *, timed: bool
) -> dict[str, Any]:
    graph = captured.graph
    schedule = choose(graph, [proposal], proposal.peak_bytes, name)
    group = Group(Options(schedule=schedule, executor="exact"))
    # each schedule is compiled anew: it has no more recompilations than one
    torch._dynamo.reset()
    step = torch.compile(measuring.workload.step, backend=group.compile, fullgraph=True, dynamic=False)

    def planned() -> Tensor:
        runs = group.runs
        loss = step(measuring.model, *measuring.batch)
        assert group.runs == runs + 1, "the step did not run by its plan"
        return loss

    # Dynamo traces nothing under the instruments; what is compiled already runs under them
    planned()
    row = measuring.row(PLANNED, f"{percent} %" if percent else "least", planned, timed=timed)
    return row | {
        "strategy": name,
        "simulated_peak_bytes": simulate(graph, schedule).peak_bytes,
        "extra_cost": round(proposal.cost / graph.cost - 1, 4),
    }


# as it is when a run begins: results that it writes are no change of the code
_commit = cache(provenance.commit)


def origin(workload: Workload) -> dict[str, Any]:
    """Say what rows of a model were made by."""
    commit, hardware = _commit(), provenance.hardware(torch.device("cpu"))
    return {
        "rmm_linear": rmm_linear.__version__,
        "commit": (commit["commit"] or "none")[:7] + ("+" if commit["modified"] else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__ if workload.is_hugging_face else None,
        "hardware": f"{hardware['cpu']}, {hardware['torch_threads']} of {hardware['cpu_cores']} cores",
    }


def _sizes(workload: Workload, shape: Shape, name: str) -> dict[str, Any]:
    with workload.without_contents(shape) as (model, _):
        parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sizes = {"batch": shape.batch, "size": shape.size, "parameter_bytes": parameters}
    return {"model": workload.name, "shape": name, **sizes}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a results file; what it holds of models that are not measured anew stays.

    Args:
        path: The CSV file.
        rows: The new rows.
    """
    old = read_rows(path) if path.exists() else []
    results_by_model.write_rows(path, rows, old=old, names=[workload.name for workload in WORKLOADS])


def run_workload(
    workload: Workload,
    *,
    names: Sequence[str],
    full: bool = True,
    runs: bool = True,
    repeats: int = _REPEATS,
    budgets: Sequence[float] = BUDGETS,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare everything on one model.

    Args:
        workload: The model.
        names: The strategies.
        full: Whether to plan its published size as well, and its published widths.
        runs: Whether schedules and baselines run; else plans are simulated alone.
        repeats: How often each method is timed.
        budgets: Of torch's partitioner.
    """
    made_by = origin(workload)
    simulated, measured = [], []
    if full:
        with workload.without_contents(workload.full) as (model, batch):
            captured = capture(model, batch, step=workload.step)
        sizes = _sizes(workload, workload.full, "full")
        simulated += [sizes | row | made_by for row in frontier_rows(captured, names, with_freed=True)[0]]
        del captured, model, batch
    # times belong to the small size; a wide one takes seconds a step, and is there for its bytes and bits
    for name, shape, times in (("small", workload.small, repeats), ("wide", workload.wide if full else None, 0)):
        if shape is None:
            continue
        measuring = Measuring(workload, shape, times)
        captured = capture(measuring.model, measuring.batch, step=workload.step)
        sizes = _sizes(workload, shape, name)
        rows, found = frontier_rows(captured, names)
        simulated += [sizes | row | made_by for row in rows]
        for row in measured_rows(measuring, captured, found, budgets=budgets) if runs else ():
            measured.append(sizes | row | made_by)
            print(_line(measured[-1]), flush=True)
        del measuring, captured, found
        gc.collect()
    return simulated, measured


def _line(row: dict[str, Any]) -> str:
    simulated = row["simulated_peak_bytes"]
    said = "" if simulated is None else f" ({simulated - row['peak_bytes']:+d} simulated)"
    took = "" if row["time_ratio"] is None else f", {row['time_ratio']:.2f} of the time"
    what = " ".join(part for part in (row["method"], row["setting"], row["strategy"]) if part)
    peak, flops = row["peak_bytes"] / 2**20, 100 * row["extra_flops"]
    return (
        f"{row['model']}, {row['shape']}: {what}: {peak:.2f} MiB{said}, {flops:+.1f} % FLOPs{took}"
        f"{'' if row['same_gradients'] else ', other gradients'}"
    )


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m experiments.checkpointing.run", description=__doc__.partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--output", type=Path, help="folder of the results (default: this experiment's)")
    parser.add_argument("--quick", action="store_true", help="small sizes alone, two budgets; writes no results")
    parser.add_argument("--simulate", action="store_true", help="plan anew and run nothing; measured rows stay")
    options = parser.parse_args(arguments)
    chosen = results_by_model.chosen(WORKLOADS, options.models)
    strategies = [name for name in available_strategies() if name != _ALL_OTHERS]
    transformers.logging.set_verbosity_error()
    # of names that are to change in transformers 6
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
    if options.quick and (options.output is not None or options.simulate):
        raise HarnessError("--quick runs and writes no results; leave --output and --simulate out")
    output = results_by_model.output_folder(options.output, RESULTS)
    _commit()
    quick: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for workload in chosen:
        if options.quick:
            parts = run_workload(workload, names=strategies, full=False, repeats=1, budgets=(0.5, 0.1))
            for all_rows, rows in zip(quick, parts, strict=True):
                all_rows += rows
            continue
        simulated, measured = run_workload(workload, names=strategies, runs=not options.simulate)
        # after each model: an interrupted run keeps what it has
        write_rows(output / FRONTIERS_FILE, simulated)
        if measured:
            write_rows(output / MEASURED_FILE, measured)
        gc.collect()
    print(summary(*quick) if options.quick else write_report(output))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the user has something to put right.
    """
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
