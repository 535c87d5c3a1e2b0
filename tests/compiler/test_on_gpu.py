"""Codes and plans on a GPU, whose fused attention is another one than a CPU's. A CPU runs them too, with its own."""

import pytest
import torch
import torch.nn.functional as F
from model_of import ModelOf
from torch import nn

from rmm_linear.compiler import plans

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
anywhere = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test
slow_on_a_cpu = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.slow
ROWS, LENGTH, WIDTH, HEADS, DRAWS = 4, 256, 128, 2, 24


def block(is_masked):
    """Attention and an MLP, whose loss is computed in float32."""

    def run(it, x, lengths, targets):
        query, key, value = (
            each.view(ROWS, LENGTH, HEADS, -1).transpose(1, 2) for each in it.attended(it.norm(x)).chunk(3, -1)
        )
        mask = None
        if is_masked:
            mask = (torch.arange(LENGTH, device=x.device) < lengths[:, None])[:, None, None].expand(-1, 1, LENGTH, -1)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not is_masked)
        x = x + it.out(found.transpose(1, 2).flatten(2))
        return (it.mlp(x).float() - targets).square().mean()

    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    parts = {"attended": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH), "mlp": mlp}
    return ModelOf(run, norm=nn.LayerNorm(WIDTH), **parts)


def gradients(model, run, inputs):
    model.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = run(*inputs)
    loss.backward()
    return [parameter.grad.double() for parameter in model.parameters()]


def model_and_inputs(is_masked):
    torch.manual_seed(0)
    lengths = torch.tensor([256, 180, 131, 97])
    inputs = torch.randn(ROWS, LENGTH, WIDTH), lengths, torch.full((ROWS, LENGTH, WIDTH), 2.0)
    return block(is_masked).to(DEVICE), tuple(each.to(DEVICE) for each in inputs)


@slow_on_a_cpu
@pytest.mark.parametrize("executor", ["exact", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
def test_the_mean_of_coded_gradients_is_the_gradient(is_masked, executor):
    model, inputs = model_and_inputs(is_masked)
    exact = gradients(model, model, inputs)
    torch._dynamo.reset()
    # what Inductor rounds otherwise is no error of codes
    alike = torch.compile(model) if executor == "inductor" else model
    rounded = gradients(model, alike, inputs)
    torch._dynamo.reset()
    coded = torch.compile(model, backend="rmm_linear", options={"bits": 8, "executor": executor})
    draws = [gradients(model, coded, inputs) for _ in range(DRAWS)]
    assert "attention" in [tensor.kind for tensor in plans(model)[-1].coding.coded]
    for name, *found in zip(dict(model.named_parameters()), exact, rounded, *draws, strict=True):
        gradient, other, *each = (tensor / found[0].norm() for tensor in found)
        single = sum((draw - gradient).norm() for draw in each) / DRAWS
        mean = (sum(each) / DRAWS - gradient).norm()
        assert single < 0.02, name
        # eager mode rounds to bf16 what a reading has the unrounded value of as its mean
        assert mean < 1.3 * single / DRAWS**0.5 + (other - gradient).norm() + 2.5e-3, (name, single, mean)


@anywhere
@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
def test_a_plan_has_the_gradients_of_eager_mode(is_masked):
    model, inputs = model_and_inputs(is_masked)
    exact = gradients(model, model, inputs)
    again = gradients(model, model, inputs)
    torch._dynamo.reset()
    planned = torch.compile(model, backend="rmm_linear", options={"budget": "85%", "executor": "exact"})
    found = gradients(model, planned, inputs)
    # kernels that add atomically repeat no bits
    for gradient, repeated, new in zip(exact, again, found, strict=True):
        assert torch.equal(new, gradient) or (new - gradient).norm() <= 4 * (repeated - gradient).norm()
