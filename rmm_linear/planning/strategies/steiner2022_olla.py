"""OLLA: Steiner et al. 2022, "Optimizing the Lifetime and Location of Arrays" (arXiv 2210.12924).

Nothing is computed twice: the order of the ops with the least peak is proposed (the paper's *lifetimes*, section 3.2).
Its *locations* give each storage an address; no schedule has addresses, and `experiments.checkpointing.arenas` computes
them.

The paper writes integer programs over (storage, step). Here it is a constraint program: with p(v) the place of op v,

    p(u) < p(v) for each op u that v reads from;  all places differ
    storage x is in memory from p(writer) to e(x) >= p(v) for each reader v; outputs to the end
    minimise the capacity of one cumulative constraint over these intervals

The paper's bounds of places by ancestors and descendants (its ASAP and ALAP, section 4.1) are the variables' domains.
The solver begins with the plain program's order.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

from rmm_linear.byte_sizes import readable
from rmm_linear.planning.constraint_solver import constraint_programs, search
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import Proposal, peak_and_cost, plain_peak_bytes
from rmm_linear.planning.strategies.base import Strategy, checked_budget, choose


def least_peak_order(
    graph: Graph, *, time_limit_s: float = 20.0, deterministic_limit: float | None = None
) -> tuple[tuple[int, ...], int]:
    """Return an order of the ops, each once, with the least peak that is found within the limits, and a bound of it.

    Raises:
        ImportError: If OR-tools, which solves the program, is not installed.
    """
    programs = constraint_programs("OLLA")
    model, count = programs.CpModel(), len(graph.ops)
    before = _before(graph)
    after = [sum(earlier >> op & 1 for earlier in before) for op in range(count)]
    places = [model.new_int_var(before[op].bit_count(), count - 1 - after[op], f"place {op}") for op in range(count)]
    model.add_all_different(places)
    for op, edges in enumerate(_edges(graph)):
        for earlier in edges:
            model.add(places[earlier] < places[op])
    intervals, heights = [], []
    for index, writer in enumerate(graph.writer):
        end = model.new_int_var(0, count, f"end {index}")
        needed = {*graph.readers[index]}
        needed.update(op for op in range(count) if index in graph.freed and index in graph.ops[op].holds_back)
        if index in graph.results:
            needed.update(graph.writer[other] for other in graph.results)
        if index in graph.outputs:
            model.add(end == count)
        for reader in needed:
            model.add(end > places[reader])
        model.add(end > places[writer])
        length = model.new_int_var(1, count, f"length {index}")
        intervals.append(model.new_interval_var(places[writer], length, end, f"lives {index}"))
        heights.append(graph.sizes[index])
    for op in range(count):
        if graph.ops[op].temporary_bytes > 0:
            intervals.append(model.new_fixed_size_interval_var(places[op], 1, f"temporary {op}"))
            heights.append(graph.ops[op].temporary_bytes)
        model.add_hint(places[op], op)
    plain = tuple(range(count))
    peak = model.new_int_var(0, plain_peak_bytes(graph), "peak")
    model.add_cumulative(intervals, heights, peak)
    model.minimize(peak)
    # several workers find another one of equally good orders each time, also where they wait for each other
    workers = 8 if deterministic_limit is None else 1
    found = search(
        programs, model, time_limit_s=time_limit_s, deterministic_limit=deterministic_limit, num_workers=workers
    )
    least_bytes = max(0, round(found.solver.best_objective_bound))
    if found.status not in ("optimal", "found"):
        return plain, least_bytes
    order = tuple(sorted(plain, key=lambda op: int(found.solver.value(places[op]))))
    return min(plain, order, key=lambda order: peak_and_cost(graph, order)[0]), least_bytes


def _edges(graph: Graph) -> list[list[int]]:
    """Return, for each op, the ops that must run before it."""
    edges = [[graph.writer[index] for index in op.reads] for op in graph.ops]
    draws = [number for number, op in enumerate(graph.ops) if op.is_random]
    for one, other in pairwise(draws):
        edges[other].append(one)
    results = [graph.writer[index] for index in graph.results]
    for number, op in enumerate(graph.ops):
        if op.is_backward:
            edges[number] += [writer for writer in results if writer < number]
        elif (op.is_random or not op.is_recomputable) and results and number < max(results):
            edges[max(results)].append(number)
    return [sorted(set(each)) for each in edges]


def _before(graph: Graph) -> list[int]:
    """Return, for each op, the set of all ops that run before it in any order, as bits."""
    found: list[int] = []
    for edges in _edges(graph):
        bits = 0
        for earlier in edges:
            bits |= found[earlier] | 1 << earlier
        found.append(bits)
    return found


class Olla(Strategy):
    """Steiner et al. 2022: the order of the least peak, nothing computed twice."""

    name: ClassVar[str] = "steiner2022_olla"
    time_limit_s: ClassVar[float] = 60.0
    deterministic_limit: ClassVar[float] = 2.0

    def orders(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        yield self._least(graph)[0]

    def plan(self, graph: Graph, budget_bytes: int) -> Schedule:
        checked_budget(budget_bytes)
        order, least_bytes = self._least(graph)
        proposals = [Proposal(*peak_and_cost(graph, each), each) for each in (tuple(range(len(graph.ops))), order)]
        proof = f"no order that computes nothing twice has a peak below {readable(least_bytes)}"
        return choose(graph, proposals, budget_bytes, self.name, proof if least_bytes else "")

    def _least(self, graph: Graph) -> tuple[tuple[int, ...], int]:
        limits = {"time_limit_s": self.time_limit_s, "deterministic_limit": self.deterministic_limit}
        return least_peak_order(graph, **limits)
