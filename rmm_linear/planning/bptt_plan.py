"""From bytes to a schedule for backpropagation through time: which of Gruslys' plans fits, and what it really holds."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning import bencheikh2024_double as double
from rmm_linear.planning.strategies import griewank2000_revolve as revolve
from rmm_linear.planning.strategies import gruslys2016_bptt as gruslys
from rmm_linear.planning.strategies.chain_reversal import Action, run_actions

# places that a table of mixed states has at most: a state is rounded up to a place of that part of the budget
_MOST_UNITS = 400
_PURE: tuple[gruslys.Kind, ...] = ("hsm", "ism")


@dataclass(frozen=True)
class BPTTPlan:
    """What to do with each step, and what it takes.

    Attributes:
        strategy: "hsm", "ism", "msm" or "double".
        steps: Length of the sequence.
        slots: Places that the schedule was made for, as its paper counts them; of "double" k1.
        actions: What to do.
        forward_steps: Forward steps, the first pass and those that are differentiated included.
        peak_bytes: The most that is held at a time between two steps, or while one is being differentiated.
        plain_bytes: What plain backpropagation through time holds.
        paged_bytes: What is paged out at most.
    """

    strategy: gruslys.Kind | Literal["double"]
    steps: int
    slots: int
    actions: tuple[Action, ...]
    forward_steps: int
    peak_bytes: int
    plain_bytes: int
    paged_bytes: int = 0


def plain_bytes(steps: int, *, state_bytes: int, internal_bytes: int) -> int:
    """Return what plain backpropagation through time keeps.

    Args:
        steps: Length of the sequence.
        state_bytes: Bytes of a state; the initial and the final one are the caller's and do not count.
        internal_bytes: Bytes that autograd keeps of a step beside the states before and after it.
    """
    return steps * internal_bytes + (steps - 1) * state_bytes


def peak_bytes(actions: Iterable[Action], steps: int, *, state_bytes: int, internal_bytes: int) -> int:
    """Return the most that actions hold at a time.

    Counted are the states that are held, the one that a step starts from and the one that it makes, and the internals
    of the steps that are stored or being differentiated; each state once. What a step needs only while it runs is not.

    Args:
        actions: What to do.
        steps: Length of the sequence.
        state_bytes: Bytes of a state; the initial and the final one are the caller's and do not count.
        internal_bytes: Bytes that autograd keeps of a step beside the states before and after it.
    """
    pinned: Counter[int] = Counter({0: 1})
    stored: set[int] = set()
    paged: set[int] = set()
    peak = states = 0

    def pin(state: int, change: int) -> None:
        nonlocal states
        was_there = pinned[state] > 0
        pinned[state] += change
        if 0 < state < steps:
            states += (pinned[state] > 0) - was_there

    def passing(*passed: int) -> int:
        return states + sum(0 < state < steps and not pinned[state] for state in passed)

    for kind, stage in actions:
        if kind == "release":
            pin(stage, -1)
            continue
        if kind == "reverse" and stage in stored:
            stored.remove(stage)
            pin(stage, -1)
            pin(stage + 1, -1)
            continue
        latest = stage
        while pinned[latest] <= 0 and latest not in paged:
            latest -= 1
        internals = len(stored)
        # the first step leaves a state that is held, and the others leave two that may not be
        for step in {latest, min(latest + 1, stage - 1), stage - 1} if latest < stage else ():
            peak = max(peak, passing(step, step + 1) * state_bytes + internals * internal_bytes)
        if kind == "page":
            paged.add(stage)
            continue
        if kind == "hold":
            paged.discard(stage)
            pin(stage, 1)
            continue
        peak = max(peak, passing(stage, stage + 1) * state_bytes + (internals + 1) * internal_bytes)
        if kind == "store":
            stored.add(stage)
            pin(stage, 1)
            pin(stage + 1, 1)
    return peak


def plan_for_slots(
    steps: int, slots: int, *, strategy: gruslys.Kind, state_bytes: int, internal_bytes: int
) -> BPTTPlan:
    """Return the plan of the fewest forward steps for a number of places, as the paper counts them.

    Args:
        steps: Length of the sequence, at least 1.
        slots: "hsm": hidden states, the initial one included. "ism": internal states, that of the step being
            differentiated included. "msm": places of the size of a hidden state, beside the initial state and the
            step being differentiated; 0 is possible.
        strategy: Which of the three.
        state_bytes: Bytes of a state, at least 0.
        internal_bytes: Bytes that autograd keeps of a step beside the states before and after it, at least 0.

    Raises:
        ValueError: If an argument is out of its range.
    """
    _check(steps, strategy, state_bytes, internal_bytes)
    least = 0 if strategy == "msm" else 1
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < least:
        raise ValueError(f"slots={slots!r}: strategy {strategy!r} needs an int of at least {least}")
    unit = max(1, state_bytes)
    return _plan(_Family(strategy, steps, slots, unit, state_bytes, internal_bytes), slots)


def plan_for_bytes(
    steps: int, budget_bytes: int, *, strategy: gruslys.Kind, state_bytes: int, internal_bytes: int
) -> BPTTPlan:
    """Return the plan of the fewest forward steps that a strategy has for a budget.

    Args:
        steps: Length of the sequence, at least 1.
        budget_bytes: The most that may be held; see `peak_bytes`.
        strategy: "hsm", "ism" or "msm".
        state_bytes: Bytes of a state, at least 0.
        internal_bytes: Bytes that autograd keeps of a step beside the states before and after it, at least 0.

    Returns:
        The plan; its `peak_bytes` are at most the budget.

    Raises:
        ValueError: If an argument is out of its range.
        InfeasibleBudgetError: If not even one step fits.
    """
    _check(steps, strategy, state_bytes, internal_bytes)
    return _plan_for_bytes(steps, budget_bytes, strategy, state_bytes, internal_bytes)


@lru_cache(maxsize=64)
def _plan_for_bytes(
    steps: int, budget_bytes: int, strategy: gruslys.Kind, state_bytes: int, internal_bytes: int
) -> BPTTPlan:
    everything = plain_bytes(steps, state_bytes=state_bytes, internal_bytes=internal_bytes)
    if budget_bytes >= everything and strategy != "hsm":
        actions = tuple(Action("store", step) for step in range(steps))
        actions += tuple(Action("reverse", step) for step in reversed(range(steps)))
        return _measured(strategy, steps, steps, actions, state_bytes, internal_bytes)
    unit = max(1, state_bytes, -(-budget_bytes // _MOST_UNITS)) if strategy == "msm" else max(1, state_bytes)
    least = 0 if strategy == "msm" else 1
    # more places than these cannot fit, or are of no use
    most = {
        "hsm": min(steps, 1 + budget_bytes // max(1, state_bytes)),
        "ism": min(steps, 1 + budget_bytes // max(1, internal_bytes)),
        # a table's places are not all taken at one time: those of a quarter more may still fit
        "msm": 1 + min(budget_bytes * 5 // (4 * unit), steps * (internal_bytes // unit + 2)),
    }[strategy]
    family = _Family(strategy, steps, max(most, least), unit, state_bytes, internal_bytes)
    best = _plan(family, least)
    if best.peak_bytes > budget_bytes:
        raise InfeasibleBudgetError(
            f"{budget_bytes} bytes hold not even one step of {strategy!r}, which takes {best.peak_bytes}; an int is a"
            " number of bytes, and a float a part of what plain backpropagation through time keeps",
            budget_bytes=budget_bytes,
            least_bytes=best.peak_bytes,
        )
    low, high = least, max(most, least)
    while low < high:
        middle = (low + high + 1) // 2
        tried = _plan(family, middle)
        if tried.peak_bytes <= budget_bytes:
            low = middle
            best = min(best, tried, key=lambda plan: (plan.forward_steps, plan.peak_bytes))
        else:
            high = middle - 1
    if strategy != "msm":
        return best
    # a place of mixed states is a part of the budget, rounded: where that is too coarse, one of the two alone is better
    others = [_plan_for_bytes(steps, budget_bytes, kind, state_bytes, internal_bytes) for kind in _PURE]
    return replace(min((best, *others), key=lambda plan: (plan.forward_steps, plan.peak_bytes)), strategy=strategy)


@dataclass(frozen=True)
class _Family:
    """Plans that one table holds."""

    strategy: gruslys.Kind
    steps: int
    most: int
    unit: int
    state_bytes: int
    internal_bytes: int

    def actions(self, slots: int) -> Iterator[Action]:
        if self.strategy == "hsm":
            return revolve.revolve(self.steps, slots)
        if self.strategy == "ism":
            # a few sizes of tables, each of which serves many budgets
            most = max(slots, min(self.steps, 1 << self.most.bit_length()))
            return gruslys.actions(gruslys.ism_table(self.steps, most), self.steps, slots)
        # an internal state holds the state after its step as well
        units = max(1, -(-(self.internal_bytes + self.state_bytes) // self.unit))
        table = gruslys.msm_table(self.steps, self.most, units, input_units=1)
        return gruslys.actions(table, self.steps, slots)


def _plan(family: _Family, slots: int) -> BPTTPlan:
    actions = tuple(family.actions(slots))
    return _measured(family.strategy, family.steps, slots, actions, family.state_bytes, family.internal_bytes)


def _measured(
    strategy: gruslys.Kind | Literal["double"],
    steps: int,
    slots: int,
    actions: tuple[Action, ...],
    state_bytes: int,
    internal_bytes: int,
) -> BPTTPlan:
    return BPTTPlan(
        strategy,
        steps,
        slots,
        actions,
        run_actions(actions, steps).forward_steps,
        peak_bytes(actions, steps, state_bytes=state_bytes, internal_bytes=internal_bytes),
        plain_bytes(steps, state_bytes=state_bytes, internal_bytes=internal_bytes),
    )


def plan_double(steps: int, host_every: int, local_every: int, *, state_bytes: int, internal_bytes: int) -> BPTTPlan:
    """Return the plan of double checkpointing; see `bencheikh2024_double`.

    Args:
        steps: Length of the sequence, at least 1.
        host_every: A state is paged out before every so many steps.
        local_every: A state is kept before every so many steps of those that run again, a divisor of `host_every`.
        state_bytes: Bytes of a state.
        internal_bytes: Bytes that autograd keeps of a step beside the states before and after it.

    Raises:
        ValueError: If an argument is out of its range.
    """
    actions = tuple(double.actions(steps, host_every, local_every))
    plan = _measured("double", steps, host_every, actions, state_bytes, internal_bytes)
    return replace(plan, paged_bytes=state_bytes * sum(action.kind == "page" for action in actions))


def _check(steps: int, strategy: str, state_bytes: int, internal_bytes: int) -> None:
    if strategy not in ("hsm", "ism", "msm"):
        raise ValueError(f"strategy={strategy!r} is unknown; choose one of 'hsm', 'ism', 'msm'")
    if steps < 1:
        raise ValueError(f"steps={steps}: there is nothing to plan for less than one step")
    if state_bytes < 0 or internal_bytes < 0:
        raise ValueError(f"state_bytes={state_bytes}, internal_bytes={internal_bytes}: both must be at least 0")
