"""Fits an order of computations into a budget, and takes computations out of it again, one change after the other.

An order that takes too much is changed where it takes most: something that is in memory there, and is not used, is
dropped and computed again before its next use. Of several such changes the one is made that frees most for its cost,
as the simulator finds it. An order that fits is changed the other way round: each second computation is left out, the
dearest first, if its result can stay in memory within the budget. Both repair what published planners and a linear
program propose, for these look at one place of the step, and at a simpler model of its memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import end_of_forward
from rmm_linear.planning.simulate import bytes_of_order

# Changes that are simulated before one of them is made: those that free most for their cost.
_MOST_TRIED = 6
# Computations that are simulated until an order counts as too far from the budget: seconds for any graph.
_MOST_WORK = 10_000_000
# Second computations, one after the other, that a round of the search leaves out at once.
_LEFT_OUT = (1, 2, 3, 5, 8)


class _Change(NamedTuple):
    """Another order.

    Attributes:
        price: What it costs more, over the bytes that it frees.
        order: Indices of ops, with repetitions.
    """

    price: float
    order: list[int]


class LocalSearch:
    """Changes orders of one graph for one budget.

    Args:
        graph: The graph.
        budget_bytes: The most that may be in memory at any time.

    Attributes:
        work: Computations that were simulated so far.
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self._graph, self._budget_bytes = graph, budget_bytes
        self.work = 0

    def fitted(self, order: Sequence[int]) -> list[int] | None:
        """Insert computations until an order fits the budget.

        Args:
            order: Indices of ops, with repetitions, in an order in which they can run.

        Returns:
            The order; None if no change that was tried brings it nearer to the budget, or too many are needed.
        """
        order, begin = list(order), self.work
        during = self._bytes_during(order)
        while excess := self._excess(during):
            place = max(range(len(order)), key=during.__getitem__)
            best: tuple[float, list[int], list[int]] | None = None
            changes = sorted(_Place(self._graph, order, place).changes(), key=lambda change: change.price)
            for tried, change in enumerate(changes):
                if best is not None and tried >= _MOST_TRIED:
                    break
                changed = self._pruned(change.order)
                found = self._bytes_during(changed)
                saved = excess - self._excess(found)
                if saved > 0:
                    price = (self.cost(changed) - self.cost(order)) / saved
                    if best is None or price < best[0]:
                        best = price, changed, found
            if best is None or self.work - begin > _MOST_WORK:
                return None
            _, order, during = best
        return order

    def reduced(self, order: Sequence[int]) -> list[int]:
        """Leave computations out of an order that fits the budget, as long as it fits.

        Args:
            order: Indices of ops, with repetitions, in an order in which they can run.
        """
        order = self._pruned(order)
        during = self._bytes_during(order)
        is_changed = True
        while is_changed:
            is_changed = False
            for repetition in sorted(_repetitions(order), key=lambda each: -self._graph.ops[each[0]].cost):
                place = _place_of(order, repetition)
                if place is None or not self._has_room(order, during, place):
                    continue
                changed = self._pruned([*order[:place], *order[place + 1 :]])
                found = self._bytes_during(changed)
                if max(found) <= self._budget_bytes:
                    order, during, is_changed = changed, found, True
        return order

    def best_of(self, orders: Iterable[Sequence[int]]) -> list[int] | None:
        """Fit several orders, and reduce them.

        Returns:
            The cheapest one; None if none could be fitted.
        """
        fitted = (self.fitted(order) for order in dict.fromkeys(map(tuple, orders)))
        return min((self.reduced(order) for order in fitted if order is not None), key=self.cost, default=None)

    def searched(self, order: Sequence[int], most_work: int, enough: float) -> list[int]:
        """Leave some computations out of an order that fits, at random, and fit it again; keep what is cheaper.

        Args:
            order: Indices of ops, with repetitions, in an order in which they can run.
            most_work: Computations that are simulated until the search ends.
            enough: A cost at which the search ends.
        """
        best = list(order)
        random = Random(0)
        begin = self.work
        while self.work - begin < most_work and self.cost(best) > enough and (again := list(_repetitions(best))):
            first, count = random.randrange(len(again)), random.choice(_LEFT_OUT)
            places = {_place_of(best, repetition) for repetition in again[first : first + count]}
            fitted = self.fitted(self._pruned([op for place, op in enumerate(best) if place not in places]))
            if fitted is not None:
                reduced = self.reduced(fitted)
                if self.cost(reduced) < self.cost(best):
                    best = reduced
        return best

    def _bytes_during(self, order: Sequence[int]) -> list[int]:
        self.work += len(order)
        return bytes_of_order(self._graph, order)

    def cost(self, order: Sequence[int]) -> float:
        """Return the cost of an order."""
        return sum(self._graph.ops[op].cost for op in order)

    def _excess(self, during: Iterable[int]) -> int:
        return sum(size - self._budget_bytes for size in during if size > self._budget_bytes)

    def _pruned(self, order: Sequence[int]) -> list[int]:
        """Leave out computations whose results are not read before they are computed anew."""
        ops = self._graph.ops
        wanted = bytearray(len(self._graph.storages))
        for index in self._graph.outputs:
            wanted[index] = 1
        seen: set[int] = set()
        is_first = [op not in seen and not seen.add(op) for op in order]  # type: ignore[func-returns-value]
        kept: list[int] = []
        following: set[int] = set()
        for place in range(len(order) - 1, -1, -1):
            number = order[place]
            op = ops[number]
            is_needed = is_first[place] and (number not in following or not _may_start_later(self._graph, number))
            if is_needed or any(map(wanted.__getitem__, op.writes)):
                for index in op.writes:
                    wanted[index] = 0
                for index in op.reads:
                    wanted[index] = 1
                kept.append(number)
                following.add(number)
        kept.reverse()
        return kept

    def _has_room(self, order: Sequence[int], during: Sequence[int], place: int) -> bool:
        """Tell whether an op's results can stay from their last use on until the ops before it are computed again."""
        ops = self._graph.ops
        writes = set(ops[order[place]].writes)
        last_use = place - 1
        while writes.isdisjoint(ops[order[last_use]].reads) and writes.isdisjoint(ops[order[last_use]].writes):
            last_use -= 1
        seen = set(order[: last_use + 1])
        end = place
        while end > last_use + 1 and order[end - 1] in seen:
            end -= 1
        size = sum(self._graph.storages[index].size_bytes for index in writes)
        return max(during[last_use + 1 : end], default=0) + size <= self._budget_bytes


class _Place:
    """A place of an order, and other orders that may take less there."""

    def __init__(self, graph: Graph, order: Sequence[int], place: int) -> None:
        self._graph, self._order, self._place = graph, order, place
        ops = graph.ops
        self._here = {*ops[order[place]].reads, *ops[order[place]].writes}
        # of storages that are computed before the place: whether they were read since
        self._is_read: dict[int, bool] = {}
        for op in order[:place]:
            self._is_read.update(dict.fromkeys(ops[op].reads, True))
            self._is_read.update(dict.fromkeys(ops[op].writes, False))
        self._next_use: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._next_made: dict[int, int] = {}
        for later in range(place + 1, len(order)):
            for index in ops[order[later]].reads:
                if index in self._is_read and index not in self._next_made:
                    self._next_use.setdefault(index, later)
                    self._last_use[index] = later
            for index in ops[order[later]].writes:
                self._next_made.setdefault(index, later)
        self._end = end_of_forward(graph, order)
        self._stays = {*graph.outputs, *graph.freed}
        if place <= self._end:
            self._stays.update(graph.results)
        self._there = self._next_use.keys() | self._here | (self._is_read.keys() & self._stays)

    def changes(self) -> Iterator[_Change]:
        """Yield the orders."""
        yield from self._computed_again()
        yield from self._outputs_later()
        yield from self._readers_earlier()

    def _computed_again(self) -> Iterator[_Change]:
        """What is in memory, and not used here, is computed again before its next use."""
        freed_by: dict[int, list[int]] = {}
        for index in self._next_use.keys() - self._here - self._stays:
            freed_by.setdefault(self._graph.writer[index], []).append(index)
        for writer, freed in freed_by.items():
            use = min(map(self._next_use.__getitem__, freed))
            again = self._ops_from_there(writer, use, freed)
            size = sum(map(self._graph.sizes.__getitem__, freed))
            if again and size:
                cost = sum(self._graph.ops[op].cost for op in again)
                if self._is_unread(writer):
                    # it is computed later, and not twice
                    cost -= self._graph.ops[writer].cost
                yield _Change(cost / size, [*self._order[:use], *again, *self._order[use:]])

    def _ops_from_there(self, writer: int, use: int, freed: Sequence[int]) -> list[int]:
        """The ops that compute an op's results from what is in memory at a later place; none if that can't be."""
        ops = self._graph.ops
        again, waiting = set(), [writer]
        while waiting:
            number = waiting.pop()
            if number in again:
                continue
            again.add(number)
            if not ops[number].is_recomputable or not set(freed).isdisjoint(ops[number].reads):
                return []
            missing = (i for i in ops[number].reads if i not in self._there and self._next_made.get(i, use) >= use)
            waiting += map(self._graph.writer.__getitem__, missing)
        return sorted(again)

    def _outputs_later(self) -> Iterator[_Change]:
        """An output that is not read is computed after this place."""
        order, after = self._order, self._place + 1
        for index in self._is_read.keys() & set(self._graph.outputs) - self._next_use.keys() - self._here:
            writer = self._graph.writer[index]
            is_ready = self._there.issuperset(self._graph.ops[writer].reads)
            if is_ready and self._is_unread(writer) and _may_start_later(self._graph, writer):
                yield _Change(0.0, [*order[:after], writer, *order[after:]])

    def _readers_earlier(self) -> Iterator[_Change]:
        """The op itself runs as early as it can, or the last reader of what is in memory runs before it."""
        ops, order, place = self._graph.ops, self._order, self._place
        made = max((at for at in range(place) if not self._here.isdisjoint(ops[order[at]].writes)), default=-1)
        if made < place - 1 and self._may_move(order[place], made + 1):
            yield _Change(0.0, [*order[: made + 1], order[place], *order[made + 1 : place], *order[place + 1 :]])
        for use in sorted(set(self._last_use.values())):
            op = ops[order[use]]
            is_ready = all(index in self._is_read and self._is_there_until(index, use) for index in op.reads)
            if is_ready and self._may_move(order[use], place):
                freed = (i for i in op.reads if self._last_use.get(i) == use and i not in self._stays | self._here)
                if sum(map(self._graph.sizes.__getitem__, freed)) > sum(map(self._graph.sizes.__getitem__, op.writes)):
                    yield _Change(0.0, [*order[:place], order[use], *order[place:use], *order[use + 1 :]])

    def _is_there_until(self, index: int, use: int) -> bool:
        return index in self._there and self._next_made.get(index, use) >= use

    def _is_unread(self, writer: int) -> bool:
        return not any(self._is_read.get(index, True) for index in self._graph.ops[writer].writes)

    def _may_move(self, number: int, place: int) -> bool:
        """Tell whether an op may run at an earlier place."""
        op = self._graph.ops[number]
        return op.is_recomputable and not op.is_random and (not op.is_backward or place > self._end)


def _may_start_later(graph: Graph, number: int) -> bool:
    op = graph.ops[number]
    return op.is_recomputable and not op.is_random and {*graph.results, *graph.freed}.isdisjoint(op.writes)


def _repetitions(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each op that was computed before, and how often."""
    times: dict[int, int] = {}
    for op in order:
        if times.setdefault(op, 0):
            yield op, times[op]
        times[op] += 1


def _place_of(order: Sequence[int], repetition: tuple[int, int]) -> int | None:
    op, number = repetition
    places = [place for place, each in enumerate(order) if each == op]
    return places[number] if number < len(places) else None
