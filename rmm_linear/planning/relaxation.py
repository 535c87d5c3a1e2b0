"""A linear program that bounds the time of any plan, and says which storages are worth keeping.

At one moment of the step, memory holds all that the ops after it read and that is not computed again after it. So for
each forward storage s and op o, with variables between 0 and 1:

    for each s that an op after the moment reads     keep(s) + again(writer of s) >= 1
    for each forward op o and each s that it reads   keep(s) + again(writer of s) >= again(o)
    sum of bytes(s) keep(s) <= budget - bytes that are there anyway
    minimise the sum of cost(o) again(o)

Results and the storages that the op of the moment reads are kept; again(o) is 0 for an op that may not run twice, and
costs nothing for an op that no result depends on, which may run after the moment for the first time.

Where tensors may be coded, memory may also be free(s), if codes are read in its place, and the codes are kept:

    for each s that an op after the moment reads     keep(s) + again(writer of s) + free(s) >= 1
    for each s that the op of the moment reads       keep(s) + free(s) >= 1
    for each such s and each code c in its place     code(c) >= free(s)
    or, where a backward op runs, for each such s    sum of code(c) >= free(s)
    sum of bytes(s) keep(s) + sum of bytes(c) code(c) <= budget - bytes that are there anyway
    minimise the sum of cost(o) again(o) + the sum of cost(c) code(c)

Every schedule within the budget satisfies this at the end of the forward pass, and also when a backward op first runs,
if only the ops that depend on it count as being after it. The extra time of any schedule is hence at least the
program's: the largest one of several moments is a bound. With a variable for each moment it would be the program of
Jain et al. 2020 (Checkmate), without integrality.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from rmm_linear.planning.coding import Coding
from rmm_linear.planning.graph import Graph, reached
from rmm_linear.planning.simulate import bytes_of_order

# Moments that are looked at beside the end of the forward pass: backward ops during which the plain program holds most.
_MOMENTS = 3
# A tensor that is coded to a smaller part is as good as exact.
_PART = 1e-3
_NO_CODES = Coding()
# The solver's time for a program.
_MOST_S = 10.0
# The solver's status of a program without a solution.
_INFEASIBLE = 2


class Relaxed(NamedTuple):
    """The solution of a linear program.

    `kept` has the storages that are kept for more than a half; `coded` has the tensors that are coded, even in part.
    """

    extra_cost: float
    kept: set[int]
    coded: frozenset[str]


class Relaxation:
    """The linear program of one moment.

    Args:
        graph: A graph with a backward pass.
        moment: The backward op that runs; None for the end of the forward pass.
        coding: Tensors that may be coded; none by default.
        prices: Cost of the code of each of them, by name.

    Attributes:
        entries: Coefficients other than 0.

    Raises:
        ImportError: If scipy, which solves it, is not installed.
    """

    def __init__(
        self,
        graph: Graph,
        moment: int | None = None,
        coding: Coding = _NO_CODES,
        prices: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        try:
            import numpy
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ImportError("it needs scipy, as better plans do: pip install rmm-linear[plan]") from error
        backward = range(graph.forward_count, len(graph.ops))
        after: Collection[int] = backward if moment is None else _descendants(graph, moment)
        wanted = _forward_reads(graph, after)
        read = set() if moment is None else _forward_reads(graph, [moment])
        codes = {code.name: code for code in coding.coded}
        memories = {memory.name: memory.codes for memory in coding.freed}
        freed = {index: memories[name] for index in wanted | read if (name := graph.storages[index].name) in memories}
        self._storages = sorted(_with_ancestors(graph, wanted | freed.keys()))
        ops = sorted({graph.writer[index] for index in self._storages})
        # an op that no result depends on may run for the first time after the moment
        needed = {graph.writer[index] for index in _with_ancestors(graph, graph.results)}
        there = {*graph.results} if moment is None else read - freed.keys()
        there |= {index for index in graph.outputs if graph.writer[index] in needed}
        # a variable, its bounds, its price, and the bytes that it takes
        columns: list[tuple[tuple[str, Any], int, int, float, int]] = [
            (("keep", index), int(index in there), 1, 0.0, graph.sizes[index]) for index in self._storages
        ]
        for number in ops:
            op = graph.ops[number]
            price, taken = (op.cost, op.state_bytes) if number in needed else (0.0, 0)
            columns.append((("again", number), 0, int(op.is_recomputable), price, taken))
        columns += [(("free", index), 0, 1, 0.0, 0) for index in freed]
        columns += [(("code", name), 0, 1, prices[name], code.code_bytes) for name, code in codes.items()]
        place = {key: number for number, (key, *_) in enumerate(columns)}
        rows: list[tuple[dict[Any, int], int]] = []
        for index in sorted(wanted):
            ways = {("keep", index): 1, ("again", graph.writer[index]): 1}
            rows.append((ways | {("free", index): 1} if index in freed else ways, 1))
        rows += [({("keep", index): 1, ("free", index): 1}, 1) for index in read & freed.keys()]
        for index, names in freed.items():
            # ops that read the tensor itself may have run before a moment of the backward pass: one code may do then
            groups = [(name,) for name in names] if moment is None else [names]
            rows += [({("code", name): 1 for name in group} | {("free", index): -1}, 0) for group in groups]
        rows += [
            ({("keep", index): 1, ("again", graph.writer[index]): 1, ("again", number): -1}, 0)
            for number in ops
            for index in set(graph.ops[number].reads)
        ]
        fixed = 0 if moment is None else _bytes_of(graph, moment)
        fixed += sum(graph.sizes[index] for index in there if ("keep", index) not in place)
        self._fixed_bytes = fixed
        cost, size = [price for *_, price, _ in columns], [taken for *_, taken in columns]
        self._codes = list(codes)
        # numbers near 1 for the solver
        self._unit_bytes, self._unit_cost = max(size, default=0) or 1, max(cost, default=0) or 1.0
        self._cost = numpy.array(cost) / self._unit_cost
        self._bounds = numpy.array([(low, high) for _, low, high, *_ in columns])
        entries = [
            (number, place[key], float(-value)) for number, (row, _) in enumerate(rows) for key, value in row.items()
        ]
        entries += [(len(rows), number, each / self._unit_bytes) for number, each in enumerate(size) if each]
        self.entries = len(entries)
        values, where = [value for *_, value in entries], [[at for at, *_ in entries], [at for _, at, _ in entries]]
        self._matrix = csr_array((values, where), shape=(len(rows) + 1, len(place)), dtype=float)
        self._limits = numpy.array([-limit for _, limit in rows] + [0.0])

    def solve(self, budget_bytes: int, kept: Collection[int] = ()) -> Relaxed | None:
        """Solve it, with some storages kept in any case; None if no schedule fits.

        Raises:
            TimeoutError: If the solver finds no solution in time.
        """
        from scipy.optimize import linprog

        if not self._cost.size:
            return Relaxed(0.0, set(), frozenset()) if self._fixed_bytes <= budget_bytes else None
        limits = self._limits.copy()
        limits[-1] = (budget_bytes - self._fixed_bytes) / self._unit_bytes
        bounds = self._bounds.copy()
        bounds[[number for number, index in enumerate(self._storages) if index in kept], 0] = 1
        options = {"time_limit": _MOST_S}
        found: Any = linprog(self._cost, A_ub=self._matrix, b_ub=limits, bounds=bounds, method="highs", options=options)
        if found.status == _INFEASIBLE:
            return None
        if found.status:
            raise TimeoutError(f"the solver of the linear program has not ended within {_MOST_S:g} s: {found.message}")
        kept = {index for index, part in zip(self._storages, found.x, strict=False) if part > 0.5}
        coded = {name for name, part in zip(self._codes, found.x[-len(self._codes) :], strict=False) if part > _PART}
        return Relaxed(max(0.0, found.fun) * self._unit_cost, kept, frozenset(coded))


def relaxations(
    graph: Graph, coding: Coding = _NO_CODES, prices: Mapping[str, float] = MappingProxyType({})
) -> list[Relaxation]:
    """Return the programs of the moments that bound most: none for a graph without a backward pass.

    Raises:
        ImportError: If scipy, which solves them, is not installed.
    """
    if graph.forward_count == len(graph.ops) or not graph.results:
        return []
    during = bytes_of_order(graph, range(len(graph.ops)))
    backward = sorted(range(graph.forward_count, len(graph.ops)), key=lambda op: -during[op])
    moments = (op for op in backward if _forward_reads(graph, _descendants(graph, op)))
    return [Relaxation(graph, moment, coding, prices) for moment in (None, *islice(moments, _MOMENTS))]


def least_extra_cost(programs: Iterable[Relaxation], budget_bytes: int) -> float:
    """Return a bound: no schedule within the budget has less extra cost, which is infinite if no schedule fits.

    Raises:
        TimeoutError: If the solver finds no solution in time.
    """
    solved = [program.solve(budget_bytes) for program in programs]
    return max((float("inf") if each is None else each[0] for each in solved), default=0.0)


def _descendants(graph: Graph, moment: int) -> set[int]:
    written = set(graph.ops[moment].writes)
    found = set()
    for op in range(moment + 1, len(graph.ops)):
        if not written.isdisjoint(graph.ops[op].reads):
            found.add(op)
            written.update(graph.ops[op].writes)
    return found


def _forward_reads(graph: Graph, ops: Iterable[int]) -> set[int]:
    return {index for op in ops for index in graph.ops[op].reads if graph.writer[index] < graph.forward_count}


def _with_ancestors(graph: Graph, storages: Iterable[int]) -> set[int]:
    return reached(storages, lambda index: graph.ops[graph.writer[index]].reads)


def _bytes_of(graph: Graph, op: int) -> int:
    """The bytes in memory while a backward op runs, beside forward storages."""
    backward = {index for index in graph.ops[op].reads if graph.writer[index] >= graph.forward_count}
    return graph.bytes_while_running[op] + sum(graph.sizes[index] for index in backward)
