"""convert_linears and revert_linears: which layers, what happens to them, and what must not."""

import re
import warnings

import pytest
import torch
from model_of import ModelOf, linears
from tiny_transformers import tiny
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from rmm_linear import RMMConfig, RMMLinear, convert_linears, revert_linears, summary
from rmm_linear.names import strip_wrappers


def two_blocks(size=8):
    """Two blocks and a head with linear layers of its own, like RobertaForSequenceClassification."""

    def run(it, x):
        for block in it.layers:
            x = x + block.dense(block.attention.out_proj(block.attention.query(x) * block.attention.key(x)))
        return it.classifier.out_proj(it.classifier.dense(x))

    def block():
        attention = nn.ModuleDict(linears("query key out_proj", size))
        return nn.ModuleDict({"attention": attention, **linears("dense", size)})

    head = nn.ModuleDict({**linears("dense", size), "out_proj": nn.Linear(size, 2)})
    return ModelOf(run, layers=nn.ModuleList([block(), block()]), classifier=head)


BODY = [
    f"layers.{block}.{name}"
    for block in (0, 1)
    for name in ("attention.query", "attention.key", "attention.out_proj", "dense")
]


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, RMMLinear)]


def tiny_roberta(**changes):
    return tiny("RobertaForSequenceClassification", dropout=0.1, hidden_size=16, intermediate_size=32, **changes)


def squares(names):
    return lambda: nn.ModuleDict(linears(names, 4))


class Named(nn.Module):
    """A body and a layer of which one method of the model says that it is its head."""

    def __init__(self, **methods):
        super().__init__()
        self.body, self.unusual_name = nn.Linear(4, 4), nn.Linear(4, 9)
        for name, result in methods.items():
            object.__setattr__(self, name, lambda result=result: self.get_submodule(result))


def in_a_base_model():
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = two_blocks()
    return model


def test_a_ratio_is_short_for_a_configuration_and_half_is_the_default():
    assert convert_linears(two_blocks()).layers[0].dense.rmm_config == RMMConfig(ratio=0.5)
    assert convert_linears(two_blocks(), 0.3).layers[0].dense.rmm_config == RMMConfig(ratio=0.3)
    with pytest.raises(ValueError, match="both ratio=0.5 and config"):
        convert_linears(two_blocks(), 0.5, config=RMMConfig())


def test_a_converted_layer_is_the_same_object_and_a_second_call_reconfigures_its_targets_only():
    model = two_blocks()
    layer, weight, bias = model.layers[0].dense, model.layers[0].dense.weight, model.layers[0].dense.bias
    for _ in range(2):
        assert convert_linears(model, 0.25) is model
        assert model.layers[0].dense is layer
        assert (type(layer), layer.weight is weight, layer.bias is bias) == (RMMLinear, True, True)
    config = RMMConfig(ratio=0.1, sketch="gaussian")
    convert_linears(model, config=config, target_modules=["query"])
    assert model.layers[0].attention.query.rmm_config == config
    assert model.layers[0].attention.key.rmm_config == RMMConfig(ratio=0.25)


QUERIES = [f"layers.{block}.attention.query" for block in (0, 1)]
LAYERS = {
    "a head is left out whole": (two_blocks, {}, BODY),
    **{
        f"{name} is a head": (squares(f"body {name}"), {}, ["body"])
        for name in ("lm_head", "score", "classification_head", "qa_outputs", "head")
    },
    "a head's name deep inside is no head": (lambda: nn.Sequential(squares("classifier")()), {}, ["0.classifier"]),
    "the model names its output embeddings": (lambda: Named(get_output_embeddings="unusual_name"), {}, ["body"]),
    "a part names its head": (lambda: nn.Sequential(Named(get_output_embeddings="unusual_name")), {}, ["0.body"]),
    "the model names its classifier": (lambda: Named(get_classifier="unusual_name"), {}, ["body"]),
    "the model fails to name its head": (lambda: Named(get_output_embeddings="no"), {}, ["body", "unusual_name"]),
    "a list has ends of names": (two_blocks, {"target_modules": ["query", "1.dense"]}, [*QUERIES, "layers.1.dense"]),
    "an end starts after a dot": (squares("out_proj proj"), {"target_modules": ["proj"]}, ["proj"]),
    "a list may name the head": (two_blocks, {"target_modules": ["classifier.dense"]}, ["classifier.dense"]),
    "a string matches whole names": (two_blocks, {"target_modules": r"layers\.\d\.attention\.query"}, QUERIES),
    "names of PEFT": (in_a_base_model, {"target_modules": ["query"]}, [f"base_model.model.{name}" for name in QUERIES]),
    "a list excludes": (
        two_blocks,
        {"exclude_modules": ["out_proj", "layers.0.dense", "key"]},
        [*QUERIES, "layers.1.dense"],
    ),
    "an expression excludes": (
        two_blocks,
        {"exclude_modules": r".*\.out_proj|layers\.0\.dense|.*key"},
        [*QUERIES, "layers.1.dense"],
    ),
    "wrappers have no names": (
        lambda: torch.compile(nn.DataParallel(two_blocks())),
        {"target_modules": r"layers\.\d\.dense"},
        ["_orig_mod.module.layers.0.dense", "_orig_mod.module.layers.1.dense"],
    ),
    "a wrapped model has a head": (lambda: torch.compile(two_blocks()), {}, [f"_orig_mod.{name}" for name in BODY]),
    "raw names match too": (
        lambda: torch.compile(two_blocks()),
        {"target_modules": ["_orig_mod.layers.0.dense"]},
        ["_orig_mod.layers.0.dense"],
    ),
    "the model is a layer": (lambda: nn.Linear(4, 4), {}, [""]),
    "a shared module has any of its names": (
        lambda: nn.ModuleDict(dict.fromkeys(("first", "second"), nn.Linear(4, 4))),
        {"target_modules": ["second"]},
        ["first"],
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_these_layers_are_converted_and_reverted(case):
    make, arguments, names = LAYERS[case]
    model = make()
    before = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    assert converted(convert_linears(model, **arguments)) == names
    assert revert_linears(model) is model
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"exclude_modules": ["out_proj", "outproj", "layers.0.dense"]}, "no linear layer: 'outproj'$"),
        ({"exclude_modules": "out_proj"}, "layer: 'out_proj'$"),
        ({"overrides": {"qeury": None}}, "qeury"),
    ],
)
def test_a_name_that_matches_nothing_is_told(arguments, named):
    with pytest.warns(UserWarning, match=named):
        convert_linears(two_blocks(), **arguments)


def test_the_first_override_that_matches_wins_and_none_leaves_exact():
    small, large = RMMConfig(ratio=0.1), RMMConfig(ratio=0.9)
    model = convert_linears(two_blocks(), 0.5, overrides={"layers.0.dense": small, r".*\.dense": large, "dense": None})
    assert model.layers[0].dense.rmm_config == small
    assert model.layers[1].dense.rmm_config == large
    assert model.layers[0].attention.query.rmm_config == RMMConfig(ratio=0.5)
    convert_linears(model, 0.5, overrides={"query": None})
    assert type(model.layers[0].attention.query) is nn.Linear
    assert not hasattr(model.layers[0].attention.query, "rmm_config")
    assert type(model.layers[0].attention.key) is RMMLinear


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.dense", "layers.0.dense"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.dense", "layers.0.dense"),
        ("layers.module.dense", "layers.module.dense"),
        ("module", ""),
    ],
)
def test_wrapper_prefixes_are_stripped(raw, expected):
    assert strip_wrappers(raw) == expected


def hooked():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)
    return layer


def hooked_by_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")
    return hooks.add_hook_to_module(nn.Linear(8, 8), hooks.ModelHook())


class Quantized(nn.Linear):
    pass


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "odd: .*parametrized"),
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), "odd: .*parametrized"),
        (lambda: spectral_norm(nn.Linear(8, 8)), "odd: .*computed by a hook"),
        (lambda: weight_norm(nn.Linear(8, 8)), "odd: .*computed by a hook"),
        (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), "odd: .*computed by a hook"),
        (lambda: nn.LazyLinear(8), "odd: .*LazyLinear"),
        (lambda: Quantized(8, 8), "odd: .*Quantized"),
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), "odd: .*dtype torch.complex64"),
        (hooked, "odd: .*forward is replaced"),
        (hooked_by_accelerate, "odd: .*forward is replaced"),
        (lambda: nn.MultiheadAttention(8, 2), r"odd\.out_proj: nn.MultiheadAttention"),
    ],
)
def test_a_layer_that_cannot_be_converted_is_left_exact_and_named_once(make, reason):
    model = nn.ModuleDict({"good": nn.Linear(8, 8), "odd": make()})
    kind = type(model["odd"])
    with pytest.warns(UserWarning, match=f"left exact.*{reason}") as caught:
        convert_linears(model)
    assert len([each for each in caught if "left exact" in str(each.message)]) == 1
    assert str(caught[0].message).count("odd") == 1
    assert converted(model) == ["good"]
    assert type(model["odd"]) is kind
    assert re.search(reason.partition(": ")[2].removeprefix(".*"), " ".join(row.note for row in summary(model).rows))


def test_a_converted_layer_under_a_later_change_reverts_to_exact_by_name():
    hooks = pytest.importorskip("accelerate.hooks")
    changes = {
        "ratio=1.0": (lambda layer: hooks.add_hook_to_module(layer, hooks.ModelHook()), hooks.remove_hook_from_module),
        "undo the change first": (
            parametrizations.weight_norm,
            lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight"),
        ),
    }
    for told, (change, undo) in changes.items():
        model = convert_linears(nn.Sequential(nn.Linear(8, 8)), config=RMMConfig(ratio=0.25, min_rows=1))
        change(model[0])
        with pytest.warns(UserWarning, match=told):
            revert_linears(model)
        assert model[0].rmm_config.ratio == 1.0
        assert model(torch.randn(256, 8)).shape == (256, 8)
        undo(model[0])
        assert type(revert_linears(model)[0]) is nn.Linear


@pytest.mark.parametrize(
    ("dtype", "ratio", "warned"),
    [(torch.float16, 0.03, True), (torch.float16, 0.3, False), (torch.float32, 0.03, False)],
)
def test_float16_weights_at_a_small_ratio_are_warned_of(dtype, ratio, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_linears(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype), ratio=ratio)
    said = [str(warning.message) for warning in caught]
    assert len(said) == warned
    assert all("2 sketched layers" in text and "float16" in text and "65504" in text for text in said)


def test_nothing_convertible_among_the_matches_is_an_error():
    eight_bits = nn.Linear(8, 8)
    eight_bits.weight = nn.Parameter(eight_bits.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    for layer, reason in ((Quantized(8, 8), "Quantized"), (eight_bits, "float8")):
        with pytest.raises(ValueError, match=f"none of the layers that match can be converted.*{reason}"):
            convert_linears(nn.Sequential(layer))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_sharded_first", [True, False])
def test_a_fully_sharded_layer_keeps_its_unshard_whenever_it_is_converted(is_sharded_first):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if not is_sharded_first:
        convert_linears(model, 0.5)
    mesh = init_device_mesh("cpu", (1,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    before = type(model[0])
    convert_linears(model, 0.25)
    assert isinstance(model[0], RMMLinear)
    assert isinstance(model[0], FSDPModule)
    assert model[0].rmm_config.ratio == 0.25
    assert type(model[0]) is type(model[2])
    model(torch.randn(256, 8)).sum().backward()
    grad = model[0].weight.grad.full_tensor()
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0
    reverted = type(revert_linears(model)[0])
    assert issubclass(reverted, FSDPModule)
    assert not issubclass(reverted, RMMLinear)
    assert (reverted is before) == is_sharded_first


def test_state_dicts_go_both_ways_and_an_optimizer_of_before_trains_on():
    model, exact = two_blocks(), two_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    convert_linears(model)
    weight = model.layers[0].dense.weight.detach().clone()
    assert list(model.state_dict()) == keys
    model(torch.randn(256, 8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].dense.weight, weight)
    assert str(exact.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert str(model.load_state_dict(exact.state_dict())) == "<All keys matched successfully>"


def test_hooks_keep_running():
    model, calls = two_blocks(), []
    model.layers[0].dense.register_forward_hook(lambda *_: calls.append("forward"))
    model.layers[0].dense.register_full_backward_hook(lambda *_: calls.append("backward"))
    convert_linears(model)
    model(torch.randn(256, 8)).sum().backward()
    assert calls == ["forward", "backward"]


def test_tied_weights_stay_tied_and_collect_both_gradients():
    model, exact = (nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)) for _ in range(2))
    model[1].weight, exact[1].weight = model[0].weight, exact[0].weight
    exact.load_state_dict(model.state_dict())
    convert_linears(model, config=RMMConfig(ratio=1.0))
    assert model[0].weight is model[1].weight
    x = torch.randn(256, 8)
    for each in (model, exact):
        each(x).sum().backward()
    assert torch.equal(model[0].weight.grad, exact[0].weight.grad)


def test_a_model_of_transformers_is_saved_as_a_plain_one_and_keeps_its_tied_head_exact(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = convert_linears(transformers.RobertaForMaskedLM(tiny_roberta().config))
    assert type(model.lm_head.decoder) is nn.Linear
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert converted(plain) == []
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"ratio": ratio}, "ratio=") for ratio in (0, -0.5, 1.5, float("nan"), "half", True)),
        ({"config": {"ratio": 0.5}}, "config is a dict"),
        ({"target_modules": "layers.(0"}, "not a regular expression"),
        ({"target_modules": [1, 2]}, "neither a string nor a list"),
        ({"target_modules": []}, "matches none"),
        ({"target_modules": r"layers\.\d\.attention\.q"}, "matches none"),
        ({"target_modules": ["qeury"]}, r"matches none of the model's 10 linear layers: layers\.0"),
        ({"exclude_modules": r".*"}, "matches none"),
        ({"overrides": ["dense"]}, "overrides is a list"),
        ({"overrides": {"dense": 0.5}}, "RMMConfig"),
        ({"overrides": {3: None}}, "key 3"),
        ({"overrides": {".*": None, "layers.(0": None}}, "overrides='layers.\\(0' is not a regular expression"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_leaves_the_model_untouched(arguments, message):
    model = convert_linears(two_blocks(), 0.5, target_modules=["dense"])
    before = converted(model)
    with pytest.raises(ValueError, match=message):
        convert_linears(model, **arguments)
    assert converted(model) == before
    assert model.layers[0].dense.rmm_config == RMMConfig(ratio=0.5)


def test_a_model_without_layers_to_convert_is_refused():
    with pytest.raises(ValueError, match="and 28 more"):
        convert_linears(nn.Sequential(*(nn.Linear(2, 2) for _ in range(40))), target_modules=["nowhere"])
    with pytest.raises(ValueError, match="ReLU has no linear layers"):
        convert_linears(nn.ReLU())
    for function in (convert_linears, revert_linears):
        with pytest.raises(ValueError, match="model is a dict"):
            function({"weight": torch.zeros(2, 2)})
