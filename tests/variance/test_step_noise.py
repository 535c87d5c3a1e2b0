"""measure_step_noise: against closed forms, and that it leaves the model as it was."""

import pytest
import torch
from assert_unchanged import assert_unchanged
from torch import nn

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.candidates import noise_on
from rmm_linear.variance import gradient_noise, measure_step_noise

ROWS, FEATURES, OUTPUTS = 64, 12, 5


def _loss(model, x):
    # gradient of the output: the same for each draw of the sketch
    return (model(x) * x[:, :OUTPUTS]).sum()


def test_a_sketched_layers_variance_is_the_closed_form_and_the_minibatchs_is_that_of_its_batches():
    torch.manual_seed(0)
    config = RMMConfig(ratio=0.25, sketch="gaussian", center=False, min_rows=1)
    model = convert_linears(nn.Sequential(nn.Linear(FEATURES, OUTPUTS)), config=config).train()
    # of different sizes, so that the step's variance differs from batch to batch, too
    batches = [torch.randn(ROWS, FEATURES) * (0.5 + torch.rand(())) for _ in range(1000)]
    noise = measure_step_noise(model, batches, loss_fn=_loss)
    exact = [gradient_noise(x, x[:, :OUTPUTS], config) for x in batches]
    closed = sum(each.sketch_variance for each in exact) / len(exact)
    # the standard errors are so small that a factor would be seen; bounds of 4 of them fail by chance 1 in 16,000 times
    assert noise.step.standard_error < 0.04 * closed
    assert abs(noise.step.value - closed) < 4 * noise.step.standard_error
    assert noise.gradient_squared == pytest.approx(sum(each.gradient_squared for each in exact) / len(exact), rel=0.1)
    assert sum(noise.by_parameter.values()) == pytest.approx(noise.step.value)
    # the bias is exact
    assert noise.by_parameter["0.bias"] == 0.0
    gradients = [torch.cat([(y[:, :OUTPUTS].T @ y).flatten(), y[:, :OUTPUTS].sum(0)]) for y in batches]
    variance = torch.stack(gradients).double().var(0).sum()
    assert abs(noise.minibatch.value - variance) < 4 * noise.minibatch.standard_error
    assert noise.minibatch.standard_error < 0.2 * variance
    assert noise.noise_ratio == noise.step.value / noise.minibatch.value


def test_an_exact_step_has_no_noise_and_the_model_stays_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, OUTPUTS)).train()
    model[1].weight.grad = torch.ones(OUTPUTS, FEATURES)
    batches = [torch.randn(ROWS, FEATURES) for _ in range(5)]
    with assert_unchanged(model):
        noise = measure_step_noise(model, batches, loss_fn=_loss)
    assert noise.step.value == noise.relative_variance == noise.noise_ratio == 0.0
    assert noise.minibatch.value > 0
    assert noise.minibatch.draws == 2


class InFloat32(nn.Linear):
    """Its backward pass would compute in bfloat16 under autocast."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("is_autocast", [False, True])
def test_codes_are_measured_too(is_autocast):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), InFloat32(256, OUTPUTS)).train()
    batches = [torch.randn(256, FEATURES) for _ in range(4)]
    compiled = torch.compile(model, backend="rmm_linear", options={"bits": 4, "executor": "exact"})
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        noise = measure_step_noise(compiled, batches, loss_fn=_loss)
    # small beside the minibatch's: the outputs' layer reads its input from codes, the bias is exact
    assert 0 < noise.noise_ratio < 0.1
    assert noise.by_parameter["_orig_mod.2.bias"] == 0.0
    assert noise.by_parameter["_orig_mod.2.weight"] > 0


def test_too_few_batches_and_a_frozen_model_are_refused():
    batches = [torch.randn(2, FEATURES, requires_grad=True) for _ in range(4)]
    with pytest.raises(ValueError, match="3 batches leave no standard error: pass at least 4"):
        measure_step_noise(nn.Linear(FEATURES, OUTPUTS), batches[:3], loss_fn=_loss)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        measure_step_noise(nn.Linear(FEATURES, OUTPUTS).requires_grad_(False), batches, loss_fn=_loss)


def test_parts_after_the_fourth_are_left_out_where_the_noise_is_far_below_the_limit():
    torch.manual_seed(0)
    config = RMMConfig(ratio=0.25, sketch="gaussian", min_rows=1)
    model = convert_linears(nn.Sequential(nn.Linear(FEATURES, OUTPUTS)), config=config).train()
    parts = [torch.randn(ROWS, FEATURES) for _ in range(8)]
    every = noise_on(model, parts, _loss, 0.0)
    assert every.step.draws == 8
    assert noise_on(model, parts, _loss, every.noise_ratio) == every
    assert noise_on(model, parts, _loss, 100 * every.noise_ratio) == noise_on(model, parts[:4], _loss, 0.0)


def test_complex_parameters_count_with_both_of_their_parts():
    torch.manual_seed(0)
    real = nn.Linear(FEATURES, OUTPUTS, bias=False)
    pair = nn.ParameterList([real.weight.detach().clone(), real.weight.detach().clone() / 2])
    whole = nn.ParameterList([torch.complex(pair[0].detach(), pair[1].detach())])
    batches = [torch.randn(ROWS, FEATURES) for _ in range(4)]

    def loss_fn(weights, x):
        weight = torch.complex(*weights) if len(weights) == 2 else weights[0]
        return (nn.functional.dropout(x).to(weight.dtype) @ weight.T).abs().square().sum()

    found = []
    for weights in (pair, whole):
        torch.manual_seed(0)
        found.append(measure_step_noise(weights, batches, loss_fn=loss_fn))
    assert found[1].gradient_squared == pytest.approx(found[0].gradient_squared, rel=1e-5)
    assert found[1].step.value == pytest.approx(found[0].step.value, rel=1e-5)
