"""Revolve: the fewest forward steps for a number of snapshots (Griewank & Walther 2000, ACM TOMS 26(1), Algorithm 799).

A chain of t steps is reversed with m snapshots, the one of the initial state among them: store a snapshot after y
steps, reverse the rest with one snapshot less, then the first y steps with all of them. With beta(m, r) =
binom(m + r, m), the most steps that m snapshots reverse with no step run forward more than r + 1 times, the fewest
forward steps are t + r t - binom(m + r, r - 1), r being the least one with beta(m, r) >= t (Theorem 1, counted with the
step that is differentiated). The split is read off the same numbers: no table is needed, for any length.

On a graph, a step is a run of forward ops between cuts that few bytes cross, of about equal time.
"""

from collections.abc import Iterator, Sequence
from math import comb
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.chain_reversal import (
    Action,
    ChainView,
    balanced_cuts,
    crossing_bytes,
    order_of_actions,
    some_counts,
    unfolded,
)
from rmm_linear.planning.strategies.segments import segments_of_cuts

_ALL_UP_TO = 12
_STAGE_COUNTS = 12
_MOST_STAGES = 160
_SLOT_COUNTS = 9


def repetitions(steps: int, slots: int) -> int:
    """Return the least r with binom(slots + r, slots) >= steps: no step needs to run forward more than r + 1 times.

    Snapshots include the initial state's.

    Raises:
        ValueError: If there is less than one step or snapshot.
    """
    _check(steps, slots)
    found = 0
    while comb(slots + found, slots) < steps:
        found += 1
    return found


def split(steps: int, slots: int) -> int:
    """Return after how many steps to store the next snapshot; there are at least two steps and two snapshots.

    The steps after it then take at most r repetitions with one snapshot less, the steps before it at most r - 1, and
    neither so few that a repetition is wasted: each y between these bounds is optimal, and the least is taken.
    """
    r = repetitions(steps, slots)
    before = comb(slots + r - 2, slots) if r >= 2 else 0
    return max(1, before, steps - comb(slots - 1 + r, slots - 1))


def revolve(steps: int, slots: int) -> Iterator[Action]:
    """Write a schedule for a chain, of the fewest forward steps.

    Raises:
        ValueError: If there is less than one step or snapshot.
    """
    _check(steps, slots)
    return unfolded(steps, slots, lambda length, free: (split(length, free) if min(length, free) > 1 else 0, 0))


def _check(steps: int, slots: int) -> None:
    if min(steps, slots) < 1:
        raise ValueError(f"steps={steps}, slots={slots}: both must be at least 1")


def chains_of(graph: Graph) -> Iterator[ChainView]:
    """See a training graph as chains of stages, for several numbers of stages; a graph of a forward pass is none.

    Stages take about equal time, or have about equally many ops, and are cut where few bytes cross.
    """
    if graph.forward_count == len(graph.ops):
        return
    prices = crossing_bytes(graph)
    costs = [op.cost for op in graph.ops[: graph.forward_count]]
    seen: set[tuple[int, ...]] = set()
    for parts in some_counts(min(_MOST_STAGES, graph.forward_count), all_up_to=_ALL_UP_TO, number=_STAGE_COUNTS):
        for weights, slack in ((costs, 0.5), ([1.0] * graph.forward_count, 0.0)):
            cuts = balanced_cuts(weights, prices, parts, slack=slack)
            if cuts not in seen:
                seen.add(cuts)
                yield ChainView(graph, segments_of_cuts(graph.forward_count, cuts))


class Revolve(Strategy):
    """Griewank & Walther 2000: binomial checkpointing of a chain of stages.

    Examples:
        >>> [f"{action.kind} {action.stage}" for action in revolve(3, 2)]
        ['hold 1', 'reverse 2', 'reverse 1', 'release 1', 'reverse 0']
    """

    name: ClassVar[str] = "griewank2000_revolve"

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        for view in chains_of(graph):
            stages = len(view.stages)
            for slots in some_counts(stages, all_up_to=_ALL_UP_TO, number=_SLOT_COUNTS):
                yield order_of_actions(view, revolve(stages, slots))
