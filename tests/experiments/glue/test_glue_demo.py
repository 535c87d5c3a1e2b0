"""The generated task: grammatical sentences are, broken ones are not, and the data never changes."""

import hashlib

import pytest
import torch

from experiments.glue import demo, demo_pretraining
from experiments.glue.demo import Grammar, demo_splits, demo_tokenizer


@pytest.fixture(scope="module")
def splits():
    return demo_splits(2000, 400)


def test_every_neighbourhood_of_the_grammar_is_known_to_be_possible():
    grammar = Grammar(6)
    assert all(demo._neighbours(grammar.sentence()) <= demo.possible_neighbours() for _ in range(4000))


def test_the_data_is_balanced_without_repetitions_and_the_same_in_every_call_and_version(splits):
    rows = [*splits["train"], *splits["validation"]]
    assert len({row["sentence"] for row in rows}) == len(rows) == 2400
    assert sum(row["label"] for row in rows) == 1200
    # these were parsed: good ones have no error, broken agreement one, and broken order is no sentence
    texts = "\n".join(demo_splits(200, 50)["train"]["sentence"])
    assert texts == "\n".join(demo_splits(200, 50)["train"]["sentence"])
    assert hashlib.sha256(texts.encode()).hexdigest()[:12] == "f947dfa90ea5"


def test_pretraining_is_reproducible_and_leaves_the_random_state_alone(splits, monkeypatch):
    monkeypatch.setattr(demo, "HIDDEN_SIZE", 32)
    monkeypatch.setattr(demo_pretraining, "STEPS", 2)
    tokenizer = demo_tokenizer(list(splits["train"]["sentence"]))
    state = torch.get_rng_state()
    first = demo_pretraining.pretrained_weights(tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert demo_pretraining.pretrained_weights(tokenizer) is first
    torch.manual_seed(99)
    demo_pretraining._PRETRAINED.clear()
    again = demo_pretraining.pretrained_weights(tokenizer)
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_pretraining_sees_no_sentence_of_the_validation_split(splits):
    tokenizer = demo_tokenizer(list(splits["train"]["sentence"]))
    held_out = frozenset(demo_splits()["validation"]["sentence"])

    def seen(held, batches=40):
        stream = demo_pretraining._batches(tokenizer, held_out=held)
        rows = [row for _ in range(batches) for row in next(stream)[0]]
        return {tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows}

    assert not seen(held_out) & held_out
    # the grammar is small: without the exclusion there would be some
    assert seen(frozenset()) & held_out


def _accuracy_of_counts(words_in_a_row):
    """Validation accuracy of a logistic regression on counts of words, or of words in a row."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    counts = CountVectorizer(ngram_range=(1, words_in_a_row), token_pattern=r"\S+")
    model = make_pipeline(counts, LogisticRegression(max_iter=1000))
    train, validation = ([rows["sentence"], rows["label"]] for rows in demo_splits().values())
    return float(model.fit(*train).score(*validation))


@pytest.mark.slow
def test_words_alone_do_not_solve_the_task_and_pairs_of_words_only_partly():
    # 2,000 validation rows: a standard error of 0.01
    assert _accuracy_of_counts(1) < 0.58
    assert 0.70 < _accuracy_of_counts(2) < 0.82
