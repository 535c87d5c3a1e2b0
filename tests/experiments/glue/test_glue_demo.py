"""The generated task: grammatical sentences are, broken ones are not, and the data never changes."""

import hashlib
import itertools

import pytest
import torch
from datasets import DatasetDict

from experiments.glue import demo, demo_pretraining
from experiments.glue.demo import (
    LONE_VERB_FORMS,
    NOUN_FORMS,
    POSSIBLE_NEIGHBOURS,
    VERB_FORMS,
    Grammar,
    demo_splits,
    demo_tokenizer,
    has_possible_order,
)

THIRD = {pair[0] for pair in (*VERB_FORMS, *LONE_VERB_FORMS)}
PLAIN = {pair[1] for pair in (*VERB_FORMS, *LONE_VERB_FORMS)}
PERSON_OF_PRONOUN = {"I": "first", "you": "second", "he": "third", "she": "third", "we": "plural", "they": "plural"}
BE = {"first": "am", "second": "are", "third": "is", "plural": "are"}


@pytest.fixture(scope="module")
def splits() -> DatasetDict:
    return demo_splits(2000, 400)


class Reader:
    """A parser of the grammar, written from its description rather than from the generator: finds agreement errors."""

    def __init__(self, sentence: str) -> None:
        self.words = sentence.removesuffix(" .").split()
        self.at = 0
        self.errors = 0

    def peek(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def take(self) -> str:
        self.at += 1
        return self.words[self.at - 1]

    def is_verb(self) -> bool:
        return self.peek() in THIRD | PLAIN | {"am", "is", "are"}

    def subject(self) -> str:
        if self.peek() in PERSON_OF_PRONOUN:
            return PERSON_OF_PRONOUN[self.take()]
        person = self.noun_phrase()
        if self.peek() == "and":
            self.take()
            self.noun_phrase()
            return "plural"
        return person

    def noun_phrase(self) -> str:
        assert self.take() in {"a", "every", "the", "this", "many", "some", "these"}
        if self.peek() in demo._ADJECTIVES:
            self.take()
        noun = self.take()
        assert noun in {form for pair in NOUN_FORMS for form in pair}
        person = "plural" if noun in {pair[0] for pair in NOUN_FORMS} else "third"
        if self.peek() in demo._PREPOSITIONS:
            self.take()
            self.noun_phrase()
        elif self.peek() == "that":
            self.take()
            if self.is_verb():
                self.verb_phrase(person)
            else:
                self.verb(self.subject())
        return person

    def verb_phrase(self, person: str) -> None:
        verb = self.verb(person)
        if verb in ("am", "is", "are"):
            assert self.take() in demo._ADJECTIVES
        elif verb in {form for pair in LONE_VERB_FORMS for form in pair}:
            if self.peek() in demo._ADVERBS:
                self.take()
        else:
            self.noun_phrase()

    def verb(self, person: str) -> str:
        verb = self.take()
        if verb in ("am", "is", "are"):
            self.errors += verb != BE[person]
        else:
            assert verb in THIRD | PLAIN
            self.errors += verb not in (THIRD if person == "third" else PLAIN)
        return verb

    def sentence(self) -> int:
        """Number of verbs that don't agree; an AssertionError or IndexError where the order is impossible."""
        self.verb_phrase(self.subject())
        assert self.at == len(self.words)
        return self.errors


def test_good_sentences_parse_and_broken_ones_have_one_error_or_no_order(splits: DatasetDict) -> None:
    rows = [*splits["train"], *splits["validation"]]
    assert len({row["sentence"] for row in rows}) == len(rows) == 2400
    for at, row in enumerate(splits["train"]):
        assert row["label"] == (at + 1) % 2
        if at % 4 == 3:
            with pytest.raises((AssertionError, IndexError)):
                Reader(row["sentence"]).sentence()
        else:
            assert Reader(row["sentence"]).sentence() == (at % 4 == 1)


def test_every_neighbourhood_of_the_grammar_is_known_to_be_possible() -> None:
    grammar = Grammar(5)
    sentences = [grammar.sentence() for _ in range(4000)]
    assert all(has_possible_order(sentence) for sentence in sentences)
    seen = set()
    for sentence in sentences:
        kinds = ["", *(word.kind for word in sentence), ""]
        seen |= set(itertools.pairwise(kinds))
    # and none is called possible that never occurs, or shuffled sentences would be refused for nothing
    assert seen == POSSIBLE_NEIGHBOURS


def _accuracy_of_counts(words_in_a_row: int) -> float:
    """Validation accuracy of a logistic regression on counts of words, or of words in a row."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    counts = CountVectorizer(ngram_range=(1, words_in_a_row), token_pattern=r"\S+")
    splits = demo_splits()
    model = make_pipeline(counts, LogisticRegression(max_iter=1000)).fit(
        splits["train"]["sentence"], splits["train"]["label"]
    )
    return float(model.score(splits["validation"]["sentence"], splits["validation"]["label"]))


def test_words_alone_do_not_solve_the_task_and_pairs_of_words_only_partly() -> None:
    # 2,000 validation rows: a standard error of 0.01
    assert _accuracy_of_counts(1) < 0.58
    assert 0.70 < _accuracy_of_counts(2) < 0.82


def test_the_data_is_the_same_in_every_call_and_version() -> None:
    texts = "\n".join(demo_splits(200, 50)["train"]["sentence"])
    assert texts == "\n".join(demo_splits(200, 50)["train"]["sentence"])
    assert hashlib.sha256(texts.encode()).hexdigest()[:12] == "f947dfa90ea5"


def test_the_tokenizer_is_reproducible_and_loses_nothing(splits: DatasetDict) -> None:
    sentences = list(splits["train"]["sentence"])
    tokenizer, again = demo_tokenizer(sentences), demo_tokenizer(sentences)
    ids = tokenizer(sentences[:50])["input_ids"]
    assert ids == again(sentences[:50])["input_ids"]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == [f" {sentence}" for sentence in sentences[:50]]
    assert all(each[0] == tokenizer.bos_token_id and each[-1] == tokenizer.eos_token_id for each in ids)
    assert max(len(each) for each in tokenizer(sentences)["input_ids"]) <= tokenizer.model_max_length


def test_pretraining_is_reproducible_and_leaves_the_random_state_alone(
    splits: DatasetDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "HIDDEN_SIZE", 32)
    monkeypatch.setattr(demo_pretraining, "STEPS", 2)
    tokenizer = demo_tokenizer(list(splits["train"]["sentence"]))
    state = torch.get_rng_state()
    first = demo_pretraining.pretrained_weights(tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert demo_pretraining.pretrained_weights(tokenizer) is first
    torch.manual_seed(99)
    demo_pretraining._pretrain.cache_clear()
    again = demo_pretraining.pretrained_weights(tokenizer)
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_pretraining_sees_no_sentence_of_the_validation_split(splits: DatasetDict) -> None:
    tokenizer = demo_tokenizer(list(splits["train"]["sentence"]))
    held_out = frozenset(demo_splits()["validation"]["sentence"])

    def seen(held: frozenset[str], batches: int = 100) -> set[str]:
        stream = demo_pretraining._batches(tokenizer, held_out=held)
        rows = [row for _ in range(batches) for row in next(stream)[0]]
        return {tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows}

    assert not seen(held_out) & held_out
    # the grammar is small: without the exclusion there would be some
    assert seen(frozenset()) & held_out
