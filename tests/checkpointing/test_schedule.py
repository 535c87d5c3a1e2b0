"""Schedules: when storages go, what is refused, and at which step."""

import re
from dataclasses import replace

import pytest

from experiments.checkpointing.generators import chain, random_layers, with_backward
from rmm_linear.checkpointing import Graph, Op, Schedule, Step, Storage, simulate, validate
from rmm_linear.errors import ScheduleError
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.segments import order_of_segments

CHAIN = with_backward(chain([8, 4, 2]))


def edited(schedule, *, without=(), insert=None):
    steps = [step for number, step in enumerate(schedule.steps) if number not in without]
    if insert:
        steps.insert(*insert)
    return replace(schedule, steps=tuple(steps))


def test_the_plain_schedule_frees_after_the_last_use():
    # nodes 0, 1, 2 of 8, 4, 2 bytes; gradients of 2, 4, 8 bytes; the gradient of a node is read by the one before
    simulation = simulate(CHAIN, Schedule.plain(CHAIN))
    steps = zip(simulation.bytes_at_step, Schedule.plain(CHAIN).steps, strict=True)
    computes = [held for held, step in steps if step.kind == "compute"]
    # 2 bytes of node 2 are a result and stay: 8; 8+4; 8+4+2; +2; +4; then node 1 and gradient 2 are still read: +8
    assert computes == [8, 12, 14, 16, 20, 26]
    assert simulation.peak_bytes == 26
    assert simulation.extra_cost == 0


def test_recomputing_frees_early_and_counts_the_time():
    # node 1 is computed twice
    schedule = Schedule.from_order(CHAIN, [0, 1, 2, 3, 1, 4, 5])
    simulation = simulate(CHAIN, schedule)
    assert Step("free", 1) in schedule.steps[3:5]
    assert simulation.cost == 7
    assert simulation.extra_cost == 1
    assert simulation.overhead == pytest.approx(1 / 6)


@pytest.mark.parametrize("seed", range(30))
def test_fast_and_slow_simulation_agree(seed):
    graph = with_backward(random_layers(14, seed=seed))
    order = order_of_segments(graph, [list(range(4)), list(range(4, 9)), list(range(9, 14))])
    simulation = simulate(graph, Schedule.from_order(graph, order))
    assert peak_and_cost(graph, order) == (simulation.peak_bytes, simulation.cost)
    assert simulation.peak_bytes == max(simulation.bytes_at_step)


def test_temporaries_and_unread_results_count_while_the_op_runs():
    ops = (Op("f", 1.0, (), (0, 1), temporary_bytes=100), Op("g", 1.0, (0,), (2,)))
    graph = Graph(ops, (Storage("a", 1), Storage("unread", 20), Storage("b", 2)), (2,))
    simulation = simulate(graph, Schedule.plain(graph))
    assert simulation.peak_bytes == 121
    assert simulation.bytes_at_step[-1] == 2


def test_what_is_there_already_counts_twice_while_it_is_computed_again():
    ops = (Op("f", 1.0, (), (0, 1)), Op("g", 1.0, (0,), (2,)))
    graph = Graph(ops, (Storage("a", 1), Storage("kept", 20), Storage("b", 2)), (1, 2))
    steps = (Step("compute", 0), Step("free", 0), Step("compute", 0), Step("compute", 1), Step("free", 0))
    simulation = simulate(graph, Schedule(steps, graph.fingerprint))
    assert simulation.bytes_at_step == (21, 20, 41, 23, 22)


def test_results_stay_until_the_forward_pass_ends_and_no_longer():
    # two results: the first is an update of a buffer, which nobody needs once it is copied
    ops = (
        Op("update", 1.0, (), (0,)),
        Op("loss", 1.0, (), (1,)),
        Op("gradient", 1.0, (1,), (2,), is_backward=True),
    )
    graph = Graph(ops, (Storage("new buffer", 16), Storage("loss", 4), Storage("gradient", 8)), (1, 2), (0, 1))
    schedule = Schedule.plain(graph)
    assert schedule.steps == (Step("compute", 0), Step("compute", 1), Step("free", 0), Step("compute", 2))
    with pytest.raises(ScheduleError, match=r"step 1 \(free 0\): 'new buffer' is a result"):
        validate(graph, Schedule((schedule.steps[0], Step("free", 0), schedule.steps[1]), graph.fingerprint))


def test_a_result_whose_op_runs_twice_in_the_forward_pass_stays():
    # "norm" writes a result and a tensor that is computed again
    ops = Op("norm", 1.0, (), (0, 1)), Op("loss", 1.0, (1,), (2,)), Op("gradient", 1.0, (2,), (3,), is_backward=True)
    graph = Graph(ops, tuple(Storage(str(index), 8) for index in range(4)), (3,), (0, 2))
    schedule = Schedule.from_order(graph, [0, 0, 1, 2])
    assert peak_and_cost(graph, schedule.order)[0] == simulate(graph, schedule).peak_bytes == 24


PLAIN = Schedule.plain(CHAIN)


@pytest.mark.parametrize(
    ("schedule", "message", "step"),
    [
        (replace(PLAIN, graph="0" * 16), "made for graph 0000000000000000", None),
        (edited(PLAIN, without=[0]), r"step 0 .*reads '0', which has not been computed", 0),
        (edited(PLAIN, insert=(1, Step("free", 0))), "reads '0', which was freed", 2),
        (edited(PLAIN, insert=(1, Step("free", 1))), "'1' is not in memory", 1),
        (edited(PLAIN, insert=(1, Step("free", 77))), "there are 6 storages", 1),
        (edited(PLAIN, insert=(1, Step("compute", 77))), "there are 6 ops", 1),
        (edited(PLAIN, insert=(1, Step("rest", 1))), "neither", 1),
        (Schedule(PLAIN.steps[:-4], PLAIN.graph), "not in memory at the end", None),
        (edited(PLAIN, insert=(2, Step("free", 0))), "was freed", 7),
        *(
            (edited(PLAIN, insert=(1, Step("free", target))), rf"\(free {re.escape(repr(target))}\): .* no int", 1)
            for target in (0.0, "0", None, [0], True)
        ),
    ],
)
def test_a_wrong_step_is_named(schedule, message, step):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(CHAIN, schedule)
    if step is not None:
        assert caught.value.step == step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [["compute", 0], [1, 0]]}, "step 1 .*neither 'compute' nor 'free'"),
        ({"steps": [["compute", 0], ["free", True]]}, r"step 1 \(free True\): the target is no int"),
        ({"steps": [["compute"]]}, "incomplete"),
        ({"steps": ["compute"]}, "incomplete"),
        ({"steps": 5}, "incomplete"),
        ({"graph": 5}, "graph=5, which is no text"),
        ({"strategy": None}, "strategy=None, which is no text"),
        ({"proof": 1}, "proof=1, which is no text"),
    ],
)
def test_data_of_another_kind_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_dict({**PLAIN.to_dict(), **change})


def marked(*, is_second_random=True, loss_reads=(0, 1), gradient_reads=(0, 1, 2), **marks):
    """A graph of two random ops in a row with a backward op, and the marks on its first op."""
    ops = (
        Op("first", 1.0, (), (0,), is_random=True, **marks),
        Op("second", 1.0, (), (1,), is_random=is_second_random),
        Op("loss", 1.0, loss_reads, (2,)),
        Op("gradient", 1.0, gradient_reads, (3,), is_backward=True),
    )
    return Graph(ops, tuple(Storage(str(index), 4) for index in range(4)), (2, 3), (2,))


UNREAD, IN_BACKWARD = ({"loss_reads": (1,), "gradient_reads": reads} for reads in ((1, 2), (0, 2)))


@pytest.mark.parametrize(
    ("changes", "order", "message"),
    [
        ({}, [1, 0, 2, 3], "'first' draws after 'second', and the plain program before it"),
        (UNREAD, [1, 2, 3], "'first', which has an effect, is never computed"),
        (IN_BACKWARD | {"is_second_random": False}, [1, 2, 0, 3], "'first' draws after the forward pass has ended"),
        ({"is_recomputable": False}, [0, 1, 2, 0, 3], "'first' must not run twice"),
        ({"gradient_reads": (0, 1)}, [0, 1, 3, 2], "backward op 'gradient' runs before 'loss'"),
    ],
)
def test_random_ops_keep_their_order_and_none_is_left_out_or_runs_where_it_must_not(changes, order, message):
    graph = marked(**changes)
    with pytest.raises(ScheduleError, match=message):
        validate(graph, Schedule.from_order(graph, order))
    validate(marked(), Schedule.from_order(marked(), [0, 1, 2, 0, 3]))


def test_json_keeps_everything():
    assert Schedule.from_json(PLAIN.to_json()) == PLAIN
    for broken in ({}, {"version": 1}, {"version": 1, "steps": [1], "graph": "", "strategy": ""}, []):
        with pytest.raises(ValueError, match="no schedule|incomplete"):
            Schedule.from_dict(broken)
