"""Row sampling on a GPU: what is random about it, and the sums over all rows, in a launch each.

In plain torch a draw is some hundred operators, nearly all of them for Philox. Here a program computes its own numbers
and looks for them among the cumulative weights. These are made by one program, which goes through the norms twice, in
place of some twenty launches: a rule made without measuring, for thousands of rows rather than millions. Sorting, for
WTA-CRS and for draws without replacement, is torch's.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..philox.kernel import CHOICE_STREAM, words_in_order, words_of_counter
from ..philox.reference import smallest_keys
from . import reference

# Draws of a program, and norms of a step.
_DRAWS, _NORMS = 256, 2048
_WARPS, _MANY_WARPS = 4, 8
# What is added to a number below 2**51, and taken off again, to round it to an integer: the even one of two as near.
_ROUNDING = tl.constexpr(float(1 << 52))
_TINY = tl.constexpr(torch.finfo(torch.float64).tiny)
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("rows", "rank", "steps")


@triton.jit(do_not_specialize=["count", "rows"])
def _uniform_draws_kernel(SEED, OUT, count, rows, REPLACEMENT: tl.constexpr, DRAWS: tl.constexpr):
    first = tl.program_id(0) * DRAWS
    counter = first // 4 + tl.arange(0, DRAWS // 4)
    word = words_in_order(tl.load(SEED), counter, counter * 0 + CHOICE_STREAM).to(tl.int64)
    if REPLACEMENT:
        word = (word * rows) >> 32
    draw = first.to(tl.int64) + tl.arange(0, DRAWS)
    tl.store(OUT + draw, word, mask=draw < count)


@triton.jit
def _is_finite(number):
    return tl.abs(number) < float("inf")


@triton.jit(do_not_specialize=["rows", "steps"])
def _sampling_weights_kernel(
    NORMS,
    WEIGHTS,
    ENDS,
    FACTOR,
    rows,
    norms_stride,
    unit,
    steps,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    # int64, as below: a part of a step may be beyond 2**31
    place = tl.arange(0, STEP).to(tl.int64)
    largest = tl.zeros((STEP,), tl.float64)
    others = tl.zeros((STEP,), tl.int32)
    # the interpreter wants a Python number in a loop
    for step in range(steps if STEPS is None else STEPS):
        row = step * STEP + place
        norm = tl.load(NORMS + row * norms_stride, mask=row < rows, other=0.0)
        is_finite = _is_finite(norm)
        largest = tl.maximum(largest, tl.where(is_finite, norm, 0.0))
        others += tl.where(is_finite, 0, 1)
    most, has_others = tl.max(largest, 0), tl.max(others, 0) > 0
    # no row at all has a norm: each counts for one
    has_weight = (most > 0) | has_others
    most = tl.maximum(most, _TINY)
    before = tl.sum(tl.zeros((STEP,), tl.int64), 0)
    for step in range(steps if STEPS is None else STEPS):
        row = step * STEP + place
        is_row = row < rows
        norm = tl.load(NORMS + row * norms_stride, mask=is_row, other=0.0)
        relative = tl.where(_is_finite(norm), norm / most, 1.0)
        weight = ((relative * unit + _ROUNDING) - _ROUNDING).to(tl.int64)
        weight = tl.maximum(weight, (relative > 0).to(tl.int64))
        weight = tl.where(is_row, tl.where(has_weight, weight, 1), 0)
        tl.store(WEIGHTS + row, weight, mask=is_row)
        tl.store(ENDS + row, before + tl.cumsum(weight, 0), mask=is_row)
        before += tl.sum(weight, 0)
    tl.store(FACTOR, tl.where(has_others, float("nan"), 1.0).to(tl.float64))


@triton.jit(do_not_specialize=_ANY_ROWS)
def _weighted_draws_kernel(
    SEED,
    WEIGHTS,
    ENDS,
    FACTOR,
    ORDER,
    SIZE,
    INDEX,
    SQUARED,
    rows,
    rank,
    steps,
    HAS_ORDER: tl.constexpr,
    DRAWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    is_draw = draw < rank
    # a fraction of 53 bits, out of two words of a counter's four
    first, second, third, fourth = words_of_counter(tl.load(SEED), draw >> 1, CHOICE_STREAM)
    is_odd = (draw & 1) == 1
    high, low = tl.where(is_odd, third, first), tl.where(is_odd, fourth, second)
    fraction = (((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)).to(tl.float64) * 2.0**-53
    total = tl.load(ENDS + (rows - 1))
    kept = total * 0
    if HAS_ORDER:
        size = tl.load(SIZE)
        kept = tl.where(size > 0, tl.load(ENDS + tl.maximum(size - 1, 0)), 0)
    tail = total - kept
    target = (fraction * tail.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, tl.maximum(tail - 1, 0)) + kept
    # the first row whose end is beyond the target
    lower, upper = draw * 0, draw * 0 + rows
    for _ in range(steps if STEPS is None else STEPS):
        middle = lower + (upper - lower) // 2
        is_open = lower < upper
        is_beyond = tl.load(ENDS + middle, mask=is_open, other=0) > target
        upper = tl.where(is_open & is_beyond, middle, upper)
        lower = tl.where(is_open & (is_beyond == 0), middle + 1, lower)
    factor = tl.load(FACTOR)
    if HAS_ORDER:
        is_kept = draw < size
        position = tl.where(is_kept, draw, tl.minimum(lower, rows - 1))
        weight = tl.load(WEIGHTS + position, mask=is_draw, other=1)
        drawn = tl.maximum(rank - size, 1).to(tl.float64) * tl.maximum(weight, 1).to(tl.float64)
        squared = factor * tl.where(is_kept, 1.0, tail.to(tl.float64) / drawn)
        index = tl.load(ORDER + position, mask=is_draw, other=0)
    else:
        weight = tl.load(WEIGHTS + lower, mask=is_draw & (lower < rows), other=1)
        squared = factor * total.to(tl.float64) / (rank.to(tl.float64) * weight.to(tl.float64))
        index = lower
    tl.store(INDEX + draw, index.to(tl.int32), mask=is_draw)
    tl.store(SQUARED + draw, squared.to(tl.float32), mask=is_draw)


@lru_cache
def _uniform_constants(replacement: bool) -> Constants:
    """Constants of the kernel."""
    return Constants({"REPLACEMENT": replacement, "DRAWS": _DRAWS}, num_warps=1)


@lru_cache
def _weights_constants(steps: int | None) -> Constants:
    """Constants of the kernel; `steps` is for the interpreter alone."""
    return Constants({"STEP": _NORMS, "STEPS": steps}, num_warps=_MANY_WARPS)


@lru_cache
def _weighted_constants(ordered: bool, steps: int | None) -> Constants:
    """Constants of the kernel; `steps` is for the interpreter alone."""
    return Constants({"HAS_ORDER": ordered, "DRAWS": _DRAWS, "STEPS": steps}, num_warps=_WARPS)


def uniform_draws(x: Tensor, seed: Tensor, *, rank: int, replacement: bool) -> Tensor:
    """Draw rows of x uniformly: those of the reference.

    Args:
        x: Shape (rows, features).
        seed: 0-d int64 on x's device.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.

    Returns:
        Row numbers, shape (rank,), int64.
    """
    rows = x.shape[0]
    count = rank if replacement else rows
    if count == 0:
        return reference.uniform_draws(x, seed, rank=rank, replacement=replacement)
    out = empty(x, (count,), torch.int64)
    grid = (ceil_div(count, _DRAWS), 1, 1)
    launch(_uniform_draws_kernel, grid, (seed, out, count, rows), _uniform_constants(replacement))
    return out if replacement else smallest_keys(out, rank)


def sampling_weights(x: Tensor, norms: Tensor) -> reference.Weights:
    """Return the integer sampling weights of the rows of x, those of the reference, their sums, and a factor.

    Args:
        x: Shape (rows, features), at least one row.
        norms: What they are proportional to, shape (rows,), float64, not negative.

    Returns:
        Weights and their cumulative sums, (rows,), int64; 1, or NaN where a norm is no finite number, 0-d float64.
    """
    rows = norms.shape[0]
    weights, ends = (empty(x, (rows,), torch.int64) for _ in range(2))
    factor = empty(x, (), torch.float64)
    steps = ceil_div(rows, _NORMS)
    arguments = (norms, weights, ends, factor, rows, norms.stride(0), reference.unit_of(rows), steps)
    launch(_sampling_weights_kernel, (1, 1, 1), arguments, _weights_constants(steps if IS_INTERPRETED else None))
    return weights, ends, factor


def weighted_draws(
    x: Tensor,
    seed: Tensor,
    weights: Tensor,
    ends: Tensor,
    factor: Tensor,
    order: Tensor | None,
    size: Tensor | None,
    *,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Draw rows of x by their weights: those of the reference.

    Args:
        x: Shape (rows, features), at least one row.
        seed: 0-d int64 on x's device.
        weights: Shape (rows,), int64, contiguous; in falling order where there is one.
        ends: Their cumulative sums, (rows,), int64, contiguous.
        factor: Of the squared entries of S, 0-d float64.
        order: Row numbers in the order of the weights, (rows,), int64, contiguous, or None.
        size: With an order: how many of the first are kept as they are, 0-d int64.
        rank: Number of rows.

    Returns:
        Row numbers, (rank,), int32, and squared entries of S, (rank,), float32.
    """
    rows = weights.shape[0]
    index = empty(x, (rank,), torch.int32)
    squared = empty(x, (rank,), torch.float32)
    # as many as halve the rows to nothing
    steps = rows.bit_length()
    arguments = (seed, weights, ends, factor, order, size, index, squared, rows, rank, steps)
    constants = _weighted_constants(order is not None, steps if IS_INTERPRETED else None)
    launch(_weighted_draws_kernel, (ceil_div(rank, _DRAWS), 1, 1), arguments, constants)
    return index, squared
