"""SavedTensors, measure_kept_bytes and MeasuredSaving: every distinct storage, once, to the byte."""

import pytest
import torch
from tiny_transformers import tiny
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.memory import MeasuredSaving, SavedTensors, measure_kept_bytes, profile

FLOAT = 4


def test_a_linear_layer_keeps_its_input_and_nothing_else(device):
    layer, x = nn.Linear(8, 4, device=device), torch.randn(16, 8, device=device)
    kept = SavedTensors(layer)
    for rows in (16, 4):
        part = x[:rows].clone()
        with kept:
            y = layer(part)
        assert kept.bytes == rows * 8 * FLOAT
        assert (kept.holds(part), kept.holds(part.clone()), kept.holds(y)) == (True, False, False)
    with kept, torch.no_grad():
        layer(x)
    assert kept.bytes == 0
    with kept, pytest.raises(ValueError, match="active already"):
        kept.__enter__()
    with pytest.raises(ValueError, match="cannot exclude str"):
        SavedTensors("model")
    with torch.no_grad():
        assert measure_kept_bytes(layer, x) == measure_kept_bytes(layer.forward, input=x) == 16 * 8 * FLOAT
    assert measure_kept_bytes(lambda: layer(x), exclude=[layer]) == 16 * 8 * FLOAT
    assert measure_kept_bytes(lambda: layer(x), exclude=[layer, x]) == 0


def test_parameters_and_buffers_and_their_views_do_not_count():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    x = torch.randn(16, 8, requires_grad=True)
    with SavedTensors(model) as kept:
        model.eval()(x)
    assert not any(kept.holds(tensor) for tensor in (*model.parameters(), *model.buffers()))
    with SavedTensors() as everything:
        model(x)
    assert everything.holds(model[0].weight)
    assert everything.holds(model[0].weight.t()[1:])


def test_counters_around_a_counter_count_as_well():
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    x = torch.randn(16, 8)
    with SavedTensors(model) as outer, SavedTensors() as middle:
        with SavedTensors(model, x) as inner:
            model(x)
        report = profile(model, x)
    assert inner.bytes == 16 * 4 * FLOAT
    # two calls: one input, and the output of each
    assert outer.bytes == middle.bytes == 16 * 8 * FLOAT + 2 * 16 * 4 * FLOAT
    assert report.total_bytes == 16 * 12 * FLOAT


def test_a_profile_around_a_counter_finds_out_which_ops_keep_its_tensors():
    class Counting(nn.Sequential):
        def forward(self, x):
            with SavedTensors(self):
                return super().forward(x)

    layers, x = (nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(16, 8)
    found, plain = profile(Counting(*layers), x), profile(nn.Sequential(*layers), x)
    assert [call.status for call in found.linears] == [call.status for call in plain.linears] == ["kept", "kept"]
    assert found.by_op() == plain.by_op()


def test_a_shared_input_counts_once_and_a_view_as_the_whole_of_what_it_keeps_alive():
    layers, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), torch.randn(16, 5, 8)
    assert measure_kept_bytes(lambda: sum(layer(x) for layer in layers), exclude=[layers]) == 16 * 5 * 8 * FLOAT
    with SavedTensors(layers) as kept:
        layers[0](x[:, 0])
    assert kept.bytes == 16 * 5 * 8 * FLOAT
    assert kept.holds(x[3:4, 2])


def test_measuring_keeps_nothing_alive():
    layer, x = nn.Linear(8, 4), torch.randn(16, 8)
    storage = StorageWeakRef(x.untyped_storage())
    with SavedTensors(layer) as kept:
        y = layer(x)
        del x
        assert not storage.expired()
        del y
        assert storage.expired()
    assert kept.bytes == 16 * 8 * FLOAT


@pytest.mark.parametrize("saves_its_output", [torch.tanh, lambda y: y.softmax(-1)])
def test_a_graph_without_a_backward_pass_is_freed(saves_its_output):
    def watched():
        layer = nn.Linear(8, 4)
        measure_kept_bytes(lambda x: saves_its_output(layer(x)), torch.randn(16, 8))
        with SavedTensors(layer):
            saves_its_output(layer(torch.randn(16, 8)))
        return StorageWeakRef(layer.weight.untyped_storage())

    assert watched().expired()


class _ReadsAnAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, g):
        (factor,) = ctx.saved_tensors
        return g * factor * factor.extra, None


def test_what_has_no_graph_keeps_its_identity():
    x, factor = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    factor.extra = 5.0
    with SavedTensors():
        output = _ReadsAnAttribute.apply(x, factor)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 10.0))


def test_an_in_place_change_is_refused_as_autograd_refuses_it():
    x = torch.randn(8, requires_grad=True)
    with SavedTensors():
        y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a \(8,\) torch.float32 .* at version 1"):
        y.sum().backward()
    with SavedTensors():
        z = torch.relu_(x * 2)
    z.sum().backward()


def test_gradients_are_bitwise_those_of_an_unwatched_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(16, 8)
    plain = model(x).square().sum()
    with SavedTensors(model):
        watched = model(x).square().sum()
    found, expected = (torch.autograd.grad(loss, [*model.parameters()]) for loss in (watched, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_memory_that_is_freed_and_used_again_counts_each_time():
    layer = nn.Linear(256, 4)
    with SavedTensors(layer) as kept:
        for _ in range(20):
            # each result is dropped at once, and the allocator hands out the same address again and again
            layer(torch.randn(64, 256))
    assert kept.bytes == 20 * 64 * 256 * FLOAT


def test_autocast_keeps_the_casts(device):
    layer, x = nn.Linear(8, 4, device=device), torch.randn(16, 8, device=device, requires_grad=True)
    with SavedTensors(layer) as kept, torch.autocast(device.type, torch.bfloat16):
        layer(x)
    assert kept.bytes == (16 * 8 + 4 * 8) * 2
    assert not kept.holds(x)


def test_a_checkpointed_block_keeps_its_input_alone():
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(16, 8, requires_grad=True)
    with SavedTensors(block) as kept:
        y = checkpoint(block, x, use_reentrant=False)
    assert kept.holds(x)
    # besides x: the state of the random number generator
    assert kept.bytes <= 16 * 8 * FLOAT + torch.get_rng_state().numel()
    y.sum().backward()
    assert x.grad is not None


def test_a_compiled_model_is_measured_when_it_runs():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(16, 8)
    compiled(x).sum().backward()
    with SavedTensors(model) as kept:
        y = compiled(x)
    # the input and the tanh
    assert kept.bytes == 2 * 16 * 8 * FLOAT
    y.sum().backward()
    assert model[0].weight.grad is not None


def roberta(attention, **changes):
    return tiny("RobertaForSequenceClassification", hidden_size=16, attn_implementation=attention, **changes)


def batch():
    ids = torch.randint(5, 50, (8, 32))
    mask = torch.ones_like(ids)
    mask[3:, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(8, dtype=torch.long)}


def compare(model, forward, config):
    """The exact model's bytes: measured, and as MeasuredSaving tells them from the sketched model's forward."""
    with SavedTensors(model) as exact:
        forward()
    convert_linears(model, config=config)
    with SavedTensors(model) as sketched:
        forward()
    with MeasuredSaving(model) as saving:
        forward()
    assert saving.kept_bytes == sketched.bytes
    return exact.bytes, saving


@pytest.mark.parametrize(
    ("attention", "autocast", "config"),
    [
        ("sdpa", False, RMMConfig(ratio=0.1)),
        ("sdpa", True, RMMConfig(ratio=0.5)),
        ("eager", True, RMMConfig(ratio=0.1)),
        ("sdpa", False, RMMConfig(ratio=0.1, min_rows=1000)),
        ("dropout", False, RMMConfig(ratio=0.1)),
    ],
    ids=str,
)
def test_the_exact_model_is_told_to_the_byte(attention, autocast, config):
    model, inputs = roberta(attention) if attention != "dropout" else roberta("eager", hidden_dropout_prob=0.1), batch()
    if attention == "dropout":
        # and a frozen part
        model.roberta.encoder.layer[0].requires_grad_(False)
        model.roberta.embeddings.requires_grad_(False)

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(**inputs).loss

    exact, saving = compare(model, forward, config)
    assert saving.exact_bytes == exact
    assert saving.saving_bytes == exact - saving.kept_bytes
    # an input below min_rows is kept as it is, and the layer promises nothing
    assert (saving.promised_bytes == saving.saving_bytes == 0) == (config.min_rows == 1000)
    assert (config.min_rows == 1000) <= any("min_rows" in reason for reason in saving.reasons())


def test_layers_that_share_an_input_save_less_than_they_promise():
    layers, x = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), torch.randn(640, 32)
    alone = RMMConfig(ratio=0.5, share_sketch=False)
    exact, saving = compare(layers, lambda: sum(layer(x) for layer in layers), alone)
    assert saving.exact_bytes == exact == 640 * 32 * FLOAT
    assert saving.saving_bytes < 0 < saving.promised_bytes
    assert saving.reasons()[0].startswith("2 calls share their input")
    convert_linears(layers, config=RMMConfig(ratio=0.5))
    with MeasuredSaving(layers) as shared:
        sum(layer(x) for layer in layers)
    assert shared.exact_bytes == exact
    assert 0 < shared.saving_bytes < shared.promised_bytes


def gated(layer, x):
    y = nn.functional.gelu(x)
    return layer(y) * y


@pytest.mark.parametrize(
    ("forward", "costs", "reason"),
    [
        (gated, True, "kept by another operation"),
        # the op that made it keeps it
        (lambda layer, x: layer(torch.tanh(x)), False, None),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=True), False, "checkpointed"),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=False), False, "checkpointed"),
    ],
)
def test_an_input_that_is_kept_anyway_frees_nothing(forward, costs, reason):
    layer, x = nn.Linear(32, 32), torch.randn(640, 32, requires_grad=True)
    exact, saving = compare(layer, lambda: forward(layer, x), RMMConfig(ratio=0.25))
    assert saving.exact_bytes == exact
    assert (saving.kept_bytes > exact) == costs
    assert (saving.kept_bytes == exact) == (not costs)
    assert (saving.promised_bytes > 0) == saving.sketches_anything == (reason is not None)
    assert [reason in each for each in saving.reasons()] == [True] * (reason is not None)


def test_a_strided_input_costs_the_exact_layer_a_copy():
    layer = nn.Linear(24, 8)
    x = torch.randn(24, 16, 32).permute(2, 1, 0)
    exact, saving = compare(layer, lambda: layer(x), RMMConfig(ratio=0.25))
    assert saving.exact_bytes == exact == 24 * 16 * 32 * FLOAT


def test_measuring_a_saving_leaves_no_hook_behind():
    model = convert_linears(nn.Sequential(nn.Linear(8, 8)))
    with MeasuredSaving(model):
        model(torch.randn(256, 8))
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    with pytest.raises(ValueError, match="mismatch|last dimension"), MeasuredSaving(model):
        model(torch.randn(256, 9))
    assert not model[0]._forward_hooks
