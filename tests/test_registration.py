"""The two ways to an operator: through torch's dispatcher where somebody may be watching, past it where nobody is."""

import inspect

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear import RMMConfig, RMMLinear, available_sketches, ops
from rmm_linear_kernels.row_sampling import reference


class Watch(TorchDispatchMode):
    """Takes note of the library's operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "rmm_linear":
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Labelled(torch.Tensor):
    """A subclass that wants to see what is done with it."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


X, INDEX = torch.arange(12.0).view(4, 3), torch.tensor([2, 0], dtype=torch.int32)


@pytest.fixture
def ways(monkeypatch):
    """Ways that calls of `gather_rows` take: whether through the dispatcher, in order."""
    found, gather = [], reference.gather_rows

    def watched(*args, **kwargs):
        found.append(any(frame.filename.endswith("torch/_ops.py") for frame in inspect.stack()))
        return gather(*args, **kwargs)

    monkeypatch.setattr(reference, "gather_rows", watched)
    return found


def test_where_nobody_watches_the_function_is_called(ways):
    weight = nn.Parameter(X.clone())
    ops.gather_rows(X, INDEX, None)
    with torch.no_grad():
        ops.gather_rows(weight, INDEX, None)
    with torch.inference_mode():
        ops.gather_rows(X, INDEX, None)
    with torch.autocast("cpu"):
        ops.gather_rows(X, INDEX, X[0], torch.ones(2))
    assert ways == [False] * 4


def test_a_mode_sees_the_operator(ways):
    with Watch() as watch:
        ops.gather_rows(X, INDEX, None)
    assert watch.seen == ["gather_rows"]
    with Functions() as functions:
        ops.gather_rows(X, INDEX, None)
    assert torch.ops.rmm_linear.gather_rows.default in functions.seen
    assert ways == [True] * 2


def test_a_profile_shows_the_operator(ways):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.gather_rows(X, INDEX, None)
    assert "rmm_linear::gather_rows" in [event.name for event in profile.events()]
    assert ways == [True]


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_traced_graph_has_the_operator(mode, pre_dispatch):
    graph = make_fx(lambda x, index: ops.gather_rows(x, index, None), tracing_mode=mode, pre_dispatch=pre_dispatch)(
        X, INDEX
    )
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.rmm_linear.gather_rows.default]


def test_tensors_that_are_more_than_their_memory_go_through_the_dispatcher(ways):
    """A view that is to be negated, a subclass, a zero without memory, and one that autograd follows."""
    negated = torch.complex(X, X).conj().imag
    assert negated.is_neg()
    zero = torch._efficientzerotensor((4, 3))
    for x in (negated, X.as_subclass(Labelled), zero, X.clone().requires_grad_()):
        torch.testing.assert_close(ops.gather_rows(x, INDEX, None).detach(), x.detach()[[2, 0]], check_device=False)
    assert ways == [True] * 4
    assert torch.ops.rmm_linear.gather_rows.default in Labelled.seen
    assert ops.gather_rows(X.to("meta"), INDEX.to("meta"), None).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_sees_the_operator(ways):
    batch = torch.stack([X, X + 1])
    gathered = torch.func.vmap(lambda x: ops.gather_rows(x, INDEX, None))(batch)
    assert torch.equal(gathered, batch[:, [2, 0]])
    assert ways == [True] * 2


def gradients(config, dtype):
    torch.manual_seed(3)
    layer, x = RMMLinear(12, 8, config=config, dtype=dtype), torch.randn(2, 150, 12).to(dtype).requires_grad_()
    output = layer(x)
    output.backward(torch.randn(2, 150, 8).to(dtype))
    return output, x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("storage", [None, "int4"])
@pytest.mark.parametrize("sketch", available_sketches())
def test_both_ways_are_bitwise_equal(sketch, storage):
    for dtype in (torch.float32, torch.bfloat16):
        config = RMMConfig(ratio=0.3, sketch=sketch, storage=storage, keep_tokens=(0,))
        with Watch() as watch:
            watched = gradients(config, dtype)
        assert "draw_seed" in watch.seen
        assert any(name.startswith("sketched_grad_weight") for name in watch.seen)
        assert all(map(torch.equal, gradients(config, dtype), watched))


def test_autocast_is_off_both_ways():
    """A float32 sum inside of an operator stays one."""
    x, g = torch.randn(256, 12), torch.randn(256, 8)
    seed = torch.tensor(3)
    for watch in (None, Watch()):
        with torch.autocast("cpu"):
            if watch is None:
                found = ops.random_projection(x, seed, None, rank=64, gaussian=True, gradient=True)
            else:
                with watch:
                    assert torch.equal(
                        ops.random_projection(x, seed, None, rank=64, gaussian=True, gradient=True), found
                    )
            product, _ = ops.sketched_grad_weight(g[:64], found)
        assert found.dtype == product.dtype == torch.float32
        assert torch.equal(found, ops.random_projection(x, seed, None, rank=64, gaussian=True, gradient=True))
