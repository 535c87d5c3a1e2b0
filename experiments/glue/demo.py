"""The task `demo`: tell sentences of a small grammar from broken sentences. Generated, seeded, offline, learnable.

The grammar makes English sentences whose verbs agree with their subjects in number and person, across adjectives,
prepositional phrases and nested relative clauses that put nouns of another number in between:

    S         -> SUBJECT VP
    SUBJECT   -> PRONOUN | NP | NP and NP
    NP        -> DET (ADJ) NOUN (PP | RELATIVE)
    PP        -> PREP NP
    RELATIVE  -> that VP | that SUBJECT VERB
    VP        -> BE ADJ | LONE-VERB (ADVERB) | VERB NP

Half of the sentences are broken, in one of two ways. *Agreement*: one verb takes the wrong number. *Order*: a few
neighbouring words are shuffled until two words follow each other that never do in the grammar, so that a broken
sentence is never a good one by accident. Learning the second takes word order, the first takes finding each verb's
subject.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForSequenceClassification, RobertaTokenizerFast

from .tasks import DEMO_TASK

# the data, unlike the model, does not vary with the seed of a run: every run sees the same sentences
DATA_SEED = 20220131
TRAIN_ROWS, VALIDATION_ROWS = 3_360, 2_000
VOCABULARY_SIZE, LONGEST_SENTENCE = 600, 64
HIDDEN_SIZE, LAYERS, HEADS = 256, 2, 4

# nouns: plural, singular; verbs: third person singular, all others
Forms = tuple[tuple[str, str], ...]
NOUN_FORMS: Forms = (
    *(("birds", "bird"), ("cats", "cat"), ("children", "child")),
    *(("dogs", "dog"), ("men", "man"), ("nurses", "nurse")),
)
VERB_FORMS: Forms = (("calls", "call"), ("follows", "follow"), ("sees", "see"), ("watches", "watch"))
LONE_VERB_FORMS: Forms = (("laughs", "laugh"), ("sings", "sing"), ("sleeps", "sleep"))
_OTHER_FORM = {form: other for pair in (*VERB_FORMS, *LONE_VERB_FORMS) for form, other in (pair, pair[::-1])}
_ADJECTIVES, _ADVERBS, _PREPOSITIONS = ("happy", "old", "tall"), ("here", "today"), ("behind", "near")
_DETERMINERS = {"third": ("every", "the", "this"), "plural": ("many", "the", "these")}
_PRONOUNS = {"first": ("I",), "second": ("you",), "third": ("he", "she"), "plural": ("we", "they")}
_BE = {"first": "am", "second": "are", "third": "is", "plural": "are"}
WORDS_OF_KIND: dict[str, Sequence[str]] = {
    "determiner": sorted({*_DETERMINERS["third"], *_DETERMINERS["plural"]}),
    "pronoun": list(itertools.chain(*_PRONOUNS.values())),
    "noun": list(itertools.chain(*NOUN_FORMS)),
    "verb": list(itertools.chain(*VERB_FORMS)),
    "lone verb": list(itertools.chain(*LONE_VERB_FORMS)),
    "be": sorted(set(_BE.values())),
    "adjective": _ADJECTIVES,
    "adverb": _ADVERBS,
    "preposition": _PREPOSITIONS,
    "that": ("that",),
    "and": ("and",),
}


class Word(NamedTuple):
    """A word of a sentence with its part of speech and, for verbs, the person that it agrees with."""

    text: str
    kind: str
    person: str = ""


class Grammar:
    """Draws sentences. One instance holds one stream of random numbers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._choose = self._random.choice

    def sentence(self) -> list[Word]:
        subject, person = self._subject(depth=1)
        return subject + self._verb_phrase(person, depth=0)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _subject(self, depth: int) -> tuple[list[Word], str]:
        """Words of a subject and its person: first, second, third (singular) or plural."""
        if self._chance(0.15):
            person = self._choose(tuple(_PRONOUNS))
            return [Word(self._choose(_PRONOUNS[person]), "pronoun")], person
        if depth > 0 and self._chance(0.08):
            left, _ = self._noun_phrase(0)
            right, _ = self._noun_phrase(0)
            return [*left, Word("and", "and"), *right], "plural"
        return self._noun_phrase(depth)

    def _noun_phrase(self, depth: int) -> tuple[list[Word], str]:
        person = self._choose(("third", "plural"))
        words = [Word(self._choose(_DETERMINERS[person]), "determiner")]
        if self._chance(0.25):
            words.append(Word(self._choose(_ADJECTIVES), "adjective"))
        words.append(Word(self._random.choice(NOUN_FORMS)[person == "third"], "noun"))
        if depth > 0 and self._chance(0.35):
            inner, _ = self._noun_phrase(depth - 1)
            words += [Word(self._choose(_PREPOSITIONS), "preposition"), *inner]
        elif depth > 0 and self._chance(0.45):
            words += self._relative_clause(person, depth - 1)
        return words, person

    def _relative_clause(self, person: str, depth: int) -> list[Word]:
        if self._chance(0.5):
            return [Word("that", "that"), *self._verb_phrase(person, depth)]
        inner, inner_person = self._subject(depth)
        return [Word("that", "that"), *inner, self._verb(VERB_FORMS, inner_person, "verb")]

    def _verb_phrase(self, person: str, depth: int) -> list[Word]:
        if self._chance(0.3):
            return [Word(_BE[person], "be", person), Word(self._choose(_ADJECTIVES), "adjective")]
        if depth < 0 or self._chance(0.5):
            words = [self._verb(LONE_VERB_FORMS, person, "lone verb")]
            return [*words, Word(self._choose(_ADVERBS), "adverb")] if self._chance(0.5) else words
        inner, _ = self._noun_phrase(depth - 1)
        return [self._verb(VERB_FORMS, person, "verb"), *inner]

    def _verb(self, forms: Sequence[tuple[str, str]], person: str, kind: str) -> Word:
        return Word(self._random.choice(forms)[person != "third"], kind, person)

    def break_agreement(self, words: Sequence[Word]) -> list[Word]:
        """Give one verb of a sentence a form that its subject does not take."""
        at = self._random.choice([index for index, word in enumerate(words) if word.person])
        verb = words[at]
        if verb.kind == "be":
            text = self._choose([form for form in ("am", "are", "is") if form != verb.text])
        else:
            text = _OTHER_FORM[verb.text]
        return [*words[:at], Word(text, verb.kind, verb.person), *words[at + 1 :]]

    def break_order(self, words: Sequence[Word]) -> list[Word]:
        """Shuffle four neighbouring words of a sentence until some two neighbours are impossible in the grammar."""
        span = min(4, len(words))
        while True:
            start = self._random.randrange(len(words) - span + 1)
            shuffled = list(words[start : start + span])
            self._random.shuffle(shuffled)
            broken = [*words[:start], *shuffled, *words[start + span :]]
            if not _neighbours(broken) <= possible_neighbours():
                return broken


@functools.cache
def possible_neighbours() -> frozenset[tuple[str, str]]:
    """Return the pairs of kinds that are neighbours in the grammar, found in so many sentences that none is missed."""
    grammar = Grammar(5)
    return frozenset(itertools.chain(*(_neighbours(grammar.sentence()) for _ in range(4000))))


def _neighbours(words: Sequence[Word]) -> set[tuple[str, str]]:
    # "" is the beginning of a sentence and its end
    return set(itertools.pairwise(["", *(word.kind for word in words), ""]))


def as_text(words: Sequence[Word]) -> str:
    return " ".join(word.text for word in words) + " ."


def demo_splits(train_rows: int = TRAIN_ROWS, validation_rows: int = VALIDATION_ROWS) -> DatasetDict:
    """Generate both splits: half good, a quarter with broken agreement, a quarter with broken order.

    Returns:
        Splits `train` and `validation` with columns `sentence` and `label`; equal in every call.
    """
    grammar = Grammar(DATA_SEED)
    # in order of generation: good, broken agreement, good, broken order, and so on; a dictionary keeps it
    labels: dict[str, int] = {}
    while len(labels) < train_rows + validation_rows:
        words, kind = grammar.sentence(), len(labels) % 4
        if kind == 1:
            words = grammar.break_agreement(words)
        elif kind == 3:
            words = grammar.break_order(words)
        labels.setdefault(as_text(words), int(kind % 2 == 0))
    rows = {"sentence": list(labels), "label": list(labels.values())}
    everything = Dataset.from_dict(rows, features=DEMO_TASK.features)
    # the last rows are the validation split; the sampler shuffles the training split
    return DatasetDict(
        train=everything.select(range(train_rows)),
        validation=everything.select(range(train_rows, train_rows + validation_rows)),
    )


def demo_tokenizer(sentences: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train RoBERTa's tokenizer, a byte-level BPE, on sentences."""
    special = {token: number for number, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "<mask>"))}
    empty = RobertaTokenizerFast(vocab=special, merges=[], add_prefix_space=True, model_max_length=LONGEST_SENTENCE)
    return empty.train_new_from_iterator(sentences, VOCABULARY_SIZE, show_progress=False)


def demo_model(vocabulary_size: int, *, num_outputs: int, is_regression: bool) -> RobertaForSequenceClassification:
    """Build the small RoBERTa with random weights from torch's default generator."""
    config = RobertaConfig(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN_SIZE,
        # RoBERTa counts positions from the padding token's index plus one
        max_position_embeddings=LONGEST_SENTENCE + 2,
        # twice the usual: so small a model learns its embeddings faster from there
        initializer_range=0.04,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        problem_type="regression" if is_regression else "single_label_classification",
    )
    config.num_labels = num_outputs
    return RobertaForSequenceClassification(config)
