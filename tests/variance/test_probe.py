"""LayerProbe: what it sees of a training step, and that it leaves nothing behind."""

import copy
import gc
import io
import weakref

import pytest
import torch
from captured import captured
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.variance.probe import LayerProbe, is_compiled

CONFIG = RMMConfig(ratio=0.5, min_rows=1)


class Block(nn.Module):
    """Two layers and a residual, whole or checkpointed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.reentrant = reentrant

    def inner(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def model(*modules):
    torch.manual_seed(0)
    return convert_linears(nn.Sequential(*(modules or (Block(), Block()))), config=CONFIG)


class Recorder:
    """A probe that watches every layer and writes down what it is handed."""

    def __init__(self, network):
        self.calls = []
        self.probe = LayerProbe(network, lambda *call: self.calls.append(call))
        self.probe.watch(self.probe.layers)

    @property
    def names(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, 9, 8, requires_grad=True)


def step_on(x):
    return lambda network: network(x).square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_measured_once(reentrant, x):
    network = model(Block(reentrant), Block())
    plain = copy.deepcopy(network)
    plain[0].reentrant = None
    expected = captured(plain, step_on(x))
    recorder = Recorder(network)
    for _ in range(2):
        recorder.calls.clear()
        recorder.probe.watch(recorder.probe.layers)
        network(x).square().sum().backward()
        # in the order of the backward pass
        assert recorder.names == ["1.down", "1.up", "0.down", "0.up"]
        for name, layer, found_x, found_g, index in recorder.calls:
            assert layer is network.get_submodule(name)
            torch.testing.assert_close(found_x, expected[name][0])
            torch.testing.assert_close(found_g, expected[name][1])
            assert not found_x.requires_grad
            assert not found_g.requires_grad
            assert index is None


def test_the_first_call_and_the_first_micro_batch_count(x):
    shared = nn.Linear(8, 8)
    network = model(shared, nn.ReLU(), shared)
    recorder = Recorder(network)
    network(x).sum().backward()
    (call,) = recorder.calls
    assert torch.equal(call[2], x)
    network(x + 1).sum().backward()
    assert len(recorder.calls) == 1
    recorder.probe.watch(["0"])
    network(x + 1).sum().backward()
    assert len(recorder.calls) == 2


def test_an_input_changed_in_place_is_left_out(x):
    network = model(nn.Identity(), nn.Linear(8, 8))
    recorder = Recorder(network)
    y = x.detach().flatten(0, 1).clone()
    output = network(y)
    y.add_(1)
    output.sum().backward()
    assert recorder.calls == []
    recorder.probe.watch(["1"])
    output = network(y)
    # of the output, that is nobody's business: the gradient is that of the layer's own
    output.mul_(2).sum().backward()
    ((*_, g, _),) = recorder.calls
    assert torch.equal(g, torch.full((36, 8), 2.0))


def test_only_the_watched_inputs_stay_alive(x):
    network = model()
    alive = []
    for block in network:
        block.down.register_forward_pre_hook(lambda layer, args: alive.append(weakref.ref(args[0].untyped_storage())))
    recorder = Recorder(network)
    recorder.probe.watch(["1.down"])
    loss = network(x).sum()
    gc.collect()
    held = recorder.probe._held["1.down"][0]
    assert [reference() is not None for reference in alive] == [False, True]
    loss.backward()
    del held, loss
    recorder.calls.clear()
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False]


def test_a_copy_of_the_model_is_not_watched(x):
    network = model()
    recorder = Recorder(network)
    other = copy.deepcopy(network)
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    for copied in (other, torch.load(file, weights_only=False)):
        copied(x).sum().backward()
        assert recorder.calls == []
    network(x).sum().backward()
    assert len(recorder.calls) == 4


@pytest.mark.parametrize("part", ["wrapper", "child"])
def test_a_compiled_model_is_refused(part):
    network = model()
    assert not is_compiled(network)
    if part == "wrapper":
        network = torch.compile(network)
    else:
        network[0].compile()
    assert is_compiled(network)
    with pytest.raises(ValueError, match="compiled.*measure the eager model, before torch.compile"):
        Recorder(network)
