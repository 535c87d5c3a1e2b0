"""Loops of Inductor: elementwise results take no memory, and the fewest bytes are kept for backward loops."""

import copy
import itertools
import random
from functools import partial

import pytest
import torch
from model_of import ModelOf
from torch import fx, nn
from torch.nn import functional

from rmm_linear.compiler import inductor_program, plans
from rmm_linear.compiler.backend import rmm_linear
from rmm_linear.compiler.joint_graph import read_joint_graph
from rmm_linear.planning.coding import Bits
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import simulate

ROWS, WIDTH = 16, 8
SIZE = 4 * ROWS * WIDTH
LOSS = 4


def captured(step):
    """Capture step(x, first, second, third), which returns the loss."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(3)]
    traced = fx.symbolic_trace(lambda x, first, second, third: (step(x, first, second, third),))
    return read_joint_graph(traced, [torch.randn(ROWS, WIDTH), *weights], for_inductor=True)


def loss_of(function):
    return lambda x, up, down: ((function(x @ up) @ down).sum(),)


def written(capture):
    """How many float tensors of the size of the activation are written."""
    sizes = [capture.graph.storages[each].size_bytes for op in capture.graph.ops for each in op.writes]
    return sizes.count(4 * 256 * 64)


def kept_bytes(capture):
    """What the plain program keeps for its backward pass, without the loss."""
    return simulate(capture.graph, Schedule.plain(capture.graph)).forward_bytes - LOSS


def test_a_gelu_of_eight_ops_is_one_op_and_keeps_its_input_alone():
    def step(x, up, down, unused):
        h = x @ up
        act = 0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0))))
        return (act @ down).sum()

    capture = captured(step)
    # the products need their inputs: act, and h for the loop that computes the gradient of the gelu
    assert kept_bytes(capture) == 2 * SIZE
    kinds = [op.kind for op in capture.graph.ops if not op.is_backward]
    assert kinds == ["aten.mm", "aten.mul.Tensor", "aten.mm", "aten.sum"]


@pytest.mark.parametrize("bits", [8, 4])
def test_an_activation_is_read_from_a_code_in_one_loop(bits):
    arguments = [torch.randn(256, 16), torch.randn(16, 64).requires_grad_(), torch.randn(64, 16).requires_grad_()]
    for function in (functional.gelu, functional.silu, partial(functional.gelu, approximate="tanh")):
        traced = fx.symbolic_trace(loss_of(function))
        exact = read_joint_graph(traced, arguments, for_inductor=True)
        coded = read_joint_graph(traced, arguments, for_inductor=True, bits=Bits.of(bits))
        assert [(tensor.kind, tensor.bits) for tensor in coded.coding.coded] == [("activation", bits)]
        # the result of the activation is read beside its gradient
        assert written(coded) == written(exact) + 1


@pytest.mark.parametrize("part", [lambda h: h[:, 2:6], lambda h: h[3]])
def test_the_gradient_of_a_part_is_padded_in_the_loop_that_adds_it(part):
    def step(x, first, second, third):
        h = x @ first
        return part(h).exp().sum() + (h.tanh() @ second @ third).sum()

    capture = captured(step)
    kinds = {op.kind for op in capture.graph.ops}
    assert not kinds & {"aten.slice_backward", "aten.select_backward"}
    weights = [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=rmm_linear, options={"budget": "100%"})
    compiled(torch.randn(64 * ROWS, WIDTH), *weights).backward()
    *_, plan = plans(compiled)
    assert plan.measured_peak_bytes <= plan.peak_bytes


def test_sums_of_a_residual_stream_are_kept_and_not_their_addends():
    def step(x, first, second, third):
        h = x @ first
        h = h + (h.tanh() @ second)
        h = h + (h.tanh() @ third)
        return h.exp().sum()

    # two tanhs, which products read, and the last exp: sums are computed nowhere again
    assert kept_bytes(captured(step)) == 3 * SIZE


@pytest.mark.parametrize("seed", range(12))
def test_the_fewest_bytes_are_kept_of_random_elementwise_steps(seed):
    draw = random.Random(seed)
    ops = []
    while len(ops) < 6:
        place = 3 + len(ops)
        kind = draw.choice(["mul", "tanh", "exp", "add"])
        sources = draw.sample(range(place), 2) if kind in ("mul", "add") else [draw.randrange(place)]
        if (kind, sources) not in ops:
            ops.append((kind, sources))

    def step(x, *weights):
        values = [x @ weight for weight in weights]
        for kind, sources in ops:
            values.append(getattr(torch, kind)(*(values[source] for source in sources)))
        return sum(values[3:]).sum()

    def closed(kept):
        found = set(kept)
        for place, (_, sources) in enumerate(ops, start=3):
            if found.issuperset(sources):
                found.add(place)
        return found

    read = set()
    for place, (kind, sources) in enumerate(ops, start=3):
        read.update(sources if kind == "mul" else [place] if kind in ("tanh", "exp") else [])
    subsets = (set(kept) for count in range(10) for kept in itertools.combinations(range(3 + len(ops)), count))
    least = next(len(kept) for kept in subsets if read <= closed(kept))
    assert kept_bytes(captured(step)) == least * SIZE


@pytest.mark.parametrize("steps", [40, pytest.param(80, marks=pytest.mark.grid)])
def test_of_a_long_recurrence_each_backward_loop_computes_a_short_part_again(steps):
    def step(x, first, second, third):
        h = x @ first
        for row in range(steps):
            h = torch.tanh(h * second[0] + x[row % ROWS])
        return h.sum()

    capture = captured(step)
    ops = 3 * steps
    again = sum(len(loop) for op, loop in zip(capture.graph.ops, capture.inlined, strict=True) if op.is_backward)
    assert again < 20 * ops
    assert kept_bytes(capture) < SIZE * ops / 8


@pytest.mark.usefixtures("uncompiled_graphs")
def test_what_was_computed_from_a_buffer_is_not_computed_again_after_the_step_has_written_into_it(monkeypatch):
    monkeypatch.setattr(inductor_program, "measured_peak_bytes", lambda *_: 1)

    def scaled(it, x):
        y = it.linear(x)
        y = y * (it.scale + 1).exp() * y.tanh()
        it.scale.mul_(2)
        return y.sum()

    eager = ModelOf(scaled, linear=nn.Linear(WIDTH, WIDTH), scale=torch.rand(ROWS, WIDTH))
    model = copy.deepcopy(eager)
    step = torch.compile(model, backend=rmm_linear, options={"budget": "100%"})
    x = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        eager(x).backward()
        step(x).backward()
    assert torch.equal(model.scale, eager.scale)
    assert len(plans(model)) == 1
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
