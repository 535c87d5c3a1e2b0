"""Coop: Zhang et al. 2023, "Coop: Memory is not a Commodity" (arXiv 2311.00591).

Free bytes at two addresses do not make one free block. DTR (`kirisame2021_dtr`) evicts by the storages alone, and so
frees pieces here and there, until by chance a hole is large enough. Coop evicts contiguous storages: all storages are
in one arena, and where no hole fits, a window slides over the arena in the order of addresses. Of all windows of
evictable storages and holes that are large enough, the window of the least sum of

    h = (cost + cost of its evicted neighbourhood) / staleness

is evicted, without a division by bytes: all windows have the size that is needed. Storages that are dear to compute
again are placed from the low end of the arena, cheap ones from the high end, so that cheap storages lie beside each
other. Storages are dear here where their cost per byte is above the graph's.

The paper's third part, in-place updates that can be computed again, keeps parameters at their address; here parameters
are outside of the arena, and captured steps have no in-place ops. A schedule has no addresses either: the proposals
are the orders that the policy takes in arenas of many sizes.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.kirisame2021_dtr import OnlineRun, UnionFind, orders_of_runs

# the owner of an op's temporaries
_TEMPORARY = -1


class Block(NamedTuple):
    """A piece of the arena.

    Attributes:
        size_bytes: Its size, more than 0.
        owner: The storage that it holds; None for a hole.
    """

    size_bytes: int
    owner: int | None


class Arena:
    """One piece of memory, as blocks in the order of addresses; no two holes lie beside each other."""

    def __init__(self, size_bytes: int) -> None:
        self.blocks = [Block(size_bytes, None)]

    def place(self, owner: int, size_bytes: int, *, is_low: bool) -> bool:
        """Place a storage at the near end of the first hole that fits, seen from either end; tell whether one does."""
        places = range(len(self.blocks))
        for place in places if is_low else reversed(places):
            hole = self.blocks[place]
            if hole.owner is None and hole.size_bytes >= size_bytes:
                pieces = [Block(size_bytes, owner), Block(hole.size_bytes - size_bytes, None)]
                self.blocks[place : place + 1] = [piece for piece in pieces[:: 1 if is_low else -1] if piece.size_bytes]
                return True
        return False

    def free(self, owner: int) -> None:
        """Make a hole of a storage's block, joined with its neighbours."""
        place = next(place for place, block in enumerate(self.blocks) if block.owner == owner)
        first, last = place, place + 1
        if first and self.blocks[first - 1].owner is None:
            first -= 1
        if last < len(self.blocks) and self.blocks[last].owner is None:
            last += 1
        self.blocks[first:last] = [Block(sum(block.size_bytes for block in self.blocks[first:last]), None)]

    def cheapest_window(self, size_bytes: int, price: Callable[[int], float | None]) -> list[int] | None:
        """Return the storages of the cheapest window that makes a hole of so many bytes; None if none is large enough.

        `price` is the price of evicting a storage, or None if that can't be.
        """
        best: tuple[float, list[int]] | None = None
        window: list[tuple[Block, float]] = []
        held, total = 0, 0.0
        for block in self.blocks:
            own = 0.0 if block.owner is None else price(block.owner)
            if own is None:
                window, held, total = [], 0, 0.0
                continue
            window.append((block, own))
            held, total = held + block.size_bytes, total + own
            while held - window[0][0].size_bytes >= size_bytes:
                gone, its = window.pop(0)
                held, total = held - gone.size_bytes, total - its
            if held >= size_bytes and (best is None or total < best[0]):
                best = total, [each.owner for each, _ in window if each.owner is not None]
        return best and best[1]


class CoopRun(OnlineRun):
    """One run of the plain program in an arena.

    Attributes:
        arena: The arena, as the run left it.
    """

    def __init__(self, graph: Graph, arena_bytes: int) -> None:
        super().__init__(graph, arena_bytes, UnionFind(graph))
        self.arena = Arena(arena_bytes)
        self._running: set[int] = set()
        self._cost_per_byte = graph.cost / max(1, sum(graph.sizes))

    def _make_room(self, op: int) -> bool:
        graph = self._graph
        self._running = set(graph.ops[op].writes)
        sizes = {index: graph.sizes[index] for index in graph.ops[op].writes if index not in self._live}
        sizes[_TEMPORARY] = graph.ops[op].temporary_bytes
        is_low = graph.ops[op].cost > self._cost_per_byte * sum(map(graph.sizes.__getitem__, graph.ops[op].writes))
        for index, size in sizes.items():
            while size and not self.arena.place(index, size, is_low=is_low):
                evicted = self._to_evict(size)
                if evicted is None:
                    return False
                for each in evicted:
                    self._evict(each)
        if sizes[_TEMPORARY]:
            self.arena.free(_TEMPORARY)
        return True

    def _to_evict(self, size_bytes: int) -> list[int] | None:
        return self.arena.cheapest_window(size_bytes, self._price)

    def _may_go(self, index: int) -> bool:
        # a storage that an op writes again keeps its place
        return index not in self._running and super()._may_go(index)

    def _price(self, index: int) -> float | None:
        is_candidate = index in self._live and self._may_go(index)
        return self._h(index) * self._graph.sizes[index] if is_candidate else None

    def _evict(self, index: int) -> None:
        super()._evict(index)
        if self._graph.sizes[index]:
            self.arena.free(index)


class Coop(Strategy):
    """Zhang et al. 2023: evicted storages lie side by side."""

    name: ClassVar[str] = "zhang2023_coop"

    def orders(self, graph: Graph) -> Iterator[list[int]]:
        return orders_of_runs(graph, lambda arena_bytes: CoopRun(graph, arena_bytes))
