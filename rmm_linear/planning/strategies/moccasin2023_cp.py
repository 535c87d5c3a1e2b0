"""Moccasin: Bartan, Li, Teague, Lott, Dilkina 2023, "Moccasin: Efficient Tensor Rematerialization for Neural Networks".

A constraint program over *retention intervals* (arXiv 2304.14463, section 2): op v runs at most C times, its i-th run
at the event s(v, i), and storage x that it writes is in memory from there to the event e(x, i). Events are dealt out in
stages (section 2.3): in stage t, op t of the plain program runs for the first time, and earlier ops may run again
before it, in their order, so that

    op v runs in stage t at the event t (t + 1) / 2 + v,        s(v, 1) = v (v + 1) / 2 + v.

With a(v, i) = 1 if the i-th run happens,

    minimise the sum of cost(v) a(v, i) over i > 1, with
    s(v, i) + 1 <= e(x, i) <= s(v, i + 1)
    for each op v, each x that it reads, and each i:  a run j of x's op with s(u, j) < s(v, i) <= e(x, j)
    the intervals [s(v, i), e(x, i)], each as high as x has bytes, stay below the budget (one cumulative constraint).

**How the paper's model is mapped.** Its nodes have one output; here an op may write several storages, which share the
start of an interval and have ends of their own. Temporaries are intervals of one event. Results stay until the forward
pass ends, outputs to the end, and ops that must not run twice, and backward ops, have one interval. Random states are
not in the program: the simulator judges the solution.

**Large graphs.** The paper solves graphs of more than 250 nodes part by part. Here neighbouring ops are joined to
parts (`rmm_linear.planning.contraction`), the program plans the parts, and the plan is spelled out in ops.

The paper's first phase looks for any plan that fits. Here `auto`'s plan is the hint that the solver begins with, if
there is one; else the peak above the budget is minimised first.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.constraint_solver import constraint_programs, search
from rmm_linear.planning.contraction import contracted, divided
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.local_search import LocalSearch
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import peak_and_cost, plain_peak_bytes
from rmm_linear.planning.strategies.auto import Auto
from rmm_linear.planning.strategies.base import Strategy, checked_budget, refusal
from rmm_linear.planning.strategies.jain2020_checkmate import Solution, ladder

# the solver's costs are whole numbers: so many parts of the plain step
_PARTS_OF_COST = 1_000_000
# the most runs of an op: the second where the first is not known to give the best plan
_RUNS = (2, 3)
# beyond so many ops, neighbours are joined to so many parts of the forward pass, and of the backward pass
_MOST_OPS, _PARTS = 250, 12
# parts of the plain peak that are proposed
_BUDGETS = 5


def _event(op: int, stage: int) -> int:
    return stage * (stage + 1) // 2 + op


class Program:
    """Moccasin's program of one graph and budget; `runs` is C, the most runs of an op.

    Attributes:
        is_interrupted: Whether Ctrl-C has ended a search.

    Raises:
        ImportError: If OR-tools, which solves it, is not installed.
    """

    def __init__(self, graph: Graph, budget_bytes: int, *, runs: int = 2) -> None:
        self._graph, self._budget, self._cp = graph, budget_bytes, constraint_programs("Moccasin")
        self._model = self._cp.CpModel()
        self.is_interrupted = False
        self._end = _event(0, len(graph.ops))
        again = [op.is_recomputable and not op.is_backward for op in graph.ops]
        fixed = {*graph.outputs, *graph.freed}
        self._count = [
            runs if again[op] and fixed.isdisjoint(graph.ops[op].writes) and op + 1 < len(graph.ops) else 1
            for op in range(len(graph.ops))
        ]
        # variables: whether a run happens, where it starts, and where each storage of it ends
        self._active: list[list[Any]] = [[] for _ in graph.ops]
        self._start: list[list[Any]] = [[] for _ in graph.ops]
        self._ends: list[list[Any]] = [[] for _ in graph.storages]
        self._intervals: list[Any] = []
        self._heights: list[int] = []
        for op in range(len(graph.ops)):
            self._add_runs(op)
        for op in range(len(graph.ops)):
            self._add_reads(op)
        self._excess = self._model.new_int_var(0, max(0, plain_peak_bytes(graph) - budget_bytes), "excess")
        self._model.add_cumulative(self._intervals, self._heights, budget_bytes + self._excess)
        unit = graph.cost / _PARTS_OF_COST
        self._cost = sum(
            int(graph.ops[op].cost / unit) * active for op, several in enumerate(self._active) for active in several[1:]
        )

    def _add_runs(self, op: int) -> None:
        model, graph = self._model, self._graph
        written = graph.ops[op].writes
        temporary = graph.ops[op].temporary_bytes
        last_result = max((graph.writer[index] for index in graph.results), default=-1)
        for run in range(self._count[op]):
            name = f"{op} {run}"
            if run:
                values = [_event(op, stage) for stage in range(op + 1, len(graph.ops))]
                start = model.new_int_var_from_domain(self._cp.Domain.from_values(values), f"start {name}")
                active: Any = model.new_bool_var(f"active {name}")
            else:
                start, active = model.new_constant(_event(op, op)), model.new_constant(1)
            self._start[op].append(start)
            self._active[op].append(active)
            for index in written:
                end = model.new_int_var(0, self._end, f"end {index} {run}")
                self._ends[index].append(end)
                # while the op runs it is there, whether or not a later op reads it
                length = model.new_int_var(1, self._end + 1, f"length {index} {run}")
                stays = model.new_optional_interval_var(start, length, end + 1, active, f"stays {index} {run}")
                self._intervals.append(stays)
                self._heights.append(graph.sizes[index])
                if index in graph.outputs:
                    model.add(end == self._end)
                elif index in graph.results and run == 0:
                    model.add(end >= _event(last_result, last_result))
            if temporary > 0:
                self._intervals.append(
                    model.new_optional_fixed_size_interval_var(start, 1, active, f"temporary {name}")
                )
                self._heights.append(temporary)
        for run, (one, other) in enumerate(pairwise(self._start[op])):
            model.add(one < other).only_enforce_if(self._active[op][run + 1])
            model.add_implication(self._active[op][run + 1], self._active[op][run])
            for index in written:
                model.add(self._ends[index][run] < other).only_enforce_if(self._active[op][run + 1])

    def _add_reads(self, op: int) -> None:
        model, graph = self._model, self._graph
        for index in graph.ops[op].holds_back:
            if index in graph.freed:
                model.add(self._ends[index][0] >= _event(op, op))
        for index in graph.ops[op].reads:
            writer = graph.writer[index]
            for start, active in zip(self._start[op], self._active[op], strict=True):
                serves = []
                for run, end in enumerate(self._ends[index]):
                    by = model.new_bool_var("")
                    model.add_implication(by, self._active[writer][run])
                    model.add(self._start[writer][run] < start).only_enforce_if(by)
                    model.add(start <= end).only_enforce_if(by)
                    serves.append(by)
                model.add_bool_or([*serves, active.negated()])

    def _add_hint(self, order: Sequence[int]) -> None:
        model, seen = self._model, [0] * len(self._graph.ops)
        model.clear_hints()
        stage_after = len(self._graph.ops)
        stages: list[tuple[int, int]] = []
        first = {op: place for place, op in reversed(list(enumerate(order)))}
        for place in reversed(range(len(order))):
            op = order[place]
            if first[op] == place:
                stage_after = op
            stages.append((op, stage_after))
        for op, stage in reversed(stages):
            run = seen[op]
            seen[op] += 1
            if 0 < run < self._count[op] and op < stage < len(self._graph.ops):
                model.add_hint(self._active[op][run], 1)
                model.add_hint(self._start[op][run], _event(op, stage))
        for op, runs in enumerate(seen):
            for run in range(max(1, runs), self._count[op]):
                model.add_hint(self._active[op][run], 0)

    def solve(
        self, hint: Sequence[int] | None = None, *, time_limit_s: float = 20.0, deterministic_limit: float | None = None
    ) -> Solution:
        """Return the cheapest plan that is found within two limits, or until Ctrl-C, beginning with the hint's order.

        The time is that of both phases. The deterministic limit is as in `search`.
        """
        end = time.monotonic() + time_limit_s
        if hint is not None:
            self._add_hint(hint)
        else:
            self._model.minimize(self._excess)
            status, order = self._solved(time_limit_s, deterministic_limit)
            if order is None or peak_and_cost(self._graph, order)[0] > self._budget:
                # no excess is less: nothing fits, with so many runs of an op
                is_proven = status == "infeasible" or self._bound > 0
                return Solution(math.inf, None, math.inf if is_proven else 0.0, "infeasible" if is_proven else status)
            self._add_hint(order)
        self._model.add(self._excess == 0)
        self._model.minimize(self._cost)
        left_s = 0.0 if self.is_interrupted else max(0.0, end - time.monotonic())
        status, order = self._solved(left_s, deterministic_limit)
        bound = math.inf if status == "infeasible" else self._graph.cost * (1 + max(0.0, self._bound) / _PARTS_OF_COST)
        orders = [tuple(each) for each in (order, hint) if each is not None]
        judged = [(*peak_and_cost(self._graph, each), each) for each in orders]
        fitting = [(cost, each) for peak, cost, each in judged if peak <= self._budget]
        cost, best = min(fitting, default=(math.inf, None))
        if (status == "infeasible") != (best is None):
            # the hint has runs that the program has not, or random states take the program's order above the budget
            status = "stopped"
        return Solution(cost, best, min(bound, cost), status)

    def leanest(self, time_limit_s: float = 20.0, deterministic_limit: float | None = None) -> tuple[int, ...]:
        """Return the order of the least peak that is found."""
        self._model.minimize(self._excess)
        return self._solved(time_limit_s, deterministic_limit)[1] or tuple(range(len(self._graph.ops)))

    def _solved(self, time_limit_s: float, deterministic_limit: float | None) -> tuple[str, tuple[int, ...] | None]:
        limits: dict[str, Any] = {"time_limit_s": time_limit_s, "deterministic_limit": deterministic_limit}
        # workers that wait for each other find the same plan each time
        found = search(self._cp, self._model, num_workers=8, interleave_search=True, **limits)
        solver, self._bound = found.solver, found.solver.best_objective_bound
        self.is_interrupted |= found.is_interrupted
        status = found.status if found.status in ("optimal", "infeasible") else "stopped"
        if found.status in ("infeasible", "nothing"):
            return status, None
        runs = [
            (solver.value(start), op)
            for op in range(len(self._graph.ops))
            for start, active in zip(self._start[op], self._active[op], strict=True)
            if solver.value(active)
        ]
        return status, tuple(op for _, op in sorted(runs))


class Moccasin(Strategy):
    """Bartan et al. 2023: retention intervals, solved anew for each budget; begun with `auto`'s plan.

    A plan takes `time_limit_s` at most, beside `auto`'s and the time in which the programs are made.
    Beyond some 250 ops the solver seldom finds anything cheaper than that within its limits.
    """

    name: ClassVar[str] = "moccasin2023_cp"
    time_limit_s: ClassVar[float] = 60.0
    deterministic_limit: ClassVar[float] = 2.0

    def orders(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        for budget_bytes in ladder(graph, _BUDGETS):
            found = self._solution(graph, budget_bytes, self._hint(graph, budget_bytes)[0])
            if found.order is not None:
                yield found.order
            if found.order is None or found.is_interrupted:
                break

    def plan(self, graph: Graph, budget_bytes: int) -> Schedule:
        hint, least_bytes = self._hint(graph, checked_budget(budget_bytes))
        found = self._solution(graph, budget_bytes, hint)
        order = found.order
        if order is None and len(graph.ops) <= _MOST_OPS:
            leanest = Program(graph, 1, runs=_RUNS[-1]).leanest(self.time_limit_s, self.deterministic_limit)
            least_bytes = min(least_bytes, peak_and_cost(graph, leanest)[0])
            order = leanest if least_bytes <= budget_bytes else None
        if order is None:
            raise refusal(self.name, budget_bytes, least_bytes)
        return Schedule.from_order(graph, order, strategy=self.name, proof=found.proof(graph.cost))

    def _hint(self, graph: Graph, budget_bytes: int) -> tuple[tuple[int, ...] | None, int]:
        """The order of `auto`'s plan, and its peak; if there is none, the least peak that `auto` found."""
        try:
            order = Auto().plan(graph, budget_bytes).order
        except InfeasibleBudgetError as error:
            return None, error.least_bytes
        return order, peak_and_cost(graph, order)[0]

    def _solution(self, graph: Graph, budget_bytes: int, hint: tuple[int, ...] | None) -> Solution:
        """The cheapest plan of both programs, and the bound and status of the last, which allows the most."""
        if len(graph.ops) > _MOST_OPS:
            return self._solution_by_parts(graph, budget_bytes, hint)
        found: list[Solution] = []
        end = time.monotonic() + self.time_limit_s
        for runs in _RUNS:
            program, left = Program(graph, budget_bytes, runs=runs), end - time.monotonic()
            if found and left <= 0:
                break
            solution = program.solve(hint, time_limit_s=max(0.0, left), deterministic_limit=self.deterministic_limit)
            found.append(solution)
            if solution.status == "optimal" or program.is_interrupted:
                break
        best = min(found, key=lambda each: each.cost)
        if best.order is None and program.is_interrupted:
            raise KeyboardInterrupt
        return found[-1]._replace(cost=best.cost, order=best.order, is_interrupted=program.is_interrupted)

    def _solution_by_parts(self, graph: Graph, budget_bytes: int, hint: tuple[int, ...] | None) -> Solution:
        """Plan the graph of its parts, spell the plan out, and leave out computations that no op needs; no bound."""
        parts = divided(graph, _PARTS)
        program = Program(contracted(graph, parts), budget_bytes, runs=_RUNS[0])
        # the rest of the time is for the hint
        found = program.solve(time_limit_s=self.time_limit_s / 2, deterministic_limit=self.deterministic_limit)
        orders = [] if hint is None else [hint]
        if found.order is not None:
            spelled = [op for part in found.order for op in parts[part]]
            if peak_and_cost(graph, spelled)[0] <= budget_bytes:
                orders.append(tuple(LocalSearch(graph, budget_bytes).reduced(spelled)))
        if not orders and program.is_interrupted:
            raise KeyboardInterrupt
        cost, best = min(((peak_and_cost(graph, order)[1], order) for order in orders), default=(math.inf, None))
        return Solution(cost, best, 0.0, "stopped", program.is_interrupted)
