"""Binomial checkpointing: the closed form, the split, and schedules that take what it says."""

import pytest
from empty_chain import fewest_forward_steps, run_actions

from experiments.checkpointing.generators import chain, with_backward
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.chain_reversal import ChainView, order_of_actions
from rmm_linear.planning.strategies.griewank2000_revolve import repetitions, revolve
from rmm_linear.planning.strategies.segments import segments_of_cuts


def test_schedules_take_the_forward_steps_of_the_closed_form_and_no_more_snapshots():
    for steps in range(1, 121):
        for slots in range(1, 13):
            taken = run_actions(revolve(steps, slots), steps)
            assert taken.forward_steps == fewest_forward_steps(steps, slots), (steps, slots)
            assert taken.most_states == min(slots, steps)
            assert taken.most_internals == 1


def test_long_chains_need_no_table():
    steps = 30_000
    taken = run_actions(revolve(steps, 60), steps)
    assert taken.forward_steps == fewest_forward_steps(steps, 60)
    assert repetitions(steps, 60) == 3
    assert repetitions(40_000, 60) == 4


@pytest.mark.parametrize("width", [1, 3])
def test_each_snapshot_is_one_more_state_in_the_simulator(width):
    """Snapshots, a stage's internals, two gradients, the chain's result, and the state of the step after the stage."""
    graph = with_backward(chain([4] * 24))
    view = ChainView(graph, segments_of_cuts(24, list(range(width, 24, width))))
    for slots in (1, 2, 3, 4, 6):
        peak, _ = peak_and_cost(graph, order_of_actions(view, revolve(24 // width, slots)))
        # the initial state is computed and not given: slots - 1 are held
        assert peak == 4 * (slots - 1 + width + 2 + 1 + 1)


def test_known_values():
    assert [fewest_forward_steps(1000, slots) for slots in (10, 20, 50, 100)] == [4636, 3747, 2948, 2898]
    assert fewest_forward_steps(10, 1) == 55
    # Griewank & Walther 2000: 10 steps, 3 snapshots, and each step twice at most beside the first pass
    assert repetitions(10, 3) == 2
    assert repetitions(11, 3) == 3
