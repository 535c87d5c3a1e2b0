"""The Hadamard sketch in low bits on a GPU: x is read, codes are written, and the sketch stays in registers.

Row `block * kept + c` of the sketch is combination c of a block, so that a group of rows with a step of its own is a
whole number of neighbouring blocks, if `kept` divides it. A program sketches these blocks for a tile of features, one
after the other, finds the extremes of all, and rounds them. Where a mean is taken off, it also sums x over the blocks'
rows, and takes off what the codes stand for times S^T 1: its part of what is left of the mean of x.
"""

# a tuple of tiles grows in a loop that the compiler unrolls
# mypy: disable-error-code="assignment, misc"

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..backends import compiled_backend
from ..device_functions import awaited, converted, spread
from ..hadamard_sketch import reference as hadamard
from ..hadamard_sketch.entries import entries_of, half_places, sum_of_signs, sylvester_rows, sylvester_words
from ..hadamard_sketch.kernel import both_halves, hadamard_sketch, hadamard_sketch_and_sums, mixed
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..low_bit import reference as low_bit
from ..low_bit.kernel import (
    codes_of_sums,
    extremes,
    fp8_value,
    quantize,
    rest_of_sums,
    store_codes,
    store_scales,
    sums_of_codes,
)
from ..philox.kernel import CHOICE_STREAM, ROUNDING_STREAM, SIGN_STREAM, half_of_words, words_in_order
from ..quantize_and_mean.kernel import quantize_and_mean
from ..quantize_and_mean.reference import rounded_dtype
from ..strides import are_rows_aligned, rows_of
from .shapes import ORDER, holds

# Features of a program: more than rows are kept of a block, or the warps would share a product otherwise. Fewer of
# float32, of whose three parts each value takes more registers.
_TILE, _WIDE_TILE = 64, 32
# Values of the sketch that a thread holds. 128 take 15 to 20 % less instructions, as entries of H serve more of them,
# but all 255 registers: they are for int4's groups at ratio 0.5, centred, which would spill in eight warps.
_VALUES, _MANY_VALUES = 64, 128
# Warps of 64 features of float32: 32 or 64 values a thread.
_WIDE_WARPS = 8
# Blocks that are read at a time: a multiprocessor has few programs, which would all wait for one after the other. Where
# these are all that a program reads, it holds them in registers while it draws what is random; of more, that would
# leave registers for fewer programs. Half of them where each number has an address of its own, and of float32.
_AT_ONCE = 4
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("rows", "blocks", "shortest", "longer")


@triton.jit
def _drawn(
    seed,
    first_block,
    first_feature,
    blocks,
    shortest,
    longer,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """All that is random, of which each thread makes a part: one counter a lane, and few numbers.

    Returns:
        Of each row of the sketch, KEPT to a block: the two words of its signs; and S^T 1 from bit 16 on, above twice
        its part of the dither. The sum of S^T 1. Of each feature: twice its part of the dither.
    """
    RANK: tl.constexpr = BLOCKS * KEPT
    # first counters of 8 halves of a word, or 4 words
    OF_COLUMNS: tl.constexpr = RANK // 8
    OF_SIGNS: tl.constexpr = OF_COLUMNS + TILE // 8
    OF_CHOICE: tl.constexpr = OF_SIGNS + BLOCKS // 2
    LANES: tl.constexpr = 32 if OF_CHOICE < 32 else 64
    lane = tl.arange(0, LANES)
    counter = tl.where(lane < OF_COLUMNS, first_block * KEPT // 8 + lane, 0)
    counter = tl.where(
        (lane >= OF_COLUMNS) & (lane < OF_SIGNS), (blocks * KEPT + first_feature) // 8 + lane - OF_COLUMNS, counter
    )
    counter = tl.where((lane >= OF_SIGNS) & (lane < OF_CHOICE), first_block // 2 + lane - OF_SIGNS, counter)
    stream = tl.where(lane < OF_SIGNS, ROUNDING_STREAM, tl.where(lane < OF_CHOICE, SIGN_STREAM, CHOICE_STREAM))
    words = words_in_order(seed, counter, stream)

    row = tl.arange(0, RANK)
    of_row, of_column = half_of_words(words, row), half_of_words(words, OF_COLUMNS * 8 + tl.arange(0, TILE))
    choice = tl.gather(words, OF_CHOICE * 4 + row * 0, 0)
    low, high = sylvester_words(sylvester_rows(choice, row % KEPT, DEGREE, POLYNOMIAL))
    sign = OF_SIGNS * 4 + row // KEPT * 2
    low, high = low ^ tl.gather(words, sign, 0), high ^ tl.gather(words, sign + 1, 0)
    block = tl.minimum(first_block + row // KEPT, blocks - 1)
    ones = sum_of_signs(low, high, shortest + (block < longer).to(tl.int32))
    total = tl.sum(tl.where(first_block + row // KEPT < blocks, ones, 0), 0)
    return low, high, (ones << 16) | ((of_row * 2) & 0xFFFE), total, spread(of_column * 2)


@triton.jit
def _some_blocks(X, place, first_block, blocks, rows, row_stride, run, gap, is_feature, COUNT: tl.constexpr):
    """Both halves of blocks that follow each other, as two tuples."""
    x, more_of_x = (), ()
    for index in tl.static_range(COUNT):
        # The last block stands in for those that are not there: it changes no extreme, and masks nothing.
        block = tl.minimum(first_block + index, blocks - 1)
        one, other = both_halves(X, place, block, blocks, rows, row_stride, run, gap, is_feature)
        x += (one,)
        more_of_x += (other,)
    return x, more_of_x


@triton.jit(do_not_specialize=[*_ANY_ROWS, "run", "scale"])
def _hadamard_sketch_quantized_kernel(
    X,
    SEED,
    MEAN,
    CODES,
    STEPS,
    OFFSETS,
    REST,
    rows,
    features,
    width,
    blocks,
    shortest,
    longer,
    row_stride,
    column_stride,
    run,
    gap,
    mean_stride,
    scale,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    IS_WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    # programs next to each other in time read neighbouring parts of the same rows
    tiles = tl.cdiv(features, TILE)
    group = tl.program_id(0) // tiles
    first_feature = (tl.program_id(0) % tiles) * TILE
    first_block = group * BLOCKS
    feature = first_feature + tl.arange(0, TILE)
    is_feature = feature < features
    place, kept_place = half_places(CHUNK), tl.arange(0, KEPT)
    seed = tl.load(SEED)
    x_columns = X + feature.to(tl.int64)[None, :] * column_stride
    x, more_of_x = _some_blocks(x_columns, place, first_block, blocks, rows, row_stride, run, gap, is_feature, AT_ONCE)
    mean = tl.zeros((TILE,), tl.float32)
    if HAS_MEAN:
        mean = tl.load(MEAN + feature.to(tl.int64) * mean_stride, mask=is_feature, other=0.0).to(tl.float32)
        sums = tl.zeros((KEPT, TILE), tl.float32)
    low, high, ones_and_dither, sum_of_ones, twice_of_column = _drawn(
        seed,
        first_block,
        first_feature,
        blocks,
        shortest,
        longer,
        DEGREE,
        POLYNOMIAL,
        KEPT,
        BLOCKS,
        TILE,
    )
    products = ()
    for index in tl.static_range(BLOCKS):
        if index > 0 and index % AT_ONCE == 0:
            x, more_of_x = _some_blocks(
                x_columns, place, first_block + index, blocks, rows, row_stride, run, gap, is_feature, AT_ONCE
            )
        block = tl.minimum(first_block + index, blocks - 1)
        in_group = (block - first_block) * KEPT + kept_place
        of_rows = tl.gather(ones_and_dither, in_group, 0)
        first, second = entries_of(tl.gather(low, in_group, 0), tl.gather(high, in_group, 0), CHUNK, DTYPE)
        mine, more = x[index % AT_ONCE], more_of_x[index % AT_ONCE]
        # float32 is cut into parts in registers first
        if not IS_WIDE:
            mine, more = awaited(mine, BACKEND), awaited(more, BACKEND)
        product = mixed(first, second, mine, more, IS_WIDE, UPCAST)
        if HAS_MEAN:
            # in as many equal rows as the sketch has: nothing has to be exchanged
            is_block = tl.zeros((KEPT, CHUNK // 2), DTYPE)
            is_block += tl.where(first_block + index < blocks, 1.0, 0.0).to(DTYPE)
            sums = mixed(is_block, is_block, mine, more, IS_WIDE, UPCAST, sums)
            product -= (of_rows >> 16).to(tl.float32)[:, None] * mean[None, :]
        if index == 0:
            least, largest = extremes(product, product, product, True, IS_FP8)
        else:
            least, largest = extremes(product, least, largest, False, IS_FP8)
        products += (product,)
    scales = group.to(tl.int64) * features + feature
    inverse, minus_half_offset, half_step = store_scales(
        least, largest, scale, STEPS + scales, OFFSETS + scales, is_feature, LEVELS, IS_FP8, TILE
    )
    if HAS_MEAN:
        # what the codes stand for is products, less what is rounded off, for which the scale of the sketch is left out
        unit = half_step * (2.0**-15 / scale)
        if not IS_FP8:
            sums -= (unit * (sum_of_ones.to(tl.float32) * (32767.0 / KEPT)))[None, :]
    for index in tl.static_range(BLOCKS):
        block = first_block + index
        row = block * KEPT + kept_place
        # handed round once more: held from above, it would take registers
        of_rows = tl.gather(ones_and_dither, index * KEPT + kept_place, 0)
        codes_and_rest = sums_of_codes(
            products[index],
            scale,
            inverse[None, :],
            minus_half_offset[None, :],
            # ones are from bit 16 on, which are left out
            of_rows[:, None],
            twice_of_column[None, :],
            IS_FP8,
            UPCAST,
        )
        codes = codes_of_sums(codes_and_rest, BITS)
        if HAS_MEAN:
            # S^T 1 for KEPT equal rows. A block that stands in for another one counts for nothing.
            ones = tl.where(block < blocks, of_rows >> 16, 0).to(tl.float32)[:, None]
            if IS_FP8:
                # half of it, rounded as it will be multiplied by the sketch of g
                value = converted(fp8_value(codes) * half_step[None, :], X.dtype.element_ty, UPCAST)
                value = value.to(tl.float32) * (2.0 / scale)
            else:
                value = products[index] - rest_of_sums(codes_and_rest) * unit[None, :]
            sums -= value * ones
        is_row = tl.zeros((KEPT,), tl.int32) + block < blocks
        store_codes(codes, CODES, width, row, first_feature, is_row, is_feature, BITS, KEPT, TILE)
    if HAS_MEAN:
        tl.store(REST + scales, tl.sum(sums, 0) * (1.0 / KEPT) * (1.0 / rows), mask=is_feature)


@lru_cache
def _constants(kept: int, dtype: torch.dtype, kind: str, group: int, mean: bool, aligned: bool) -> Constants:
    """Constants of the kernel."""
    degree, wide = ORDER.bit_length() - 1, dtype == torch.float32
    tile = _WIDE_TILE if wide and kept < _WIDE_TILE else _TILE
    values = {
        "DEGREE": degree,
        "POLYNOMIAL": hadamard.POLYNOMIALS[degree],
        "KEPT": kept,
        "BLOCKS": group // kept,
        "CHUNK": ORDER,
        "TILE": tile,
        "AT_ONCE": min(group // kept, _AT_ONCE >> (wide + (not aligned))),
        "BITS": low_bit.BITS[kind],
        "IS_FP8": kind == low_bit.FP8,
        "HAS_MEAN": mean,
        "IS_WIDE": wide,
        "UPCAST": IS_INTERPRETED,
        "DTYPE": tl.float32 if IS_INTERPRETED else tl.float16 if dtype == torch.float16 else tl.bfloat16,
        "BACKEND": compiled_backend() if group // kept <= _AT_ONCE else None,
    }
    if wide:
        return Constants(values, num_warps=_WIDE_WARPS * tile // _TILE)
    # 4 warps for the 128 rows of int8's groups, and 8 for the 256 of int4's but in one case
    held = _MANY_VALUES if mean and group > 128 and kept == 32 and aligned else _VALUES
    return Constants(values, num_warps=max(4, group * tile // (32 * held)))


def hadamard_sketch_quantized(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round scale * sqrt(kept) * S^T (x - 1 mean^T) to 8, 4, 3 or 2 bits an element, for the Hadamard S.

    What `shapes.holds` denies is sketched into memory first, in float32.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides; or in runs, see `strides.in_runs`.
        seed: 0-d int64 on x's device, of the sketch and of the rounding.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations; of one that is no power of 2, the sketch goes by way of the memory.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share, in a column, a step and an offset.

    Returns:
        Codes (blocks * kept, ceil(features * bits / 8)), uint8, steps (groups, features), bfloat16, and offsets of the
        same shape and dtype, (0,) for fp8: those of the reference, but where a sum that is rounded otherwise falls on
        the other side of an edge. With a mean, the mean of x less X^T (S^T 1) / rows, with X what the codes stand for,
        rounded as `quantize_and_mean.reference.rounded_dtype` says, (features,), otherwise (0,), float32.
    """
    rows, features, *strides = rows_of(x)
    # products are scaled after the extremes have been found: any other scale would round these in another way
    is_scaled_after = math.frexp(scale)[0] == 0.5
    if not is_scaled_after or not holds(x, blocks=blocks, kept=kept, kind=kind, group=group):
        options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": torch.float32}
        if mean is None:
            sketch = hadamard_sketch(x, seed, None, **options)
            return *quantize(sketch, seed, None, kind=kind, group=group), empty(x, (0,), torch.float32)
        sketch, sums = hadamard_sketch_and_sums(x, seed, mean, **options)
        decoded = rounded_dtype(x.dtype, kind, blocks)
        options = {"blocks": blocks, "kept": kept, "scale": 1 / (kept * scale), "kind": kind, "group": group}
        return quantize_and_mean(sketch, seed, None, sums, rows=rows, **options, decoded=decoded)
    rank = blocks * kept
    codes = empty(x, (rank, low_bit.packed_width(features, kind)), torch.uint8)
    steps = empty(x, (ceil_div(rank, group), features), low_bit.SCALE_DTYPE)
    offsets = empty(x, (0,) if kind == low_bit.FP8 else tuple(steps.shape), low_bit.SCALE_DTYPE)
    rest = None if mean is None else empty(x, tuple(steps.shape), torch.float32)
    arguments = (
        x,
        seed,
        mean,
        codes,
        steps.view(torch.int16),
        offsets.view(torch.int16),
        rest,
        rows,
        features,
        codes.shape[1],
        blocks,
        rows // blocks,
        rows % blocks,
        *strides,
        0 if mean is None else mean.stride(0),
        scale,
    )
    constants = _constants(kept, x.dtype, kind, group, mean is not None, are_rows_aligned(x))
    grid = (steps.shape[0] * ceil_div(features, constants["TILE"]), 1, 1)
    launch(_hadamard_sketch_quantized_kernel, grid, arguments, constants)
    # one part after the other: the same in every run, which atomic additions are not
    left = empty(x, (0,), torch.float32) if rest is None else rest.sum(0)
    return codes, steps, offsets, left
