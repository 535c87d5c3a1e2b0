"""The trainers of TRL and of sentence-transformers, with RMMCallback: they train converted models, which work after."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from tiny_models import CONFIG, llama, roberta, sketched_weights
from tiny_text import sentences, sft_trainer, tokenizer
from tiny_transformers import trainer_options

from rmm_linear import RMMCallback, convert_linears, revert_linears, valid_rows
from rmm_linear.memory import measure_kept_bytes

# the callback's own warnings are about savings, and these models have no layer to spare
pytestmark = pytest.mark.filterwarnings("ignore:the sketched layers promise.*")


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model, before):
    return {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}


def assert_was_sketched(model, callback, before, layers):
    names = sketched_weights(model)
    assert len(names) == layers
    assert names <= changed(model, before)
    assert all(value.isfinite().all() for value in weights_of(model).values())
    assert callback.kept_bytes is not None
    assert callback.kept_bytes < callback.exact_bytes


@pytest.mark.parametrize("lora", [False, True])
def test_sft_trainer(tmp_path, lora):
    options = {"peft_config": pytest.importorskip("peft").LoraConfig(r=4, init_lora_weights=False)} if lora else {}
    target = {"target_modules": r".*\.lora_A\.default"} if lora else {}
    callback, trained = RMMCallback(config=CONFIG, **target), {}
    for name, callbacks in (("sketched", [callback]), ("exact", [])):
        torch.manual_seed(0)
        trainer = sft_trainer(llama(), tmp_path, callbacks, **options)
        before = weights_of(trainer.model)
        trainer.train()
        if callbacks:
            assert_was_sketched(trainer.model, callback, before, layers=4 if lora else 12)
        trained[name] = trainer
    # the first step's loss is the exact model's, and its gradients are not
    first = [next(row for row in trainer.state.log_history if "loss" in row) for trainer in trained.values()]
    assert first[0]["loss"] == first[1]["loss"]
    assert first[0]["grad_norm"] > first[1]["grad_norm"]
    model = trained["sketched"].model.eval()
    prompt = tokenizer()("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(written, revert_linears(model).generate(**prompt, max_new_tokens=4, do_sample=False))
    assert written.shape[1] > 3


def sentence_transformer(folder):
    st = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    roberta().roberta.save_pretrained(folder / "encoder")
    tokenizer().save_pretrained(folder / "encoder")
    encoder = modules.Transformer(str(folder / "encoder"), max_seq_length=40)
    return st.SentenceTransformer(modules=[encoder, modules.Pooling(32)], device="cpu")


@pytest.mark.parametrize("skip_padding", [False, True])
def test_sentence_transformer_trainer(tmp_path, skip_padding):
    st = pytest.importorskip("sentence_transformers")
    model = sentence_transformer(tmp_path)
    texts = sentences(32)
    callback = RMMCallback(config=CONFIG.replace(skip_padding=skip_padding), exclude_modules=["pooler.dense"])
    trainer = st.SentenceTransformerTrainer(
        model=model,
        args=st.SentenceTransformerTrainingArguments(**trainer_options(tmp_path, max_steps=2)),
        train_dataset=Dataset.from_list([{"anchor": texts[i], "positive": texts[i + 16]} for i in range(16)]),
        loss=pytest.importorskip("sentence_transformers.losses").MultipleNegativesRankingLoss(model),
        callbacks=[callback],
    )
    before = weights_of(model)
    trainer.train()
    assert_was_sketched(model, callback, before, layers=10)
    model.eval()
    encoded = model.encode(texts[:3], convert_to_tensor=True)
    assert torch.equal(encoded, revert_linears(model).encode(texts[:3], convert_to_tensor=True))


def test_sentence_transformers_keep_fewer_bytes_without_padding_if_the_mask_is_announced(tmp_path):
    # sentence-transformers 6 calls the model's forward, not the model: the hook with the mask never runs
    model = sentence_transformer(tmp_path).train()
    features = tokenizer()(sentences(8), padding=True, return_tensors="pt", return_token_type_ids=False)
    kept = []
    for skip_padding in (False, True):
        config = CONFIG.replace(skip_padding=skip_padding)
        convert_linears(model, config=config, exclude_modules=["pooler.dense"])
        with valid_rows(features["attention_mask"]):
            kept.append(measure_kept_bytes(model, dict(features)))
    assert kept[1] < kept[0]
