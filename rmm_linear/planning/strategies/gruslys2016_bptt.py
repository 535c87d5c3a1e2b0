"""Backpropagation through time in little memory: Gruslys et al. 2016 (arXiv 1606.03401), three dynamic programs.

A recurrent net of t steps is reversed with m places in memory. Three policies keep different states:

- HSM, hidden states (section 3.1): m places, one of which the initial state takes.

      C(t, 1) = t (t + 1) / 2        C(t, m) = min over 1 <= y < t of  y + C(t - y, m - 1) + C(y, m)

  It keeps the state after y steps. Its minimum is that of Revolve (`griewank2000_revolve`), by a table.
- ISM, internal states (3.2): all that autograd keeps of a step, so that reversing it needs no forward step, and the
  state after it. m places, one of which is the step's that is being reversed; the initial state lies outside.

      C(0, m) = 0    C(t, 1) = t (t + 1) / 2    C(t, m) = min over 1 <= y <= t of  y + C(t - y, m - 1) + C(y - 1, m)

- MSM, both (3.3): m places of the size of a hidden state, beside the initial state and the step that is being
  reversed; an internal state takes alpha of them.

      C(0, m) = 0    C(t, m) = min of  t (t + 1) / 2
                                       y + C(t - y, m - 1) + C(y, m)               for 1 <= y < t, if m >= 1
                                       y + C(t - y, m - alpha) + C(y - 1, m)       for 1 <= y <= t, if m >= alpha

C counts forward steps; the backward steps are t in any case. An internal state also holds the state that its step
starts from. Where that state is kept anyway it takes no place, or else one more: `input_units=1` counts it so, which is
needed by the executor `rmm_linear.checkpointing.bptt` to keep its peak to the byte; 0 is the paper's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.chain_reversal import Action, order_of_actions, some_counts, unfolded
from rmm_linear.planning.strategies.griewank2000_revolve import chains_of

Kind = Literal["hsm", "ism", "msm"]

_SLOT_COUNTS = 8
_ALL_UP_TO = 12
# so that counts are 32-bit integers, which are twice as fast: a table for more steps would not fit into memory anyway
_MOST_STEPS = 30_000
# larger than any count, and small enough that two of them and a length add up without an overflow
_NEVER = 1 << 29


@dataclass(frozen=True, eq=False)
class Table:
    """Fewest forward steps for all lengths and memories, and the choices that reach them.

    Attributes:
        kind: "hsm", "ism" or "msm".
        internal_units: Places that an internal state takes (alpha; 1 but for "msm").
        input_units: Places that the state takes which an internal state starts from, where it is not kept anyway.
        forward_steps: C, at [memory, steps].
        split: The y of each choice, at [memory, steps]: 0 where nothing is kept.
        keeps_internal: Whether the choice keeps the internal state of step y, at [memory, steps].
    """

    kind: Kind
    internal_units: int
    input_units: int
    forward_steps: NDArray[np.int32]
    split: NDArray[np.int32]
    keeps_internal: NDArray[np.bool_]


@lru_cache(maxsize=8)
def tabulated(kind: Kind, steps: int, memory: int, internal_units: int = 1, *, input_units: int = 0) -> Table:
    """Tabulate the fewest forward steps for all lengths up to `steps` and all memories up to `memory`; see `Table`.

    Memory counts places m as the module's docstring does, at least 1, and at least 0 for "msm". Of "hsm" and "ism"
    there is nothing at 0 places: those entries are larger than any count. The units are of use for "msm" alone.

    Raises:
        ValueError: If an argument is too small, or there are more steps than a table is made for.
    """
    # least memory for which there is a schedule at all: HSM and ISM count the states that no schedule can do without
    least = 0 if kind == "msm" else 1
    if steps < 1 or memory < least:
        raise ValueError(f"steps={steps}, memory={memory}: there must be at least 1 step, and {least} of memory")
    if steps > _MOST_STEPS:
        raise ValueError(
            f"steps={steps} is more than a table is made for, {_MOST_STEPS}; use the closed form of Revolve"
        )
    if internal_units < 1 or input_units < 0:
        raise ValueError(
            f"internal_units={internal_units}, input_units={input_units}: an internal state takes at least one unit,"
            " and its input none or more"
        )
    # steps first while it is filled: the entries of one length depend on shorter ones only, for all memories at once
    cost = np.full((steps + 1, memory + 1), _NEVER, dtype=np.int32)
    split = np.zeros((steps + 1, memory + 1), dtype=np.int32)
    internal = np.zeros((steps + 1, memory + 1), dtype=np.bool_)
    cost[0] = 0

    def improve(t: int, units: int, first: int, last: int, *, keeps_internal: bool) -> None:
        """Improve the entries of length t by keeping something that takes `units` after y steps, first <= y <= last."""
        if units > memory or first > last:
            return
        # rows y = first..last: cost of the rest with less memory, and of the steps before it with all of it
        rest = cost[t - last : t - first + 1][::-1, : memory + 1 - units]
        before = cost[first - keeps_internal : last + 1 - keeps_internal, units:]
        total = rest + before
        total += np.arange(first, last + 1, dtype=np.int32)[:, None]
        best = total.argmin(axis=0)
        found = total[best, np.arange(best.size)]
        where = slice(max(units, least), None)
        found, best = found[where.start - units :], best[where.start - units :]
        better = found < cost[t, where]
        cost[t, where][better] = found[better]
        split[t, where][better] = (best + first)[better]
        internal[t, where][better] = keeps_internal

    for t in range(1, steps + 1):
        cost[t, least:] = t * (t + 1) // 2
        if kind != "ism":
            improve(t, 1, 1, t - 1, keeps_internal=False)
        if kind != "hsm":
            # with the input kept anyway, and then for y > 1 where it is not
            end = 1 if input_units else t
            improve(t, internal_units, 1, end, keeps_internal=True)
            improve(t, internal_units + input_units, end + 1, t, keeps_internal=True)
    for part in (cost, split, internal):
        part.flags.writeable = False
    return Table(kind, internal_units, input_units, cost.T, split.T, internal.T)


def actions(table: Table, steps: int, memory: int) -> Iterator[Action]:
    """Write an optimal schedule, of `table.forward_steps[memory, steps]` forward steps.

    Raises:
        ValueError: If the table has no such entry.
    """
    most_memory, most_steps = (size - 1 for size in table.forward_steps.shape)
    least = 0 if table.kind == "msm" else 1
    if not (1 <= steps <= most_steps and least <= memory <= most_memory):
        raise ValueError(
            f"steps={steps}, memory={memory} is not in the table, which goes from 1 to {most_steps} steps and from"
            f" {least} to {most_memory} of memory"
        )

    def choose(length: int, free: int) -> tuple[int, int]:
        ahead = int(table.split[free, length])
        units = table.internal_units + (table.input_units if ahead > 1 else 0)
        return ahead, units if table.keeps_internal[free, length] else 0

    return unfolded(steps, memory, choose)


class GruslysBPTT(Strategy):
    """Gruslys et al. 2016: hidden, internal and mixed states of a chain of stages, the cheapest of the three.

    A stage is a time step: its hidden state is what crosses the cut before it, its internal state all that its
    backward ops read. Stages count alike, as time steps do; alpha is the ratio of their mean sizes.

    Examples:
        >>> table = tabulated("ism", 1000, 50)
        >>> int(table.forward_steps[50, 1000])
        1950
        >>> [f"{action.kind} {action.stage}" for action in actions(table, 3, 2)]
        ['store 0', 'reverse 2', 'reverse 1', 'reverse 0']
    """

    name: ClassVar[str] = "gruslys2016_bptt"

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        for view in chains_of(graph):
            stages = len(view.stages)
            if stages < 2:
                continue
            hidden = sum(graph.sizes[index] for state in view.state for index in state) / (stages - 1)
            internal = sum(graph.sizes[index] for storages in view.internals for index in storages) / stages
            alpha = min(stages, max(1, round(internal / hidden))) if hidden else 1
            kinds: tuple[tuple[Kind, int, int], ...] = (("hsm", 1, 1), ("ism", 1, 1), ("msm", alpha, 2))
            for kind, units, share in kinds:
                table = tabulated(kind, stages, units * stages, units)
                for memory in some_counts(units * stages, all_up_to=_ALL_UP_TO, number=share * _SLOT_COUNTS):
                    yield order_of_actions(view, actions(table, stages, memory))
