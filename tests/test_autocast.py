"""Autocast: the layer computes, keeps and returns what nn.Linear would, and spoils nobody's weight cache."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.functional import linear
from rmm_linear.memory import SavedTensors

CONFIG = RMMConfig(ratio=0.25, min_rows=1)
LOW = (torch.bfloat16, torch.float16)


def _step(layer, x, low, device):
    x = x.clone().requires_grad_()
    with torch.autocast(device.type, low):
        output = layer(x)
    output.float().square().sum().backward()
    return [output.detach(), x.grad, layer.bias.grad]


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, "low"], ids=str)
def test_output_grad_input_and_grad_bias_are_bit_equal_under_autocast(low, x_dtype, device):
    layer = RMMLinear(16, 8, device=device, config=CONFIG)
    plain = nn.Linear(16, 8, device=device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 70, 16, device=device).to(low if x_dtype == "low" else x_dtype)
    got, want = _step(layer, x, low, device), _step(plain, x, low, device)
    assert got[0].dtype == low
    for name, one, other in zip(("output", "grad_input", "grad_bias"), got, want, strict=True):
        # A GPU kernel may sum the bias gradient in its one pass over g.
        if name == "grad_bias" and device.type == "cuda":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other), name
        assert one.dtype == other.dtype
    assert layer.weight.grad.dtype == torch.float32


def test_float64_is_not_lowered():
    layer = RMMLinear(16, 8, dtype=torch.float64, config=CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(70, 16, dtype=torch.float64)).dtype == torch.float64


def test_the_kept_sketch_is_in_the_low_precision():
    layer, x = RMMLinear(16, 8, config=CONFIG), torch.randn(256, 16, requires_grad=True)
    with SavedTensors() as kept, torch.autocast("cpu", torch.bfloat16):
        layer(x)
    # nn.Linear keeps a lowered copy of the weight; here the weight itself is kept, and cast again when needed.
    assert kept.holds(layer.weight)
    assert kept.bytes == CONFIG.saved_bytes(256, 16, torch.bfloat16) + layer.weight.nbytes


def test_a_weight_used_by_an_exact_layer_as_well_gets_both_gradients():
    # A cast made inside the autograd function would enter autocast's weight cache without a graph: the exact use of
    # the same weight, later in the region, would then give it no gradient at all.
    x, weight = torch.randn(70, 16), torch.randn(8, 16)

    def gradient(use_sketch, use_exact):
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.zeros(())
            if use_sketch:
                loss = loss + linear(x, leaf, config=CONFIG, seed=3).sum()
            if use_exact:
                loss = loss + F.linear(x, leaf).sum()
        loss.backward()
        return leaf.grad

    torch.testing.assert_close(gradient(True, True), gradient(True, False) + gradient(False, True))


@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_grad_scaler_settles_where_it_does_for_the_exact_layer(device, ratio):
    # Rows of 2**10 and gradients scaled close to float16's end: an S^T g kept in float16 would overflow, and the
    # scaler would back off where the exact layer's does not.
    scales = {}
    for name in ("exact", "sketched"):
        torch.manual_seed(4)
        layer = nn.Linear(32, 16) if name == "exact" else RMMLinear(32, 16, config=CONFIG.replace(ratio=ratio))
        layer = layer.to(device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=3)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        x = torch.randn(1024, 32, device=device) + 1
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16):
                loss = layer(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales[name] = scaler.get_scale()
    assert 0.5 <= scales["sketched"] / scales["exact"] <= 2, scales
