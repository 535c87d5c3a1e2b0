"""RMMLinear is an nn.Linear in all but what it keeps."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert_linears
from rmm_linear.memory import SavedTensors

CONFIG = RMMConfig(ratio=0.25, min_rows=1)


def test_it_is_a_linear_layer_with_a_config():
    layer = RMMLinear(16, 8, bias=False, dtype=torch.float64, config=CONFIG)
    assert isinstance(layer, nn.Linear)
    assert layer.weight.dtype == torch.float64
    assert layer.bias is None
    assert RMMLinear(16, 8).rmm_config == RMMConfig()
    assert repr(layer) == (
        "RMMLinear(in_features=16, out_features=8, bias=False, ratio=0.25, sketch='hadamard', center=True)"
    )
    with pytest.raises(ValueError, match="RMMConfig"):
        RMMLinear(16, 8, config={"ratio": 0.5})
    with pytest.raises(TypeError):
        RMMLinear(4, 4)(None)


def test_initial_parameters_equal_those_of_nn_linear():
    torch.manual_seed(5)
    plain = nn.Linear(16, 8)
    torch.manual_seed(5)
    layer = RMMLinear(16, 8, config=CONFIG)
    assert torch.equal(plain.weight, layer.weight)
    assert list(plain.state_dict()) == list(layer.state_dict())


def test_eval_mode_is_nn_linear_to_the_bit_and_the_byte():
    layer = RMMLinear(16, 8, config=CONFIG).eval()
    plain = nn.Linear(16, 8)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(300, 16)
    state = torch.get_rng_state()
    kept = []
    for module in (layer, plain):
        with SavedTensors() as saved:
            output = module(x)
        output.square().sum().backward()
        kept.append((saved.bytes, saved.holds(x)))
    assert kept == [(x.nbytes, True)] * 2
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_keep_parameters_and_config():
    model, file = convert_linears(nn.Sequential(nn.Linear(16, 8)), config=CONFIG), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for other in copies:
        assert type(other[0]) is RMMLinear
        assert other[0] is not model[0]
        assert other[0].rmm_config == CONFIG
        assert torch.equal(other[0].weight, model[0].weight)
