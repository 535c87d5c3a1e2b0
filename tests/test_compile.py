"""torch.compile: one graph, no recompilation, the compiled gradient unbiased, and the sketch kept instead of x."""

import uuid

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import rmm_linear.fingerprint
from rmm_linear import RMMConfig, RMMLinear, available_sketches
from rmm_linear.memory import SavedTensors
from rmm_linear.sketches import SKETCHES, STORAGES, Hadamard

CONFIG = RMMConfig(ratio=0.3, min_rows=1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def _network(config):
    torch.manual_seed(2)
    return nn.Sequential(RMMLinear(16, 8, config=config), nn.GELU(), RMMLinear(8, 4, config=config))


def step(run, network, x):
    """The output and the gradients of the network's parameters, of one seed."""
    torch.manual_seed(5)
    output = run(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), list(network.parameters()))]


QUICK = [
    {},
    {"center": False},
    {"sketch": "gaussian"},
    {"sketch": "wta_crs"},
    *({"storage": "int4", "ratio": ratio} for ratio in (0.4, 1.0)),
]
ALL = [
    *({"sketch": sketch, "center": center} for sketch in available_sketches() for center in (True, False)),
    *({"storage": storage, "ratio": ratio} for storage in STORAGES for ratio in (0.4, 1.0)),
]


@pytest.mark.parametrize("changes", [*QUICK, *(pytest.param(each, marks=pytest.mark.grid) for each in ALL)], ids=str)
def test_layers_are_one_frame_and_at_most_two_over_lengths_and_keep_their_bytes(changes):
    config = CONFIG.replace(**changes)
    network = _network(config)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, backend=counter, fullgraph=True)
    x, weight = torch.randn(4, 130, 16), network[0].weight
    gradients = [torch.autograd.grad(compiled(x).square().sum(), weight)[0] for _ in range(10)]
    assert counter.frame_count == 1
    assert not torch.equal(*gradients[:2])
    # never just one group of stored rows, or always
    for length in (140, 150, 133, 147, 158):
        compiled(torch.randn(4, length, 16)).square().sum().backward()
    assert counter.frame_count <= 2
    x = torch.randn(4, 77, 16)
    torch.testing.assert_close(step(compiled, network, x), step(network, network, x), rtol=1e-4, atol=1e-4)
    with SavedTensors(network) as kept:
        compiled(x)
    # the first layer's, GELU's input, and the second layer's
    promised = config.saved_bytes(308, 16, torch.float32) + 308 * 8 * 4 + config.saved_bytes(308, 8, torch.float32)
    assert kept.bytes == promised


@pytest.mark.parametrize("of_images", [lambda x: x, torch.relu], ids=["leaf", "ReLU"])
def test_an_input_that_has_no_view_as_a_matrix_is_compiled(of_images):
    # as patches of images reach a Transformer
    network, images = _network(CONFIG), torch.randn(2, 16, 4, 4, requires_grad=True)

    def run(images):
        return network(of_images(images).flatten(2).transpose(1, 2))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, network, images), step(run, network, images), rtol=1e-4, atol=1e-4)


def test_a_layer_is_one_node_of_the_graph_and_its_configuration_one_guard():
    targets = []
    names = []

    def backend(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def guards(entries):
        names.extend(entry.name for entry in entries if entry.guard_type == "CONSTANT_MATCH")
        return [True] * len(entries)

    network = _network(CONFIG)
    compiled = torch.compile(network, backend=backend, fullgraph=True, options={"guard_filter_fn": guards})
    compiled(torch.randn(4, 32, 16)).sum().backward()
    assert [getattr(target, "__name__", "") for target in targets] == [
        "sketched_linear.default",
        "gelu",
        "sketched_linear.default",
    ]
    read = {name.rpartition(".")[2] for name in names if "rmm_config." in name}
    assert read == {"graph_key", "skip_padding"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_operator_of_a_layer_is_one_that_torch_expects(autocast, bias):
    # with a seed: the results of two calls have to be equal
    x, weight = torch.randn(3, 64, 16), torch.randn(8, 16, requires_grad=True)
    added = torch.randn(8, requires_grad=True) if bias else None
    mask = torch.arange(64) < torch.tensor([[64], [40], [9]]) if bias else None
    arguments = x, weight, added, x.reshape(-1, 16), mask, torch.tensor(3), CONFIG.graph_key
    operator = torch.ops.rmm_linear.sketched_linear.default
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_a_changed_configuration_is_compiled_anew_and_an_equal_one_is_not():
    layer = RMMLinear(16, 8, config=CONFIG)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    x = torch.randn(128, 16)
    for config, frames in ((CONFIG, 1), (CONFIG.replace(), 1), (CONFIG.replace(ratio=0.6), 2), (CONFIG, 2)):
        layer.rmm_config = config
        torch.testing.assert_close(step(compiled, layer, x), step(layer, layer, x), rtol=1e-4, atol=1e-4)
        assert counter.frame_count == frames


def test_inductor_gives_the_eager_gradients_and_finds_its_graph_on_disk_by_the_same_code_alone(monkeypatch):
    x = torch.randn(4, 32, 16)
    # a code that no test had before: in a new folder Inductor would compile a dozen questions to the compiler again
    one, other = uuid.uuid4().hex, uuid.uuid4().hex

    def layer():
        torch.manual_seed(2)
        # a new configuration, whose key for the graph tells the code
        return RMMLinear(16, 8, config=CONFIG.replace())

    eager_layer = layer()
    eager, found, hits = step(eager_layer, eager_layer, x), {}, {}
    for name, code in (("first", one), ("again", one), ("changed", other)):
        monkeypatch.setattr(rmm_linear.fingerprint, "_FINGERPRINT", code)
        compiled_layer = layer()
        torch._dynamo.reset()
        counters.clear()
        found[name] = step(torch.compile(compiled_layer, fullgraph=True), compiled_layer, x)
        hits[name] = counters["aot_autograd"]["autograd_cache_hit"]
    assert hits == {"first": 0, "again": 1, "changed": 0}
    torch.testing.assert_close(found["first"], eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["again"], found["first"], rtol=0, atol=0)


SCHEDULE = {"factor": 1.0}


class Scheduled(Hadamard):
    """Somebody's sketch, which looks at what changes while it trains."""

    def compress(self, x, seed, *, mean=None):
        return super().compress(x * SCHEDULE["factor"], seed, mean=mean)


class Exact(RMMConfig):
    """Somebody's configuration, which never sketches."""

    def sketches(self, rows, kept=0):
        return False


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sketches_and_configurations_of_others_are_followed_whatever_they_look_at(backend, monkeypatch):
    monkeypatch.setitem(SKETCHES, "scheduled", Scheduled)
    layer = RMMLinear(16, 8, config=RMMConfig(sketch="scheduled", center=False, min_rows=1))
    compiled = torch.compile(layer, backend=backend)
    x = torch.randn(128, 16)
    for factor in (1.0, 2.0):
        monkeypatch.setitem(SCHEDULE, "factor", factor)
        torch.testing.assert_close(step(compiled, layer, x), step(layer, layer, x), rtol=1e-4, atol=1e-3)
    layer.rmm_config = Exact(min_rows=1)
    layer.zero_grad()
    g = torch.randn(128, 8)
    compiled(x).backward(g)
    torch.testing.assert_close(layer.weight.grad, g.t() @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_exported_without_gradients_needs_no_library(strict):
    with torch.no_grad():
        exported = torch.export.export(_network(CONFIG), (torch.randn(128, 16),), strict=strict)
    assert not [node for node in exported.graph.nodes if "rmm_linear" in str(node.target)]
