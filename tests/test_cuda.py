"""On a GPU: no host synchronisation, and CUDA graphs that draw a new S at every replay."""

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear.functional import linear
from rmm_linear.sketches import STORAGES, available_sketches
from rmm_linear_kernels.low_bit import reference

pytestmark = pytest.mark.gpu

ROWS, FEATURES, OUTPUTS = 300, 32, 16


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(4, ROWS // 4, FEATURES, device="cuda")
    weight = torch.randn(OUTPUTS, FEATURES, device="cuda", requires_grad=True)
    bias = torch.randn(OUTPUTS, device="cuda", requires_grad=True)
    return x, weight, bias, torch.randn(4, ROWS // 4, OUTPUTS, device="cuda")


CONFIGS = [
    *(RMMConfig(ratio=0.3, sketch=sketch, min_rows=1) for sketch in available_sketches()),
    *(RMMConfig(ratio=ratio, storage=storage, min_rows=1) for storage in STORAGES for ratio in (0.3, 1.0)),
    *(RMMConfig(ratio=0.3, storage=storage, min_rows=1, keep_tokens=(0, -1)) for storage in (None, "int4")),
]


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_step_waits_for_the_device(config, center):
    x, weight, bias, g = tensors()
    config = config.replace(center=center)
    # the first call loads libraries, which may wait
    torch.autograd.grad(linear(x, weight, bias, config=config), (weight, bias), g)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(linear(x, weight, bias, config=config), (weight, bias), g)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("kind", STORAGES)
def test_codes_are_those_of_the_cpu(kind):
    y, seed = torch.randn(300, 33), torch.tensor(5)
    expected = reference.quantize(y, seed, None, kind=kind, group=64)
    found = reference.quantize(y.cuda(), seed.cuda(), None, kind=kind, group=64)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one.cpu(), other)
    # the quotient may be rounded differently, and so, rarely, a code
    assert (found[0].cpu() != expected[0]).float().mean() < 1e-3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_replay_of_a_cuda_graph_draws_its_own_sketch(config):
    x, weight, bias, g = tensors()

    def step() -> torch.Tensor:
        return torch.autograd.grad(linear(x, weight, bias, config=config), weight, g)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    draws = []
    for _ in range(400):
        graph.replay()
        draws.append(captured.clone())
    assert not torch.equal(draws[0], draws[1])
    exact = g.t() @ x
    projections = torch.stack([(draw * exact).sum() / exact.square().sum() for draw in draws])
    # 6 standard errors: one run in 5e8 fails by chance
    assert abs(projections.mean() - 1) < 6 * projections.std() / len(draws) ** 0.5
