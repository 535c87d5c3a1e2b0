"""Checkmate: Jain et al. 2020, "Breaking the Memory Wall with Optimal Tensor Rematerialization" (arXiv 1910.02653).

The step is cut into stages. In stage t the ops of the stage run for the first time, and before them any ops of earlier
stages may run again, each at most once, in the order of the plain program. With variables between 0 and 1

    R(t, k)      op k runs in stage t; 1 for the ops of the stage
    S(t, i)      storage i is in memory when stage t begins
    H(t, i, j)   storage i stays in memory in stage t until its reader j
    U(t, k)      bytes in memory before op k of stage t

the program is (section 4 of the paper)

    minimise the sum of cost(k) R(t, k), with
    R(t, j) <= R(t, writer of i) + S(t, i)      for each i that j reads
    S(t + 1, i) <= S(t, i) + R(t, writer of i)
    H(t, i, j) >= R(t, j), and >= H(t, i, j') for the next reader j', and >= S(t + 1, i) for the last one
    U(t, k + 1) = U(t, k) + what H gains by what k writes - what H loses by what k reads
    U(t, k) + bytes that k writes and its temporaries, times R(t, k) <= budget

**How the paper's model is mapped.** Its graph has nodes of one output each, and forward and backward nodes are one
topological order; so are ops here, the plain program being the order. An op may write several storages: R belongs to
ops, S to storages. FREE(t, i, k), which says that i goes after k, is H's decrease: for integers the two say the same,
and H needs no count of hazards. With R given, the least S and H are integers as well; so R alone is integral.
Parameters and inputs are outside of the budget, temporaries inside. Outputs stay once they are there, results until the
forward pass ends, gradients until they are handed over. Random states are not in the program.

**Sizes.** The paper has one op a stage, n^2 / 2 variables R: so it is here up to 80 ops. Larger graphs get one stage
for the forward pass, in which nothing is computed twice, and 12 for the backward pass, in which forward ops are. The
bound then holds for plans of such stages only.

**Rounding (section 5).** The program is solved without integrality, S is rounded at a threshold, and R is the least
for this S. A rounded plan may exceed the budget: so programs of lesser budgets are rounded as well,
the paper's slack, and the simulator decides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import Proposal, peak_and_cost, plain_peak_bytes
from rmm_linear.planning.strategies.base import Strategy, checked_budget, choose

# graphs of at most so many ops have one stage an op, others so many for the backward pass
_MOST_STAGES, _COARSE_STAGES = 80, 12
_MOST_OPS = 2500
_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Parts of a budget whose relaxed programs are rounded where that of the budget itself gives no plan that fits: the
# paper's slack is a tenth.
_SLACKS = (0.9, 0.8, 0.65)
# parts of the plain peak that are proposed
_BUDGETS, _BUDGETS_ROUNDED = 5, 20
# The solver's tolerance is 1e-6 of the plain peak. A plan that exceeds its budget, by this or by random states, is
# sought again that much lower.
_TOLERANCE, _ATTEMPTS = 4e-6, 2
# Relative error of sums of costs.
_ROUNDING = 1e-5
# scipy's number for it
_INFEASIBLE = 2


class Solution(NamedTuple):
    """The result of a solver.

    Attributes:
        cost: Time of all computations, in the graph's unit; infinity if nothing was found that fits.
        order: Indices of ops, with repetitions; None if nothing was found that fits.
        bound: No plan of these stages costs less; infinity if none fits.
        status: "optimal", "infeasible", or "stopped", by a limit or by Ctrl-C.
        is_interrupted: Whether Ctrl-C stopped it, where the solver is told of it.
    """

    cost: float
    order: tuple[int, ...] | None
    bound: float
    status: str
    is_interrupted: bool = False

    def proof(self, plain_cost: float) -> str:
        """Return a sentence with the bound, in parts of the cost of the plain program; empty if there is none."""
        least = 100 * (self.bound / plain_cost - 1)
        if self.order is None or least <= 0:
            return ""
        if self.status == "optimal":
            return "its program has no plan of less cost"
        return f"its program has no plan that costs less than {least:.1f} % more than the plain step"


class Program:
    """Checkmate's program of one graph.

    Raises:
        ImportError: If scipy, which solves it, is not installed.
        ValueError: If the graph has more than 2500 ops.
    """

    def __init__(self, graph: Graph) -> None:
        try:
            import scipy.optimize  # noqa: F401
        except ImportError as error:
            raise ImportError("Checkmate needs scipy: pip install rmm-linear[plan]") from error
        if len(graph.ops) > _MOST_OPS:
            raise ValueError(f"the graph has {len(graph.ops)} ops, and Checkmate's program is built for {_MOST_OPS}")
        self._graph = graph
        self._stages = _stages(graph)
        self._stage_of = {op: number for number, stage in enumerate(self._stages) for op in stage}
        self._unit_bytes = max(1, plain_peak_bytes(graph))
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._is_integral: list[bool] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        # the peak that is allowed
        self._peak = self._variable(0, 1)
        self._end_of_forward = max((graph.writer[index] for index in graph.results), default=-1)
        self._run = [[self._run_variable(stage, op) for op in range(stage[-1] + 1)] for stage in self._stages]
        self._kept = [self._kept_variables(number) for number in range(len(self._stages) + 1)]
        self._loaded = [self._load_variables(number) for number in range(len(self._stages))]
        for number in range(len(self._stages)):
            self._add_stage(number)

    def _variable(self, lower: float, upper: float, *, is_integral: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._is_integral.append(is_integral)
        return len(self._lower) - 1

    def _run_variable(self, stage: range, op: int) -> int:
        if op in stage:
            return self._variable(1, 1)
        is_coarse = len(self._stages) < len(self._graph.ops)
        may_run = self._graph.ops[op].is_recomputable and not (is_coarse and self._graph.ops[op].is_backward)
        return self._variable(0, float(may_run), is_integral=may_run)

    def _kept_variables(self, number: int) -> dict[int, int]:
        """Variables of the storages that may be in memory when a stage begins."""
        graph = self._graph
        end_stage = self._stage_of.get(self._end_of_forward, -1)
        kept = {}
        for index, writer in enumerate(graph.writer):
            if self._stage_of[writer] < number:
                stays = index in graph.outputs or (index in graph.results and number <= end_stage)
                kept[index] = self._variable(float(stays), float(stays or number < len(self._stages)))
        return kept

    def _load_variables(self, number: int) -> dict[int, int]:
        """Variables of the storages that may be loaded when a stage begins; Checkmate pages nothing."""
        return {}

    def _add(self, terms: Sequence[tuple[int, float]], lower: float = 0, upper: float = math.inf) -> None:
        row: dict[int, float] = {}
        for variable, factor in terms:
            row[variable] = row.get(variable, 0.0) + factor
        self._rows.append((row, lower, upper))

    def _add_stage(self, number: int) -> None:
        graph, run, kept, after = self._graph, self._run[number], self._kept[number], self._kept[number + 1]
        count = len(run)
        # changes of the bytes in memory, op by op
        changes: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for index, places in self._readers(number).items():
            writer, size = graph.writer[index], graph.sizes[index] / self._unit_bytes
            there = [(each[index], 1.0) for each in (kept, self._loaded[number]) if index in each]
            if index in kept:
                self._add([*there, (run[writer], 1), (after[index], -1)])
            follows = after[index]
            for place in reversed(places):
                stays = self._variable(0, 1)
                self._add([(stays, 1), (run[place], -1)])
                self._add([(stays, 1), (follows, -1)])
                changes[place] += [(follows, size), (stays, -size)]
                follows = stays
            changes[writer].append((follows, size))
            if index in kept:
                changes[writer] += [(variable, -size) for variable, _ in there]
                for place in graph.readers[index]:
                    if place < count:
                        self._add([(run[writer], 1), *there, (run[place], -1)])
        self._add_gradients(number)
        used = self._variable(0, math.inf)
        there_first = (*kept.items(), *self._loaded[number].items())
        held = [(variable, graph.sizes[index] / self._unit_bytes) for index, variable in there_first]
        self._add([*held, (used, -1)], 0, 0)
        for op, change in enumerate(changes):
            bytes_while_running = graph.bytes_while_running[op] / self._unit_bytes
            self._add([(used, 1), (run[op], bytes_while_running), (self._peak, -1)], -math.inf, 0)
            following = self._variable(0, math.inf)
            self._add([(used, 1), *change, (following, -1)], 0, 0)
            used = following

    def _readers(self, number: int) -> dict[int, list[int]]:
        """For each storage, the ops of a stage after its writer that need it in memory."""
        graph, count = self._graph, len(self._run[number])
        written = [index for index, writer in enumerate(graph.writer) if writer < count]
        found = {index: {op for op in graph.readers[index] if op < count} for index in written}
        for op in range(count):
            for index in graph.ops[op].holds_back:
                if index in graph.freed and graph.writer[index] < op:
                    found[index].add(op)
        if self._end_of_forward in self._stages[number]:
            for index in graph.results:
                if graph.writer[index] < self._end_of_forward:
                    found[index].add(self._end_of_forward)
        return {index: sorted(places) for index, places in found.items()}

    def _add_gradients(self, number: int) -> None:
        """A gradient that goes is there, without a gap, until the last op that holds it back."""
        graph, run, kept, after = self._graph, self._run[number], self._kept[number], self._kept[number + 1]
        for index in graph.freed.intersection(kept):
            self._add([(kept[index], 1), (after[index], -1)])
        for op in range(len(run)):
            for index in graph.freed.intersection((*graph.ops[op].reads, *graph.ops[op].holds_back), kept):
                self._add([(kept[index], 1), (run[op], -1)])

    @cached_property
    def _matrix(self) -> Any:
        from scipy.sparse import csr_array

        entries = [(at, variable, value) for at, (row, *_) in enumerate(self._rows) for variable, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        return csr_array((values, (rows, columns)), shape=(len(self._rows), len(self._lower)))

    def _solved(self, budget_bytes: float, *, least_peak: bool = False, is_integral: bool, **limits: Any) -> Any:
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp

        objective = numpy.zeros(len(self._lower))
        for variable, cost in {self._peak: 1.0}.items() if least_peak else self._costs():
            objective[variable] = cost
        upper = numpy.array(self._upper)
        upper[self._peak] = budget_bytes / self._unit_bytes
        constraint = LinearConstraint(self._matrix, *([row[side] for row in self._rows] for side in (1, 2)))
        return milp(
            objective,
            integrality=numpy.array(self._is_integral) if is_integral else None,
            bounds=Bounds(numpy.array(self._lower), upper),
            constraints=constraint,
            options={"mip_rel_gap": 1e-6, **{name: limit for name, limit in limits.items() if limit is not None}},
        )

    def _costs(self) -> Iterator[tuple[int, float]]:
        for variables in self._run:
            for op, variable in enumerate(variables):
                yield variable, self._graph.ops[op].cost / self._graph.cost

    def _price(self, order: Sequence[int]) -> tuple[int, float]:
        return peak_and_cost(self._graph, order)

    def _orders(self, runs: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Orders of the ops of each stage: the program's, and with each op and load just before its reader."""
        late: list[int] = []
        count = len(self._graph.ops)
        for stage, ops in zip(self._stages, runs, strict=True):
            missing = set(ops)
            for last in (*stage, *ops):
                waiting = [last]
                while waiting:
                    op = waiting[-1]
                    reads = self._graph.runnable[op].reads
                    needed = {each for index in reads for each in (self._graph.writer[index], count + index)} & missing
                    if op in missing and needed:
                        waiting += sorted(needed)
                    elif waiting.pop() in missing:
                        missing.remove(op)
                        late.append(op)
        return [tuple(op for ops in runs for op in ops), tuple(late)]

    def relaxed(self, budget_bytes: float, time_limit_s: float) -> tuple[float, list[tuple[int, ...]]]:
        """Solve the program without integrality, and round it.

        Return a bound of the cost, infinity if nothing fits, 0 if there was no time to know; and orders, whose peaks
        may be above the budget.
        """
        found = self._solved(budget_bytes, is_integral=False, time_limit=time_limit_s)
        if found.x is None:
            return math.inf if found.status == _INFEASIBLE else 0.0, []
        orders: dict[tuple[int, ...], None] = {}
        for threshold in _THRESHOLDS:
            kept, loaded = (
                [{i for i, at in each.items() if found.x[at] > threshold} for each in variables]
                for variables in (self._kept, self._loaded)
            )
            for missing_is_loaded in (False, True):
                runs = self._least_runs(kept, loaded, missing_is_loaded)
                orders.update(dict.fromkeys(self._orders(runs)))
        return max(found.fun, 1) * self._graph.cost, list(orders)

    def _least_runs(
        self, kept: Sequence[set[int]], loaded: Sequence[set[int]], missing_is_loaded: bool
    ) -> list[list[int]]:
        """Return the loads of each stage, and the fewest ops that compute the other storages that it reads or keeps."""
        ops, writer = self._graph.ops, self._graph.writer
        runs = []
        for number, stage in enumerate(self._stages):
            there = kept[number].union(
                i for i in self._kept[number] if not ops[writer[i]].is_recomputable and i not in loaded[number]
            )
            loads = loaded[number] - there
            there |= loads
            again = set(stage)
            waiting = [*kept[number + 1], *(index for op in stage for index in ops[op].reads)]
            while waiting:
                index = waiting.pop()
                if missing_is_loaded and index in self._loaded[number] and index not in there:
                    loads.add(index)
                    there.add(index)
                if index not in there and writer[index] not in again:
                    again.add(writer[index])
                    waiting += ops[writer[index]].reads
            runs.append([*(len(ops) + index for index in sorted(loads)), *sorted(again)])
        return runs

    def solve(self, budget_bytes: int, *, time_limit_s: float = 20.0, node_limit: int | None = None) -> Solution:
        """Return the cheapest plan within a budget that is found within two limits.

        The time limits each relaxed program, and the integral program. The number of nodes limits the solver's tree,
        and gives the same plan each time, which a time limit does not. After Ctrl-C the plan is the best rounded one:
        HiGHS can't return its best plan so far, and runs on in a thread until the time limit.
        """
        plain_cost, (bound, orders) = self._graph.cost, self.relaxed(budget_bytes, time_limit_s)
        for part in _SLACKS:
            priced = map(self._price, orders)
            if bound == math.inf or any(peak <= budget_bytes for peak, _ in priced):
                break
            orders += self.relaxed(part * budget_bytes, time_limit_s)[1]
        status = "infeasible" if bound == math.inf else "stopped"
        limits: dict[str, Any] = {"time_limit": time_limit_s, "node_limit": node_limit}
        allowed: float = budget_bytes
        for _ in range(_ATTEMPTS if bound < math.inf else 0):
            solved = _until_interrupted(partial(self._solved, allowed, is_integral=True, **limits))
            if solved is None:
                break
            if allowed == budget_bytes:
                status = {0: "optimal", _INFEASIBLE: "infeasible"}.get(solved.status, "stopped")
                bound = math.inf if status == "infeasible" else max(bound, (solved.mip_dual_bound or 0) * plain_cost)
            if solved.x is None:
                break
            found = self._orders_of(solved)
            orders += found
            excess = peak_and_cost(self._graph, found[0])[0] - budget_bytes
            if excess <= 0:
                break
            allowed -= excess + _TOLERANCE * self._unit_bytes
        judged = [(*self._price(order), order) for order in orders]
        fitting = [(cost, order) for peak, cost, order in judged if peak <= budget_bytes]
        least, best = min(fitting, default=(math.inf, None))
        if best is not None and (status == "infeasible" or least < bound * (1 - _ROUNDING)):
            # the program does not contain this order
            status, bound = "stopped", min(bound, least)
        return Solution(least, best, bound, status)

    def _orders_of(self, solved: Any) -> list[tuple[int, ...]]:
        runs = []
        for run, loaded in zip(self._run, self._loaded, strict=True):
            loads = [len(self._graph.ops) + index for index, at in loaded.items() if solved.x[at] > 0.5]
            runs.append([*loads, *(op for op, at in enumerate(run) if solved.x[at] > 0.5)])
        return self._orders(runs)

    def leanest(self, time_limit_s: float = 20.0) -> tuple[int, ...]:
        """Return the order of the least peak that is found."""
        orders = [tuple(range(len(self._graph.ops)))]
        solved = self._solved(self._unit_bytes, least_peak=True, is_integral=True, time_limit=time_limit_s)
        if solved.x is not None:
            orders += self._orders_of(solved)
        return min(orders, key=lambda order: peak_and_cost(self._graph, order))


def _stages(graph: Graph) -> list[range]:
    """One op a stage; or the forward ops, and backward ops that first read equal parts of what these write."""
    count, forward = len(graph.ops), graph.forward_count
    if count <= _MOST_STAGES:
        return [range(op, op + 1) for op in range(count)]
    weights = dict.fromkeys(range(forward, count), 0)
    for index, readers in enumerate(graph.readers):
        for op in readers:
            if op >= forward and graph.writer[index] < forward:
                weights[op] += graph.sizes[index]
                break
    share = max(1, sum(weights.values())) / _COARSE_STAGES
    stages, start, held = [range(forward)] if forward else [], forward, 0
    for op in range(forward, count):
        held += weights[op]
        if held >= share * (len(stages) + 1 - bool(forward)) and op + 1 < count:
            stages.append(range(start, op + 1))
            start = op + 1
    return [*stages, range(start, count)] if start < count else stages


def _until_interrupted(solve: Callable[[], Any]) -> Any:
    """Return the result of a function; None after Ctrl-C, while the function runs on."""
    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(solve).result()
    except KeyboardInterrupt:
        return None
    finally:
        executor.shutdown(wait=False)


class Checkmate(Strategy):
    """Jain et al. 2020: the integer program, solved anew for each budget."""

    name: ClassVar[str] = "jain2020_checkmate"
    time_limit_s: ClassVar[float] = 20.0
    program: ClassVar[type[Program]] = Program

    def orders(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        program = self.program(graph)
        for budget_bytes in ladder(graph, _BUDGETS):
            found = program.solve(budget_bytes, time_limit_s=self.time_limit_s)
            if found.order is None:
                break
            yield found.order
        yield program.leanest(self.time_limit_s)

    def plan(self, graph: Graph, budget_bytes: int) -> Schedule:
        program = self.program(graph)
        found = program.solve(checked_budget(budget_bytes), time_limit_s=self.time_limit_s)
        order = program.leanest(self.time_limit_s) if found.order is None else found.order
        proposal = Proposal(*peak_and_cost(graph, order), order)
        return choose(graph, [proposal], budget_bytes, self.name, found.proof(graph.cost))


class CheckmateRounding(Strategy):
    """Jain et al. 2020, section 5: the program without integrality, rounded."""

    name: ClassVar[str] = "jain2020_rounding"
    time_limit_s: ClassVar[float] = 20.0

    def orders(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        program = Program(graph)
        for budget_bytes in ladder(graph, _BUDGETS_ROUNDED):
            bound, orders = program.relaxed(budget_bytes, self.time_limit_s)
            yield from orders
            if bound == math.inf:
                break


def ladder(graph: Graph, steps: int) -> list[int]:
    """Return budgets below the plain peak, falling by equal steps."""
    plain_bytes = plain_peak_bytes(graph)
    return [max(1, plain_bytes * part // steps) for part in range(steps - 1, 0, -1)]
