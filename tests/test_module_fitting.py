"""`fit(..., executor=None)`: whole modules are converted or checkpointed, by measurement."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert_linears, fit, module_fitting
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.layer import SketchedLayer
from tests.checkpointing.measured_peak import MeasuredPeak

ROWS, WIDTH = 2048, 64


def _stack(*inner):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH), *inner)
        for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 5)).train()


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


fit_stack = partial(fit, loss_fn=_loss, executor=None)


@pytest.fixture
def batch():
    return torch.randn(ROWS, WIDTH), torch.randint(0, 5, (ROWS,))


@pytest.fixture
def times(monkeypatch):
    """Milliseconds that steps seem to take, by name; 9 for others."""
    found = {}
    monkeypatch.setattr(module_fitting._Trials, "_time", lambda _, means: found.get(module_fitting._name(means), 9.0))
    return found


def _gradients(model, run):
    model.zero_grad()
    torch.manual_seed(7)
    run(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _attributes(model):
    def described(value):
        return {key: id(each) for key, each in value.items()} if isinstance(value, dict) else id(value)

    return [
        (type(module), {name: described(each) for name, each in vars(module).items()}) for module in model.modules()
    ]


def _peak_of(model, batch):
    model.zero_grad()
    with MeasuredPeak() as measured:
        _loss(model, batch).backward()
    return measured.peak


def test_as_few_blocks_are_checkpointed_as_the_budget_allows_and_gradients_have_the_bits_of_eager_mode(batch):
    model = _stack()
    given, expected = _attributes(model), _gradients(model, lambda model: _loss(model, batch))
    plain = _peak_of(model, batch)
    found = fit_stack(model, batch, "60%", noise=0)
    count = found.chosen.options["checkpoints"]
    assert found.plain_bytes == pytest.approx(plain, rel=0.01)
    assert _peak_of(model, batch) == pytest.approx(found.chosen.least_bytes, rel=0.01)
    assert found.chosen.least_bytes <= found.budget_bytes == int(0.6 * found.plain_bytes)
    assert all(map(torch.equal, _gradients(model, lambda model: _loss(model, batch)), expected))
    assert {each.name for each in found.candidates} == {"as it is", f"{count} checkpoints"}
    for part in ("no compiler was used", "time, ms", "does not fit", f"{found.chosen.time:.1f}"):
        assert part in str(found)
    found.remove()
    assert _attributes(model) == given
    for block in model[: count - 1]:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    assert _peak_of(model, batch) > found.budget_bytes


def test_a_transformer_is_converted_and_checkpointed_and_stays_as_it_was(times):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=256
    )
    model = transformers.BertForSequenceClassification(config).train()
    model.register_buffer("average", torch.zeros(()))
    # parts of T5's blocks have the flag of blocks
    model.bert.encoder.layer[0].attention.gradient_checkpointing = False
    model.register_forward_hook(lambda module, args, output: (module.average.add_(1), None)[1])
    ids = torch.randint(0, 50, (64, 16))
    batch = {"input_ids": ids, "labels": torch.randint(0, 2, (64,))}
    expected = _gradients(model, lambda model: model(**batch).loss)
    model.average.zero_()
    given, state = _attributes(model), torch.get_rng_state()
    contents = copy.deepcopy(model.state_dict())
    times["int8 + 2 checkpoints"] = 1.0
    found = fit(model, batch, "50%", noise=0.05, executor=None)
    assert found.chosen.name == "int8 + 2 checkpoints"
    assert 0 < found.chosen.noise_ratio < 0.05
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, contents[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, (each.grad for each in model.parameters()), expected))
    layers = model.bert.encoder.layer
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, False]
    assert isinstance(layers[0].output.dense, SketchedLayer)
    noisy = _gradients(model, lambda model: model(**batch).loss)
    assert any(not torch.equal(one, other) for one, other in zip(noisy, expected, strict=True))
    assert found.remove() is model
    assert _attributes(model) == given
    assert all(map(torch.equal, _gradients(model, lambda model: model(**batch).loss), expected))


def test_noise_buys_time_as_far_as_the_limit_goes(batch, times):
    times.update({"ratio 0.1": 1.0, "ratio 0.25": 2.0, "ratio 0.5": 3.0})
    loud = fit_stack(_stack(), batch, noise=1e9).chosen
    assert loud.name == "ratio 0.1"
    found = fit_stack(_stack(), batch, noise=0.9 * loud.noise_ratio)
    assert found.chosen.name == "ratio 0.25"
    assert [each.name for each in found.candidates if each.noise] == ["ratio 0.1", "ratio 0.25"]
    # the default allows no sketches
    assert [each.name for each in fit_stack(_stack(), batch).candidates] == ["as it is"]


def test_what_can_not_be_met_names_the_least(batch):
    model = _stack()
    given = _attributes(model)
    with pytest.raises(
        InfeasibleBudgetError, match=r"found no means within 5% = .*takes [\d.]+% = .*takes as it is$"
    ) as told:
        fit_stack(model, batch, "5%")
    assert _attributes(model) == given
    found = fit_stack(model, batch, told.value.least_bytes)
    assert found.chosen.least_bytes <= told.value.least_bytes
    with pytest.raises(InfeasibleBudgetError, match="noisier than noise=1e-09: the least is .*exact gradients take"):
        fit_stack(_stack(), batch, "80%", noise=1e-9, allow="code")


def test_averages_over_batches_are_computed_once(batch):
    with pytest.raises(InfeasibleBudgetError) as told:
        fit_stack(_stack(nn.BatchNorm1d(WIDTH)), batch, "60%", noise=0)
    assert told.value.budget_bytes == int(0.6 * told.value.least_bytes)


def test_what_can_not_be_tried_is_told(batch, times, monkeypatch):
    class Once(nn.GELU):
        def forward(self, x):
            in_backward = torch._C._current_graph_task_id() >= 0
            return x if in_backward else super().forward(x)

    times["int8"] = 1.0
    found = fit_stack(_stack(Once()), batch, "90%", noise=0.01, allow=["recompute", "code"])
    assert "\n4 checkpoints: torch.utils.checkpoint: A different number of tensors" in str(found)
    assert found.chosen.name == "int8"
    found = fit_stack(convert_linears(_stack(), 0.5), batch, "90%")
    assert "that are converted already stay as they are" in str(found)
    assert isinstance(found.remove()[0][0], SketchedLayer)
    measured = module_fitting.measure_peak_bytes

    def measure(run, device):
        peak = measured(run, device)
        if peak > 20 * 2**20:
            raise torch.OutOfMemoryError("out of memory")
        return peak

    monkeypatch.setattr(module_fitting, "measure_peak_bytes", measure)
    found = fit_stack(_stack(), batch, "16MiB", noise=0)
    assert "as it is: out of memory" in str(found)
    assert found.chosen.least_bytes <= 16 * 2**20
    with pytest.raises(ValueError, match="pass a budget in bytes"):
        fit_stack(_stack(), batch, "50%")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": _stack().to("meta")}, "executor=None measures steps"),
        ({"model": _stack().requires_grad_(False)}, "nothing that the step returns depends on a parameter"),
        ({"loss_fn": None, "sample": torch.randn(8, WIDTH)}, r"pass loss_fn\(model, batch\)"),
        ({"allow": ("recompute", "page"), "page_to": "host"}, "executor=None was given"),
        ({"sample": (torch.randn(256, WIDTH), torch.randint(0, 5, (256,)))}, "too few rows"),
    ],
)
def test_bad_arguments_are_refused(batch, change, message):
    given = {"model": _stack(), "sample": batch, "budget": "95%", "loss_fn": _loss, "allow": "code", **change}
    with pytest.raises(ValueError, match=message):
        fit(**given, executor=None)
