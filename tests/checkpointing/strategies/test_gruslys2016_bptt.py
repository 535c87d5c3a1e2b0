"""Three dynamic programs, against exhaustive search and a closed form; and their schedules, run on a chain."""

import itertools
from functools import cache

import pytest
from empty_chain import fewest_forward_steps, run_actions

from rmm_linear.planning.strategies.chain_reversal import Action
from rmm_linear.planning.strategies.griewank2000_revolve import repetitions, revolve
from rmm_linear.planning.strategies.gruslys2016_bptt import actions, tabulated


def exhaustive(steps, memory, kind, alpha):
    """Fewest forward steps by a search over what is kept after each forward step: no recursion over splits.

    A state of the search: the next step to reverse, the kept hidden and internal states, and where the net stands.
    """
    # positions of states: 0 is always there; an internal state of step i also has state i + 1
    start = (steps - 1, frozenset(), frozenset(), 0)
    best = {start: 0}
    waiting = [start]
    while waiting:
        waiting.sort(key=lambda state: -best[state])
        state = waiting.pop()
        turn, hidden, internal, here = state
        if turn < 0:
            return best[state]
        units = len(hidden) + alpha * len(internal)
        there = {0, *hidden, *(i + 1 for i in internal)}
        following = [((turn, hidden, internal, position), 0) for position in there - {here}]
        if turn in internal:
            following.append(((turn - 1, hidden, internal - {turn}, 0), 0))
        if here <= turn:
            # one step without a trace
            if here < turn:
                following.append(((turn, hidden, internal, here + 1), 1))
            else:
                # the step that is differentiated takes a place where the paper counts it
                if kind != "ism" or len(internal) < memory:
                    following.append(((turn - 1, hidden, internal, 0), 1))
            room = memory - (1 if kind == "hsm" else 0)
            if here and here not in hidden and kind != "ism" and units + 1 <= room:
                following.append(((turn, hidden | {here}, internal, here), 0))
            if kind != "hsm" and here not in internal and units + alpha <= room:
                following.append(((turn, hidden, internal | {here}, here + 1), 1))
        following += [((turn, hidden - {h}, internal, here), 0) for h in hidden]
        for other, cost in following:
            if best[state] + cost < best.get(other, 1 << 30):
                best[other] = best[state] + cost
                waiting.append(other)
    raise AssertionError("no schedule")


@pytest.mark.parametrize(
    ("kind", "alpha", "memories"),
    [("hsm", 1, (1, 2, 3)), ("ism", 1, (1, 2, 3)), ("msm", 1, (0, 2)), ("msm", 2, (1, 2, 3)), ("msm", 3, (4,))],
)
def test_tables_equal_exhaustive_search(kind, alpha, memories):
    table = tabulated(kind, 6, max(memories), alpha)
    for memory, steps in itertools.product(memories, range(1, 7)):
        assert table.forward_steps[memory, steps] == exhaustive(steps, memory, kind, alpha), (steps, memory)


def test_hidden_states_equal_the_closed_form():
    table = tabulated("hsm", 120, 12)
    for steps, slots in itertools.product(range(1, 121), range(1, 13)):
        assert table.forward_steps[slots, steps] == fewest_forward_steps(steps, slots), (steps, slots)


def recursive(kind, alpha=1, input_units=0):
    @cache
    def least(t, m):
        if t == 0:
            return 0
        found = [t * (t + 1) // 2] if m >= (kind != "msm") else []
        if kind != "ism" and m >= 1 and (kind == "msm" or m >= 2):
            found += [y + least(t - y, m - 1) + least(y, m) for y in range(1, t)]
        if kind != "hsm":
            for y in range(1, t + 1):
                rest = m - alpha - (input_units if y > 1 else 0)
                if rest >= 0 and (kind == "msm" or rest >= 1 or y == t):
                    found.append(y + least(t - y, rest) + least(y - 1, m))
        return min(found)

    return least


@pytest.mark.parametrize(
    ("kind", "alpha", "input_units"), [("hsm", 1, 0), ("ism", 1, 0), ("msm", 1, 0), ("msm", 3, 0), ("msm", 3, 1)]
)
def test_tables_equal_the_recursions_and_schedules_take_what_tables_say(kind, alpha, input_units):
    most = 14
    table = tabulated(kind, 33, most, alpha, input_units=input_units)
    least = recursive(kind, alpha, input_units)
    for steps, memory in itertools.product(range(1, 34), range(kind != "msm", most + 1)):
        assert table.forward_steps[memory, steps] == least(steps, memory), (steps, memory)
        taken = run_actions(actions(table, steps, memory), steps, internal_units=alpha)
        assert taken.forward_steps == table.forward_steps[memory, steps], (steps, memory)
        used = {"hsm": taken.most_states, "ism": taken.most_internals, "msm": taken.most_units}[kind]
        assert used <= memory, (steps, memory)


def test_enough_memory_costs_no_step_and_hidden_states_alone_one_each():
    for steps in range(1, 20):
        assert tabulated("ism", steps, steps).forward_steps[steps, steps] == steps
        assert tabulated("hsm", steps, steps).forward_steps[steps, steps] == 2 * steps - 1
        assert tabulated("msm", steps, 3 * steps, 3).forward_steps[3 * steps, steps] == steps


def test_a_thousand_steps_in_a_twentieth_of_the_memory_take_a_third_more_time():
    """Section 4 of the paper: 95 % of the memory, a third more time; a backward step takes as long as two forward."""
    assert tabulated("ism", 1000, 50).forward_steps[50, 1000] == 1950
    assert (2 * 1000 + 1950) / 3000 < 1.32


def test_wrong_arguments_are_named():
    for message, wrong in (
        ("at least", lambda: repetitions(0, 2)),
        ("at least", lambda: list(revolve(3, 0))),
        ("at least", lambda: tabulated("hsm", 0, 3)),
        ("at least", lambda: tabulated("ism", 4, 0)),
        ("at least", lambda: tabulated("msm", 4, -1, 2)),
        ("at least one unit", lambda: tabulated("msm", 4, 3, 0)),
        ("not in the table", lambda: list(actions(tabulated("ism", 5, 2), 5, 3))),
        ("not in the table", lambda: list(actions(tabulated("ism", 5, 2), 6, 2))),
        ("turn of", lambda: run_actions([Action("reverse", 0)], 2)),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
