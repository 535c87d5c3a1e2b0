"""Plan captured steps, and run nothing: `python -m experiments.checkpointing.plans KIND`.

Each model is captured at its published size on the meta device, which takes no memory.

- `strategies`: the plans of every strategy, budget by budget.
- `bounds`: the plans of `auto` beside the linear program's bound of any plan.
- `growth`: the seconds that `auto` takes for small and large graphs, without the capture: chains of random costs,
  U-shapes, and RoBERTa of 12 and 48 layers. These are seconds of this process on the processor.
- `arenas`: the least arenas of two online policies, DTR and Coop, which evict in one arena in the order of addresses,
  for arenas of 1.5 down to .025 of the plain peak: an arena that is met does not mean that all larger arenas are. And
  the arena that OLLA's best-fit addresses of the plain program take.
- `energy`: time and energy of POET's plans on the devices of devices.csv, and of paging alone and recomputation alone.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.checkpointing.generators import chain, u_shape, with_backward
from experiments.command_line import Parser, add_models
from experiments.provenance import origin
from experiments.rows import read_rows, write_rows
from rmm_linear.checkpointing import Graph, available_strategies, capture, get_strategy
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.relaxation import least_extra_cost, relaxations
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.jain2020_checkmate import Program
from rmm_linear.planning.strategies.patil2022_poet import PagingProgram
from rmm_linear.planning.strategies.zhang2023_coop import CoopRun

from .arenas import DtrInArena, arena_for, least_arena, lifetimes
from .models import Shape, Workload, of_shape
from .report import RESULTS, write_report

# `auto` proposes the orders of all others
_ALL_OTHERS = "auto"
# budgets in percent of the plain peak
BOUNDS_PERCENTS, GROWTH_PERCENTS, ENERGY_PERCENTS = (80, 60, 40, 25, 15), (75, 50, 25), (80, 60, 40)
_CHAINS, _US, _LAYERS = (100, 1000, 10_000, 100_000), (100, 1000, 10_000), (12, 48)
DEVICES = Path(__file__).parent / "devices.csv"
PUBLISHED = of_shape("published")


def _captured(workload: Workload, shape: Shape, costs: str = "roofline") -> Graph:
    model, batch = workload.without_contents(shape)
    return capture(model, kwargs=batch, step=workload.step, costs=costs).graph


def _plain_bytes(graph: Graph) -> int:
    return peak_and_cost(graph, range(len(graph.ops)))[0]


def _auto_cost(graph: Graph, budget: int) -> float | None:
    """The extra cost of auto's plan as a share of the plain step's; None if it finds none."""
    try:
        return round(peak_and_cost(graph, get_strategy("auto").plan(graph, budget).order)[1] / graph.cost - 1, 4)
    except InfeasibleBudgetError:
        return None


def strategies(workload: Workload, graph: Graph) -> Iterator[dict[str, Any]]:
    """Plan with every strategy: a row for each proposal that some budget, in percent of the plain peak, chooses."""
    shape, plain_bytes = workload.shapes["published"], _plain_bytes(graph)
    parameters = sum(each.nbytes for each in workload.without_contents(shape)[0].parameters())
    for name in available_strategies():
        if name == _ALL_OTHERS:
            continue
        began = time.perf_counter()
        try:
            frontier = get_strategy(name).frontier(graph)
        except ValueError as error:
            print(f"{name} refuses a graph of {len(graph.ops)} ops: {error}", flush=True)
            continue
        seconds, last = round(time.perf_counter() - began, 2), None
        least = min(proposal.peak_bytes for proposal in frontier)
        # 0 stands for the least that the strategy can do
        for percent in range(100, -1, -1):
            budget = plain_bytes * percent // 100 if percent else least
            fitting = [proposal for proposal in frontier if proposal.peak_bytes <= budget]
            best = min(fitting, key=lambda proposal: (proposal.cost, proposal.peak_bytes), default=None)
            if best is None or best is last:
                continue
            last = best
            row: dict[str, Any] = {"batch": shape.batch, "size": shape.size, "parameter_bytes": parameters}
            row |= {"ops": len(graph.ops), "plain_peak_bytes": plain_bytes, "strategy": name, "planning_s": seconds}
            row |= {"budget_percent": percent, "peak_bytes": best.peak_bytes}
            yield row | {"extra_cost": round(best.cost / graph.cost - 1, 4)}


def bounds(_: Workload, graph: Graph) -> Iterator[dict[str, Any]]:
    """Plan with `auto`, and compute the bound."""
    programs, plain_bytes = relaxations(graph), _plain_bytes(graph)
    for percent in BOUNDS_PERCENTS:
        budget = plain_bytes * percent // 100
        bound = least_extra_cost(programs, budget)
        row: dict[str, Any] = {"ops": len(graph.ops), "plain_peak_bytes": plain_bytes}
        row |= {"budget_percent": percent, "extra_cost": _auto_cost(graph, budget)}
        yield row | {"bound": round(bound / graph.cost, 4) if bound < float("inf") else None}


def arenas(_: Workload, graph: Graph) -> Iterator[dict[str, Any]]:
    """Give addresses to a step; then find the least arena of each policy, and the free part where it fails."""
    policies: dict[str, Callable[[], tuple[float, float | None]]] = {
        "OLLA": lambda: (arena_for(lifetimes(graph, range(len(graph.ops)))).size_bytes / _plain_bytes(graph), None),
        "DTR": lambda: least_arena(graph, DtrInArena),
        "Coop": lambda: least_arena(graph, CoopRun),
    }
    for policy, measure in policies.items():
        began = time.perf_counter()
        least, free = measure()
        row = {"ops": len(graph.ops), "policy": policy, "least_arena": round(least, 4)}
        row |= {"free_at_failure": None if free is None else round(free, 4)}
        yield row | {"scan_s": round(time.perf_counter() - began, 1)}


def energy(workload: Workload, graph: Graph) -> Iterator[dict[str, Any]]:
    """Plan for each device: by paging and computing again, by either alone, each for the least energy."""
    flops, moved = (_captured(workload, workload.shapes["published"], costs) for costs in ("flops", "bytes"))
    plain_bytes = _plain_bytes(graph)
    for device in read_rows(DEVICES):
        ops = tuple(
            replace(op, cost=max(op.cost / device["flops_per_s"], other.cost / device["memory_bytes_per_s"]))
            for op, other in zip(flops.ops, moved.ops, strict=True)
        )
        rate = (1 / device["page_out_bytes_per_s"] + 1 / device["page_in_bytes_per_s"]) / 2
        both = replace(graph, ops=ops, cost_unit="s", page_cost=rate)
        once = replace(both, ops=tuple(replace(op, is_recomputable=False) for op in ops))
        weight = device["page_watts"] / device["watts"]
        ways: dict[str, Program] = {
            "POET": PagingProgram(both, page_weight=weight),
            "paging alone": PagingProgram(once, page_weight=weight),
            "computing again alone": Program(both),
        }
        for way, program in ways.items():
            for percent in ENERGY_PERCENTS:
                began = time.perf_counter()
                found = program.solve(plain_bytes * percent // 100)
                row = {"ops": len(ops), "plain_peak_bytes": plain_bytes, "device": device["device"], "way": way}
                row |= {"budget_percent": percent, "status": found.status, "time": None, "energy": None}
                if found.order is not None:
                    row["time"] = round(peak_and_cost(both, found.order)[1] / both.cost, 4)
                    row["energy"] = round(found.cost / both.cost, 4)
                yield row | {"planning_s": round(time.perf_counter() - began, 1)}


def _growing_graphs() -> Iterator[tuple[str, Graph]]:
    for ops in _CHAINS:
        draw = random.Random(0)
        sizes, costs = zip(*((draw.randint(1, 100), float(draw.randint(1, 9))) for _ in range(ops // 2)), strict=True)
        yield "chain", with_backward(chain(sizes, costs))
        if ops in _US:
            yield "U", with_backward(u_shape(ops // 4, size=1 << 20))
    roberta = next(workload for workload in PUBLISHED if workload.name == "roberta")
    shape = roberta.shapes["published"]
    for layers in _LAYERS:
        options = shape.options | {"num_hidden_layers": layers}
        yield f"RoBERTa, {layers} layers", _captured(roberta, replace(shape, options=options))


def growth() -> Iterator[dict[str, Any]]:
    """Plan graphs of several sizes within parts of their peaks, the small ones first."""
    for name, graph in _growing_graphs():
        for percent in GROWTH_PERCENTS:
            budget, began = _plain_bytes(graph) * percent // 100, time.process_time()
            extra = _auto_cost(graph, budget)
            row = {"model": name, "ops": len(graph.ops), "budget_percent": percent}
            yield row | {"seconds": round(time.process_time() - began, 2), "extra_cost": extra}


_OF_MODELS: dict[str, tuple[str, Callable[[Workload, Graph], Iterator[dict[str, Any]]]]] = {
    "strategies": ("frontiers.csv", strategies),
    "bounds": ("bounds.csv", bounds),
    "arenas": ("arenas.csv", arenas),
    "energy": ("energy.csv", energy),
}


def _work(options: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    for row in growth() if options.kind == "growth" else ():
        found.append(row | origin())
        print(row, flush=True)
        write_rows(options.results / "growth.csv", found)
    file, rows = _OF_MODELS.get(options.kind, ("", bounds))
    for workload in (each for each in PUBLISHED if file and each.name in options.models):
        graph = _captured(workload, workload.shapes["published"])
        of_model = [{"model": workload.title} | row | origin() for row in rows(workload, graph)]
        write_rows(options.results / file, of_model, order=[each.title for each in PUBLISHED])
        print(f"{workload.title}: {len(of_model)} rows", flush=True)
    print(write_report(options.results))


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("kind", choices=(*_OF_MODELS, "growth"))
    add_models(parser, PUBLISHED)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    sys.exit(parser.run(_work))
