"""Fits an order of computations into a budget, and takes computations out of it again, one change after the other.

An order that takes too much is changed where it takes most: a storage that is in memory there, and is not used, is
dropped and computed again before its next use. Of several such changes, the search makes the change that frees most for
its cost. An order that fits is changed the other way round: each second computation is left out, the dearest first, if
its result can stay in memory within the budget. Both repair orders that segments and a linear program propose, for
these look at one place of the step, and at a simpler model of its memory.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from rmm_linear.planning.changing_order import ChangingOrder
from rmm_linear.planning.graph import Graph

# The number of changes of a place that are tried, of the most freed bytes for their cost, before one is made.
_MOST_TRIED = 6
# Places whose bytes are counted anew until an order counts as too far from the budget: for each of its computations,
# and in all.
_WORK, _MOST_WORK = 5000, 10_000_000
# Looking at a change takes as long as counting the bytes of so many places.
_WORK_OF_CHANGE = 10
# Ops that are computed again for one change.
_MOST_AGAIN = 100
# A change is as good as it was before another one if its price has not grown by more.
_AS_GOOD = 1.01
_ROUNDING = 1e-9
# Second computations, one after the other, that a round of the search leaves out at once.
_LEFT_OUT = (1, 2, 3, 5, 8)
# The search at random ends after this part of its work in which it found nothing cheaper.
_PATIENCE = 0.25


class _Change(NamedTuple):
    """Ops that are computed right before a key, and the key of a computation that goes, if one does."""

    # the extra cost over the bytes that the change frees
    price: float
    ops: list[int]
    before: int
    gone: int | None = None


class LocalSearch:
    """Changes orders of one graph for one budget.

    Attributes:
        work: Places whose bytes were counted anew so far.
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self._graph, self._budget_bytes = graph, budget_bytes
        self.work = 0

    def fitted(self, order: Sequence[int]) -> list[int] | None:
        """Insert computations until an order fits the budget.

        Return None if no change that was tried brings it nearer to the budget, or too many are needed.
        """
        changing = self._changing(order)
        is_fitted = self._fit(changing)
        self.work += changing.work
        return changing.order() if is_fitted else None

    def reduced(self, order: Sequence[int]) -> list[int]:
        """Leave computations out of an order that fits the budget, as long as it fits."""
        changing = self._changing(order)
        self._reduce(changing)
        self.work += changing.work
        return changing.order()

    def best_of(self, orders: Iterable[Sequence[int]], most_work: int, enough: float) -> list[int] | None:
        """Fit several orders, and reduce them: return the cheapest one, or None if none could be fitted.

        The most promising orders come first. No further one is fitted after `most_work`, after half of it if none could
        be fitted, or at a cost of `enough`.
        """
        best, begin = None, self.work
        for order in orders:
            fitted = self.fitted(order)
            if fitted is not None:
                reduced = self.reduced(fitted)
                best = reduced if best is None else min(best, reduced, key=self.cost)
                if self.cost(best) <= enough:
                    break
            if self.work - begin > (most_work // 2 if best is None else most_work):
                break
        return best

    def searched(self, order: Sequence[int], most_work: int, enough: float) -> list[int]:
        """Leave some computations out of an order that fits, at random, and fit it again; keep the cheaper order.

        The search ends after `most_work`, after a quarter of it that brings nothing cheaper, or at a cost of `enough`.
        """
        random = Random(0)
        changing = self._changing(order)
        patience = int(_PATIENCE * most_work)
        end = patience
        while changing.work < end and changing.cost > enough and (again := sorted(changing.repetitions())):
            mark = changing.mark()
            first, count = random.randrange(len(again)), random.choice(_LEFT_OUT)
            for key in again[first : first + count]:
                if key in changing.op_at:
                    changing.take(key)
            if self._fit(changing):
                self._reduce(changing)
            # sums of costs in another order differ by rounding
            if changing.excess or changing.cost >= mark[1] * (1 - _ROUNDING):
                changing.undo(mark)
            else:
                end = min(most_work, changing.work + patience)
        self.work += changing.work
        return changing.order()

    def cost(self, order: Sequence[int]) -> float:
        """Return the cost of an order."""
        return sum(self._graph.ops[op].cost for op in order)

    def _changing(self, order: Sequence[int]) -> ChangingOrder:
        changing = ChangingOrder(self._graph, order, self._budget_bytes)
        for key in reversed(changing.keys[:-1]):
            if key in changing.op_at and changing.is_idle(key):
                changing.take(key)
        return changing

    def _most_work(self, changing: ChangingOrder) -> int:
        return changing.work + min(_WORK * len(changing.keys), _MOST_WORK)

    def _fit(self, changing: ChangingOrder) -> bool:
        most_work = self._most_work(changing)
        while changing.excess:
            key = changing.keys[max(range(len(changing.keys)), key=changing.during.__getitem__)]
            if key == changing.keys[-1]:
                return False
            changes = sorted(_Place(self._graph, changing, key).changes(), key=lambda change: change.price)
            changing.work += len(changing.events) + _WORK_OF_CHANGE * len(changes)
            found: list[tuple[float, int, _Change]] = []
            for tried, change in enumerate(changes):
                if found and tried >= _MOST_TRIED:
                    break
                mark = changing.mark()
                price = self._made(changing, change)
                changing.undo(mark)
                if price is not None:
                    found.append((price, tried, change))
            if not found or changing.work > most_work:
                return False
            # the best one, and others as long as they are needed, and as good as they were
            for price, _, change in sorted(found):
                mark = changing.mark()
                now = self._made(changing, change)
                if now is None or now > price * _AS_GOOD:
                    changing.undo(mark)
                if key not in changing.op_at or changing.during[changing.place(key)] <= self._budget_bytes:
                    break
        return True

    def _made(self, changing: ChangingOrder, change: _Change) -> float | None:
        """Make a change, and return its cost for each byte that it takes from the excess; None if it takes none."""
        excess, cost = changing.excess, changing.cost
        keys = changing.keys_before(change.before, len(change.ops))
        for op, key in zip(change.ops, keys, strict=False):
            # another change may have moved its operands to a later place
            if any(changing.last_run(self._graph.writer[index], key) is None for index in self._graph.ops[op].reads):
                return None
            changing.put(op, key)
        if change.gone is not None:
            changing.take(change.gone)
        for op, key in zip(change.ops, keys, strict=False):
            before = changing.last_run(op, key)
            if before is not None and changing.is_idle(before):
                changing.take(before)
        saved = excess - changing.excess
        return (changing.cost - cost) / saved if saved > 0 else None

    def _reduce(self, changing: ChangingOrder) -> None:
        ops, is_changed = self._graph.ops, True
        most_work = self._most_work(changing)
        while is_changed and changing.work < most_work:
            is_changed = False
            for key in sorted(changing.repetitions(), key=lambda each: (-ops[changing.op_at[each]].cost, each)):
                if key not in changing.op_at or not self._has_room(changing, key):
                    continue
                if changing.work > most_work:
                    break
                mark = changing.mark()
                changing.take(key)
                if changing.excess:
                    changing.undo(mark)
                else:
                    is_changed = True

    def _has_room(self, changing: ChangingOrder, key: int) -> bool:
        """Tell whether an op's results can stay from their last use on until the ops before it are computed again."""
        writes = self._graph.ops[changing.op_at[key]].writes
        if not writes:
            return True
        size = sum(map(self._graph.sizes.__getitem__, writes))
        first = changing.place(
            max(events[events.index(key) - 1] for events in map(changing.events.__getitem__, writes))
        )
        last = changing.place(key)
        while last > first + 1 and changing.is_repetition(changing.keys[last - 1]):
            last -= 1
        changing.work += max(0, last - first)
        return max(changing.during[first + 1 : last], default=0) + size <= self._budget_bytes


class _Place:
    """A place of an order, and changes after which it may take less there."""

    def __init__(self, graph: Graph, changing: ChangingOrder, key: int) -> None:
        self._graph, self._changing, self._key = graph, changing, key
        op = graph.ops[changing.op_at[key]]
        self._here = {*op.reads, *op.writes}
        self._stays = {*graph.outputs, *graph.freed}
        if key <= changing.end:
            self._stays.update(graph.results)
        # of earlier computations: where they are read first, and last, before they run again
        self._next_use: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        op_at = changing.op_at
        for index, (writer, events) in enumerate(zip(graph.writer, changing.events, strict=True)):
            if not events or events[-1] <= key or events[0] >= key:
                continue
            use = None
            for place in range(bisect_right(events, key), len(events)):
                if op_at[events[place]] == writer:
                    break
                use = events[place]
                self._next_use.setdefault(index, use)
            if use is not None:
                self._last_use[index] = use

    def changes(self) -> Iterator[_Change]:
        yield from self._computed_again()
        yield from self._outputs_later()
        yield from self._readers_earlier()

    def _computed_again(self) -> Iterator[_Change]:
        """A storage that is in memory, and not used here, is computed again before its next use."""
        freed_by: dict[int, list[int]] = {}
        for index in self._next_use.keys() - self._here - self._stays:
            freed_by.setdefault(self._graph.writer[index], []).append(index)
        for writer, freed in freed_by.items():
            use = min(map(self._next_use.__getitem__, freed))
            again = self._ops_from_there(writer, use, freed)
            size = sum(map(self._graph.sizes.__getitem__, freed))
            if again and size:
                yield _Change(self._cost(writer, again) / size, again, use)

    def _cost(self, writer: int, again: Sequence[int]) -> float:
        cost = sum(self._graph.ops[op].cost for op in again)
        # a storage that was not read yet is computed later, and not twice
        return cost - self._graph.ops[writer].cost if self._is_unread(writer) else cost

    def _ops_from_there(self, writer: int, use: int, freed: Sequence[int]) -> list[int]:
        """The ops that compute an op's results from storages in memory at a later place; an empty list if none can."""
        ops, is_freed = self._graph.ops, set(freed)
        again, waiting = set(), [writer]
        while waiting:
            number = waiting.pop()
            if number in again:
                continue
            again.add(number)
            self._changing.work += 1
            if (
                len(again) > _MOST_AGAIN
                or not ops[number].is_recomputable
                or not is_freed.isdisjoint(ops[number].reads)
            ):
                return []
            waiting += (self._graph.writer[index] for index in ops[number].reads if not self._is_there(index, use))
        return sorted(again)

    def _is_there(self, index: int, use: int) -> bool:
        """Tell whether a storage is in memory here, or is computed before a later place."""
        if index in self._next_use or index in self._here:
            return True
        last = self._changing.last_run(self._graph.writer[index], use)
        return last is not None and (last > self._key or index in self._stays)

    def _outputs_later(self) -> Iterator[_Change]:
        """An output that is not read is computed after this place."""
        keys = self._changing.keys
        after = keys[self._changing.place(self._key) + 1]
        for index in set(self._graph.outputs) - self._next_use.keys() - self._here:
            writer = self._graph.writer[index]
            if self._is_unread(writer) and self._changing.may_start_later(writer):
                again = self._ops_from_there(writer, after, [])
                if again and self._graph.sizes[index]:
                    yield _Change(self._cost(writer, again) / self._graph.sizes[index], again, after)

    def _readers_earlier(self) -> Iterator[_Change]:
        """The op itself runs as early as it can, or the last reader of a storage in memory runs before it."""
        ops, changing, key = self._graph.ops, self._changing, self._key
        made = max((last for i in self._here if (last := changing.last_run(self._graph.writer[i], key))), default=0)
        first = changing.keys[changing.place(made) + 1] if made else changing.keys[0]
        if first < key and changing.may_start_at(changing.op_at[key], first):
            yield _Change(0.0, [changing.op_at[key]], first, key)
        not_freed = self._stays | self._here
        for use in sorted(set(self._last_use.values())):
            op = ops[changing.op_at[use]]
            freed = (i for i in op.reads if self._last_use.get(i) == use and i not in not_freed)
            if sum(map(self._graph.sizes.__getitem__, freed)) <= sum(map(self._graph.sizes.__getitem__, op.writes)):
                continue
            is_ready = all(
                self._is_there(i, use)
                and changing.last_run(self._graph.writer[i], use) == changing.last_run(self._graph.writer[i], key)
                for i in op.reads
            )
            if is_ready and changing.may_start_at(changing.op_at[use], key):
                yield _Change(0.0, [changing.op_at[use]], key, use)

    def _is_unread(self, writer: int) -> bool:
        """Tell whether no result of an op was read since it was computed, before this place."""
        last = self._changing.last_run(writer, self._key)
        return last is not None and not any(
            bisect_left(events, self._key) > bisect_right(events, last)
            for events in map(self._changing.events.__getitem__, self._graph.ops[writer].writes)
        )
