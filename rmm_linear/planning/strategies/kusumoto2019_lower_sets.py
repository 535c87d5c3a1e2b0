r"""Recomputation by a chain of lower sets (Kusumoto, Inoue, Watanabe, Akiba, Koyama 2019, arXiv 1905.11722).

The paper's graph has the intermediate values of the forward pass for nodes: node v takes T_v to compute and M_v bytes
to hold. A *lower set* L holds with each node all that it depends on; its *boundary* dL are the nodes of L that a node
outside reads. A plan is a chain L_1 < L_2 < ... < L_k = V. The forward pass keeps the boundaries; the backward pass
goes through the blocks V_i = L_i \ L_(i-1) from the last, and computes each again from the boundaries before it
(section 3). With U_i the union of the first i boundaries, this takes, by eqs. 1 and 2,

    overhead  T = sum over i of T(V_i \ dL_i)                                                               (eq. 1)
    peak      M = max over i of M(U_(i-1)) + 2 M(V_i) + M(succ(L_i) \ L_i) + M(pred(succ(L_i)) \ L_i)        (eq. 2)

which a dynamic program over (L, t) minimises: of all chains that end in L after an overhead of t, with no block above
the cap B, only the chain with the least M(U) matters. Over all lower sets the program is exact, and there
may be exponentially many; the approximate program looks at {} and V and the ancestors of each node alone.
The *time-centric* plan has the least T of the plans below B. The *memory-centric* plan has the largest T: its blocks
are coarse, and freeing each value after its last use, which eq. 2 does not count, helps coarse blocks most.

Here the chains of a range of caps are proposals: `orders_of_segments` brings them to the training graph, where each
value is freed after its last use.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.segments import orders_of_segments

# The nodes of each block of a chain, sorted.
Blocks = tuple[tuple[int, ...], ...]

_MOST_LOWER_SETS = 1500


@dataclass(frozen=True)
class NodeGraph:
    """The paper's graph: forward values that take time to compute and memory to hold.

    Attributes:
        costs: T of each node, at least 0.
        sizes: M of each node, in bytes.
        edges: Pairs (u, v), u < v: v reads u.
        order_edges: Pairs (u, v), u < v: v must run after u, and does not read it.
        ops: The ops of the training graph that each node stands for, in order.
    """

    costs: tuple[float, ...]
    sizes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    order_edges: tuple[tuple[int, int], ...] = ()
    ops: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_forward(cls, graph: Graph) -> "NodeGraph":
        """Make the paper's graph of the forward ops of a training graph, its nodes in an order in which they can run.

        An op whose results are read by one later forward op alone belongs to that op's node: nothing is gained by
        keeping it without the other. A node has the size of its storages that others read. Storages that must not be
        computed twice cost no time again. Random ops keep their order, and ops with effects stay before the last
        result. Without a backward pass, each op is a node: a backward pass might read the results of any op.
        """
        count = graph.forward_count
        has_backward = count < len(graph.ops)
        outputs = set(graph.outputs)
        root = list(range(count))
        # without backward ops their reads are not known
        for position in reversed(range(count if has_backward else 0)):
            op = graph.ops[position]
            readers = {reader for index in op.writes for reader in graph.readers[index]}
            if len(readers) == 1 and op.is_recomputable and not op.is_random and outputs.isdisjoint(op.writes):
                (reader,) = readers
                root[position] = root[reader] if reader < count else position
        # a group's ops all lead to its last one, the only one that others read: numbered by it, groups are in order
        numbers = {last: number for number, last in enumerate(sorted(set(root)))}
        members: list[list[int]] = [[] for _ in numbers]
        for position in range(count):
            members[numbers[root[position]]].append(position)
        edges = {
            (numbers[root[graph.writer[index]]], numbers[root[position]])
            for position in range(count)
            for index in graph.ops[position].reads
            if root[graph.writer[index]] != root[position]
        }
        draws = [position for position in range(count) if graph.ops[position].is_random]
        ordered = set(pairwise(draws))
        last_result = max((graph.writer[index] for index in graph.results), default=0)
        before = enumerate(graph.ops[:last_result])
        ordered |= {(position, last_result) for position, op in before if op.is_random or not op.is_recomputable}
        is_read = [bool(readers) or index in outputs for index, readers in enumerate(graph.readers)]
        ends = [graph.ops[group[-1]] for group in members]
        return cls(
            costs=tuple(sum(graph.ops[op].cost for op in group if graph.ops[op].is_recomputable) for group in members),
            sizes=tuple(sum(graph.sizes[index] for index in end.writes if is_read[index]) for end in ends),
            edges=tuple(sorted(edges)),
            order_edges=tuple(sorted((numbers[root[u]], numbers[root[v]]) for u, v in ordered)),
            ops=tuple(map(tuple, members)),
        )

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that must run before each node, by either kind of edge."""
        found: list[list[int]] = [[] for _ in self.costs]
        for u, v in (*self.edges, *self.order_edges):
            found[v].append(u)
        return tuple(map(tuple, found))


def all_lower_sets(nodes: NodeGraph) -> NDArray[np.bool_]:
    """Return all lower sets of a graph: a row each, a column a node; the smaller ones first, the empty one too.

    Raises:
        ValueError: If there are too many.
    """
    needs = [sum(1 << u for u in set(before)) for before in nodes.predecessors]
    # by the largest node of the set: each one is found once, from the set without it
    found = [0]
    for node, need in enumerate(needs):
        found += [lower | 1 << node for lower in found if lower & need == need]
        if len(found) > _MOST_LOWER_SETS:
            raise ValueError(
                f"the graph's {len(needs)} nodes have more than {_MOST_LOWER_SETS} lower sets, too many for the exact"
                " program; use kusumoto2019_approximate"
            )
    return _sorted_rows(np.array([[lower >> node & 1 for node in range(len(needs))] for lower in found], dtype=bool))


def ancestor_closures(nodes: NodeGraph) -> NDArray[np.bool_]:
    """Return the lower sets of the approximate program: none, all, and the ancestors of each node with itself.

    The rows and columns are the same as of `all_lower_sets`.

    Raises:
        ValueError: If there are too many.
    """
    count = len(nodes.costs)
    if count > _MOST_LOWER_SETS:
        raise ValueError(f"the graph has {count} nodes, and the approximate program goes to {_MOST_LOWER_SETS}")
    rows = np.zeros((count + 2, count), dtype=bool)
    for node, before in enumerate(nodes.predecessors):
        rows[node, node] = True
        for u in before:
            rows[node] |= rows[u]
    rows[-1] = True
    return _sorted_rows(rows)


def _sorted_rows(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    # eight nodes a byte, the first one in its highest bit: sorted as the rows are, in a fraction of the time
    _, first = np.unique(np.packbits(rows, axis=1), axis=0, return_index=True)
    rows = rows[first[::-1]]
    return rows[np.argsort(rows.sum(axis=1), kind="stable")]


class LowerSetProgram:
    """The dynamic program over a family of lower sets.

    States are (L, t). The program counts the time of kept nodes, T(V) - t, which is equivalent. Where costs are
    no small multiples of one number, states whose times are close share a place: the one with the least memory stays,
    with its own time. So at worst a better chain is missed.
    """

    def __init__(self, nodes: NodeGraph, lower_sets: NDArray[np.bool_]) -> None:
        """Prepare the terms of eqs. 1 and 2 for each pair of lower sets, of which the last has all nodes."""
        self.lower_sets = lower_sets
        costs, sizes = np.array(nodes.costs, dtype=float), np.array(nodes.sizes, dtype=float)
        inside = np.ascontiguousarray(lower_sets.T)
        boundary, following, beside = (np.zeros_like(inside) for _ in range(3))
        for u, v in nodes.edges:
            leaves = inside[u] & ~inside[v]
            boundary[u] |= leaves
            following[v] |= leaves
        for u, v in nodes.edges:
            beside[u] |= following[v] & ~inside[u]
        rows = inside.T.astype(float)
        # sums of whole numbers below 2**53 are exact in float64; [larger, smaller]
        held = 2 * sizes @ inside
        self._block = (held[:, None] - held[None, :]) + (sizes @ following + sizes @ beside)[:, None]
        self._kept_bytes = (boundary.T * sizes) @ (1 - rows).T
        self._kept_time = (boundary.T * costs) @ (1 - rows).T
        smaller = (rows @ rows.T) == rows.sum(axis=1)[None, :]
        np.fill_diagonal(smaller, False)
        self._smaller = [np.flatnonzero(row) for row in smaller]
        count = len(lower_sets)
        levels = min(4096, max(32, 20_000_000 // count**2))
        self._quantum = _quantum(costs, levels)
        self._levels = int(costs.sum() / self._quantum) + 2

    @property
    def largest_cap(self) -> int:
        """The cap at which one block, the whole graph, is a plan."""
        return int(self._block[-1, 0])

    @cached_property
    def least_cap(self) -> int:
        """The least cap B with a plan, by bisection."""
        return bisect_left(range(self.largest_cap), True, key=self._is_feasible)

    def _is_feasible(self, cap: int) -> bool:
        # overhead left aside, only the least M(U) of each lower set matters
        least = np.full(len(self.lower_sets), np.inf)
        least[0] = 0
        for place, smaller in enumerate(self._smaller):
            if place:
                kept = least[smaller]
                fits = kept + self._block[place, smaller] <= cap
                if fits.any():
                    least[place] = (kept[fits] + self._kept_bytes[place, smaller[fits]]).min()
        return bool(np.isfinite(least[-1]))

    def centric_plans(self, cap: int) -> tuple[Blocks, ...]:
        """Return the time-centric and the memory-centric plan for which eq. 2 gives `cap` bytes at most, as blocks.

        There is one if they are the same, and none if the cap is below `least_cap`.
        """
        memory, before = self._states(cap)
        levels = np.flatnonzero(np.isfinite(memory[-1]))
        found = []
        # the most time kept is the least overhead
        for level in (*levels[-1:], *levels[:1]):
            place, at = len(memory) - 1, int(level)
            places = [place]
            while place:
                place, at = divmod(int(before[place, at]), before.shape[1])
                places.append(place)
            found.append(tuple(reversed(places)))
        return tuple(
            tuple(tuple(np.flatnonzero(self.lower_sets[b] & ~self.lower_sets[a]).tolist()) for a, b in pairwise(places))
            for places in dict.fromkeys(found)
        )

    def _states(self, cap: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Least M(U) of each (lower set, level of the kept time), and the state before it, as one number."""
        shape = (len(self.lower_sets), self._levels)
        memory = np.full(shape, np.inf)
        time = np.zeros(shape)
        before = np.full(shape, -1, dtype=np.int64)
        least = np.full(shape[0], np.inf)
        memory[0, 0] = least[0] = 0
        for place, smaller in enumerate(self._smaller):
            if not place:
                continue
            block = self._block[place]
            rows = smaller[least[smaller] + block[smaller] <= cap]
            if not len(rows):
                continue
            old = memory[rows]
            some, level = np.nonzero(old + block[rows, None] <= cap)
            row = rows[some]
            new = old[some, level] + self._kept_bytes[place, row]
            kept = time[row, level] + self._kept_time[place, row]
            # half of a millionth: sums of decimal fractions land on either side of a multiple
            at = (kept / self._quantum + 5e-7).astype(np.int64)
            np.minimum.at(memory[place], at, new)
            best = np.flatnonzero(new == memory[place, at])
            time[place, at[best]] = kept[best]
            before[place, at[best]] = row[best] * shape[1] + level[best]
            least[place] = memory[place].min()
        return memory, before


def _quantum(costs: NDArray[np.float64], levels: int) -> float:
    """The largest number of which all costs are multiples, if it tells few enough levels; else a part of their sum."""
    total = float(costs.sum())
    if total <= 0:
        return 1.0
    whole = costs.astype(np.int64)
    if (whole == costs).all():
        divisor = math.gcd(*whole.tolist())
        if total / divisor < levels:
            return float(divisor)
    return total / (levels - 1)


class Kusumoto2019Exact(Strategy):
    """The exact program: all lower sets. For graphs of few of them: some ten nodes, or long and narrow."""

    name: ClassVar[str] = "kusumoto2019_exact"
    # the lower sets to look at: the empty one and all nodes are among them
    family = staticmethod(all_lower_sets)
    # caps from the least feasible cap to a single block's, each in the same ratio to the cap before
    caps: ClassVar[int] = 24

    def orders(self, graph: Graph) -> Iterator[list[int]]:
        if graph.forward_count == 0:
            return
        nodes = NodeGraph.of_forward(graph)
        program = LowerSetProgram(nodes, self.family(nodes))
        least, largest = max(1, program.least_cap), program.largest_cap
        caps = [math.ceil(least * (largest / least) ** (number / (self.caps - 1))) for number in range(self.caps)]
        for blocks in dict.fromkeys(blocks for cap in caps for blocks in program.centric_plans(cap)):
            segments = [sorted(op for node in block for op in nodes.ops[node]) for block in blocks]
            yield from orders_of_segments(graph, segments)


class Kusumoto2019Approximate(Kusumoto2019Exact):
    """The approximate program: the ancestors of each node."""

    name: ClassVar[str] = "kusumoto2019_approximate"
    family = staticmethod(ancestor_closures)
