"""The rows of an input that are kept exactly while the others are sketched: tokens at chosen positions of sequences.

The rows of g differ in size. If a classifier reads the first token alone, that row has most of the gradient in the
upper layers, and the whole gradient past the last layer's keys and values. A sketch spreads its noise evenly over the
rows of x, weighted by the rows of g, so that keeping these few rows removes their part of the variance.

The choice of rows may not depend on g, which is not known yet; a position in the sequence is known before the forward
pass. With the rows of K kept and S drawn for the others,

    grad_weight ~ sum_(i in K) g_i x_i^T + (S^T g_rest)^T (S^T x_rest)

is unbiased for any K, and its variance is the sketch's on the rest alone.

Sequences run along the last dimension but one of inputs of three dimensions or more. A matrix has no sequences, and all
of its rows are sketched.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """The division of an input's rows into kept and sketched rows, in plain numbers."""

    # number of rows that are kept exactly
    kept: int = 0
    sequences: int = 0
    # number of rows of each sequence, padding included
    length: int = 0
    # positions of the kept rows in every sequence, in order, if there is no index; negative from the sequence's end
    places: tuple[int, ...] = ()


NO_ROWS_KEPT = Layout()


def sequences_of(shape: Sequence[int]) -> int:
    """Return the number of sequences of an input (..., length, features); 0 for a matrix."""
    return math.prod(shape[:-2]) if len(shape) > 2 else 0


def layout_of(shape: Sequence[int], tokens: tuple[int, ...], index: Tensor | None = None) -> Layout:
    """Return the layout of the rows of an input of this shape.

    `tokens` are positions in a sequence, from its end if negative, and `index` has the numbers of the rows that are not
    left out, or is None for all. len(tokens) rows a sequence are kept, or all rows if there are fewer: if a sequence is
    too short for all of the tokens, other rows are kept instead.
    """
    sequences = sequences_of(shape) if tokens else 0
    if not sequences:
        return NO_ROWS_KEPT
    length = shape[-2]
    if index is not None:
        return Layout(min(sequences * len(tokens), index.shape[0]), sequences, length)
    places = _places(length, tokens)
    return Layout(sequences * len(places), sequences, length, places)


def _places(length: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    front, back = sorted(token for token in tokens if token >= 0), sorted(token for token in tokens if token < 0)
    # negative positions stay negative, so that a compiler gets the same constant for every length
    if length >= max(front, default=-1) + 1 - min(back, default=0):
        return (*front, *back)
    wanted = [token if token >= 0 else length + token for token in tokens]
    found = {place for place in wanted if 0 <= place < length}
    # the same number from every sequence, so that the bytes follow from the shape
    others = [place for place in range(length) if place not in found]
    return tuple(sorted([*found, *others[: len(tokens) - len(found)]]))


def kept_first(index: Tensor, sequences: int, length: int, tokens: tuple[int, ...]) -> Tensor:
    """Put the rows to keep in front of the others, without a device synchronisation.

    `index` has the numbers of the rows that are not left out, ascending; `length` counts the others too, and `tokens`
    are positions among the rows of `index` in their sequence. Both parts stay in order. If a sequence lacks a token,
    other rows fill the first part.
    """
    sequence = torch.div(index, length, rounding_mode="floor").long()
    counts = torch.zeros(sequences, dtype=torch.int64, device=index.device)
    counts.scatter_add_(0, sequence, torch.ones_like(sequence))
    from_start = torch.arange(index.shape[0], device=index.device) - (counts.cumsum(0) - counts)[sequence]
    from_end = from_start - counts[sequence]
    is_kept = torch.zeros_like(index, dtype=torch.bool)
    for token in tokens:
        is_kept |= (from_start if token >= 0 else from_end) == token
    return index[torch.argsort((~is_kept).to(torch.uint8), stable=True)]


def split(y: Tensor, layout: Layout, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the kept rows of y (rows, features), which share no memory with `y`, and the sketched rows.

    `index` has the rows that are not left out, kept rows first; if it is None, the layout's positions divide all rows.
    """
    if not layout.kept:
        return y.new_empty((0, y.shape[1])), y if index is None else y.index_select(0, index)
    if index is not None:
        return y.index_select(0, index[: layout.kept]), y.index_select(0, index[layout.kept :])
    deep = y.reshape(layout.sequences, layout.length, y.shape[1])
    kept = torch.stack([deep[:, place] for place in layout.places], 1)
    between, start = [], 0
    for place in layout.places:
        # consecutive kept positions of one sign: the slice between a front and a back position may be empty
        if start < place or (start >= 0 > place):
            between.append(deep[:, start:place])
        start = place + 1
    if start != 0:
        between.append(deep[:, start:])
    rest = between[0] if len(between) == 1 else torch.cat(between, 1) if between else deep[:, :0]
    return kept.flatten(0, 1), rest.flatten(0, 1)
