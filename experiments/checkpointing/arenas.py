"""How small an arena may be: by OLLA's addresses, and by DTR where memory has addresses, beside Coop.

OLLA (Steiner et al. 2022, section 3.3) gives an address to each storage of a schedule, so that the arena that holds all
of them is as small as can be. The constraint program is: rectangles of a storage's lifetime and its addresses must not
overlap, and the highest address is minimised. It begins with best-fit addresses. No plan has addresses, so that the
library has no use for them.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rmm_linear.checkpointing import Graph
from rmm_linear.planning.constraint_solver import constraint_programs, search
from rmm_linear.planning.schedule import frees_of_order
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.zhang2023_coop import CoopRun


class Lifetime(NamedTuple):
    """The time for which a piece of memory is there.

    Attributes:
        name: Number of the storage; -1 for an op's temporaries.
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


def lifetimes(graph: Graph, order: Sequence[int]) -> list[Lifetime]:
    """Return the intervals in which an order of ops, with repetitions, has storages in memory."""
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
    """Give addresses to lifetimes, in as small an arena as is found; with a limit of 0 s, best-fit addresses alone."""
    least = _most_at_once(alive)
    best = min((_best_fit(alive, key) for key in _KEYS), key=lambda arena: arena.size_bytes)
    if best.size_bytes == least or not time_limit_s:
        return best._replace(is_optimal=best.size_bytes == least)
    programs = constraint_programs("OLLA")
    model = programs.CpModel()
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
    found = search(programs, model, time_limit_s=time_limit_s, num_workers=8)
    if found.status not in ("optimal", "found"):
        return best
    placed = tuple(int(found.solver.value(address)) for address in addresses)
    return Arena(int(found.solver.value(top)), placed, found.status == "optimal")


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
    first, end, size = np.array([each[1:] for each in alive], np.int64).reshape(-1, 3).T
    address = np.zeros(len(alive), np.int64)
    by_address = np.empty(0, np.int64)
    for number in sorted(range(len(alive)), key=lambda number: key(alive[number])):
        others = by_address[(first[by_address] < end[number]) & (end[by_address] > first[number])]
        low, high = address[others], np.maximum.accumulate(np.append(0, address[others] + size[others]))
        gaps = np.append(low, np.iinfo(np.int64).max) - high
        fits = np.flatnonzero(gaps >= size[number])
        address[number] = high[fits[gaps[fits].argmin()]]
        place = np.searchsorted(address[by_address], address[number])
        by_address = np.insert(by_address, place, number)
    return Arena(int((address + size).max(initial=0)), tuple(address.tolist()), is_optimal=False)


class DtrInArena(CoopRun):
    """DTR in the same arena: it evicts the storage of the least h, wherever that lies, until a hole fits."""

    def _to_evict(self, size_bytes: int) -> list[int] | None:
        may_go = [index for index in self._live if self._may_go(index)]
        return [min(may_go, key=lambda index: (self._h(index), index))] if may_go else None


def least_arena(graph: Graph, kind: type[CoopRun]) -> tuple[float, float]:
    """Scan arenas from the plain peak, and a half more, downwards: that one is met does not say that larger ones are.

    Returns:
        The least arena in which the policy ends, as a part of the plain peak, infinity if it ends in none; and the mean
        part of the arena that is free where it fails, 0 if it never does.
    """
    plain_bytes = peak_and_cost(graph, range(len(graph.ops)))[0]
    least, free = float("inf"), []
    for arena_bytes in (plain_bytes * part // 40 for part in range(60, 0, -1)):
        run = kind(graph, arena_bytes)
        if run.run():
            least = arena_bytes / plain_bytes
        else:
            holes = sum(block.size_bytes for block in run.arena.blocks if block.owner is None)
            free.append(holes / arena_bytes)
    return least, sum(free) / max(1, len(free))
