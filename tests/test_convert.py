"""convert_linears and revert_linears: which layers, what happens to them, and what must not."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from rmm_linear import RMMConfig, RMMLinear, convert_linears, revert_linears
from rmm_linear.convert import why_not
from rmm_linear.names import strip_wrappers


class Attention(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.attention = Attention(size)
        self.dense = nn.Linear(size, size)


class Head(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.dense = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, 2)


class Model(nn.Module):
    """Two blocks and a head with linear layers of its own, like RobertaForSequenceClassification."""

    def __init__(self, size=8):
        super().__init__()
        self.layers = nn.ModuleList([Block(size), Block(size)])
        self.classifier = Head(size)

    def forward(self, x):
        for block in self.layers:
            x = x + block.dense(block.attention.out_proj(block.attention.query(x) * block.attention.key(x)))
        return self.classifier.out_proj(self.classifier.dense(x))


BODY = [
    f"layers.{block}.{name}"
    for block in (0, 1)
    for name in ("attention.query", "attention.key", "attention.out_proj", "dense")
]


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, RMMLinear)]


def tiny_roberta(**changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        **changes,
    )
    return transformers.RobertaForSequenceClassification(config)


# which configuration


def test_neither_ratio_nor_config_means_half():
    model = convert_linears(Model())
    assert model.layers[0].dense.rmm_config == RMMConfig(ratio=0.5)


def test_ratio_is_short_for_a_config():
    assert convert_linears(Model(), 0.3).layers[0].dense.rmm_config == RMMConfig(ratio=0.3)


def test_ratio_and_config_together_are_refused():
    with pytest.raises(ValueError, match="both ratio=0.5 and config"):
        convert_linears(Model(), 0.5, config=RMMConfig())


def test_a_converted_layer_is_the_same_object_with_the_same_parameters():
    model = Model()
    layer, weight, bias = model.layers[0].dense, model.layers[0].dense.weight, model.layers[0].dense.bias
    assert convert_linears(model) is model
    assert model.layers[0].dense is layer
    assert (layer.weight is weight, layer.bias is bias) == (True, True)


def test_converting_twice_changes_nothing():
    model = convert_linears(Model(), 0.25)
    before = [(name, type(module), vars(module).get("rmm_config")) for name, module in model.named_modules()]
    convert_linears(model, 0.25)
    after = [(name, type(module), vars(module).get("rmm_config")) for name, module in model.named_modules()]
    assert before == after


def test_a_second_call_reconfigures_the_layers_it_targets_only():
    model = convert_linears(Model(), 0.5)
    convert_linears(model, config=RMMConfig(ratio=0.1, sketch="gaussian"), target_modules=["query"])
    assert model.layers[0].attention.query.rmm_config == RMMConfig(ratio=0.1, sketch="gaussian")
    assert model.layers[0].attention.key.rmm_config == RMMConfig(ratio=0.5)


# which layers


def test_all_linear_leaves_a_head_out_whole():
    assert converted(convert_linears(Model())) == BODY


@pytest.mark.parametrize("name", ["lm_head", "score", "classification_head", "qa_outputs", "head"])
def test_all_linear_knows_heads_by_their_usual_names(name):
    model = nn.Module()
    model.body = nn.Linear(4, 4)
    model.add_module(name, nn.Linear(4, 4))
    assert converted(convert_linears(model)) == ["body"]


def test_a_head_name_deep_inside_is_no_head():
    model = nn.Sequential(nn.ModuleDict({"classifier": nn.Linear(4, 4)}))
    assert converted(convert_linears(model)) == ["0.classifier"]


def test_all_linear_asks_the_model_for_its_output_embeddings():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unusual_name = nn.Linear(4, 4), nn.Linear(4, 9)

        def get_output_embeddings(self):
            return self.unusual_name

    assert converted(convert_linears(Language())) == ["body"]
    assert converted(convert_linears(nn.Sequential(Language()))) == ["0.body"]


def test_all_linear_asks_the_model_for_its_classifier():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unusual_name = nn.Linear(4, 4), nn.Linear(4, 9)

        def get_classifier(self):
            return self.unusual_name

    assert converted(convert_linears(Vision())) == ["body"]


def test_a_model_that_cannot_name_its_head_is_converted_all_the_same():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)

        def get_output_embeddings(self):
            raise NotImplementedError

    assert converted(convert_linears(Stubborn())) == ["body"]


def test_a_list_names_layers_by_the_end_of_their_name():
    model = convert_linears(Model(), target_modules=["query", "layers.1.dense"])
    assert converted(model) == ["layers.0.attention.query", "layers.1.attention.query", "layers.1.dense"]


def test_the_end_of_a_name_starts_after_a_dot():
    model = nn.ModuleDict({"out_proj": nn.Linear(4, 4), "proj": nn.Linear(4, 4)})
    assert converted(convert_linears(model, target_modules=["proj"])) == ["proj"]


def test_a_list_may_name_the_head():
    assert converted(convert_linears(Model(), target_modules=["classifier.dense"])) == ["classifier.dense"]


def test_a_string_is_a_regular_expression_for_the_whole_name():
    model = convert_linears(Model(), target_modules=r"layers\.\d\.attention\.(query|key)")
    assert converted(model) == [f"layers.{block}.attention.{name}" for block in (0, 1) for name in ("query", "key")]
    with pytest.raises(ValueError, match="matches none"):
        convert_linears(Model(), target_modules="query")


def test_peft_style_names_match():
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = Model()
    names = converted(convert_linears(model, target_modules=["query"]))
    assert names == ["base_model.model.layers.0.attention.query", "base_model.model.layers.1.attention.query"]


def test_exclusion_follows_the_same_rules():
    by_list = convert_linears(Model(), exclude_modules=["out_proj", "layers.0.dense"])
    by_regex = convert_linears(Model(), exclude_modules=r".*\.out_proj|layers\.0\.dense")
    expected = [name for name in BODY if not name.endswith("out_proj") and name != "layers.0.dense"]
    assert converted(by_list) == converted(by_regex) == expected


@pytest.mark.parametrize(
    ("excluded", "named"),
    [(["out_proj", "outproj", "layers.0.dense"], "no linear layer: 'outproj'$"), (r"out_proj", "layer: 'out_proj'$")],
)
def test_an_exclusion_that_matches_nothing_is_named(excluded, named):
    with pytest.warns(UserWarning, match=named):
        convert_linears(Model(), exclude_modules=excluded)


def test_the_filter_sees_module_and_name_and_has_the_last_word():
    seen = []

    def keep(module, name):
        seen.append((type(module), name))
        return name.endswith("dense")

    model = convert_linears(Model(), filter_fn=keep)
    assert converted(model) == ["layers.0.dense", "layers.1.dense"]
    assert seen == [(nn.Linear, name) for name in BODY]


def test_the_first_override_that_matches_wins():
    small, large = RMMConfig(ratio=0.1), RMMConfig(ratio=0.9)
    model = convert_linears(Model(), 0.5, overrides={"layers.0.dense": small, r".*\.dense": large, "dense": None})
    assert model.layers[0].dense.rmm_config == small
    assert model.layers[1].dense.rmm_config == large
    assert model.layers[0].attention.query.rmm_config == RMMConfig(ratio=0.5)


def test_an_override_of_none_leaves_exact_and_reverts():
    model = convert_linears(Model(), 0.5)
    convert_linears(model, 0.5, overrides={"query": None})
    assert type(model.layers[0].attention.query) is nn.Linear
    assert not hasattr(model.layers[0].attention.query, "rmm_config")
    assert type(model.layers[0].attention.key) is RMMLinear


def test_an_override_that_matches_nothing_is_reported():
    with pytest.warns(UserWarning, match="qeury"):
        convert_linears(Model(), overrides={"qeury": None})


def test_a_model_that_is_a_linear_layer_is_converted_itself():
    layer = nn.Linear(4, 4)
    assert type(convert_linears(layer)) is RMMLinear
    assert type(revert_linears(layer)) is nn.Linear


def test_a_shared_module_is_visited_once_and_matched_by_any_of_its_names():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "second": shared})
    calls = []
    convert_linears(model, target_modules=["second"], filter_fn=lambda _, name: calls.append(name) or True)
    assert calls == ["first"]
    assert type(shared) is RMMLinear


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("_orig_mod.layers.0.dense", "layers.0.dense"),
        ("module.layers.0.dense", "layers.0.dense"),
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.dense", "layers.0.dense"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.dense", "layers.0.dense"),
        ("layers.module.dense", "layers.module.dense"),
        ("module", ""),
        ("", ""),
    ],
)
def test_wrapper_prefixes_are_stripped(raw, expected):
    assert strip_wrappers(raw) == expected


def test_a_wrapped_model_matches_by_its_unwrapped_names_and_keeps_its_head():
    model = Model()
    convert_linears(torch.compile(nn.DataParallel(model)), target_modules=r"layers\.\d\.dense")
    assert converted(model) == ["layers.0.dense", "layers.1.dense"]
    assert converted(convert_linears(torch.compile(Model()))) == ["_orig_mod." + name for name in BODY]


def test_raw_names_match_too():
    model = torch.compile(Model())
    convert_linears(model, target_modules=["_orig_mod.layers.0.dense"])
    assert converted(model) == ["_orig_mod.layers.0.dense"]


# what cannot be converted


def skipped_with(make, reason):
    """Convert a model of one such layer and one good one; the warning must name the layer and the reason."""
    model = nn.ModuleDict({"good": nn.Linear(8, 8), "odd": make()})
    kind = type(model["odd"])
    with pytest.warns(UserWarning, match=f"odd.*: .*{reason}"):
        convert_linears(model)
    assert type(model["good"]) is RMMLinear
    return type(model["odd"]) is kind


def hooked():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)
    return layer


class Quantized(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "parametrized"),
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), "parametrized"),
        (lambda: spectral_norm(nn.Linear(8, 8)), "computed by a hook"),
        (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), "computed by a hook"),
        (lambda: nn.LazyLinear(8), "LazyLinear"),
        (lambda: Quantized(8, 8), "Quantized"),
        (hooked, "forward is replaced"),
    ],
)
def test_what_cannot_be_converted_is_skipped_with_its_reason(make, reason):
    assert skipped_with(make, reason)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_old_weight_norm_is_skipped_with_its_reason():
    assert skipped_with(lambda: weight_norm(nn.Linear(8, 8)), "computed by a hook")


def test_the_projection_inside_multihead_attention_is_skipped_with_its_reason():
    model = nn.ModuleDict({"good": nn.Linear(8, 8), "odd": nn.MultiheadAttention(8, 2)})
    with pytest.warns(UserWarning, match=r"odd\.out_proj: nn.MultiheadAttention"):
        convert_linears(model)
    assert converted(model) == ["good"]


def test_a_layer_under_an_accelerate_hook_is_skipped_with_its_reason():
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    with pytest.warns(UserWarning, match="1: its forward is replaced"):
        convert_linears(model)
    hooks.remove_hook_from_module(model[1])
    assert converted(convert_linears(model)) == ["0", "1"]


def test_a_converted_layer_under_an_accelerate_hook_reverts_to_exact():
    hooks = pytest.importorskip("accelerate.hooks")
    layer = convert_linears(nn.Sequential(nn.Linear(8, 8)))
    hooks.add_hook_to_module(layer[0], hooks.ModelHook())
    with pytest.warns(UserWarning, match="ratio=1.0"):
        revert_linears(layer)
    assert layer[0].rmm_config.ratio == 1.0
    assert layer(torch.randn(256, 8)).shape == (256, 8)


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


def test_a_warning_names_each_layer_once():
    model = nn.ModuleList([nn.Linear(8, 8), *(Quantized(8, 8) for _ in range(3))])
    with pytest.warns(UserWarning, match="left exact") as caught:
        convert_linears(model)
    assert len(caught) == 1
    assert [str(caught[0].message).count(f"{index}: ") for index in (1, 2, 3)] == [1, 1, 1]


def test_nothing_convertible_among_the_matches_is_an_error():
    with pytest.raises(ValueError, match="none of the layers that match can be converted.*Quantized"):
        convert_linears(nn.Sequential(Quantized(8, 8)))


def test_a_frozen_weight_is_converted_and_behaves_as_exact():
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    convert_linears(model, 0.1)
    x = torch.randn(256, 8, requires_grad=True)
    assert type(model[0]) is RMMLinear
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))


@pytest.fixture
def process_group(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not available")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_fully_sharded_layer_keeps_its_unshard(process_group):
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=process_group)
    fully_shard(model, mesh=process_group)
    before = type(model[0])
    convert_linears(model, 0.5)
    assert isinstance(model[0], RMMLinear)
    assert isinstance(model[0], FSDPModule)
    assert type(model[0]) is type(model[2])
    model(torch.randn(256, 8)).sum().backward()
    grad = model[0].weight.grad.full_tensor()
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0
    assert type(revert_linears(model)[0]) is before


def test_a_layer_converted_before_it_is_sharded_reverts_to_a_sharded_one(process_group):
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = convert_linears(nn.Sequential(nn.Linear(8, 8)), 0.5)
    fully_shard(model[0], mesh=process_group)
    convert_linears(model, 0.25)
    assert model[0].rmm_config.ratio == 0.25
    revert_linears(model)
    assert isinstance(model[0], FSDPModule)
    assert not isinstance(model[0], RMMLinear)
    model(torch.randn(256, 8)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_layer_whose_parent_is_sharded_is_converted(process_group):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=process_group)
    assert converted(convert_linears(model, 0.5)) == ["0", "1"]
    model(torch.randn(256, 8)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_model_is_converted_after_it_was_wrapped_for_data_parallel_training(process_group):
    model = nn.parallel.DistributedDataParallel(Model())
    convert_linears(model, 0.5, target_modules=r"layers\.\d\.dense")
    assert converted(model.module) == ["layers.0.dense", "layers.1.dense"]
    model(torch.randn(256, 8)).sum().backward()
    assert model.module.layers[0].dense.weight.grad.abs().sum() > 0


def test_tensor_parallel_layers_and_those_beside_them_are_refused_with_their_reasons(process_group):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model, process_group, {"1": ColwiseParallel()})
    with pytest.raises(ValueError, match="0: other layers of the model are .*; 1: its weight is .*tensor parallel"):
        convert_linears(model)
    assert converted(model) == []


# what must not change


def test_revert_restores_everything():
    model = Model()
    before = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    revert_linears(convert_linears(model, target_modules=r".*"))
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == before


def test_reverting_an_exact_model_does_nothing():
    model = Model()
    assert revert_linears(model) is model
    assert converted(model) == []


def test_state_dict_keys_and_parameter_groups_are_unchanged():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    convert_linears(model)
    weight = model.layers[0].dense.weight.detach().clone()
    assert list(model.state_dict()) == keys
    model(torch.randn(256, 8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].dense.weight, weight)


def test_a_state_dict_goes_both_ways():
    sketched, exact = convert_linears(Model()), Model()
    assert str(exact.load_state_dict(sketched.state_dict())) == "<All keys matched successfully>"
    assert str(sketched.load_state_dict(exact.state_dict())) == "<All keys matched successfully>"


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_stay_converted(clone):
    model = convert_linears(Model(), 0.25)
    twin = clone(model)
    assert converted(twin) == BODY
    assert twin.layers[0].dense.rmm_config == RMMConfig(ratio=0.25)
    assert twin.layers[0].dense is not model.layers[0].dense
    x = torch.randn(256, 8)
    assert torch.equal(twin(x), model(x))


def test_hooks_keep_running():
    model, calls = Model(), []
    model.layers[0].dense.register_forward_hook(lambda *_: calls.append("forward"))
    model.layers[0].dense.register_full_backward_hook(lambda *_: calls.append("backward"))
    convert_linears(model)
    model(torch.randn(256, 8)).sum().backward()
    assert calls == ["forward", "backward"]


def test_tied_weights_stay_tied_and_collect_both_gradients():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    convert_linears(model, config=RMMConfig(ratio=1.0))
    assert model[0].weight is model[1].weight
    x = torch.randn(256, 8)
    model(x).sum().backward()
    twin = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    twin[1].weight = twin[0].weight
    twin.load_state_dict(model.state_dict())
    twin(x).sum().backward()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


def test_a_saved_pretrained_model_loads_as_a_plain_one(tmp_path):
    model = convert_linears(tiny_roberta(), 0.5)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert converted(plain) == []
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_roberta_is_converted_without_its_classification_head():
    model = convert_linears(tiny_roberta())
    names = converted(model)
    assert len(names) == 2 * 6
    assert not any(name.startswith("classifier") for name in names)


def test_a_masked_language_model_keeps_its_tied_head_exact():
    transformers = pytest.importorskip("transformers")
    model = transformers.RobertaForMaskedLM(tiny_roberta().config)
    convert_linears(model)
    assert type(model.lm_head.decoder) is nn.Linear
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight


# bad input


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan"), "half", True])
def test_a_bad_ratio_is_refused_by_name(ratio):
    with pytest.raises(ValueError, match="ratio="):
        convert_linears(Model(), ratio)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"ratio": 0.5}}, "config is a dict"),
        ({"target_modules": "layers.(0"}, "not a regular expression"),
        ({"target_modules": [1, 2]}, "neither a string nor a list"),
        ({"target_modules": []}, "matches none"),
        ({"target_modules": ["qeury"]}, r"matches none of the model's 10 linear layers: layers\.0"),
        ({"exclude_modules": r".*"}, "matches none"),
        ({"filter_fn": lambda module, name: False}, "filter_fn"),
        ({"overrides": ["dense"]}, "overrides is a list"),
        ({"overrides": {"dense": 0.5}}, "RMMConfig"),
        ({"overrides": {3: None}}, "key 3"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        convert_linears(model, **arguments)
    assert converted(model) == []


def test_a_long_list_of_layers_is_cut():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    with pytest.raises(ValueError, match="and 28 more"):
        convert_linears(model, target_modules=["nowhere"])


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="ReLU has no linear layers"):
        convert_linears(nn.ReLU())


@pytest.mark.parametrize("function", [convert_linears, revert_linears])
def test_something_that_is_no_module_is_refused(function):
    with pytest.raises(ValueError, match="model is a dict"):
        function({"weight": torch.zeros(2, 2)})


def test_a_bad_call_leaves_the_model_untouched():
    model = convert_linears(Model(), 0.5)
    with pytest.raises(ValueError, match="overrides"):
        convert_linears(model, 0.25, overrides={"dense": "exact"})
    assert model.layers[0].dense.rmm_config == RMMConfig(ratio=0.5)


def test_reasons_are_given_one_by_one():
    assert why_not(nn.Linear(2, 2)) is None
    assert why_not(RMMLinear(2, 2)) is None
    assert why_not(nn.ReLU()) == "its class is torch.nn.modules.activation.ReLU, not nn.Linear"


def test_a_layer_that_was_parametrized_after_its_conversion_is_made_exact_by_name():
    model = convert_linears(nn.Sequential(nn.Linear(8, 8)), config=RMMConfig(ratio=0.25, min_rows=1))
    nn.utils.parametrizations.weight_norm(model[0])
    convert_linears(model, config=RMMConfig(ratio=0.5, min_rows=1))
    assert model[0].rmm_config.ratio == 0.5
    with pytest.warns(UserWarning, match="undo the change first"):
        revert_linears(model)
    assert model[0].rmm_config.ratio == 1.0
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    revert_linears(model)
    assert type(model[0]) is nn.Linear


def test_eight_bit_floats_are_left_exact_by_name():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="float8"):
        convert_linears(nn.Sequential(layer))
