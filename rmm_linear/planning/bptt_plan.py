"""From bytes to a schedule for backpropagation through time: the plan of Gruslys et al. that fits, and its bytes."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import NamedTuple

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.strategies import griewank2000_revolve as revolve
from rmm_linear.planning.strategies import gruslys2016_bptt as gruslys
from rmm_linear.planning.strategies.chain_reversal import Action, StepBytes

# places that a table of mixed states has at most: a state is rounded up to a place of that part of the budget
_MOST_UNITS = 400
_PURE: tuple[gruslys.Kind, ...] = ("hsm", "ism")


class BPTTPlan(NamedTuple):
    """The actions of each step, and their time and memory.

    Attributes:
        actions: The actions, in order.
        forward_steps: Forward steps, the first pass and differentiated steps included.
        peak_bytes: The most that is held at a time between two steps, or while one is being differentiated.
    """

    actions: tuple[Action, ...]
    forward_steps: int
    peak_bytes: int


def plain_bytes(steps: int, sizes: StepBytes) -> int:
    """Return the bytes that plain backpropagation through time keeps; the initial and final states are the caller's."""
    return steps * sizes.internal_bytes + (steps - 1) * sizes.state_bytes


def plan_of(actions: Iterable[Action], steps: int, sizes: StepBytes) -> BPTTPlan:
    """Return the plan of actions on a sequence of so many steps.

    Its peak counts held states, the states before and after the present step, and the internals of steps that are
    stored or being differentiated; each state once, and the initial and the final state not at all, for they are
    the caller's. Temporaries of a step are not counted.
    """
    actions = tuple(actions)
    pinned: Counter[int] = Counter({0: 1})
    stored: set[int] = set()
    paged: set[int] = set()
    forward = peak = states = 0

    def pin(state: int, change: int) -> None:
        nonlocal states
        was_there = pinned[state] > 0
        pinned[state] += change
        if 0 < state < steps:
            states += (pinned[state] > 0) - was_there

    def held(*passed: int, internals: int) -> int:
        passing = sum(0 < state < steps and not pinned[state] for state in passed)
        return (states + passing) * sizes.state_bytes + internals * sizes.internal_bytes

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
        forward += stage - latest
        # the first step leaves a state that is held, and the others leave two that may not be
        for step in {latest, min(latest + 1, stage - 1), stage - 1} if latest < stage else ():
            peak = max(peak, held(step, step + 1, internals=len(stored)))
        if kind == "page":
            paged.add(stage)
            continue
        if kind == "hold":
            paged.discard(stage)
            pin(stage, 1)
            continue
        forward += 1
        peak = max(peak, held(stage, stage + 1, internals=len(stored) + 1))
        if kind == "store":
            stored.add(stage)
            pin(stage, 1)
            pin(stage + 1, 1)
    return BPTTPlan(actions, forward, peak)


def plan_for_slots(steps: int, slots: int, sizes: StepBytes, *, strategy: gruslys.Kind) -> BPTTPlan:
    """Return the plan of the fewest forward steps for a number of places, as the paper counts them.

    The places are hidden states ("hsm"), the initial one included; or internal states ("ism"), that of the step being
    differentiated included; or places of the size of a hidden state ("msm"), beside the initial state and the step
    being differentiated; 0 is possible.

    Raises:
        ValueError: If the strategy is unknown, or the slots are too few.
    """
    least = _least_slots(strategy)
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < least:
        raise ValueError(f"slots={slots!r}: strategy {strategy!r} needs an int of at least {least}")
    return _plan(strategy, steps, sizes, slots, max(1, sizes.state_bytes), slots)


@lru_cache(maxsize=64)
def plan_for_bytes(steps: int, budget_bytes: int, sizes: StepBytes, *, strategy: gruslys.Kind) -> BPTTPlan:
    """Return the plan of the fewest forward steps that a strategy has for a budget, which its `peak_bytes` keep.

    Raises:
        ValueError: If the strategy is unknown.
        InfeasibleBudgetError: If not even one step fits.
    """
    least = _least_slots(strategy)
    if budget_bytes >= plain_bytes(steps, sizes) and strategy != "hsm":
        actions = [Action("store", step) for step in range(steps)]
        actions += [Action("reverse", step) for step in reversed(range(steps))]
        return plan_of(actions, steps, sizes)
    state = max(1, sizes.state_bytes)
    unit = max(state, -(-budget_bytes // _MOST_UNITS)) if strategy == "msm" else state
    # more places than these cannot fit, or are of no use
    most = {
        "hsm": min(steps, 1 + budget_bytes // state),
        "ism": min(steps, 1 + budget_bytes // max(1, sizes.internal_bytes)),
        # a table's places are not all taken at one time: a table with a quarter more places may still fit
        "msm": 1 + min(budget_bytes * 5 // (4 * unit), steps * (sizes.internal_bytes // unit + 2)),
    }[strategy]
    low, high = least, max(most, least)
    planned = partial(_plan, strategy, steps, sizes, high, unit)
    best = planned(least)
    if best.peak_bytes > budget_bytes:
        raise InfeasibleBudgetError(
            f"{budget_bytes} bytes hold not even one step of {strategy!r}, which takes {best.peak_bytes}; an int is a"
            " number of bytes, and a float a part of what plain backpropagation through time keeps",
            budget_bytes=budget_bytes,
            least_bytes=best.peak_bytes,
        )
    while low < high:
        middle = (low + high + 1) // 2
        tried = planned(middle)
        if tried.peak_bytes <= budget_bytes:
            low = middle
            best = min(best, tried, key=lambda plan: (plan.forward_steps, plan.peak_bytes))
        else:
            high = middle - 1
    if strategy != "msm":
        return best
    # a place of mixed states is a part of the budget, rounded: where that is too coarse, one of the two alone is better
    others = [plan_for_bytes(steps, budget_bytes, sizes, strategy=kind) for kind in _PURE]
    return min((best, *others), key=lambda plan: (plan.forward_steps, plan.peak_bytes))


def _plan(strategy: gruslys.Kind, steps: int, sizes: StepBytes, most: int, unit: int, slots: int) -> BPTTPlan:
    """Return the plan for a number of places of `unit` bytes, by a table that serves up to `most` of them."""
    if strategy == "hsm":
        actions = revolve.revolve(steps, slots)
    elif strategy == "ism":
        # a few sizes of tables, each of which serves many budgets
        most = max(slots, min(steps, 1 << most.bit_length()))
        actions = gruslys.actions(gruslys.tabulated("ism", steps, most), steps, slots)
    else:
        # an internal state holds the state after its step as well
        units = max(1, -(-(sizes.internal_bytes + sizes.state_bytes) // unit))
        actions = gruslys.actions(gruslys.tabulated("msm", steps, most, units, input_units=1), steps, slots)
    return plan_of(actions, steps, sizes)


def _least_slots(strategy: str) -> int:
    if strategy not in ("hsm", "ism", "msm"):
        raise ValueError(f"strategy={strategy!r} is unknown; choose one of 'hsm', 'ism', 'msm'")
    return 0 if strategy == "msm" else 1
