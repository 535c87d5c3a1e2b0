"""OLLA: Steiner et al. 2022, "Optimizing the Lifetime and Location of Arrays" (arXiv 2210.12924).

Nothing is computed twice. First the *lifetimes*: the order of the ops with the least peak (section 3.2). Then the
*locations*: each storage gets an address, so that the arena that holds all of them is as small as can be (section 3.3).

The paper writes integer programs over (storage, step). Here both are constraint programs: with p(v) the place of op v,

    p(u) < p(v) for each op u that v reads from;  all places differ
    storage x is in memory from p(writer) to e(x) >= p(v) for each reader v; outputs to the end
    minimise the capacity of one cumulative constraint over these intervals

and with the lifetimes fixed, rectangles of a storage's lifetime and its addresses must not overlap, and the highest
address is minimised. The paper's bounds of places by ancestors and descendants (its ASAP and ALAP, section 4.1) are the
variables' domains. The plain program's order, and best-fit addresses, are what the solver begins with.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import frees_of_order
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.base import Strategy, register


class Lifetime(NamedTuple):
    """The time for which a piece of memory is there.

    Attributes:
        name: Number of the storage; -1 for what an op takes while it runs.
        first: The computation before which it is allocated.
        end: The computation before which it is free again.
        size_bytes: Its size, more than 0.
    """

    name: int
    first: int
    end: int
    size_bytes: int


class Arena(NamedTuple):
    """Addresses of all that a schedule has in memory.

    Attributes:
        size_bytes: The size of the arena.
        addresses: One for each lifetime.
        is_optimal: Whether no arena is smaller.
    """

    size_bytes: int
    addresses: tuple[int, ...]
    is_optimal: bool


def least_peak_order(
    graph: Graph, *, time_limit_s: float = 20.0, deterministic_limit: float | None = None
) -> tuple[int, ...]:
    """Return an order of the ops, each once, with the least peak that is found within two limits.

    The deterministic limit is the solver's own measure of work; unlike a time, it gives the same order each time.

    Raises:
        ImportError: If OR-tools, which solves the program, is not installed.
    """
    cp_model = _solver()
    model, count = cp_model.CpModel(), len(graph.ops)
    before = _before(graph)
    after = [sum(earlier >> op & 1 for earlier in before) for op in range(count)]
    places = [model.new_int_var(before[op].bit_count(), count - 1 - after[op], f"place {op}") for op in range(count)]
    model.add_all_different(places)
    for op, edges in enumerate(_edges(graph)):
        for earlier in edges:
            model.add(places[earlier] < places[op])
    intervals, heights = [], []
    kept = {*graph.outputs}
    for index, writer in enumerate(graph.writer):
        end = model.new_int_var(0, count, f"end {index}")
        needed = {*graph.readers[index]}
        needed.update(op for op in range(count) if index in graph.freed and index in graph.ops[op].holds_back)
        if index in graph.results:
            needed.update(graph.writer[other] for other in graph.results)
        if index in kept:
            model.add(end == count)
        for reader in needed:
            model.add(end > places[reader])
        model.add(end > places[writer])
        length = model.new_int_var(1, count, f"length {index}")
        intervals.append(model.new_interval_var(places[writer], length, end, f"lives {index}"))
        heights.append(graph.sizes[index])
    for op in range(count):
        temporary = graph.bytes_while_running[op] - sum(graph.sizes[index] for index in graph.ops[op].writes)
        if temporary > 0:
            intervals.append(model.new_fixed_size_interval_var(places[op], 1, f"temporary {op}"))
            heights.append(temporary)
        model.add_hint(places[op], op)
    plain = tuple(range(count))
    plain_bytes = peak_and_cost(graph, plain)[0]
    peak = model.new_int_var(0, plain_bytes, "peak")
    model.add_cumulative(intervals, heights, peak)
    model.minimize(peak)
    solver = _started(cp_model, time_limit_s, deterministic_limit)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return plain
    found = tuple(sorted(plain, key=lambda op: int(solver.value(places[op]))))
    return min(plain, found, key=lambda order: peak_and_cost(graph, order)[0])


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
        elif op.is_random and results and number < max(results):
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


def lifetimes(graph: Graph, order: Sequence[int]) -> list[Lifetime]:
    """Say what an order of ops, with repetitions, has in memory, and when."""
    found, since = [], dict[int, int]()
    for place, (op, freed) in enumerate(zip(order, frees_of_order(graph, order), strict=True)):
        written = graph.ops[op].writes
        again = sum(graph.sizes[index] for index in written if index in since)
        temporary = graph.bytes_while_running[op] - sum(graph.sizes[index] for index in written) + again
        if temporary:
            found.append(Lifetime(-1, place, place + 1, temporary))
        for index in written:
            since.setdefault(index, place)
        for index in freed:
            found.append(Lifetime(index, since.pop(index), place + 1, graph.sizes[index]))
    found += [Lifetime(index, place, len(order), graph.sizes[index]) for index, place in since.items()]
    return [each for each in found if each.size_bytes]


def arena_for(alive: Sequence[Lifetime], *, time_limit_s: float = 20.0) -> Arena:
    """Give addresses to lifetimes, in as small an arena as is found; with a limit of 0 s, best-fit addresses alone.

    Raises:
        ImportError: If OR-tools, which solves the program, is not installed, and best-fit addresses need it.
    """
    least = _most_at_once(alive)
    best = min((_best_fit(alive, key) for key in _KEYS), key=lambda arena: arena.size_bytes)
    if best.size_bytes == least or not time_limit_s:
        return best._replace(is_optimal=best.size_bytes == least)
    cp_model = _solver()
    model = cp_model.CpModel()
    top = model.new_int_var(least, best.size_bytes, "top")
    across, along, addresses = [], [], []
    for number, each in enumerate(alive):
        address = model.new_int_var(0, best.size_bytes - each.size_bytes, f"address {number}")
        model.add(address + each.size_bytes <= top)
        model.add_hint(address, best.addresses[number])
        across.append(model.new_fixed_size_interval_var(each.first, each.end - each.first, f"life {number}"))
        along.append(model.new_fixed_size_interval_var(address, each.size_bytes, f"bytes {number}"))
        addresses.append(address)
    model.add_no_overlap_2d(across, along)
    model.minimize(top)
    solver = _started(cp_model, time_limit_s)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return best
    found = tuple(int(solver.value(address)) for address in addresses)
    return Arena(int(solver.value(top)), found, status == cp_model.OPTIMAL)


def _most_at_once(alive: Sequence[Lifetime]) -> int:
    changes: dict[int, int] = {}
    for each in alive:
        changes[each.first] = changes.get(each.first, 0) + each.size_bytes
        changes[each.end] = changes.get(each.end, 0) - each.size_bytes
    return max(accumulate(changes[place] for place in sorted(changes)), default=0)


_KEYS = (
    lambda each: (-each.size_bytes, each.first),
    lambda each: (-each.size_bytes * (each.end - each.first), each.first),
    lambda each: (-(each.end - each.first), -each.size_bytes),
)


def _best_fit(alive: Sequence[Lifetime], key: Callable[[Lifetime], tuple[int, int]]) -> Arena:
    """Place each lifetime into the smallest gap between the addresses of lifetimes that overlap it in time."""
    placed: list[tuple[int, int, Lifetime]] = []
    address_of: dict[int, int] = {}
    for number in sorted(range(len(alive)), key=lambda number: key(alive[number])):
        own = alive[number]
        taken = sorted((at, end) for at, end, other in placed if other.first < own.end and own.first < other.end)
        best, smallest, high = None, None, 0
        for at, end in taken:
            gap = at - high
            if gap >= own.size_bytes and (smallest is None or gap < smallest):
                best, smallest = high, gap
            high = max(high, end)
        address_of[number] = high if best is None else best
        placed.append((address_of[number], address_of[number] + own.size_bytes, own))
    size = max((end for _, end, _ in placed), default=0)
    return Arena(size, tuple(address_of[number] for number in range(len(alive))), is_optimal=False)


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError("OLLA needs OR-tools: pip install rmm-linear[plan]") from error
    return cp_model


def _started(cp_model: Any, time_limit_s: float, deterministic_limit: float | None = None) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    if deterministic_limit is not None:
        solver.parameters.max_deterministic_time = deterministic_limit
    # several workers find another one of equally good orders each time, also where they wait for each other
    solver.parameters.num_workers = 8 if deterministic_limit is None else 1
    return solver


@register
class Olla(Strategy):
    """Steiner et al. 2022: the order of the least peak, nothing computed twice.

    Examples:
        >>> from rmm_linear.planning.generators import random_layers
        >>> graph = random_layers(12, seed=4)
        >>> peak_and_cost(graph, range(12))[0], peak_and_cost(graph, least_peak_order(graph))[0]
        (63, 57)
    """

    name: ClassVar[str] = "steiner2022_olla"
    time_limit_s: ClassVar[float] = 60.0
    deterministic_limit: ClassVar[float] = 2.0

    def orders(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        """Propose the order of the least peak."""
        yield least_peak_order(graph, time_limit_s=self.time_limit_s, deterministic_limit=self.deterministic_limit)
