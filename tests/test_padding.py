"""Rows left out as padding: exact where their gradient is zero, refused where it is not, kept where nobody knows."""

import copy
import pickle
import threading

import pytest
import torch
from sketch_contract import assert_unbiased
from tiny_transformers import tiny
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rmm_linear import PaddingGradientError, RMMConfig, RMMLinear, convert_linears, padding, revert_linears, valid_rows
from rmm_linear.functional import linear
from rmm_linear.memory import MeasuredSaving, SavedTensors
from rmm_linear.padding import RowsCheck, ValidRows, current_valid_rows

transformers = pytest.importorskip("transformers")

LENGTHS = torch.tensor([40, 10, 23, 5, 31, 12])
SKIP = RMMConfig(ratio=0.3, min_rows=1, skip_padding=True)
# rounding alone: what is kept wrongly, or not, shows at once
ROUNDED = RMMConfig(ratio=1.0, storage="int8", min_rows=1, skip_padding=True)


def right_padded(lengths=LENGTHS, length=40):
    return (torch.arange(length) < lengths.unsqueeze(1)).long()


def layer_pair(mask):
    """x, weight, bias and a gradient of the output that is zero where the mask is."""
    torch.manual_seed(0)
    x = torch.randn(*mask.shape, 16) + 1
    g = torch.randn(*mask.shape, 8) * (mask != 0).unsqueeze(-1)
    return x, torch.randn(8, 16), torch.randn(8), g


def tiny_bert(layers=2):
    return tiny("BertForSequenceClassification", num_hidden_layers=layers)


def converted_bert():
    """A model whose layers leave padding out, a batch and the batch's mask."""
    mask = right_padded()
    return convert_linears(tiny_bert(), config=SKIP), batch(mask), mask


def batch(mask):
    torch.manual_seed(1)
    return {
        "input_ids": torch.randint(1, 50, mask.shape),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (mask.shape[0],)),
    }


def gradients(model, inputs, seed=5):
    torch.manual_seed(seed)
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def rows_seen(model, inputs, *arguments):
    """The mask that is announced to each sketched layer."""
    seen = {}

    def look(name):
        def hook(module, args):
            found = current_valid_rows(args[0])
            seen[name] = None if found is None else found.mask

        return hook

    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, RMMLinear)]
    handles = [layer.register_forward_pre_hook(look(name)) for name, layer in layers]
    model(*arguments, **inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("storage", [None, "int4"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("sketch", ["hadamard", "gaussian", "wta_crs"])
def test_the_weight_gradient_is_that_of_the_valid_rows_alone(sketch, center, storage):
    config = SKIP.replace(sketch=sketch, center=center, storage=storage)
    mask = right_padded()
    x, weight, bias, g = layer_pair(mask)
    weight.requires_grad_()
    found = []
    of_valid_rows = x[mask != 0], None, g[mask != 0]
    for rows, valid, grad in (of_valid_rows, (x, ValidRows(mask), g), (x, ValidRows(mask, count=121), g)):
        output = linear(rows, weight, bias, config=config, seed=7, valid_rows=valid)
        found += torch.autograd.grad(output, weight, grad)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class TestUnbiased:
    """Where the rows left out carry a gradient after all, one of them, drawn at random, stands for all."""

    MASK = right_padded(torch.tensor([9, 4, 12, 6]), 12)

    def _pair(self):
        torch.manual_seed(2)
        shape = self.MASK.shape
        # alike but for a part, so that few draws tell
        x, g = 1 + 0.3 * torch.randn(*shape, 6), 1 + 0.3 * torch.randn(*shape, 5)
        return x, g, g.flatten(0, 1).t() @ x.flatten(0, 1)

    def _weight(self):
        return torch.zeros(5, 6, requires_grad=True)

    @pytest.mark.parametrize(
        "changes",
        [{}, {"storage": "int4", "ratio": 1.0}, {"sketch": "rows_without_replacement"}, {"keep_tokens": (0,)}],
        ids=str,
    )
    def test_a_gradient_on_rows_left_out_is_estimated_without_bias(self, changes):
        x, g, exact = self._pair()
        weight, config = self._weight(), SKIP.replace(**changes)

        def draw():
            output = linear(x, weight, config=config, valid_rows=ValidRows(self.MASK))
            return torch.autograd.grad(output, weight, g)[0]

        assert_unbiased(draw, exact, draws=300, bias=0.04)

    @pytest.mark.parametrize("keeps_input", [False, True])
    def test_compiled_as_well_and_no_row_is_taken_twice_without_padding(self, keeps_input):
        torch._dynamo.reset()
        x, g, exact = self._pair()
        x.requires_grad_()
        weight, plain = self._weight(), SKIP.replace(center=False)

        def run(x, weight, mask, config):
            y = x * 1.0
            with valid_rows(mask):
                output = linear(y, weight, config=config, valid_rows=current_valid_rows(y))
            return output + (y * y).sum() if keeps_input else output

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")

        def draw(config=plain, mask=self.MASK):
            return torch.autograd.grad(compiled(x, weight, mask, config), weight, g)[0]

        assert_unbiased(draw, exact, draws=600, bias=0.07)
        # a rounding of a few per mill for all noise
        found = draw(ROUNDED.replace(center=False), torch.ones_like(self.MASK))
        assert (found - exact).norm() < 0.05 * exact.norm()

    def test_a_nan_shows_unless_it_is_in_a_row_without_a_gradient(self):
        x, g, _ = self._pair()
        weight = self._weight()
        g[self.MASK == 0] = 0.0
        for is_valid in (False, True):
            x[(self.MASK != 0) == is_valid] = float("nan")
            output = linear(x, weight, config=SKIP, valid_rows=ValidRows(self.MASK))
            assert torch.autograd.grad(output, weight, g)[0].isnan().any() == is_valid


def assert_near(ours, exact, within=0.04):
    """int8 alone costs 1.5 %; a token that is missing costs several times as much."""
    for name, gradient in exact.items():
        assert (ours[name] - gradient).norm() <= within * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (tiny_bert, right_padded()),
        (tiny_bert, torch.ones(6, 40, dtype=torch.long)),
        (tiny_bert, right_padded().bool()),
        (tiny_bert, right_padded().float()),
        # packed: the number of the sequence, 0 for padding
        (tiny_bert, torch.arange(40).div(9, rounding_mode="floor").add(1).mul(right_padded())),
        (lambda: tiny("LlamaForSequenceClassification", pad_token_id=0), right_padded().flip(1)),
    ],
    ids=["right", "none", "bool", "float", "packed", "left"],
)
def test_a_models_gradients_survive_leaving_the_padding_out(make, mask):
    model, inputs = make(), batch(mask)
    inputs["input_ids"] *= mask != 0
    exact = gradients(model, inputs)
    ours = gradients(convert_linears(model, config=ROUNDED), inputs)
    assert any(not torch.equal(exact[name], ours[name]) for name in exact)
    assert_near(ours, exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(gradients(model, inputs), exact, within=0.2)


def test_the_bytes_of_a_layer_are_those_of_its_valid_rows():
    # a row of those left out, and its number
    assert SKIP.saved_bytes(240, 16, torch.float32, 121) == SKIP.saved_bytes(121, 16, torch.float32) + 16 * 4 + 4
    assert SKIP.saved_bytes(240, 16, torch.float32, 240) == SKIP.saved_bytes(240, 16, torch.float32)
    assert SKIP.replace(skip_padding=False).saved_bytes(240, 16, torch.float32, 121) > 240 * 16


def test_the_row_numbers_are_kept_once_for_all_layers_and_the_saving_is_measured_to_the_byte():
    model, inputs = tiny_bert(), batch(right_padded())
    with SavedTensors(model) as exact:
        loss = model(**inputs).loss
    convert_linears(model, config=SKIP, exclude_modules=["pooler.dense"])
    with MeasuredSaving(model) as saving:
        loss = model(**inputs).loss
    assert loss.requires_grad
    assert saving.exact_bytes == exact.bytes
    valid = int(LENGTHS.sum())
    config, rows = SKIP, LENGTHS.numel() * 40
    wide, narrow = (config.saved_bytes(rows, features, torch.float32, valid) for features in (64, 32))
    # attention keeps the input of its output projection anyway
    own = 2 * (4 * narrow + wide)
    assert saving.promised_bytes == 4 * rows * 2 * (4 * 32 + 64) - own


def test_fewer_valid_rows_than_min_rows_are_kept_as_they_are():
    mask = right_padded()
    x, weight, bias, g = layer_pair(mask)
    config = SKIP.replace(min_rows=int(mask.sum()) + 1)
    weight.requires_grad_()
    outputs = nn.functional.linear(x, weight, bias), linear(x, weight, bias, config=config, valid_rows=ValidRows(mask))
    assert torch.equal(*(torch.autograd.grad(output, weight, g)[0] for output in outputs))


def token_model():
    """A model, a batch with labels on padding, and the batch without them."""
    mask = right_padded()
    inputs = {"input_ids": mask, "attention_mask": mask, "labels": torch.ones_like(mask)}
    right = {**inputs, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    return convert_linears(tiny("BertForTokenClassification", num_hidden_layers=1), config=SKIP), inputs, right


def evaluated(model, inputs, right):
    with torch.no_grad():
        model(**inputs)
    model.eval()(**inputs)
    model.train()


def unpadded(model, inputs, right):
    full = torch.ones_like(inputs["attention_mask"])
    model(**{**inputs, "attention_mask": full, "labels": full}).loss.backward()


def few_rows(model, inputs, right):
    convert_linears(model, config=SKIP.replace(min_rows=200))
    model(**inputs).loss.backward()
    convert_linears(model, config=SKIP)


def announced(model, inputs, right):
    with valid_rows(torch.ones_like(inputs["attention_mask"])):
        model(**{**right, "attention_mask": None}).loss.backward()


# what shows nothing of padding
BEFORE = {
    "nothing": lambda *_: None,
    "no backward": lambda model, inputs, right: model(**inputs),
    "zero gradient": lambda model, inputs, right: (model(**inputs).loss * 0).backward(),
    "overflow": lambda model, inputs, right: (model(**inputs).loss * float("inf")).backward(),
    **{step.__name__: step for step in (evaluated, unpadded, few_rows, announced)},
}


class TestGradientOnPadding:
    """The loss reads masked positions: an error, not a wrong gradient."""

    def test_a_model_that_reads_its_first_position_can_not_be_padded_on_the_left(self):
        with pytest.raises(PaddingGradientError):
            convert_linears(tiny_bert(), config=SKIP)(**batch(right_padded().flip(1))).loss.backward()

    def test_later_steps_are_checked_only_where_the_mask_asks_for_it(self):
        model, inputs, right = token_model()
        model(**right).loss.backward()
        before = model.bert.encoder.layer[0].output.dense.weight.grad.clone()
        model(**inputs).loss.backward()
        assert not torch.equal(before, model.bert.encoder.layer[0].output.dense.weight.grad)
        with pytest.raises(PaddingGradientError), valid_rows(inputs["attention_mask"], check=True):
            model(**inputs).loss.backward()

    def test_one_row_is_enough(self):
        mask = right_padded()
        x, weight, _, g = layer_pair(mask)
        g[1, 39, 3] = 1e-30
        output = linear(x, weight.requires_grad_(), config=SKIP, valid_rows=ValidRows(mask, check=True))
        with pytest.raises(PaddingGradientError, match="1 of 119 rows .* row 79 of 240"):
            output.backward(g)

    @pytest.mark.parametrize("before", BEFORE)
    def test_the_first_step_that_shows_something_is_checked(self, before):
        model, inputs, right = token_model()
        BEFORE[before](model, inputs, right)
        with pytest.raises(PaddingGradientError, match=r"119 of 119 rows .* row 50 of 240.*skip_padding=False"):
            model(**inputs).loss.backward()

    def test_a_mask_announced_by_hand_is_checked_too(self):
        model, inputs, _ = token_model()
        with pytest.raises(PaddingGradientError), valid_rows(inputs["attention_mask"], count=121):
            model(**inputs).loss.backward()
        layer = RMMLinear(16, 8, config=SKIP)
        with valid_rows(right_padded()):
            output = layer(torch.randn(6, 40, 16))
        with pytest.raises(PaddingGradientError):
            output.sum().backward()

    def test_an_overflow_is_left_to_the_grad_scaler(self):
        mask = right_padded()
        x, weight, _, g = layer_pair(mask)
        g[1, 39], g[0, 0] = float("nan"), float("inf")
        weight.requires_grad_()
        check = RowsCheck()
        linear(x, weight, config=SKIP, valid_rows=ValidRows(mask), rows_check=check).backward(g)
        assert not weight.grad.isfinite().all()
        assert not check.is_satisfied


class TestWhichMaskHoldsWhere:
    @pytest.mark.parametrize("given", ["by name", "by place", "around the model"])
    def test_all_layers_but_the_pooler_see_the_mask_and_none_without_one(self, given):
        model, inputs, mask = converted_bert()
        del inputs["attention_mask"]
        assert set(rows_seen(model, inputs).values()) == {None}
        if given == "around the model":
            with valid_rows(mask):
                seen = rows_seen(model, inputs)
            with pytest.raises(ValueError, match=r"\(40, 6\) fits none"), valid_rows(mask.t()):
                model(**inputs)
        elif given == "by place":
            seen = rows_seen(model, {}, inputs["input_ids"], mask)
        else:
            seen = rows_seen(model, {**inputs, "attention_mask": mask})
        assert seen.pop("bert.pooler.dense") is None
        assert len(seen) == 12
        assert all(found is mask for found in seen.values())

    @pytest.mark.parametrize("kind", ["T5", "Bart"])
    @pytest.mark.parametrize("with_decoder_mask", [True, False])
    def test_encoder_and_decoder_have_masks_of_their_own(self, kind, with_decoder_mask):
        if kind == "T5":
            changes = {"d_kv": 16, "d_ff": 64, "num_decoder_layers": 2, "decoder_start_token_id": 0}
        else:
            sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
            changes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
        model, cross = (
            tiny(f"{kind}ForConditionalGeneration", **changes),
            {"T5": "EncDecAttention", "Bart": "encoder_attn"}[kind],
        )
        # of one shape, so that only the right rule tells them apart
        mask, of_decoder = right_padded(), right_padded(LENGTHS.flip(0))
        labels = torch.randint(1, 50, mask.shape).masked_fill(of_decoder == 0, -100)
        inputs = {"input_ids": torch.randint(3, 50, mask.shape), "attention_mask": mask, "labels": labels}
        if with_decoder_mask:
            inputs["decoder_attention_mask"] = of_decoder
        exact = gradients(model, inputs)
        convert_linears(model, config=ROUNDED)
        for name, found in rows_seen(model, inputs).items():
            reads_memory = cross in name and name.endswith((".k", ".v", ".k_proj", ".v_proj"))
            if "encoder." in name.replace("decoder.", "") or reads_memory:
                assert found is mask, name
            else:
                assert found is (of_decoder if with_decoder_mask else None), name
        assert_near(gradients(model, inputs), exact)

    def test_memory_is_known_by_what_it_shows(self):
        memory, mask, of_memory = torch.randn(3, 5, 4), right_padded(torch.tensor([5, 3, 2]), 5), torch.ones(3, 5)
        scope = padding._Scope(ValidRows(mask), memory=memory, of_memory=ValidRows(of_memory))
        # as FSDP hands it on
        assert scope.rows_of(memory.view_as(memory)).mask is of_memory
        assert scope.rows_of(memory.detach()).mask is of_memory
        assert scope.rows_of(memory.clone()).mask is mask

    @pytest.mark.parametrize(
        "make",
        [
            # sequences of two kinds, and no model for each
            lambda: tiny("LxmertModel", l_layers=1, x_layers=1, r_layers=1),
            # time comes first
            lambda: transformers.XLNetModel(transformers.XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64)),
            lambda: nn.Sequential(nn.Linear(4, 4)),
        ],
        ids=["lxmert", "xlnet", "no transformer"],
    )
    def test_models_whose_mask_may_be_of_other_rows_are_left_alone_and_named(self, make):
        with pytest.warns(UserWarning, match="no part of the model takes an attention_mask.*valid_rows"):
            convert_linears(make(), config=SKIP)

    def test_a_part_converted_before_the_whole_does_not_hide_the_mask(self):
        model, inputs = tiny_bert(), batch(right_padded())
        convert_linears(model.bert.encoder, config=SKIP)
        with pytest.warns(UserWarning, match=r"BertEncoder was given a mask of shape \(6, 1, .*, 40\)"):
            model(**inputs)
        convert_linears(model, config=SKIP)
        seen = rows_seen(model, inputs)
        assert sum(found is inputs["attention_mask"] for found in seen.values()) == 12

    def test_a_vision_tower_is_not_under_the_texts_mask(self):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        # 5 patches and 5 tokens: shapes do not tell them apart
        model = tiny(
            "CLIPModel",
            text_config={**sizes, "vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 2},
            vision_config={**sizes, "image_size": 8, "patch_size": 4},
            projection_dim=16,
        )
        convert_linears(model, config=SKIP)
        mask = right_padded(torch.tensor([5, 3, 2]), 5)
        inputs = {"input_ids": torch.randint(3, 50, (3, 5)), "attention_mask": mask, "return_loss": True}
        seen = rows_seen(model, {**inputs, "pixel_values": torch.randn(3, 3, 8, 8)})
        texts = [name for name in seen if name.startswith("text_model.encoder")]
        assert texts
        assert [name for name, found in seen.items() if found is mask] == texts
        assert [name for name, found in seen.items() if found is not None] == texts

    def test_generation_is_left_alone(self):
        model = tiny("LlamaForCausalLM").eval()
        mask = right_padded().flip(1)
        inputs = {"input_ids": torch.randint(3, 50, mask.shape), "attention_mask": mask}
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        exact = model.generate(**inputs, **options)
        convert_linears(model, config=SKIP)
        assert torch.equal(exact, model.generate(**inputs, **options))
        # keys of earlier tokens in training mode: the mask is longer than the input
        model.train()
        past = model(**inputs, use_cache=True).past_key_values
        longer = torch.cat([mask, torch.ones(6, 1, dtype=mask.dtype)], 1)
        one = {"input_ids": mask[:, :1], "attention_mask": longer, "past_key_values": past}
        assert set(rows_seen(model, one).values()) == {None}

    def test_a_model_of_ones_own_is_hooked_at_its_outermost_module(self):
        class Own(nn.Sequential):
            def forward(self, x, attention_mask=None):
                return super().forward(x)

        model = convert_linears(Own(Own(nn.Linear(16, 16)), nn.Linear(16, 16)), config=SKIP)
        mask = right_padded()
        seen = rows_seen(model, {"x": torch.randn(6, 40, 16), "attention_mask": mask})
        assert list(seen) == ["0.0", "1"]
        assert all(found is mask for found in seen.values())

    def test_threads_do_not_see_each_others_masks(self):
        x = torch.zeros(2, 3, 4)
        seen = []
        with valid_rows(torch.ones(2, 3)):
            thread = threading.Thread(target=lambda: seen.append(current_valid_rows(x)))
            thread.start()
            thread.join()
            assert current_valid_rows(x) is not None
        assert seen == [None]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, IndexError])
    def test_a_forward_that_is_broken_off_leaves_no_mask_to_the_next_step(self, error):
        model, inputs, _ = converted_bert()

        def interrupt(module, args):
            raise error

        handle = model.bert.encoder.layer[1].register_forward_pre_hook(interrupt)
        with pytest.raises(error):
            model(**inputs)
        handle.remove()
        if error is KeyboardInterrupt:
            model(**inputs)
        assert current_valid_rows(torch.zeros(6, 40, 32)) is None

    def test_a_context_may_be_entered_again_and_within_itself(self):
        mask = right_padded()
        context = valid_rows(mask)
        x = torch.zeros(6, 40, 1)
        with context:
            with context:
                assert current_valid_rows(x).count == 121
            assert current_valid_rows(x).count == 121
        # the same memory, filled anew
        mask.fill_(1)
        with context:
            assert current_valid_rows(x).count == 240
        assert current_valid_rows(x) is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_keep_all_rows(use_reentrant):
    found = []
    for config in (SKIP.replace(skip_padding=False), SKIP):
        model, inputs = convert_linears(tiny_bert(), config=config), batch(right_padded())
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        found.append(gradients(model, inputs))
    layers = [name for name in found[0] if "encoder.layer" in name]
    assert len(layers) == 32
    for name in layers:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("min_rows", [1, 200])
def test_a_mask_announced_around_checkpoint_and_backward_keeps_dropout_in_step(use_reentrant, min_rows):
    mask = right_padded()
    x, weight, _, _ = layer_pair(mask)
    config = SKIP.replace(min_rows=min_rows)
    layer = RMMLinear(16, 8, config=config)
    seen = []

    def block(y):
        z = nn.functional.dropout(layer(y), 0.5)
        seen.append(z.detach())
        return z

    with valid_rows(mask):
        # a layer outside, or nothing would fit
        with set_checkpoint_early_stop(False):
            y = checkpoint(block, RMMLinear(16, 16, config=config)(x), use_reentrant=use_reentrant)
        y[mask != 0].sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_compiled_models_zero_the_rows():
    torch._dynamo.reset()
    mask = right_padded()
    x, _, _, g = layer_pair(mask)
    config = SKIP.replace(center=False)
    layer = RMMLinear(16, 8, config=config)

    def run(x, mask):
        with valid_rows(mask):
            return layer(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    with SavedTensors(layer) as kept:
        output = compiled(x, mask)
    torch.manual_seed(3)
    zeroed = linear(x.masked_fill((mask == 0).unsqueeze(-1), 0), layer.weight, layer.bias, config=config)
    ours, expected = (torch.autograd.grad(each, layer.weight, g)[0] for each in (output, zeroed))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert kept.bytes >= config.saved_bytes(mask.numel(), 16, torch.float32)


def test_a_compiled_hugging_face_model_has_one_graph():
    torch._dynamo.reset()
    model, inputs = tiny_bert(layers=1), batch(right_padded())
    exact = gradients(model, inputs)
    convert_linears(model, config=ROUNDED).compile(fullgraph=True, backend="aot_eager")
    assert_near(gradients(model, inputs), exact)


class TestHooks:
    def test_hooks_come_once_and_go_and_leave_those_of_others(self):
        model = tiny_bert()
        model.bert.register_forward_pre_hook(lambda module, args: None)
        for take_off in (revert_linears, lambda model: convert_linears(model, config=SKIP.replace(skip_padding=False))):
            convert_linears(convert_linears(model, config=SKIP), config=SKIP)
            hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
            assert hooked == ["bert"]
            assert (len(model.bert._forward_pre_hooks), len(model.bert._forward_hooks)) == (2, 1)
            take_off(model)
            assert len(model.bert._forward_pre_hooks) == 1
            assert not model.bert._forward_hooks
            assert not model.bert._forward_hooks_always_called

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_announce_their_own_masks(self, duplicate):
        model, inputs, _ = converted_bert()
        copied = duplicate(model)
        for name, gradient in gradients(model, inputs).items():
            assert torch.equal(gradient, gradients(copied, inputs)[name])
        revert_linears(copied)
        assert not copied.bert._forward_pre_hooks
        assert not any(hasattr(layer, "_rows_check") for layer in copied.modules())
        assert model.bert._forward_pre_hooks


class TestValidRows:
    def test_a_collators_count_is_taken_over_by_the_models_hook(self):
        model, inputs, mask = converted_bert()
        told = "count=120, but the mask marks 121 rows valid"
        with pytest.raises(ValueError, match=told), valid_rows(mask, count=120):
            model(**inputs)

    @pytest.mark.parametrize(
        ("mask", "count", "message"),
        [
            ([1, 0], None, "mask is list"),
            (torch.tensor(1), None, r"mask is shape \(\), torch.int64"),
            (torch.ones(2, dtype=torch.complex64), None, "complex64"),
            (torch.zeros(6, 40).masked_fill(torch.eye(6, 40) == 1, -1e9), None, "has negative values"),
            (torch.zeros(6, 40), None, r"shape \(6, 40\) marks no row valid"),
            (right_padded().t(), None, r"\(40, 6\) fits none .* shapes \(6, 40, 16\)"),
            *((torch.ones(6, 40), count, "is not a positive int") for count in (0, -1, True, 1.5)),
        ],
    )
    def test_masks_and_counts_that_are_none_or_fit_nothing_are_refused(self, mask, count, message):
        layer = RMMLinear(16, 8, config=SKIP)
        with pytest.raises(ValueError, match=message), valid_rows(mask, count=count):
            layer(torch.randn(6, 40, 16))

    def test_an_error_inside_is_not_hidden(self):
        layer = RMMLinear(16, 8, config=SKIP)

        def fail():
            with valid_rows(right_padded().t()):
                layer(torch.randn(6, 40, 16))
                raise KeyError("of the user's")

        with pytest.raises(KeyError):
            fail()
        assert current_valid_rows(torch.zeros(40, 6, 1)) is None
