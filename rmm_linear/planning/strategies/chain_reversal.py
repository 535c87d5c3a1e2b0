"""Reversing a chain of stages with few of its states in memory, and how a training graph is seen as such a chain.

A stage is a run of consecutive forward ops. Its *state* are the storages that cross the cut before it: it or a
later stage reads them, and an earlier stage wrote them. Its *internals* are the storages that its backward ops read. A
plan for the chain is a sequence of actions (`Action`), written by the planners of `griewank2000_revolve` and
`gruslys2016_bptt`, and read by two interpreters: `order_of_actions` here, for graphs, and
`rmm_linear.checkpointing.bptt`, which runs a cell.

The graph may be any. A storage that is in no state, because it skips over cuts or belongs to two stages, is computed
from the storages in memory: a poor choice of cuts costs time and memory, which the simulator counts; the order stays
valid.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from rmm_linear.planning.graph import Graph, reached
from rmm_linear.planning.strategies.segments import crossing_storages


class Action(NamedTuple):
    """One action on a chain; forward steps that it needs run from the latest state that is there.

    Attributes:
        kind: "hold": go to the stage's state, and keep it. "release": drop it. "store": run the stage and keep its
            internals and the state after it. "reverse": bring the stage's internals back where they are not stored,
            run its backward ops, and drop them. "page": go to the stage's state, and put it where it takes no memory;
            the next hold brings it back.
        stage: Number of the stage; state i is the one before stage i.
    """

    kind: Literal["hold", "release", "store", "reverse", "page"]
    stage: int


class StepBytes(NamedTuple):
    """The bytes that one step of a cell leaves behind.

    Attributes:
        state_bytes: The state after it; with the state of the random number generator, if the cell draws.
        internal_bytes: Bytes that autograd keeps beside the states before and after it, the inputs and the parameters.
    """

    state_bytes: int
    internal_bytes: int


def unfolded(steps: int, slots: int, choose: Callable[[int, int], tuple[int, int]]) -> Iterator[Action]:
    """Write the schedule that follows from a choice for each length of a chain and number of free slots.

    `choose` tells how many steps run before something is kept, 0 if nothing is; and how many slots that takes if it is
    an internal state, 0 for a state, which takes one.
    """
    # a stack and no recursion: a chain may be longer than Python's stack
    waiting: list[Action | tuple[int, int, int]] = [(0, steps, slots)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Action):
            yield item
            continue
        start, length, free = item
        if not length:
            continue
        ahead, internal = choose(length, free)
        rest = (start + ahead, length - ahead, free - (internal or 1))
        if not ahead:
            yield from (Action("reverse", start + step) for step in reversed(range(length)))
        elif internal:
            yield Action("store", start + ahead - 1)
            waiting += [(start, ahead - 1, free), Action("reverse", start + ahead - 1), rest]
        else:
            yield Action("hold", start + ahead)
            waiting += [(start, ahead, free), Action("release", start + ahead), rest]


def crossing_bytes(graph: Graph) -> list[int]:
    """Return the price of a cut of the forward ops: the bytes that it makes wait for the backward pass.

    For each place p from 0 to the number of forward ops: bytes of the storages that an op before p writes and a forward
    op from p on reads. Storages that stay in any case (outputs, results that must not be computed twice) do not count.
    """
    always = crossing_storages(graph, [range(graph.forward_count)])
    change = [0] * (graph.forward_count + 1)
    for index, writer in enumerate(graph.writer):
        readers = [reader for reader in graph.readers[index] if reader < graph.forward_count]
        if writer < graph.forward_count and readers and index not in always:
            change[writer + 1] += graph.storages[index].size_bytes
            change[readers[-1] + 1] -= graph.storages[index].size_bytes
    return list(accumulate(change))


def written_bytes(graph: Graph) -> list[int]:
    """Return the bytes of the storages that each forward op writes and a backward op reads."""
    count = graph.forward_count
    is_read = [bool(readers) and readers[-1] >= count for readers in graph.readers]
    return [sum(graph.sizes[index] for index in op.writes if is_read[index]) for op in graph.ops[:count]]


def balanced_cuts(weights: Sequence[float], prices: Sequence[int], parts: int, *, slack: float) -> tuple[int, ...]:
    """Cut a sequence into parts of about equal weight, where cuts are cheap: return rising places, both ends left out.

    `prices` are the prices of a cut before each op, and after the last. A cut may be moved to a cheaper place by
    `slack` parts. There are fewer than parts - 1 cuts if some coincide.
    """
    count = len(weights)
    before = list(accumulate(weights, initial=0.0))
    share = before[-1] / parts
    cuts: set[int] = set()
    place = 0
    for part in range(1, parts):
        target = part * share
        place = bisect_left(before, target, place, count)
        nearest = place if place == 0 or before[place] - target <= target - before[place - 1] else place - 1
        best = nearest
        if slack:
            low = high = nearest
            while low > 1 and before[low - 1] >= target - slack * share:
                low -= 1
            while high < count - 1 and before[high + 1] <= target + slack * share:
                high += 1
            best = min(range(low, high + 1), key=lambda p: (prices[p], abs(p - nearest), p))
        if 0 < best < count:
            cuts.add(best)
    return tuple(sorted(cuts))


def some_counts(most: int, *, all_up_to: int, number: int) -> list[int]:
    """Return the counts from 1 to `most`, rising, or some of them if there are more than `all_up_to`.

    These are about `number` counts, a constant factor apart, 1 and `most` among them.
    """
    if most <= all_up_to:
        return list(range(1, most + 1))
    return sorted({round(most ** (place / (number - 1))) for place in range(number)})


class ChainView:
    """A training graph as a chain of stages.

    Attributes:
        graph: The graph.
        stages: Forward ops of each stage.
        state: Storages that cross the cut before each stage, and the end (none).
        internals: Forward storages that the backward ops of each stage read.
        backward: Backward ops of each stage, in the order of the plain program.
    """

    def __init__(self, graph: Graph, stages: Sequence[Sequence[int]]) -> None:
        self.graph = graph
        self.stages = [tuple(stage) for stage in stages]
        stage_of = {op: number for number, stage in enumerate(stages) for op in stage}
        self.always = crossing_storages(graph, [range(graph.forward_count)])
        self.state: list[set[int]] = [set() for _ in range(len(stages) + 1)]
        for index, writer in enumerate(graph.writer):
            if writer in stage_of and index not in self.always:
                readers = [stage_of[reader] for reader in graph.readers[index] if reader in stage_of]
                for number in range(stage_of[writer] + 1, max(readers, default=-1) + 1):
                    self.state[number].add(index)
        self.backward: list[list[int]] = [[] for _ in stages]
        self.internals: list[set[int]] = [set() for _ in stages]
        turn = len(stages) - 1
        for op in range(graph.forward_count, len(graph.ops)):
            reads = [index for index in graph.ops[op].reads if graph.writer[index] in stage_of]
            # a stage's last storage is also read by the backward ops of the stage that reads it: theirs is the turn
            turn = min(turn, max((stage_of[graph.writer[index]] for index in reads), default=turn))
            self.backward[turn].append(op)
            self.internals[turn].update(index for index in reads if index not in self.always)


def order_of_actions(view: ChainView, actions: Iterable[Action]) -> list[int]:
    """Return the order of computations, with repetitions, that actions on a chain of stages stand for.

    Each stage is reversed once, the last one first. Of a stage that runs again, only needed ops are computed.
    """
    graph, last = view.graph, len(view.stages) - 1
    # the first pass is the plain program's, and the first stage to be reversed is there when it ends
    order = list(range(graph.forward_count))
    kept = Counter(view.always)
    kept.update(view.internals[last])
    pinned: dict[tuple[str, int], set[int]] = {}
    first_pass = True
    now: set[int] = set()

    def missing(targets: Iterable[int]) -> list[int]:
        return [graph.writer[index] for index in targets if not kept[index] and index not in now]

    def bring(targets: Iterable[int]) -> None:
        again = reached(missing(targets), lambda op: missing(graph.ops[op].reads))
        order.extend(sorted(again))
        now.update(index for op in again for index in graph.ops[op].writes)

    def pin(key: tuple[str, int], storages: set[int]) -> None:
        if not first_pass:
            bring(sorted(storages))
        pinned[key] = storages
        kept.update(storages)
        now.clear()

    for kind, stage in actions:
        if kind == "hold":
            pin((kind, stage), view.state[stage])
        elif kind == "store":
            pin((kind, stage), view.internals[stage] | view.state[stage + 1])
        elif kind == "release":
            kept.subtract(pinned.pop(("hold", stage)))
        else:
            first_pass = False
            for op in view.backward[stage]:
                bring(index for index in graph.ops[op].reads if graph.writer[index] < graph.forward_count)
                order.append(op)
            kept.subtract(pinned.pop(("store", stage), set()))
            if stage == last:
                kept.subtract(view.internals[last])
            now.clear()
    return order
