"""A tokenizer of sixty words, sentences of them, and a trainer of TRL on these: nothing is downloaded."""

import pytest
import torch
from tiny_transformers import trainer_options

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"w{number}" for number in range(60)]


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sentences(number):
    """Of 10 to 30 words."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 31, (number,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, 60, (n,), generator=generator).tolist()) for n in lengths]


def sft_trainer(model, folder, callbacks=(), settings=(), **options):
    """A trainer of two steps, which writes into the folder."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    fixed = {"max_steps": 2, "max_length": 32, "bf16": False, "gradient_checkpointing": False, **dict(settings)}
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**trainer_options(folder, **fixed)),
        train_dataset=datasets.Dataset.from_list([{"text": text} for text in sentences(16)]),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **options,
    )
