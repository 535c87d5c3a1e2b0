"""Batches that are padded to few lengths: few plans, the same loss, and no silent padding of what is not known."""

import copy
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn

from rmm_linear.checkpointing import checkpoint_model, checkpoint_step, remove_checkpointing

PLAN = {"budget": "100%", "strategy": "chen2016_sqrt"}


def encoder(**options) -> nn.Module:
    config = transformers.RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
        **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.RobertaForSequenceClassification(config).train()


def decoder() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def batch_of(length: int, *, tokens: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 50, (3, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    ids[0, length - 2 :] = 1
    labels = ids.masked_fill(mask == 0, -100) if tokens else torch.tensor([0, 1, 1])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(("kind", "pad_to"), [(encoder, 8), (decoder, [16, 8])])
def test_few_plans_and_the_same_losses(kind, pad_to):
    model = kind()
    plain = copy.deepcopy(model)
    checkpoint_model(model, batch_of(5, tokens=kind is decoder), pad_to=pad_to, **PLAN)
    for length in (5, 7, 13):
        batch = batch_of(length, tokens=kind is decoder)
        losses = [each(**batch).loss for each in (model, plain)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for each, loss in zip((model, plain), losses, strict=True):
            each.zero_grad()
            loss.backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    assert len(vars(model)["forward"].run.plans) == 2
    # what runs as it is written has no use for padding
    batch = batch_of(5, tokens=kind is decoder)
    with torch.no_grad():
        assert model(**batch).logits.shape == plain(**batch).logits.shape


def test_longer_batches_than_all_lengths_and_copies():
    model = encoder()
    checkpoint_model(model, batch_of(5, tokens=False), pad_to=[8], **PLAN)
    model = copy.deepcopy(model)
    for length in (9, 7):
        model(**batch_of(length, tokens=False)).loss.backward()
    shapes = [[tuple(each.shape) for each in _ids(variant)] for variant in vars(model)["forward"].run._variants]
    assert shapes == [[(3, 8)], [(3, 9)]]


def _ids(variant):
    hollow = (node.meta["val"] for node in variant.runner.capture.inputs)
    return [tensor for tensor in hollow if tensor.dtype == torch.int64 and tensor.dim() == 2 and len(tensor) == 3][:1]


def test_what_is_not_known_is_refused_by_name():
    model, batch = encoder(), batch_of(5, tokens=False)
    with pytest.raises(ValueError, match="does not know how to pad 'weights' of shape"):
        checkpoint_model(model, {**batch, "weights": torch.ones(3, 5)}, pad_to=8, **PLAN)
    with pytest.raises(ValueError, match=re.escape("this one has input_ids (3, 5)")):
        checkpoint_model(model, {"input_ids": batch["input_ids"]}, pad_to=8, **PLAN)
    with pytest.raises(ValueError, match="this one has nothing by name"):
        checkpoint_model(model, tuple(batch.values()), pad_to=8, **PLAN)
    with pytest.raises(ValueError, match="pad_to=0 is no length"):
        checkpoint_model(model, batch, pad_to=0, **PLAN)
    with pytest.raises(ValueError, match="without pad_to"):
        checkpoint_model(model, batch, pad_values={"labels": 0}, **PLAN)
    with pytest.raises(ValueError, match="needs a loss"):
        checkpoint_model(model, {name: batch[name] for name in ("input_ids", "attention_mask")}, pad_to=8, **PLAN)
    assert remove_checkpointing(model) is model
    assert model.training


def test_a_model_that_does_not_follow_the_mask_is_refused():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.calls = nn.Embedding(50, 8), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input_ids, attention_mask, labels):
            self.calls += 1
            self.seen += 1
            return nn.functional.cross_entropy(self.embed(input_ids).mean(1), labels)

    model = Mean()
    with pytest.raises(ValueError, match=r"padding changes the loss of the sample: .* at length 5, .* padded to 8"):
        checkpoint_model(model, batch_of(5, tokens=False), pad_to=8, **PLAN)
    assert (model.calls, model.seen) == (0, 0)


def test_other_tensors_are_padded_with_what_is_said():
    model = encoder()

    def loss_fn(model, weights, **batch):
        hidden = model.roberta(**batch).last_hidden_state.square().mean(-1)
        return (hidden * weights).sum() / weights.sum()

    def batch(length):
        plain = batch_of(length, tokens=False)
        return {
            "weights": plain["attention_mask"] * 3,
            **{name: plain[name] for name in ("input_ids", "attention_mask")},
        }

    step = checkpoint_step(model, loss_fn, batch(5), pad_to=8, pad_values={"weights": 0}, **PLAN)
    for length in (5, 7):
        torch.testing.assert_close(step(**batch(length)), loss_fn(model, **batch(length)), rtol=1e-5, atol=1e-6)
    assert len(step.plans) == 1


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 8), nn.BatchNorm1d(8)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        return (hidden * attention_mask.unsqueeze(2)).sum() / attention_mask.sum()


def test_batch_statistics_that_may_count_padding_are_refused():
    model = Normed().train()
    with pytest.raises(ValueError, match="pad_to can't be used with 'norm', a BatchNorm1d"):
        checkpoint_model(model, batch_of(5, tokens=False), pad_to=8, **PLAN)
    model.norm.eval()
    checkpoint_model(model, batch_of(5, tokens=False), pad_to=8, **PLAN)


class Positioned(Normed):
    def __init__(self):
        super().__init__()
        self.norm, self.places = nn.Identity(), nn.Embedding(8, 8)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.embedding(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        return (hidden * attention_mask.unsqueeze(2)).sum() / attention_mask.sum()


def test_a_sample_as_long_as_the_model_takes_is_told():
    with pytest.raises(ValueError, match="padded from 8 to 16, which failed .*pass a shorter sample"):
        checkpoint_model(Positioned().train(), batch_of(8, tokens=False), pad_to=8, **PLAN)


def test_what_is_as_wide_as_a_batch_is_long_by_chance_is_not_padded():
    model = encoder(problem_type="multi_label_classification", num_labels=4)
    plain = copy.deepcopy(model)

    def batch(length):
        return {**batch_of(length, tokens=False), "labels": torch.eye(4)[:3]}

    checkpoint_model(model, batch(5), pad_to=8, **PLAN)
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(each(**batch(4)).loss, plain(**batch(4)).loss, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"'labels' of shape \(3, 4\).*4 wide by chance, pass a sample of another length"
    ):
        checkpoint_model(copy.deepcopy(plain), batch(4), pad_to=8, **PLAN)
