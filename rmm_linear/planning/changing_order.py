"""An order of computations that changes: its peak and time are known after each change, without a pass over all ops.

A computation that comes or goes changes when the storages that it reads and writes are in memory. Only between the
places where that differs, bytes are counted anew. Each computation has a key, and the keys grow along the order; they
are far enough apart for many others to come between two.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.simulate import bytes_of_order

# Between two keys, at the beginning.
_GAP = 1 << 256
# The op of the last key: no op is computed there, and storages that stay are in memory.
_NOTHING = -1


class ChangingOrder:
    """An order of computations.

    Attributes:
        keys: The keys of the computations, in order, and one more.
        during: Bytes in memory during each, as `rmm_linear.planning.simulate.bytes_of_order` says.
        op_at: The op of each key.
        runs: The keys of each op's computations, in order.
        events: The keys at which each storage is written or read, in order; of a gradient that is handed over, also of
            the ops that hold it back.
        end: The key at which the last result is computed first.
        cost: Time of all computations.
        excess: The bytes above the budget, summed over the computations.
        work: Places whose bytes were counted anew so far.
    """

    def __init__(self, graph: Graph, order: Sequence[int], budget_bytes: int) -> None:
        self._graph, self._budget_bytes = graph, budget_bytes
        self._outputs = frozenset(graph.outputs)
        self._result_writers = {graph.writer[index] for index in graph.results}
        # the storages whose time in memory depends on when an op runs
        self._touched = [
            dict.fromkeys((*op.reads, *op.writes, *(index for index in op.holds_back if index in graph.freed)))
            for op in graph.ops
        ]
        self.keys = [place * _GAP for place in range(1, len(order) + 2)]
        self.op_at = dict(zip(self.keys, (*order, _NOTHING), strict=True))
        self.during = [*bytes_of_order(graph, order), sum(graph.sizes[index] for index in self._outputs)]
        self.runs: list[list[int]] = [[] for _ in graph.ops]
        self.events: list[list[int]] = [[] for _ in graph.storages]
        for key, op in zip(self.keys, order, strict=False):
            self.runs[op].append(key)
            for index in self._touched[op]:
                self.events[index].append(key)
        self.end = self._end()
        # first computations of ops with effects stay where they are
        ops = graph.ops[: graph.forward_count]
        effects = (number for number, op in enumerate(ops) if op.is_random or not op.is_recomputable)
        self._last_effect = max((self.runs[op][0] for op in effects if self.runs[op]), default=0)
        self.cost = sum(graph.ops[op].cost for op in order)
        self.excess = self._excess(self.during)
        # as long as making this takes
        self.work = 10 * len(order)
        self._log: list[tuple[int, int, bool]] = []

    def order(self) -> list[int]:
        """Return the indices of the ops, with repetitions."""
        return [self.op_at[key] for key in self.keys[:-1]]

    def place(self, key: int) -> int:
        """Return the number of computations before a key."""
        return bisect_left(self.keys, key)

    def keys_before(self, key: int, count: int) -> list[int]:
        """Return keys for computations that come right before another one; none where there is no room left."""
        place = self.place(key)
        first = self.keys[place - 1] if place else 0
        step = (key - first) // (count + 1)
        # a random state is there a little before the computation
        return [first + step * number for number in range(1, count + 1)] if step > 1 else []

    def mark(self) -> tuple[int, float]:
        """Return how many changes were made, and the cost: for `undo`."""
        return len(self._log), self.cost

    def undo(self, mark: tuple[int, float]) -> None:
        """Go back to a state."""
        changes, cost = mark
        while len(self._log) > changes:
            op, key, is_there = self._log.pop()
            self._change(op, key, is_there=not is_there)
        self.cost = cost

    def put(self, op: int, key: int) -> None:
        """Compute an op at a place, too; its operands were computed before."""
        self._change(op, key, is_there=True)
        self._log.append((op, key, True))

    def take(self, key: int) -> None:
        """Leave a computation out, and earlier computations whose results no op needs any more."""
        waiting = [key]
        while waiting:
            key = waiting.pop()
            op = self.op_at.get(key, _NOTHING)
            if op == _NOTHING:
                continue
            self._change(op, key, is_there=False)
            self._log.append((op, key, False))
            for index in self._graph.ops[op].reads:
                before = self.last_run(self._graph.writer[index], key)
                if before is not None and self.is_idle(before):
                    waiting.append(before)

    def last_run(self, op: int, key: int) -> int | None:
        """Return the key of an op's last computation before another one."""
        runs = self.runs[op]
        place = bisect_left(runs, key)
        return runs[place - 1] if place else None

    def is_idle(self, key: int) -> bool:
        """Tell whether a computation can be left out, for its results are not read before they are computed anew."""
        op = self.op_at[key]
        runs = self.runs[op]
        if key == runs[0] and (len(runs) == 1 or not self.may_start_later(op)):
            return False
        return not any(self._is_wanted(index, key) for index in self._graph.ops[op].writes)

    def may_start_later(self, op: int) -> bool:
        """Tell whether the first computation of an op may come at a later place than in the plain program."""
        each = self._graph.ops[op]
        is_free = each.is_recomputable and not each.is_random and op not in self._result_writers
        return is_free and self._graph.freed.isdisjoint(each.writes)

    def may_start_at(self, op: int, key: int) -> bool:
        """Tell whether the first computation of an op may come as early as at a key."""
        each = self._graph.ops[op]
        # the forward pass ends after all ops with effects
        least = self.end if each.is_backward else self._last_effect if op in self._result_writers else 0
        return each.is_recomputable and not each.is_random and key > least

    def repetitions(self) -> Iterator[int]:
        """Yield the keys of computations of ops that were computed before."""
        for runs in self.runs:
            yield from runs[1:]

    def is_repetition(self, key: int) -> bool:
        """Tell whether the op of a key was computed before."""
        return self.runs[self.op_at[key]][0] < key

    def _is_wanted(self, index: int, key: int) -> bool:
        events, writer = self.events[index], self._graph.writer[index]
        for place in range(bisect_right(events, key), len(events)):
            op = self.op_at[events[place]]
            if op == writer:
                return False
            if index in self._graph.ops[op].reads:
                return True
        return index in self._outputs

    def _end(self) -> int:
        firsts = [self.runs[op][:1] for op in self._result_writers]
        return max((first[0] for first in firsts), default=0) if all(firsts) else 0

    def _spans(self, index: int) -> dict[int, int]:
        """When a storage is in memory: after each of these keys, until the other one."""
        writer, events = self._graph.writer[index], self.events[index]
        runs = self.runs[writer]
        if not runs:
            return {}
        if index in self._outputs:
            return {runs[0]: self.keys[-1]}
        if index in self._graph.freed:
            last = next((key for key in reversed(events) if self.op_at[key] != writer), runs[0])
            return {runs[0]: max(runs[0], last)}
        # each time until the last event before the storage is written anew
        following = (*runs[1:], self.keys[-1])
        found = {run: events[bisect_left(events, after) - 1] for run, after in zip(runs, following, strict=True)}
        if writer in self._result_writers and index in self._graph.results:
            found |= {run: max(last, self.end) for run, last in found.items() if run <= self.end}
        return found

    def _state_span(self, op: int) -> dict[int, int]:
        runs = self.runs[op]
        return {runs[0] - 1: runs[-1]} if len(runs) > 1 and self._graph.ops[op].state_bytes else {}

    def _change(self, op: int, key: int, *, is_there: bool) -> None:
        touched = self._touched[op]
        moves_end = op in self._result_writers and key <= min(self.runs[op], default=key)
        if moves_end:
            touched = touched | dict.fromkeys(self._graph.results)
        before = [self._spans(index) for index in touched]
        before_state = self._state_span(op)
        place = self.place(key)
        if is_there:
            # memory before the next computation, too, without its random state if that comes with it
            following = self.op_at[self.keys[place]]
            held = self.during[place]
            if following != _NOTHING:
                held -= self._graph.bytes_while_running[following]
                if self.keys[place] - 1 in self._state_span(following):
                    held -= self._graph.ops[following].state_bytes
            self.keys.insert(place, key)
            self.during.insert(place, held + self._graph.bytes_while_running[op])
            self.excess += self._excess(self.during[place : place + 1])
            self.op_at[key] = op
            insort(self.runs[op], key)
            for index in self._touched[op]:
                insort(self.events[index], key)
            self.cost += self._graph.ops[op].cost
        else:
            self.excess -= self._excess(self.during[place : place + 1])
            del self.keys[place], self.during[place], self.op_at[key]
            self.runs[op].remove(key)
            for index in self._touched[op]:
                self.events[index].remove(key)
            self.cost -= self._graph.ops[op].cost
        if moves_end:
            self.end = self._end()
        for index, spans in zip(touched, before, strict=True):
            self._count(spans, self._spans(index), self._graph.sizes[index])
        self._count(before_state, self._state_span(op), self._graph.ops[op].state_bytes)

    def _count(self, before: dict[int, int], after: dict[int, int], size: int) -> None:
        """Count a storage anew where the times at which it is in memory differ."""
        if before == after or not size:
            return
        for start in before.keys() | after.keys():
            old, new = before.get(start, start), after.get(start, start)
            if old != new:
                self._add(min(old, new), max(old, new), size if new > old else -size)

    def _add(self, after: int, until: int, size: int) -> None:
        first, last = bisect_right(self.keys, after), bisect_right(self.keys, until)
        old = self.during[first:last]
        if not old:
            return
        new = [each + size for each in old]
        self.during[first:last] = new
        self.work += last - first
        if max(max(old), max(new)) > self._budget_bytes:
            self.excess += self._excess(new) - self._excess(old)

    def _excess(self, during: Sequence[int]) -> int:
        budget = self._budget_bytes
        return sum(each - budget for each in during if each > budget)
