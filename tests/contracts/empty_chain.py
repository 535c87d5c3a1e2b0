"""A chain that does nothing but count: what actions take, and whether they come in turn."""

from math import comb
from typing import NamedTuple

from rmm_linear.planning.strategies.griewank2000_revolve import repetitions


class Taken(NamedTuple):
    """What a sequence of actions takes.

    Attributes:
        forward_steps: How often a stage is run forward.
        most_states: Most states held at a time, the initial one included, and those after stored stages not.
        most_internals: Most stages stored at a time, the one being reversed included.
        most_units: Most units at a time of states and internals, beside the initial state and the stage being
            reversed.
    """

    forward_steps: int
    most_states: int
    most_internals: int
    most_units: int


def run_actions(actions, stages, *, internal_units=1):
    """Run actions on a chain that does nothing, and count.

    Args:
        actions: The actions.
        stages: Number of stages.
        internal_units: Units that the internals of a stage take; a state takes one.

    Raises:
        ValueError: If a stage is reversed out of turn, or a state is dropped that is not there.
    """
    held, stored, paged = {0}, set(), set()
    forward, waiting = 0, stages - 1
    states = internals = units = 0
    for kind, stage in actions:
        # a stored stage also has the state after it
        latest = max(state for state in held | paged | {one + 1 for one in stored} if state <= stage)
        if kind in ("hold", "page"):
            forward += stage - latest
            paged.discard(stage)
            (held if kind == "hold" else paged).add(stage)
        elif kind == "release":
            if stage not in held:
                raise ValueError(f"state {stage} is released, and is not held")
            held.remove(stage)
        elif kind == "store":
            forward += stage - latest + 1
            stored.add(stage)
        else:
            if stage != waiting:
                raise ValueError(f"stage {stage} is reversed where it is the turn of {waiting}")
            waiting -= 1
            internals = max(internals, len(stored | {stage}))
            if stage in stored:
                stored.remove(stage)
            else:
                forward += stage - latest + 1
        states = max(states, len(held))
        internals = max(internals, len(stored))
        units = max(units, len(held) - 1 + internal_units * len(stored))
    if waiting != -1:
        raise ValueError(f"stage {waiting} is never reversed")
    return Taken(forward, states, internals, units)


def fewest_forward_steps(steps, slots):
    """The fewest forward steps that reverse a chain, by Revolve's theorem; differentiated steps are included."""
    r = repetitions(steps, slots)
    return steps + r * steps - (comb(slots + r, r - 1) if r else 0)
