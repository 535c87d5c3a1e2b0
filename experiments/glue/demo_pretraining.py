"""Pretrain the demo's small RoBERTa without labels: it learns which words of a sentence have been replaced.

The pretext task (replaced token detection, as in ELECTRA, Clark et al. 2020) sees sentences of the grammar in which
some words are exchanged, mostly for a word of the same part of speech: the model must learn agreement and word order
to spot an exchange. No sentence of the validation split is seen, neither as drawn nor after the exchange.
"""

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerFast

from . import demo

STEPS = 400
_BATCH_SIZE = 48
_LEARNING_RATE = 1e-3
_WARMUP = 0.06
_REPLACED = 0.2
# of the replaced words, how many get a word of the same part of speech
_SAME_KIND = 0.7
# label of tokens that are no words
_IGNORED = -1
# weights by all inputs that they depend on
_PRETRAINED: dict[tuple[Any, ...], dict[str, Tensor]] = {}


def pretrained_weights(tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Return the state of the model's `roberta` after pretraining, which a process does once.

    The default random state is left as it was.
    """
    key = (tokenizer.backend_tokenizer.to_str(), demo.HIDDEN_SIZE, demo.LAYERS, STEPS)
    if key not in _PRETRAINED:
        _PRETRAINED[key] = _pretrain(tokenizer)
    return _PRETRAINED[key]


def _pretrain(tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(demo.DATA_SEED)
        encoder = demo.demo_model(len(tokenizer), num_outputs=2, is_regression=False).roberta
        detector = nn.Linear(demo.HIDDEN_SIZE, 1)
        parameters = [*encoder.parameters(), *detector.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
        warm_up = math.ceil(_WARMUP * STEPS)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (STEPS - step) / max(STEPS - warm_up, 1))
        )
        batches = _batches(tokenizer, held_out=frozenset(demo.demo_splits()["validation"]["sentence"]))
        for _ in tqdm(range(STEPS), desc="demo: pretraining", dynamic_ncols=True, disable=None):
            tokens, replaced = next(batches)
            hidden = encoder(input_ids=tokens, attention_mask=(tokens != tokenizer.pad_token_id).long())[0]
            is_word = replaced != _IGNORED
            loss = nn.functional.binary_cross_entropy_with_logits(
                detector(hidden).squeeze(-1)[is_word], replaced[is_word].float()
            )
            loss.backward()
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in encoder.state_dict().items()}


def _batches(tokenizer: PreTrainedTokenizerFast, *, held_out: frozenset[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of tokens and, for each token, whether its word was replaced, without the held-out sentences."""
    # another stream of sentences than the task's own
    grammar = demo.Grammar(demo.DATA_SEED + 1)
    draw = random.Random(demo.DATA_SEED + 2)

    @functools.cache
    def tokens_of(word: str) -> list[int]:
        return tokenizer.encode(word, add_special_tokens=False)

    while True:
        rows: list[Tensor] = []
        labels: list[Tensor] = []
        while len(rows) < _BATCH_SIZE:
            words = grammar.sentence()
            texts = [_replacement(word, draw) if draw.random() < _REPLACED else word.text for word in words]
            if demo.as_text(words) in held_out or f"{' '.join(texts)} ." in held_out:
                continue
            row, label = [tokenizer.bos_token_id], [_IGNORED]
            for word, text in zip(words, texts, strict=True):
                row += tokens_of(text)
                label += [int(text != word.text)] * len(tokens_of(text))
            end = [*tokens_of("."), tokenizer.eos_token_id]
            rows.append(torch.tensor(row + end))
            labels.append(torch.tensor(label + [_IGNORED] * len(end)))
        pad = nn.utils.rnn.pad_sequence
        yield (
            pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
            pad(labels, batch_first=True, padding_value=_IGNORED),
        )


def _replacement(word: demo.Word, draw: random.Random) -> str:
    kind = word.kind if draw.random() < _SAME_KIND else draw.choice(list(demo.WORDS_OF_KIND))
    return draw.choice(demo.WORDS_OF_KIND[kind])
