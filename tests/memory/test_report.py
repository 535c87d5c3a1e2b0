"""profile: every storage once, with who keeps it; and a prediction that a converted model meets to the byte."""

import itertools
import json

import pytest
import torch
from assert_unchanged import assert_unchanged
from model_of import ModelOf, linears
from tiny_transformers import tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert_linears, revert_linears, summary
from rmm_linear.memory import SavedTensors, profile
from rmm_linear.memory.report import LINEAR_INPUTS

FLOAT = 4


def attention(width=32):
    """Query, key and value of one input, a fused attention that keeps its output, a projection of that."""

    def run(it, x):
        heads = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (it.query, it.key, it.value))
        return it.output(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    return ModelOf(run, **linears("query key value output", width))


def block(width=32):
    def run(it, x):
        x = it.norm(x + it.attention(x))
        return x + it.down(nn.functional.gelu(it.up(x)))

    wide = {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
    return ModelOf(run, attention=attention(width), norm=nn.LayerNorm(width), **wide)


def stack(blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(32, 3))


def batch(**options):
    return torch.randn(4, 50, 32, **options)


def kept_by(model, *args, **kwargs):
    with SavedTensors(model) as kept:
        model(*args, **kwargs)
    return kept.bytes


def test_every_storage_counts_once_and_is_told_by_who_keeps_it():
    model, x = stack(1), batch(requires_grad=True)
    report = profile(model, x)
    assert report.total_bytes == kept_by(model, x) == sum(report.by_op().values())
    content = json.loads(report.to_json())
    assert content["total_bytes"] == report.total_bytes == sum(storage["bytes"] for storage in content["storages"])
    hidden = 4 * 50 * 32 * FLOAT
    # x for query, key and value; the norm's output for the residual and `up`; GELU's output for `down`; the last one's
    calls = {call.layer: call for call in report.linears}
    attentions = [f"0.attention.{name}" for name in ("query", "key", "value", "output")]
    assert list(calls) == [*attentions, "0.up", "0.down", "1"]
    assert all(call.status == "kept" and call.rows == 200 and call.sequences == 4 for call in calls.values())
    assert len({calls[name].storage for name in attentions[:3]}) == 1
    assert report.others(calls["0.attention.key"]) == ()
    (attention,) = report.others(calls["0.attention.output"])
    assert attention.startswith("scaled_dot_product")
    assert report.others(calls["0.down"]) == ()
    # q/k/v's input, `up`'s, four times as wide `down`'s, and the last layer's
    assert report.own_bytes == report.by_op()[LINEAR_INPUTS] == (1 + 1 + 4 + 1) * hidden
    assert report.by_op()["gelu"] == 4 * hidden
    assert report.storages[calls["0.up"].storage].bytes == hidden


def test_the_model_is_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(16, 8)
    model(x).sum().backward()
    with torch.no_grad(), assert_unchanged(model):
        profile(model, x)


@pytest.mark.parametrize(
    ("config", "autocast", "requires_grad"),
    [
        *((RMMConfig(ratio=0.5), *flags) for flags in itertools.product((False, True), repeat=2)),
        (RMMConfig(ratio=0.1, center=False, storage="int4", keep_tokens=(0, -1)), True, True),
        (RMMConfig(ratio=0.9, sketch="crs"), False, True),
        (RMMConfig(ratio=0.5, min_rows=201), False, True),
        (RMMConfig(ratio=0.25, share_sketch=False), False, False),
        (RMMConfig(ratio=1.0), True, False),
    ],
)
def test_the_prediction_is_what_the_converted_model_keeps(config, autocast, requires_grad):
    model, x = stack(), batch(requires_grad=requires_grad)
    for layers in (None, ["0.up", "1.down"], ["0.attention.query", "0.attention.key", "1.attention.output"]):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            predicted = profile(model, x).predict(config, layers=layers)
            converted = convert_linears(stack(), config=config, target_modules=layers or ".*")
            converted.load_state_dict(model.state_dict())
            assert kept_by(converted, x) == predicted


def test_parts_in_eval_mode_and_parameters_as_inputs():
    model = ModelOf(lambda it, x: it.a(x) + it.b(x) + it.c(x * 2) + it.d(it.queries), **linears("a b c d", 8))
    model.queries = nn.Parameter(torch.randn(256, 8))
    x, config = torch.randn(256, 8), RMMConfig(ratio=0.25)
    model.b.eval()
    report = profile(model, x)
    assert [call.status for call in report.linears] == ["kept", "eval mode", "kept", "parameter"]
    predicted = report.predict(config)
    useless = report.frees_nothing(dict.fromkeys("abcd", config))
    assert useless == {
        "a": "its input is shared with b, which stays exact",
        "b": "in eval mode, where it stays exact",
        "d": "its input is a parameter, which lives anyway",
    }
    convert_linears(model, config=config, target_modules=".*")
    assert kept_by(model, x) == predicted
    revert_linears(model)
    convert_linears(model, config=config, target_modules=".*", sample=x)
    assert not model.b.training
    assert kept_by(model, x) <= min(predicted, report.total_bytes)


@pytest.mark.parametrize("width", [32, 256])
def test_autocasts_copies_of_weights_are_worth_a_sketch(width):
    """Something else keeps the input anyway, but a sketched layer keeps no copy of its weight."""

    def gated(it, x):
        y = nn.functional.gelu(x.bfloat16())
        return it.output(y) * y

    model, config = ModelOf(gated, **linears("output", width)), RMMConfig(ratio=0.1)
    x = torch.randn(640, width, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        report = profile(model, x)
        useless = report.frees_nothing({"output": config})
        predicted = report.predict(config, layers=["output"])
        convert_linears(model, config=config, target_modules=".*")
        assert kept_by(model, x) == predicted
    assert (predicted < report.total_bytes) == ("output" not in useless) == (width == 256)


def test_buffers_that_a_forward_replaces_are_put_back_with_what_goes_with_them():
    def cache(it, x):
        if len(x) > it.length:
            it.register_buffer("table", torch.ones(len(x), 8), persistent=False)
            it.register_buffer("late", torch.ones(1))
            it.length, it.seen = len(x), True
            it.mean = x.mean(0).detach()
        return it.layer(x + it.table[: len(x)])

    model = ModelOf(cache, table=torch.zeros(4, 8), **linears("layer", 8))
    model.length = 4
    model.register_buffer("mean", None)
    table, keys = model.table, set(model.state_dict())
    profile(model, torch.randn(16, 8))
    assert model.table is table
    assert (model.length, model.mean) == (4, None)
    assert not hasattr(model, "seen")
    assert not hasattr(model, "late")
    assert set(model.state_dict()) == keys
    assert model(torch.randn(16, 8)).shape == (16, 8)
    assert model.seen


def test_statuses():
    def run(it, x):
        with torch.no_grad():
            it.silent(x)
        return it.sketched(checkpoint(it.again, it.frozen(it.kept(x)), use_reentrant=False))

    model = ModelOf(run, **linears("kept frozen again silent sketched", 8))
    model.frozen.requires_grad_(False)
    convert_linears(model.sketched, ratio=0.5)
    report = profile(model, torch.randn(256, 8))
    assert {call.layer: call.status for call in report.linears} == {
        "silent": "no gradient", "kept": "kept", "frozen": "frozen", "again": "checkpointed", "sketched": "sketched",
    }  # fmt: skip
    for call in report.linears:
        assert (call.storage is not None) == (call.status == "kept")
        assert call.is_sketched_by(RMMConfig(ratio=0.5)) == (call.status == "kept")
    text = str(report)
    for words in ("its weight is frozen", "checkpointed: keeps nothing", "no gradient is wanted", "sketched"):
        assert words in text


def twice(it, x):
    return it.a(nn.functional.gelu(it.a(x)))


def partly_in_autocast(it, x):
    y = it.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        return y + it.b(x) + it.c(x)


@pytest.mark.parametrize(("run", "names", "calls"), [(twice, "a", 2), (partly_in_autocast, "a b c", 3)])
def test_layers_that_run_twice_or_partly_in_autocast_are_predicted(run, names, calls):
    model, config = ModelOf(run, **linears(names, 32)), RMMConfig(ratio=0.25)
    x = torch.randn(256, 32, requires_grad=True)
    report = profile(model, x)
    assert len(report.linears) == calls
    predicted = report.predict(config)
    assert kept_by(convert_linears(model, config=config, target_modules=".*"), x) == predicted


def test_what_the_output_does_not_depend_on_is_counted_and_guessed():
    def detour(it, x):
        it.kept_alive = it.aside(x * 2)
        return {"logits": [it.used(x * 3)]}

    model, x = ModelOf(detour, **linears("used aside", 8)), torch.randn(256, 8)
    report = profile(model, x)
    assert report.total_bytes == report.own_bytes == 2 * 256 * 8 * FLOAT
    assert [call.status for call in report.linears] == ["kept", "kept"]


def test_the_report_as_text():
    lines = str(profile(stack(3), batch(requires_grad=True))).splitlines()
    assert lines[0].startswith("Sequential keeps ")
    assert "the most that sketches can free" in lines[1]
    assert any(line.startswith("*.attention.{query, key, value}") and " 3 " in line for line in lines)
    assert any("also kept by scaled_dot_product" in line for line in lines)


def test_an_error_in_the_model_leaves_no_hook_behind():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9))
    with pytest.raises(RuntimeError):
        profile(model, torch.randn(4, 8))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="model is a function; pass a torch.nn.Module"):
        profile(lambda x: x, torch.randn(3))


def notes(model):
    return {row.name: row.note for row in summary(model).rows if row.config is None}


def test_only_what_frees_something_is_converted():
    model, x = stack(2), batch()
    model.eval()
    convert_linears(model, ratio=0.5, sample=x, target_modules=".*")
    assert not any(module.training for module in model.modules())
    left = notes(model)
    assert set(left) == {"0.attention.output", "1.attention.output"}
    assert all("a sketch frees nothing: scaled_dot_product" in note for note in left.values())
    model.train()
    # each of the layers that were left exact would have kept its input as it is
    everything = convert_linears(stack(2), ratio=0.5, target_modules=".*")
    assert kept_by(model, x) == kept_by(everything, x) == profile(stack(2), x).predict(RMMConfig(ratio=0.5))
    report = profile(stack(2), x)
    assert kept_by(model, x) == report.predict(
        RMMConfig(ratio=0.5), layers=[call.layer for call in report.linears if call.layer not in left]
    )
    # and what was converted before is judged anew
    convert_linears(everything, config=RMMConfig(ratio=0.5), sample=(x,), target_modules=".*")
    assert set(notes(everything)) == set(left)
    assert "frees nothing" not in str(notes(revert_linears(model)))


def test_a_sample_may_be_a_mapping_and_an_override_wins():
    transformers = pytest.importorskip("transformers")
    model = tiny("RobertaForSequenceClassification", attn_implementation="sdpa")
    ids = torch.randint(5, 50, (8, 32))
    model.roberta.encoder.layer[0].output.dense.weight.requires_grad_(False)
    sample = transformers.BatchEncoding({"input_ids": ids, "labels": torch.zeros(8, dtype=torch.long)})
    own = RMMConfig(ratio=0.3)
    convert_linears(model, ratio=0.25, sample=sample, overrides={"1.attention.output.dense": own})
    left = notes(model)
    assert "its weight is frozen" in left["roberta.encoder.layer.0.output.dense"]
    assert "keeps its input as well" in left["roberta.encoder.layer.0.attention.output.dense"]
    assert model.roberta.encoder.layer[1].attention.output.dense.rmm_config == own
    assert "frees nothing" not in left["classifier.dense"]


def test_a_group_of_which_a_part_stays_exact_is_left_alone():
    model, x = stack(1), batch()
    convert_linears(model, ratio=0.25, sample=x, target_modules=["query", "key", "up"])
    left = notes(model)
    assert "its input is shared with 0.attention.value, which stays exact" in left["0.attention.query"]
    assert type(model[0].up) is not nn.Linear
    # a sketch that takes more than its input
    with pytest.raises(ValueError, match=r"frees nothing in any of the layers that match: 0.up: a sketch would keep"):
        convert_linears(stack(1), config=RMMConfig(ratio=0.999, sketch="gaussian"), sample=x, target_modules=["up"])
    with pytest.raises(ValueError, match=r"0.up: its input has 200 rows, too few for min_rows=201"):
        convert_linears(stack(1), config=RMMConfig(min_rows=201), sample=x, target_modules=["up"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_not_run_again(reentrant):
    runs = []

    def counted(block, x):
        runs.append(block)
        return block(x)

    def checkpointed(it, x):
        for block in it.blocks:
            x = checkpoint(counted, block, x * 1, use_reentrant=reentrant)
        return x

    model, x = ModelOf(checkpointed, blocks=nn.ModuleList(block() for _ in range(2))), batch(requires_grad=True)
    report = profile(model, x)
    assert len(runs) == 2
    assert report.total_bytes == kept_by(model, x)
    hidden = x.numel() * FLOAT
    by_op = report.by_op()
    (op,) = [name for name in by_op if "checkpoint" in name]
    assert by_op[op] == 2 * hidden
    assert {call.status for call in report.linears} <= {"checkpointed", "no gradient"}


def test_a_sample_that_fails_leaves_the_model_as_it_was():
    model = convert_linears(stack(1), ratio=0.25, target_modules=["up"])
    model.eval()
    with pytest.raises(ValueError, match="can't be run on sample, a Tensor"):
        convert_linears(model, ratio=0.5, sample=torch.randn(3, 7))
    assert model[0].up.rmm_config == RMMConfig(ratio=0.25)
    assert type(model[0].down) is nn.Linear
    assert not any(module.training for module in model.modules())


def headed():
    """What a conversion by default leaves exact: an output head, and a layer whose class is its own."""
    odd, gelu = type("Odd", (nn.Linear,), {})(32, 32), nn.functional.gelu
    return ModelOf(lambda it, x: it.lm_head(gelu(it.odd(gelu(it.body(x))))), **linears("body lm_head", 32), odd=odd)


@pytest.mark.filterwarnings("ignore:left exact")
def test_a_conversion_by_default_is_predicted_by_default():
    x, config = torch.randn(256, 32), RMMConfig(ratio=0.25)
    report = profile(headed(), x)
    assert report.default_layers == {"body"}
    assert report.predict(config) == kept_by(convert_linears(headed(), config=config), x)
    everything = kept_by(convert_linears(headed(), config=config, target_modules=".*"), x)
    assert report.predict(config, layers=["body", "lm_head"]) == everything < report.predict(config)
    # the table tells why
    text = str(report)
    assert all(f"left exact: {why}" in text for why in ("output head", "its class is"))


def test_a_prediction_that_the_report_cannot_make_is_refused():
    x = torch.randn(256, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4), nn.GELU())
    report = profile(model, x)
    with pytest.raises(ValueError, match="config is a float; pass an RMMConfig"):
        report.predict(0.5)
    with pytest.raises(ValueError, match=r"layers=\['query'\] did not run; .*: 0; 2"):
        report.predict(RMMConfig(), layers=["0", "query"])
    # the report of a sketched layer does not have its exact input
    convert_linears(model, ratio=0.5, target_modules=["0"])
    report = profile(model, x)
    with pytest.raises(ValueError, match="'0' was sketched when it was profiled"):
        report.predict(RMMConfig(ratio=0.2))
    predicted = report.predict(RMMConfig(ratio=0.2), layers=["2"])
    assert predicted == kept_by(convert_linears(model, ratio=0.2, target_modules=["2"]), x)
