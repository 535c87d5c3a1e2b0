"""On a GPU: no host synchronisation, CUDA graphs that draw a new S at every replay, and compiled models.

`tests/test_ops.py` checks the operators' registrations on a GPU as well.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rmm_linear import RMMConfig, convert_linears, use_kernels
from rmm_linear.functional import linear
from rmm_linear.sketches import STORAGES, available_sketches
from rmm_linear_kernels.low_bit import reference

gpu = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# What has a meaning on a CPU too runs there, a step in place of a graph's replay: no test waits for a GPU to be wrong.
anywhere = gpu if torch.cuda.is_available() else lambda test: test
grid = partial(pytest.param, marks=pytest.mark.grid)
ROWS, FEATURES, OUTPUTS = 300, 32, 16


def tensors(dtype=torch.float32, rows=ROWS):
    def normal(*shape):
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    weight, bias = normal(OUTPUTS, FEATURES).requires_grad_(), normal(OUTPUTS).requires_grad_()
    return normal(4, rows // 4, FEATURES), weight, bias, normal(4, rows // 4, OUTPUTS)


CONFIGS = [
    *(RMMConfig(ratio=0.3, sketch=sketch, min_rows=1) for sketch in available_sketches()),
    *(RMMConfig(ratio=ratio, storage=storage, min_rows=1) for storage in STORAGES for ratio in (0.3, 1.0)),
    *(RMMConfig(ratio=0.3, storage=storage, min_rows=1, keep_tokens=(0, -1)) for storage in (None, "int4")),
]


def replaying(step, warm_ups):
    """Capture a step: what replays it, and the tensors that then hold what it returns."""
    if DEVICE.type == "cpu":
        results = step()

        def again():
            found = step()
            for old, new in zip(tree_leaves(results), tree_leaves(found), strict=True):
                old.detach().copy_(new)

        return again, results
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


@gpu
@pytest.mark.parametrize(
    ("kernels", "dtype", "center"),
    [
        *itertools.product(("auto",), (torch.float32, torch.bfloat16, torch.float16), (False, True)),
        *itertools.product(("torch",), (torch.float64, torch.bfloat16), (True,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_step_waits_for_the_device(config, kernels, dtype, center):
    x, weight, bias, g = tensors(dtype)
    leaves, config = (x.requires_grad_(), weight, bias), config.replace(center=center)
    with use_kernels(kernels):
        # the first call loads libraries, which may wait
        torch.autograd.grad(linear(*leaves, config=config), leaves, g)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(linear(*leaves, config=config), leaves, g)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def converted(config, dtype):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(FEATURES, 48), nn.GELU(), nn.Linear(48, OUTPUTS)).to(DEVICE, dtype)
    convert_linears(model, config=config)
    return model


STEPS = [
    RMMConfig(ratio=0.3, min_rows=1),
    RMMConfig(ratio=0.3, min_rows=1, center=False),
    RMMConfig(ratio=0.3, min_rows=1, sketch="gaussian"),
    # not those whose draws depend on the input: they would follow a rounding that the compiler did otherwise
    RMMConfig(ratio=0.3, min_rows=1, sketch="rows_without_replacement"),
    RMMConfig(ratio=0.4, min_rows=1, storage="int4", keep_tokens=(0,)),
    RMMConfig(ratio=1.0, min_rows=1, storage="int8"),
]
# difference of two gradients of rounded activations, over their size
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("config", STEPS, ids=str)
def test_a_converted_model_compiles_to_one_graph_with_the_eager_gradients(config, dtype):
    """Inductor, forward and backward, with the seeds that the model draws itself."""
    torch._dynamo.reset()
    model = converted(config, dtype)
    x, _, _, g = tensors(dtype)
    found = []
    for run in (model, torch.compile(model, fullgraph=True)):
        for _ in range(2):
            torch.manual_seed(5)
            inputs = x.clone().requires_grad_()
            output = run(inputs)
            gradients = torch.autograd.grad(output, (inputs, *model.parameters()), g)
        found.append((output, *gradients))
        assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in gradients)
    # a code may fall on the other side of a step
    tolerance = max(TOLERANCE[dtype], 0.01 if config.storage else 0.0)
    for eager, compiled in zip(*found, strict=True):
        assert (eager.double() - compiled.double()).norm() <= tolerance * eager.double().norm()
    # another seed, another sketch
    torch.manual_seed(6)
    other = torch.autograd.grad(run(x), model[0].weight, g)[0]
    assert (other.double() - found[1][2].double()).norm() > 2e-3 * other.double().norm()


@gpu
@pytest.mark.parametrize("kind", STORAGES)
def test_codes_are_those_of_the_cpu(kind):
    y, seed = torch.randn(300, 33), torch.tensor(5)
    expected = reference.quantize(y, seed, None, kind=kind, group=64)
    found = reference.quantize(y.cuda(), seed.cuda(), None, kind=kind, group=64)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one.cpu(), other)
    # the quotient may be rounded differently, and so, rarely, a code
    assert (found[0].cpu() != expected[0]).float().mean() < 1e-3


@anywhere
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1], *map(grid, CONFIGS[1:-1])], ids=str)
def test_each_replay_of_a_cuda_graph_draws_its_own_sketch(config):
    x, weight, bias, g = tensors()

    def step():
        return torch.autograd.grad(linear(x, weight, bias, config=config), weight, g)[0]

    replay, captured = replaying(step, 1)
    draws = []
    for _ in range(400):
        replay()
        draws.append(captured.clone())
    assert not torch.equal(draws[0], draws[1])
    exact = g.flatten(0, 1).t() @ x.flatten(0, 1)
    projections = torch.stack([(draw * exact).sum() / exact.square().sum() for draw in draws])
    # 6 standard errors: one run in 5e8 fails by chance
    assert abs(projections.mean() - 1) < 6 * projections.std() / len(draws) ** 0.5


@anywhere
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("config", STEPS, ids=str)
def test_a_captured_step_follows_its_input(config, dtype):
    """Forward and backward of a converted model in one CUDA graph: replayed on other inputs, they are theirs."""
    model = converted(config, dtype)
    x, _, _, g = tensors(dtype)

    def step():
        output = model(x)
        return output, *torch.autograd.grad(output, tuple(model.parameters()), g)

    replay, captured = replaying(step, 3)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        g.copy_(torch.randn_like(g))
        replay()
        exact = nn.Sequential(nn.Linear(FEATURES, 48), nn.GELU(), nn.Linear(48, OUTPUTS)).to(DEVICE, dtype)
        exact.load_state_dict(model.state_dict())
        output = exact(x)
        expected = (output, *torch.autograd.grad(output, tuple(exact.parameters()), g))
        for index, (found, wanted) in enumerate(zip(captured, expected, strict=True)):
            assert found.isfinite().all()
            # the output and the gradients of both biases are exact; a weight's gradient has this one's noise
            if index in (0, 2, 4):
                assert (found.double() - wanted.double()).norm() <= TOLERANCE[dtype] * wanted.double().norm()
            else:
                slope = (found.double() * wanted.double()).sum() / wanted.double().square().sum()
                assert 0.3 < slope < 1.7
