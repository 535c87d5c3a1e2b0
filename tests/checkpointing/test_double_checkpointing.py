"""Double checkpointing: the plain loop's bits, and local memory that does not grow with the sequence."""

import copy
import random

import pytest
import torch
from empty_chain import run_actions
from planned_models import assert_same_gradients
from test_bptt import assert_same_bits, plain_loop, train
from torch import nn

from rmm_linear.checkpointing.bptt import bptt_checkpoint, step_bytes
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.paging import FilePager, HostPager
from rmm_linear.planning.bencheikh2024_double import actions, spacing_for_bytes
from rmm_linear.planning.bptt_plan import plain_bytes, plan_of
from rmm_linear.planning.strategies.chain_reversal import StepBytes


@pytest.mark.parametrize("name", ["rnn", "lstm", "awkward"])
@pytest.mark.parametrize("spacing", [(1, 1), (4, 2), (6, 3), (5, 5), (30, 10)])
def test_gradients_are_the_plain_loops_bit_for_bit(name, spacing, tmp_path):
    for steps in (1, 2, 13, 24):
        expected = train(plain_loop, name, steps)
        options = dict(zip(("host_every", "local_every"), spacing, strict=True), page_to=tmp_path)
        found = train(lambda *a, options=options: bptt_checkpoint(*a, **options), name, steps)
        assert_same_bits(found, expected)
    assert not list(tmp_path.iterdir())


def test_each_step_runs_three_times_at_most_and_states_are_paged_once():
    counted = run_actions(actions(1000, 100, 10), 1000)
    assert counted.forward_steps <= 3 * 1000
    # one of a chunk, and ten within it; a few of the steps that run with their graphs
    assert counted.most_states <= 10 + 1
    assert counted.most_internals == 10
    paged = [action.stage for action in actions(1000, 100, 10) if action.kind == "page"]
    assert paged == list(range(100, 900, 100))


def test_the_spacing_for_a_budget_keeps_it():
    draw = random.Random(0)
    kept = 0
    for _ in range(600):
        steps, state, internal = draw.randint(1, 150), draw.randint(1, 50), draw.randint(0, 200)
        sizes = StepBytes(state, internal)
        budget = draw.randint(1, plain_bytes(steps, sizes) + 100)
        least = 3 * state + internal
        if budget < least:
            with pytest.raises(InfeasibleBudgetError, match="not even one step") as refused:
                spacing_for_bytes(budget, steps, sizes)
            assert refused.value.least_bytes == least
            continue
        spacing = spacing_for_bytes(budget, steps, sizes)
        planned = plan_of(actions(steps, *spacing), steps, sizes)
        assert planned.peak_bytes <= budget
        assert planned.forward_steps == run_actions(planned.actions, steps).forward_steps
        kept += 1
    assert kept > 400


def test_local_memory_does_not_grow_with_the_sequence():
    peaks = {plan_of(actions(steps, 50, 10), steps, StepBytes(8, 30)).peak_bytes for steps in (150, 400, 10_000)}
    assert len(peaks) == 1


@pytest.mark.slow
def test_a_hundred_thousand_steps_take_the_memory_of_a_thousand(tmp_path):
    torch.manual_seed(0)
    steps, cell = 100_000, nn.RNNCell(2, 3)
    inputs, state = torch.randn(steps, 1, 2), torch.zeros(1, 3)
    sizes = step_bytes(cell, inputs[0], state)
    budget = plain_bytes(1000, sizes)
    found = plan_of(actions(steps, *spacing_for_bytes(budget, steps, sizes)), steps, sizes)
    assert found.peak_bytes <= budget
    assert found.forward_steps <= 3 * steps
    reference = copy.deepcopy(cell)
    outputs, _ = bptt_checkpoint(cell, inputs, state, memory=budget, page_to=tmp_path)
    outputs.mean().backward()
    plain_loop(reference, inputs, state)[0].mean().backward()
    assert_same_gradients(cell, reference)


@pytest.mark.parametrize("make", [lambda folder: HostPager(), FilePager], ids=["host", "file"])
def test_a_pager_returns_what_it_was_given(make, tmp_path):
    pager = make(tmp_path)
    tensors = [
        torch.randn(3, 4).t(),
        torch.tensor(5, dtype=torch.int64),
        torch.randn(2, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False]),
    ]
    kept = [pager.put([tensor]) for tensor in tensors]
    for tensor, each in reversed(list(zip(tensors, kept, strict=True))):
        (found,) = pager.take(each)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    pager.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_every": 6, "local_every": 4}, "host_every=6 is no multiple of local_every=4; pass one, such as 4"),
        ({"host_every": 0, "local_every": 1}, "host_every=0 is no positive int"),
        ({"host_every": 4}, "belong together"),
        ({"memory": 0.5, "host_every": 4, "local_every": 2}, "pass exactly one"),
        ({"memory": 0.5, "page_to": "host"}, "in the host's memory already; pass a folder"),
        ({"memory": 0.5, "page_to": "/no/such/folder"}, 'neither "host" nor a folder that exists'),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, tmp_path):
    given = {"page_to": tmp_path} | options if "host_every" in options else options
    with pytest.raises(ValueError, match=message):
        bptt_checkpoint(nn.RNNCell(2, 3), torch.randn(8, 1, 2), torch.zeros(1, 3), **given)
