"""What made a tensor may keep it anyway: checked against what autograd saves, and what layers then do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear, convert_linears
from rmm_linear.memory import SavedTensors, measure_kept_bytes
from rmm_linear.producers import KEEPS_OUTPUT, is_free_to_keep, keeping_producer

CONFIG = RMMConfig(ratio=0.25, min_rows=1)


def _attention(x):
    q = x.view(4, 32, 4, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


KEEPING = {
    "relu": F.relu,
    "relu_": lambda x: F.relu(x + 1, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu(x + 1, inplace=True),
    "elu_": lambda x: F.elu(x + 1, inplace=True),
    "selu_": lambda x: F.selu(x + 1, inplace=True),
    "celu_": lambda x: F.celu(x + 1, inplace=True),
    "exp": torch.exp,
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: F.softmax(x, -1),
    "attention": _attention,
    "heads of an attention": lambda x: _attention(x).transpose(1, 2).contiguous().reshape(4, 32, 16),
    "lstm": lambda x: nn.LSTM(16, 8, batch_first=True)(x.view(4, 32, 16))[0],
    "no dropout": lambda x: F.dropout(F.relu(x), 0.0),
    "slice": lambda x: F.relu(x)[3:70],
    "matrix": lambda x: F.relu(x).t().unsqueeze(0).permute(0, 2, 1).squeeze(0),
}
DROPPING = {
    "leaf": lambda x: x,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "layer_norm": lambda x: F.layer_norm(x, (16,)),
    "linear": lambda x: F.linear(x, torch.ones(8, 16, requires_grad=True)),
    "dropout": lambda x: F.dropout(F.relu(x), 0.5),
    "copy": lambda x: F.relu(x).clone(),
    "sum": lambda x: F.relu(x) + 1,
    "cast": lambda x: F.relu(x).bfloat16(),
    "changed": lambda x: F.relu(x).mul_(2),
    "state of an lstm": lambda x: nn.LSTM(16, 8)(x.view(4, 32, 16))[1][0],
    "unfused attention": lambda x: torch.softmax(x @ x.t(), -1) @ x,
}


def _input():
    torch.manual_seed(0)
    return torch.randn(128, 16, requires_grad=True)


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
def test_what_is_said_to_be_kept_is_kept(make):
    assert keeping_producer(make(_input()))
    with SavedTensors() as kept:
        y = make(_input())
        # with hooks that leave tensors as they are, as well
        assert keeping_producer(y)
    assert kept.holds(y)


@pytest.mark.parametrize("make", DROPPING.values(), ids=DROPPING)
def test_what_is_not_known_to_be_kept_is_not_said_to_be(make):
    with SavedTensors() as kept:
        y = make(_input())
    assert not keeping_producer(y)
    # nothing else is missing: what was changed since it was kept has no backward pass
    assert kept.holds(y) == (make is DROPPING["changed"])


def test_every_operation_of_the_table_that_a_cpu_has_is_among_these():
    found = set()
    for make in KEEPING.values():
        node = make(_input()).grad_fn
        while node is not None:
            found.add(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
    on_other_devices = {name for name in KEEPS_OUTPUT if name.startswith("ScaledDot") and "Cpu" not in name}
    assert set(KEEPS_OUTPUT) - found == on_other_devices | {"CudnnRnnBackward0"}


@pytest.mark.parametrize("name", KEEPS_OUTPUT)
def test_what_is_read_of_each_operation_is_there_whatever_the_device(name):
    assert hasattr(getattr(torch._C._functions, name), f"_raw_saved_{KEEPS_OUTPUT[name]}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "cudnn_rnn"])
def test_what_is_said_to_be_kept_is_kept_on_a_gpu(backend):
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with SavedTensors() as kept:
        if backend == "cudnn_rnn":
            y = nn.LSTM(64, 32, batch_first=True, device="cuda", dtype=torch.float16)(x[0])[0]
        else:
            with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
                y = F.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    assert keeping_producer(y)
    assert kept.holds(y)


def test_what_a_backward_pass_has_freed_is_not_kept():
    y = F.relu(_input())
    y.sum().backward()
    assert not keeping_producer(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_memory_that_is_kept_is_free(dtype):
    y = F.relu(_input()).view(4, 32, 16)
    assert is_free_to_keep(y, dtype) == (dtype == torch.float32)
    # F.linear copies rows that no single stride leads through
    assert keeping_producer(y[:, 1:])
    assert not is_free_to_keep(y[:, 1:], torch.float32)


class _Block(nn.Module):
    """An attention and a feed-forward part, whose layers read what is kept anyway: two of four."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def attend(self, x):
        q, k, v = self.qkv(x).view(4, 32, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 32, 16)

    def forward(self, x):
        x = x + self.proj(self.attend(x))
        return x + self.down(F.relu(self.up(x)))


def _gradients(model, x, **checkpointing):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, **checkpointing) if checkpointing else model(x)
    (y * torch.linspace(0, 1, y.numel()).view_as(y)).sum().backward()
    return {"input": x.grad} | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _equal(one, other):
    return {name for name in one if torch.equal(one[name], other[name])}


EXACT = {"input", "qkv.bias", "proj.bias", "up.bias", "down.bias", "proj.weight", "down.weight"}


def test_a_layer_keeps_what_is_kept_anyway_and_its_gradient_is_exact():
    block, x = _Block(), torch.randn(4, 32, 16)
    exact, exact_bytes = _gradients(block, x), measure_kept_bytes(block, x)
    convert_linears(block, config=CONFIG)
    assert _equal(_gradients(block, x), exact) == EXACT
    freed = 2 * (x.nbytes - CONFIG.saved_bytes(128, 16, torch.float32))
    # the input of the first layer is kept by it alone, as is that of the third
    assert exact_bytes - measure_kept_bytes(block, x) == freed


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_both_forward_passes_of_a_checkpoint_decide_alike(use_reentrant, preserve):
    block, x = _Block(), torch.randn(4, 32, 16)
    exact = _gradients(block, x)
    convert_linears(block, config=CONFIG)
    torch.manual_seed(3)
    plain, state = _gradients(block, x), torch.get_rng_state()
    torch.manual_seed(3)
    again = _gradients(block, x, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    assert _equal(again, exact) == EXACT
    if preserve:
        assert _equal(again, plain) == plain.keys()
        # a layer that keeps its input draws a seed all the same: what comes after it finds the generator as before
        assert torch.equal(state, torch.get_rng_state())


def test_what_another_checkpoint_has_made_is_sketched_in_every_pass(monkeypatch):
    block, x = convert_linears(_Block(), config=CONFIG), torch.randn(4, 32, 16)
    with monkeypatch.context() as nothing:
        nothing.setattr("rmm_linear.producers.KEEPS_OUTPUT", {})
        torch.manual_seed(3)
        sketched = _gradients(block, x)
    attend, down = block.attend, block.down.forward
    # one's output is read outside of it, the other's input was made outside of it, both in a third one
    monkeypatch.setattr(block, "attend", lambda x: checkpoint(attend, x, use_reentrant=False))
    monkeypatch.setattr(block.down, "forward", lambda x: checkpoint(down, x, use_reentrant=False))
    torch.manual_seed(3)
    assert _equal(_gradients(block, x, use_reentrant=False), sketched) == sketched.keys()


def test_what_a_checkpoint_has_not_kept_is_sketched():
    layer, x = RMMLinear(16, 8, config=CONFIG), _input()
    plain = measure_kept_bytes(lambda: layer(F.relu(x)), exclude=[layer, x])
    assert plain == x.nbytes
    rest = measure_kept_bytes(lambda: layer(checkpoint(F.relu, x, use_reentrant=False)), exclude=[layer, x])
    assert rest == CONFIG.saved_bytes(128, 16, torch.float32)


def test_under_autocast_a_lowered_copy_is_sketched():
    layer, x = RMMLinear(16, 8, config=CONFIG), _input()
    with torch.autocast("cpu", torch.bfloat16):
        assert "Sketched" in layer(F.relu(x)).grad_fn.name()
        assert "Sketched" not in layer(F.relu(x.bfloat16())).grad_fn.name()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiler_keeps_what_is_needed_anyway_in_one_frame(backend):
    torch._dynamo.reset()
    x, block, counter = (
        torch.randn(4, 32, 16),
        convert_linears(_Block(), config=CONFIG),
        CompileCounterWithBackend(backend),
    )
    block.compile(fullgraph=True, backend=counter)
    exact, found = _gradients(_Block(), x), _gradients(block, x)
    # of ReLU's output a compiler keeps a byte an element, and the layer a sketch
    near = {name for name in exact if torch.allclose(found[name], exact[name], rtol=1e-3, atol=1e-4)}
    assert near == EXACT - {"down.weight"}
    assert counter.frame_count == 1


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_conversion_of_torch_s_encoder_costs_no_memory(activation):
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, activation=activation)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 64, 64)
    exact = measure_kept_bytes(model, x)
    assert measure_kept_bytes(convert_linears(model, ratio=0.5), x) < exact
