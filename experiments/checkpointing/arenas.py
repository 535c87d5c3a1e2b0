"""How small an arena may be: by OLLA's addresses, and by DTR where memory has addresses, beside Coop.

OLLA (Steiner et al. 2022, section 3.3) gives an address to each storage of a schedule, so that the arena that holds all
of them is as small as can be: rectangles of a storage's lifetime and its addresses must not overlap. Here best fit
finds the addresses; OLLA's integer program, which begins with them, is left out. The library has no arenas, for plans
have no addresses.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rmm_linear.checkpointing import Graph
from rmm_linear.planning.schedule import frees_of_order
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.zhang2023_coop import CoopRun


class Lifetime(NamedTuple):
    """The time for which a piece of memory is there: from before one computation to before another."""

    # number of the storage; -1 for an op's temporaries
    name: int
    first: int
    end: int
    # more than 0
    size_bytes: int


class Arena(NamedTuple):
    """Its size, and the address of each lifetime."""

    size_bytes: int
    addresses: tuple[int, ...]


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


def arena_for(alive: Sequence[Lifetime]) -> Arena:
    """Give addresses to lifetimes, in the smallest arena that a few orders of best fit find."""
    return min((_best_fit(alive, key) for key in _KEYS), key=lambda arena: arena.size_bytes)


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
    return Arena(int((address + size).max(initial=0)), tuple(address.tolist()))


class DtrInArena(CoopRun):
    """DTR in the same arena: it evicts the storage of the least h, wherever that lies, until a hole fits."""

    def _to_evict(self, size_bytes: int) -> list[int] | None:
        may_go = [index for index in self._live if self._may_go(index)]
        return [min(may_go, key=lambda index: (self._h(index), index))] if may_go else None


def least_arena(graph: Graph, kind: type[CoopRun]) -> tuple[float, float]:
    """Scan arenas from the plain peak, and a half more, downwards: that one is met does not say that larger ones are.

    Returns:
        The least arena in which the policy ends, as a part of the plain peak, or infinity; and the mean part of the
        arena that is free where it fails, or 0.
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
