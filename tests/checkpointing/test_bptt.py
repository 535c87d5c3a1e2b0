"""Backpropagation through time by a schedule: the same gradients, bit by bit, and no more memory than promised."""

import itertools
from functools import partial

import pytest
import torch
from assert_unchanged import assert_unchanged
from empty_chain import run_actions
from planned_models import assert_equal
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from rmm_linear.checkpointing.bptt import bptt_checkpoint, step_bytes
from rmm_linear.errors import DoubleBackwardError, InfeasibleBudgetError
from rmm_linear.planning.bencheikh2024_double import actions
from rmm_linear.planning.bptt_plan import plan_for_bytes, plan_for_slots, plan_of
from rmm_linear.planning.strategies.chain_reversal import StepBytes

BATCH, FEATURES, HIDDEN = 3, 5, 7


class Awkward(nn.Module):
    """Uses its weights and its state several times a step, draws numbers, and has outputs of its own in a dict."""

    def __init__(self):
        super().__init__()
        self.step = nn.GRUCell(FEATURES, HIDDEN)
        self.read = nn.Linear(HIDDEN, 4)

    def forward(self, x, state):
        h = nn.functional.dropout(self.step(x, state["h"]), 0.3, self.training)
        h = self.step(x * 0.5, h) + 0.1 * state["h"] * state["n"]
        after = {"h": h, "n": state["n"] + 1}
        return {"read": self.read(h), "again": self.read(h.tanh()), "h": h}, after


def make(name, steps):
    torch.manual_seed(3)
    inputs = torch.randn(steps, BATCH, FEATURES)
    h, c = torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)
    if name == "awkward":
        return Awkward(), inputs, {"h": h, "n": torch.zeros((), dtype=torch.int64)}
    cell = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}[name](FEATURES, HIDDEN)
    return cell, inputs, (h, c) if name == "lstm" else h


def plain_loop(cell, inputs, state):
    outputs = []
    for x in inputs.unbind(0):
        returned = cell(x, state)
        output, state = returned if isinstance(cell, Awkward) else (tensors_of(returned)[0], returned)
        outputs.append(output)
    return torch.utils._pytree.tree_map(lambda *tensors: torch.stack(tensors), *outputs), state


def tensors_of(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if leaf.is_floating_point()]


def train(run, name, steps, *, loss="all", needs=("inputs", "state")):
    cell, inputs, state = make(name, steps)
    inputs.requires_grad_("inputs" in needs)
    for leaf in tensors_of(state):
        leaf.requires_grad_("state" in needs)
    torch.manual_seed(11)
    outputs, final = run(cell, inputs, state)
    after = torch.rand(3)
    everything = [*tensors_of(outputs), *tensors_of(final)]
    chosen = {"all": everything, "outputs": tensors_of(outputs), "final": tensors_of(final)[:1]}[loss]
    draw = torch.Generator().manual_seed(5)
    total = sum((part * torch.randn(part.shape, generator=draw)).sum() for part in chosen)
    total.backward()
    gradients = [parameter.grad for parameter in cell.parameters()]
    gradients += [inputs.grad, *(leaf.grad for leaf in tensors_of(state))]
    return [*everything, after, torch.rand(3)], gradients


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("strategy", ["hsm", "ism", "msm"])
@pytest.mark.parametrize("name", ["rnn", "gru", "lstm", "awkward"])
def test_outputs_and_gradients_are_bit_identical_to_the_plain_loop(name, strategy):
    for steps, slots in ((1, 1), (2, 1), (3, 2), (13, 1), (13, 3), (13, 5), (13, 40)):
        expected = train(plain_loop, name, steps)
        found = train(lambda *a, k=slots: bptt_checkpoint(*a, slots=k, strategy=strategy), name, steps)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["rnn", "gru", "lstm", "awkward"])
@pytest.mark.parametrize("loss", ["outputs", "final"])
@pytest.mark.parametrize("needs", [(), ("inputs",), ("state",)])
def test_gradients_are_bit_identical_whatever_is_asked_for(name, loss, needs):
    expected = train(plain_loop, name, 11, loss=loss, needs=needs)
    found = train(lambda *a: bptt_checkpoint(*a, memory=0.6), name, 11, loss=loss, needs=needs)
    assert_same_bits(found, expected)


class Watched:
    """A cell that notes, after each step, how many bytes of what steps have left behind are still there.

    It sees storages that steps returned or autograd kept, by weak references: an instrument that knows no schedule.
    Its hooks lie around everything, for hooks within a step would hide what is kept from those around it.
    """

    def __init__(self, cell, *outside):
        self.cell, self.calls, self.most, self.now = cell, 0, 0, 0
        self.outside = {t.untyped_storage().data_ptr() for t in (*outside, *cell.parameters())}
        self.seen = {}

    def __call__(self, x, state):
        self.calls += 1
        returned = self.cell(x, state)
        for tensor in tensors_of(returned):
            self._note(tensor)
        self.now = self.held()
        self.most = max(self.most, self.now)
        return returned

    def ignore(self, tree):
        pointers = {tensor.untyped_storage()._cdata for tensor in tensors_of(tree)}
        self.seen = {key: pair for key, pair in self.seen.items() if key not in pointers}

    def watching(self):
        return saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.outside:
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        # what has a graph and is kept by it would be a cycle
        return tensor.detach()

    def held(self):
        self.seen = {key: pair for key, pair in self.seen.items() if not pair[0].expired()}
        return sum(size for _, size in self.seen.values())


@pytest.mark.parametrize("strategy", ["hsm", "ism", "msm"])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_measured_memory_and_steps_equal_the_plan(name, strategy):
    for slots in (1, 2, 4, 9, 20):
        planned_for = partial(plan_for_slots, 40, slots, strategy=strategy)
        check_memory_and_steps(name, planned_for, slots=slots, strategy=strategy)


@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.parametrize("spacing", [(8, 4), (9, 3), (40, 40)])
def test_measured_memory_and_steps_of_double_checkpointing_equal_the_plan(name, spacing, tmp_path):
    options = dict(zip(("host_every", "local_every"), spacing, strict=True), page_to=tmp_path)
    # the instrument does not see states that a pager has made
    check_memory_and_steps(name, lambda sizes: plan_of(actions(40, *spacing), 40, sizes), unseen_states=2, **options)


def check_memory_and_steps(name, planned_for, *, unseen_states=0, **options):
    cell, inputs, state = make(name, 40)
    sizes = step_bytes(cell, inputs[0], state)
    planned = planned_for(sizes)
    watched = Watched(cell, inputs, *tensors_of(state))
    with watched.watching():
        outputs, final = bptt_checkpoint(watched, inputs, state, parameters=tuple(cell.parameters()), **options)
    # the final state is the caller's: it counts only until it is returned
    watched.ignore(final)
    in_forward, watched.most = watched.most, 0
    loss = outputs.square().sum()
    with watched.watching():
        loss.backward()
    assert watched.calls == planned.forward_steps + 1
    assert in_forward <= planned.peak_bytes + sizes.state_bytes
    assert max(in_forward - sizes.state_bytes, watched.most) <= planned.peak_bytes
    seen = (in_forward - sizes.state_bytes, in_forward, watched.most)
    assert any(0 <= planned.peak_bytes - each <= unseen_states * sizes.state_bytes for each in seen)
    del outputs, final, loss
    assert watched.held() == 0


def test_memory_is_never_exceeded_and_more_of_it_never_costs_time():
    for strategy, (state, internal) in itertools.product(("hsm", "ism", "msm"), ((8, 20), (24, 24), (5, 91))):
        least = 2 * state + internal
        with pytest.raises(InfeasibleBudgetError) as refused:
            plan_for_bytes(50, least - 1, StepBytes(state, internal), strategy=strategy)
        assert refused.value.least_bytes == least
        before = None
        for budget in range(least, 50 * (state + internal), 5 * internal + 1):
            found = plan_for_bytes(50, budget, StepBytes(state, internal), strategy=strategy)
            assert found.peak_bytes <= budget
            assert found.forward_steps == run_actions(found.actions, 50).forward_steps
            # places are whole ones: a mixed plan may take a step or two more with a little more memory
            assert before is None or found.forward_steps <= before * 1.03
            before = found.forward_steps


def test_mixed_states_are_never_worse_than_the_better_of_the_two():
    for budget in range(200, 5000, 300):
        plans = [plan_for_bytes(100, budget, StepBytes(16, 40), strategy=name) for name in ("msm", "hsm", "ism")]
        mixed, *others = (plan.forward_steps for plan in plans)
        assert mixed <= min(others)


def test_a_function_with_parameters_passed_trains_them_and_others_are_refused():
    weight, inputs = torch.randn(FEATURES, FEATURES, requires_grad=True), torch.randn(6, BATCH, FEATURES)
    state = torch.zeros(BATCH, FEATURES)

    def cell_of(used):
        return lambda x, state: torch.tanh(x + state @ used)

    # a tensor that was made of a parameter outside of the loop is passed itself
    for make in (lambda: weight, lambda: weight * 2):
        used = make()
        outputs, _ = bptt_checkpoint(cell_of(used), inputs, state, slots=2, parameters=[used])
        (found,) = torch.autograd.grad(outputs.sum(), weight)
        (expected,) = torch.autograd.grad(plain_loop(cell_of(make()), inputs, state)[0].sum(), weight)
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="not among its parameters"):
        bptt_checkpoint(cell_of(weight), inputs.requires_grad_(), state, slots=2)


def test_without_gradients_it_is_the_plain_loop():
    cell, inputs, state = make("lstm", 6)
    with torch.no_grad():
        outputs, final = bptt_checkpoint(cell, inputs, state, memory=0.5)
    expected, after = plain_loop(cell, inputs, state)
    assert_equal([outputs, *final], [expected, *after])
    assert not outputs.requires_grad
    cell.requires_grad_(False)
    assert not bptt_checkpoint(cell, inputs, state, memory=0.5)[0].requires_grad


def test_autocast_is_that_of_the_forward_pass():
    def trained(run):
        cell, inputs, state = make("gru", 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs, _ = run(cell, inputs, state)
        outputs.float().square().sum().backward()
        return outputs, cell.weight_hh.grad

    (outputs, found), (expected, gradient) = (
        trained(run) for run in (lambda *a: bptt_checkpoint(*a, slots=2, strategy="hsm"), plain_loop)
    )
    assert torch.equal(outputs, expected)
    assert (found - gradient).norm() < 0.02 * gradient.norm()


def test_second_derivatives_and_second_backward_passes_are_refused():
    cell, inputs, state = make("gru", 5)
    outputs, _ = bptt_checkpoint(cell, inputs, state, slots=2)
    with pytest.raises(DoubleBackwardError, match="plain loop"):
        torch.autograd.grad(outputs.sum(), cell.weight_hh, create_graph=True)
    outputs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        outputs.sum().backward()


def test_parameters_changed_before_the_backward_pass_are_noticed():
    cell, inputs, state = make("gru", 5)
    outputs, _ = bptt_checkpoint(cell, inputs, state, slots=2)
    with torch.no_grad():
        cell.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_wrong_arguments_are_named():
    cell, inputs, state = make("gru", 5)
    for keywords, message in (
        ({}, "pass exactly one"),
        ({"memory": 0.5, "slots": 2}, "pass exactly one"),
        *(({"memory": memory}, r"neither a float in \(0, 1\] nor") for memory in (1.5, 0.0, True, -3)),
        ({"slots": -1}, "at least 0"),
        ({"slots": 0, "strategy": "ism"}, "at least 1"),
        ({"slots": 2, "strategy": "best"}, "unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            bptt_checkpoint(cell, inputs, state, **keywords)
    with pytest.raises(InfeasibleBudgetError, match="a float a part of"):
        bptt_checkpoint(cell, inputs, state, memory=1)
    with pytest.raises(ValueError, match="no step"):
        bptt_checkpoint(cell, inputs[:0], state, slots=2)
    with pytest.raises(ValueError, match="not a tensor or a structure of tensors"):
        bptt_checkpoint(cell, inputs, (), slots=2)
    with pytest.raises(ValueError, match="neither a state"):
        bptt_checkpoint(lambda x, s: (s, s, s), inputs.requires_grad_(), state, slots=2)


class Counting(nn.Module):
    """A cell that does something to a buffer, or to what it is given, in each step."""

    def __init__(self, change):
        super().__init__()
        self.gru, self.norm, self.change = nn.GRUCell(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), change
        self.norm.requires_grad_(False).eval()
        self.register_buffer("t", torch.tensor([0.0, float("nan")]))
        self.register_buffer("later", None)

    def forward(self, x, state):
        h, n = state
        self.change(self, x, h, n)
        h = self.norm(self.gru(x, h)) + self.t[0]
        return h, (h, n + 1)


def counting(change):
    torch.manual_seed(0)
    return Counting(change), torch.randn(6, BATCH, FEATURES), (torch.randn(BATCH, HIDDEN), torch.zeros(2).long())


def fails(cell, x, h, n):
    cell.t.add_(1)
    raise RuntimeError("the cell fails")


UPDATES = (
    ("t", lambda cell, x, h, n: cell.t.add_(1)),
    ("t", lambda cell, x, h, n: cell.t.mul_(1)),
    ("t", lambda cell, x, h, n: setattr(cell, "t", cell.t + 1)),
    ("later", lambda cell, x, h, n: setattr(cell, "later", n.detach())),
    ("norm.running_mean", lambda cell, x, h, n: (cell.norm.train()(h), cell.norm.eval())),
)
WRITES = (
    lambda cell, x, h, n: h.mul_(0.9),
    lambda cell, x, h, n: h[:, 0].zero_(),
    lambda cell, x, h, n: x.mul_(2),
    lambda cell, x, h, n: torch.no_grad()(h.mul_)(0.9),
    lambda cell, x, h, n: n.add_(1),
)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *((change, ValueError, f"updates '{name}'.*Keep the value in the state") for name, change in UPDATES),
        *((change, ValueError, "writes in place into its state or its input.*make new tensors") for change in WRITES),
        (fails, RuntimeError, "the cell fails"),
    ],
)
def test_a_cell_that_changes_more_than_its_state_is_refused_and_all_is_as_it_was(change, kind, message):
    cell, inputs, state = counting(change)
    # the count of steps of a batch norm raises its version, the statistics do not
    cell.norm.num_batches_tracked = None
    given = (inputs, *state)
    before = [tensor.clone() for tensor in given]
    for run in (lambda: bptt_checkpoint(cell, inputs, state, slots=2), lambda: step_bytes(cell, inputs[0], state)):
        with assert_unchanged(cell), pytest.raises(kind, match=message):
            run()
        assert_equal(given, before)
