"""Dynamic tensor rematerialization: Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv 2006.09616).

An online policy: the ops come one after the other, in the order of the plain program, and the policy does not know
later ops. An op whose operands were evicted has them computed again first, and so on. Where an op's results do not
fit the budget, the storage of the least

    h = (cost + cost of its evicted neighbourhood) / (bytes * staleness)

is evicted, until they fit. Staleness is the time since a storage was last read or written; the evicted neighbourhood
must be computed again with it: evicted ancestors and descendants that are reached through evicted storages. `h_eq`
holds neighbourhoods in a union-find, which forgets that a component falls apart when a part of it is computed again;
`h_local` has no neighbourhood. A storage that no op of the program reads again is evicted at once
(the paper's eager eviction); outputs, results until the forward pass ends, gradients until they are handed over, and
storages that must not be computed twice are never evicted.

The paper decides while the program runs; here the policy runs once for each of many budgets, and the orders that it
takes are proposals: the simulator frees storages that no later op reads, which the policy could not know. Whether a
budget is met is not monotone in it, so that smaller budgets are tried until several in a row are missed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from rmm_linear.planning.graph import Graph, reached
from rmm_linear.planning.schedule import end_of_forward, hand_over_places
from rmm_linear.planning.simulate import plain_peak_bytes
from rmm_linear.planning.strategies.base import Strategy

_BUDGETS = 40
# a run that takes so many times the plain program's time has lost its way
_MOST_COST = 8.0
# budgets missed in a row, after which smaller budgets are not tried
_MOST_MISSED = 4


class Neighbourhood:
    """The cost of evicted storages around a storage; none for h_local."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._evicted: set[int] = set()
        self._before = [frozenset(graph.ops[writer].reads) for writer in graph.writer]
        self._after = [frozenset(other for op in ops for other in graph.ops[op].writes) for ops in graph.readers]

    def cost(self, index: int) -> float:
        """Return the cost of the evicted neighbourhood of a storage that is in memory."""
        return 0.0

    def evict(self, index: int) -> None:
        """Note that a storage is evicted."""
        self._evicted.add(index)

    def restore(self, index: int) -> None:
        """Note that a storage is computed; it need not be evicted."""
        self._evicted.discard(index)


class ExactNeighbourhood(Neighbourhood):
    """The evicted ancestors and descendants."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._known: dict[int, float] = {}

    def cost(self, index: int) -> float:
        if index not in self._known:
            found = self._reached(index, self._before) | self._reached(index, self._after)
            ops = {self._graph.writer[other] for other in found} - {self._graph.writer[index]}
            self._known[index] = sum(self._graph.ops[op].cost for op in sorted(ops))
        return self._known[index]

    def evict(self, index: int) -> None:
        super().evict(index)
        self._forget(index)

    def restore(self, index: int) -> None:
        if index in self._evicted:
            self._forget(index)
        super().restore(index)

    def _reached(self, index: int, near: Sequence[frozenset[int]]) -> set[int]:
        return reached(near[index] & self._evicted, lambda other: near[other] & self._evicted)

    def _forget(self, index: int) -> None:
        for near in (self._before, self._after):
            for other in (index, *self._reached(index, near)):
                for known in near[other]:
                    self._known.pop(known, None)
        self._known.pop(index, None)


class UnionFind(Neighbourhood):
    """Components of evicted storages, each with the sum of their costs."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._parent: list[int] = []
        self._sum: list[float] = []
        self._set_of: dict[int, int] = {}

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def _roots_around(self, index: int) -> list[int]:
        near = (self._before[index] | self._after[index]) & self._evicted
        return sorted({self._root(self._set_of[other]) for other in near})

    def cost(self, index: int) -> float:
        return sum(self._sum[root] for root in self._roots_around(index))

    def evict(self, index: int) -> None:
        """Join the components that touch it."""
        roots = self._roots_around(index)
        super().evict(index)
        number = self._set_of[index] = len(self._parent)
        self._parent.append(number)
        self._sum.append(self._graph.ops[self._graph.writer[index]].cost + sum(self._sum[root] for root in roots))
        for root in roots:
            self._parent[root] = number

    def restore(self, index: int) -> None:
        """Take it out of its component, which stays one."""
        if index in self._evicted:
            self._sum[self._root(self._set_of[index])] -= self._graph.ops[self._graph.writer[index]].cost
        super().restore(index)


class OnlineRun:
    """One run of the plain program under a budget.

    Attributes:
        order: The ops that ran, with repetitions.
    """

    def __init__(self, graph: Graph, budget_bytes: int, neighbourhood: Neighbourhood) -> None:
        self._graph, self._budget_bytes, self._neighbourhood = graph, budget_bytes, neighbourhood
        self.order: list[int] = []
        self._time = 0.0
        self._used_at = [0.0] * len(graph.storages)
        self._live: set[int] = set()
        self._held = 0
        self._locks = [0] * len(graph.storages)
        self._stays = {i for op in graph.ops if not op.is_recomputable for i in op.writes}.union(graph.outputs)
        # ops of the plain program after which a storage is released
        plain = range(len(graph.ops))
        last = {index: readers[-1] if readers else graph.writer[index] for index, readers in enumerate(graph.readers)}
        self._ends = dict.fromkeys(graph.results, end_of_forward(graph, plain))
        self._ends |= hand_over_places(graph, plain, graph.freed)
        last |= {index: max(last[index], end) for index, end in self._ends.items()}
        self._released_after: list[list[int]] = [[] for _ in plain]
        for index, op in last.items():
            self._released_after[op].append(index)

    def run(self) -> bool:
        """Run all ops; tell whether the budget was kept, in reasonable time."""
        for op, released in enumerate(self._released_after):
            if not self._compute(op):
                return False
            for index in released:
                self._ends.pop(index, None)
                if index in self._live and index not in self._stays:
                    self._evict(index)
        return True

    def _compute(self, op: int) -> bool:
        waiting = [op]
        self._lock(op, 1)
        while waiting:
            op = waiting[-1]
            missing = [index for index in self._graph.ops[op].reads if index not in self._live]
            if missing:
                waiting.append(self._graph.writer[missing[0]])
                self._lock(waiting[-1], 1)
                continue
            if not self._make_room(op) or self._time > _MOST_COST * self._graph.cost:
                return False
            self._run_op(op)
            self._lock(waiting.pop(), -1)
        return True

    def _lock(self, op: int, by: int) -> None:
        for index in self._graph.ops[op].reads:
            self._locks[index] += by

    def _run_op(self, op: int) -> None:
        self.order.append(op)
        self._time += self._graph.ops[op].cost
        for index in self._graph.ops[op].writes:
            if index not in self._live:
                self._live.add(index)
                self._held += self._graph.sizes[index]
                self._neighbourhood.restore(index)
        for index in (*self._graph.ops[op].reads, *self._graph.ops[op].writes):
            self._used_at[index] = self._time

    def _make_room(self, op: int) -> bool:
        while self._held + self._graph.bytes_while_running[op] > self._budget_bytes:
            may_go = [index for index in self._live if self._may_go(index)]
            if not may_go:
                return False
            self._evict(min(may_go, key=lambda index: (self._h(index), index)))
        return True

    def _may_go(self, index: int) -> bool:
        is_needed = self._locks[index] or index in self._stays or index in self._ends
        return not is_needed and self._graph.sizes[index] > 0

    def _h(self, index: int) -> float:
        cost = self._graph.ops[self._graph.writer[index]].cost + self._neighbourhood.cost(index)
        staleness = max(self._time - self._used_at[index], 1e-9 * self._graph.cost)
        return cost / (self._graph.sizes[index] * staleness)

    def _evict(self, index: int) -> None:
        self._live.remove(index)
        self._held -= self._graph.sizes[index]
        self._neighbourhood.evict(index)


def budgets_to_try(graph: Graph) -> Iterator[int]:
    """Give parts of the plain peak, down to the bytes of the largest op."""
    plain_bytes = plain_peak_bytes(graph)
    largest = max(graph.bytes_while_running)
    for part in range(_BUDGETS, 0, -1):
        if plain_bytes * part // _BUDGETS >= largest:
            yield plain_bytes * part // _BUDGETS


def orders_of_runs(graph: Graph, make: Callable[[int], OnlineRun]) -> Iterator[list[int]]:
    """Yield the orders of a policy at the budgets that it meets, until it misses several in a row."""
    missed = 0
    for budget_bytes in budgets_to_try(graph):
        run = make(budget_bytes)
        missed = 0 if run.run() else missed + 1
        if missed == _MOST_MISSED:
            break
        if not missed:
            yield run.order


class Dtr(Strategy):
    """Kirisame et al. 2021 with the evicted neighbourhood."""

    name: ClassVar[str] = "kirisame2021_dtr"
    neighbourhood: ClassVar[type[Neighbourhood]] = ExactNeighbourhood

    def orders(self, graph: Graph) -> Iterator[list[int]]:
        return orders_of_runs(graph, lambda budget_bytes: OnlineRun(graph, budget_bytes, self.neighbourhood(graph)))


class DtrEq(Dtr):
    """Kirisame et al. 2021 with a union-find in place of the evicted neighbourhood."""

    name: ClassVar[str] = "kirisame2021_dtr_eq"
    neighbourhood: ClassVar[type[Neighbourhood]] = UnionFind


class DtrLocal(Dtr):
    """Kirisame et al. 2021 without a neighbourhood."""

    name: ClassVar[str] = "kirisame2021_dtr_local"
    neighbourhood: ClassVar[type[Neighbourhood]] = Neighbourhood
