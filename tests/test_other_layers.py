"""Layers that can't be converted are reported by name; adapters of PEFT are found by theirs."""

import warnings

import pytest
import torch
from tiny_transformers import SIZES, tiny
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert_linears, summary
from rmm_linear.memory import SavedTensors, profile

CONFIG = RMMConfig(ratio=0.25, min_rows=1)


class PackedLinear(nn.Module):
    """As quantization libraries have it: packed codes in a buffer, and no nn.Linear."""

    def __init__(self, in_features, out_features, *, trains=False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("codes", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(out_features), requires_grad=trains)

    def forward(self, x):
        return x @ self.codes.to(x.dtype).t() * self.scale


def others(model):
    return dict(summary(model).others)


def test_frozen_ones_are_named_and_trained_ones_warned_of():
    assert others(nn.ModuleDict({"one": nn.Linear(8, 8), "two": PackedLinear(8, 8)})) == {
        "two": f"its class is {__name__}.PackedLinear, not nn.Linear"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_linears(nn.ModuleDict({"one": nn.Linear(8, 8), "two": PackedLinear(8, 8)}), config=CONFIG)
    trained = nn.ModuleDict({"one": nn.Linear(8, 8), "two": PackedLinear(8, 8, trains=True)})
    with pytest.warns(UserWarning, match=r"left exact: two: its class is .*PackedLinear, not nn.Linear"):
        convert_linears(trained, config=CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_linears(trained, config=CONFIG, exclude_modules=["two"])
        convert_linears(trained, config=CONFIG, target_modules=["one"])
    with pytest.raises(ValueError, match=r"matches none of .* 1 linear layers: one; two: its class is .*PackedLinear"):
        convert_linears(trained, config=CONFIG, target_modules=["two"])
    with pytest.raises(ValueError, match=r"no linear layers; there is nothing to convert; 0: its class is .*PackedLin"):
        convert_linears(nn.Sequential(PackedLinear(8, 8)), config=CONFIG)


def test_models_without_such_layers_have_none():
    model = nn.Sequential(
        nn.Conv1d(3, 4, 2), nn.MultiheadAttention(8, 2), nn.Bilinear(4, 4, 4), nn.LSTM(4, 4), nn.Embedding(4, 4)
    )
    assert others(model) == {}


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.grid)])
def test_the_experts_of_transformers_are_named(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, head_dim=8, num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        decoder_sparse_step=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    found = others(model)
    parts = ("gate", "experts")
    assert set(found) == {f"model.layers.{layer}.mlp.{part}" for layer in range(2) for part in parts}
    assert "gate_up_proj and down_proj of 4 experts" in found["model.layers.0.mlp.experts"]
    assert "Router, not nn.Linear" in found["model.layers.0.mlp.gate"]
    assert "model.layers.*.mlp.experts (2 of them): " in str(summary(model))
    with pytest.warns(UserWarning, match="left exact: ") as warned:
        convert_linears(model, config=CONFIG)
    # a line a kind, not one a layer
    assert all(str(warned[0].message).count(f"model.layers.*.mlp.{part}: ") == 1 for part in parts)


def test_attentions_with_parameters_of_three_dimensions_are_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=32)
    found = others(transformers.XLNetModel(config))
    assert list(found) == ["layer.0.rel_attn"]
    assert "holds q and k and v and o and r and seg_embed as parameters of 3 dimensions" in found["layer.0.rel_attn"]


@pytest.mark.parametrize("name", ["Roberta", "GPT2", "Llama", "T5", "ViT", "CLIP", "Wav2Vec2", "Mamba", "DebertaV2"])
def test_usual_models_have_none(name):
    towers = {"text_config": SIZES, "vision_config": SIZES} if name == "CLIP" else {}
    assert others(tiny(f"{name}Model", **towers)) == {}


class TestAdapters:
    """LoRA through PEFT."""

    @pytest.fixture
    def peft(self):
        return pytest.importorskip("peft")

    def llama(self):
        return tiny("LlamaForCausalLM", vocab_size=60)

    def adapted(self, peft, targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), **options):
        config = peft.LoraConfig(r=4, target_modules=list(targets), lora_dropout=0.0, **options)
        return peft.get_peft_model(self.llama(), config).train()

    def test_targets_are_named_as_peft_users_know_them(self, peft):
        model = convert_linears(self.adapted(peft), config=CONFIG, target_modules=["lora_A"])
        names = [name for name, module in model.named_modules() if isinstance(module, RMMLinear)]
        assert len(names) == 10
        assert all(name.endswith("lora_A.default") for name in names)

    def test_siblings_share_a_sketch_and_the_prediction_holds(self, peft):
        model = self.adapted(peft)
        ids = torch.randint(0, 60, (8, 32))
        report = profile(model, input_ids=ids)
        status = {call.layer.rpartition("_proj.")[2]: call.status for call in report.linears}
        assert status["base_layer"] == "frozen"
        assert status["lora_A.default"] == status["lora_B.default"] == "kept"
        convert_linears(model, config=CONFIG, target_modules=["lora_A"])
        names = {call.layer for call in report.linears if "lora_A" in call.layer}
        with SavedTensors(model) as kept:
            output = model(input_ids=ids)
        assert kept.bytes == report.predict(CONFIG, layers=names)
        # the inputs of q/k/v, and of gate/up: two in a layer, one sketch each, but RMSNorm keeps its product as well
        groups = {call.group for call in report.linears if call.layer in names}
        assert len(groups) == 4
        output.logits.square().sum().backward()
        gradients = [weight.grad for name, weight in model.named_parameters() if "lora_A" in name]
        assert len(gradients) == 10
        assert all(gradient.isfinite().all() for gradient in gradients)

    def test_siblings_in_float32_on_a_model_in_bfloat16_share_as_well(self, peft):
        model = self.adapted(peft).to(torch.bfloat16)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.float()
        ids = torch.randint(0, 60, (8, 32))
        report = profile(model, input_ids=ids)
        calls = [call for call in report.linears if "lora_A" in call.layer]
        # the embedding is frozen: nothing tells that what the first layer's q, k and v are given are copies
        assert len({call.group for call in calls}) == 4 + 2
        convert_linears(model, config=CONFIG, target_modules=["lora_A"])
        with SavedTensors(model) as kept:
            model(input_ids=ids)
        assert kept.bytes == report.predict(CONFIG, layers={call.layer for call in calls})

    def test_adapters_on_conv1d(self, peft):
        model = convert_linears(tiny("GPT2LMHeadModel", vocab_size=60, num_hidden_layers=1), config=CONFIG)
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        model = peft.get_peft_model(model, lora).train()
        ids = torch.randint(0, 60, (4, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        model.eval()
        before = model(input_ids=ids).logits
        torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)

    def test_converted_before_it_is_wrapped_nothing_trains_and_the_summary_says_so(self, peft):
        model = convert_linears(self.llama(), config=CONFIG)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        rows = {row.name: row for row in summary(model).rows}
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        assert rows[f"{name}.base_layer"].note == "frozen weight: keeps no input"
        assert rows[f"{name}.lora_A.default"].note == "exact: not targeted, or excluded"

    def test_converting_frozen_layers_alone_is_named(self, peft):
        model = peft.get_peft_model(self.llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
        with pytest.warns(UserWarning, match=r"none of the 14 layers that are sketched now has a trainable weight"):
            convert_linears(model, config=CONFIG)


def test_a_subclass_of_conv1d_is_named_as_one():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

    class Packed(Conv1D):
        pass

    with pytest.warns(UserWarning, match=r"1: its class is .*Packed, not Conv1D"):
        convert_linears(nn.Sequential(nn.Linear(8, 8), Packed(8, 8)), config=CONFIG)
