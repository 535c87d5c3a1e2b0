"""A tokenizer of sixty words, and sentences of them: nothing is downloaded."""

import pytest
import torch

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


def sentences(number: int) -> list[str]:
    """Of 10 to 30 words."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 31, (number,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, 60, (n,), generator=generator).tolist()) for n in lengths]
