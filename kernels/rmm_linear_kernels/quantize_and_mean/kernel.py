"""Low bits on a GPU, and the mean of x less what they take of it: one reading of the sketch, or of x itself.

A program rounds a group of rows, as `low_bit.kernel` does, for a tile of features. It forms S^T 1 for these rows,
multiplies what their codes stand for by that, and writes what they take off the sum of x; with its share of the sums of
x, so that all programs' results add up to what is left. They are added up one after the other: the same in every run,
which atomic additions are not.

S^T 1 is a sum of +-1 for each row. For orders that are powers of two, 64 entries of a row of H are two words of bits,
which a few exclusive ors make of the row's number, and so are 64 signs: the sum is a count of bits.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..device_functions import converted, spread
from ..hadamard_sketch import reference as hadamard
from ..hadamard_sketch.entries import (
    choice_word,
    is_paley_negative,
    matrix_constants,
    parity,
    ranked_columns,
    sign_words,
    sum_of_signs,
    sylvester_rows,
    sylvester_words,
)
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..low_bit.kernel import (
    centred_rows,
    codes_of_sums,
    extremes_of_group,
    quantize_constants,
    random_part,
    rest_of_sums,
    store_codes,
    store_scales,
    sums_of_codes,
    values_of_halves,
)
from ..low_bit.reference import FP8, SCALE_DTYPE, packed_width
from ..strides import are_rows_aligned
from . import reference

# Sums of parts of x that a program adds up, more being added up first; and those that it reads at a time.
_MOST_SUMS, _SOME_SUMS = 128, 8
# With more warps, a thread would have 64 registers.
_MOST_WARPS = 16
# Rows of a block whose signs one load of random words gives.
_CHUNK = 64
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("parts", "rows", "rank", "shortest", "longer", "kept", "sign_stride")


@triton.jit
def _sums_of_rows(
    seed,
    block,
    combination,
    present,
    sign_stride,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """S^T 1 but for a factor, of a combination of a block of `present` rows each: whole numbers, int32."""
    if PRIME == 0:
        column = sylvester_rows(choice_word(seed), combination, DEGREE, POLYNOMIAL)
        entries_low, entries_high = sylvester_words(column)
    else:
        SOME: tl.constexpr = 8 if ORDER_2 > 8 else ORDER_2
        BASE: tl.constexpr = PRIME + 1 if PRIME % 4 == 3 else 2 * (PRIME + 1)
        column = tl.gather(ranked_columns(seed, ORDER, ORDER_2, KEPT_2), combination, 0)[:, None]
    total = present * 0
    for chunk in range(CHUNKS):
        low, high = sign_words(seed, block, chunk, sign_stride)
        here = tl.minimum(tl.maximum(present - chunk * 64, 0), 64)
        if PRIME == 0:
            flipped = parity((column >> 6) & chunk).to(tl.uint32) * 0xFFFFFFFF
            total += sum_of_signs(low ^ entries_low ^ flipped, high ^ entries_high ^ flipped, here)
        else:
            # some entries at a time: all would not fit the registers
            for start in range(0, ORDER_2, SOME):
                place = start + tl.arange(0, SOME)[None, :]
                odd = parity((column // BASE) & (place // BASE))
                odd ^= is_paley_negative(column % BASE, place % BASE, PRIME, SQUARES)
                signs = tl.where(place < 32, low[:, None], high[:, None]) >> (place & 31).to(tl.uint32)
                odd ^= (signs & 1).to(tl.int32)
                total += tl.sum(tl.where(place < here[:, None], 1 - 2 * odd, 0), axis=1)
    return total


@triton.jit(do_not_specialize=[*_ANY_ROWS, "scale"])
def _quantize_and_mean_kernel(
    Y,
    SEED,
    MEAN,
    SUMS,
    CODES,
    STEPS,
    OFFSETS,
    REST,
    parts,
    rows,
    rank,
    shortest,
    longer,
    kept,
    sign_stride,
    features,
    width,
    y_row,
    y_column,
    mean_stride,
    scale,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHARE: tl.constexpr,
    SOME_SUMS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    # integer codes that are not rounded once more need no decoding
    IS_DECODED: tl.constexpr = IS_FP8 or DTYPE != tl.float32
    tiles = tl.cdiv(features, BLOCK)
    # programs next to each other in time read neighbouring parts of the same rows
    group = tl.program_id(0) // tiles
    first_column = (tl.program_id(0) % tiles) * BLOCK
    first_row = group * GROUP
    last_row = tl.minimum(first_row + GROUP, rank) - 1
    column = first_column + tl.arange(0, BLOCK)
    is_column = column < features
    seed = tl.load(SEED)
    of_column = random_part(seed, rank + column)
    mean = tl.zeros((BLOCK,), tl.float32)
    if HAS_MEAN:
        mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)

    y, low, high = extremes_of_group(
        Y, y_row, y_column, mean, first_row, last_row, column, is_column, GROUP, CHUNK, IS_FP8
    )
    scales = group.to(tl.int64) * features + column
    inverse, minus_half_offset, half_step = store_scales(
        low, high, 1.0, STEPS + scales, OFFSETS + scales, is_column, LEVELS, IS_FP8, BLOCK
    )

    taken_off = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, GROUP, CHUNK):
        row = first_row + start + tl.arange(0, CHUNK)
        if GROUP > CHUNK:
            y = centred_rows(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        of_row = random_part(seed, row)
        codes_and_rest = sums_of_codes(
            y,
            1.0,
            inverse[None, :],
            minus_half_offset[None, :],
            2 * of_row[:, None],
            2 * of_column[None, :],
            IS_FP8,
            INTERPRETED,
        )
        codes = codes_of_sums(codes_and_rest, BITS)
        is_row = row <= last_row
        ones = is_row.to(tl.int32)
        if ORDER > 0:
            block = row // kept
            ones *= _sums_of_rows(
                seed,
                block,
                row % kept,
                shortest + (block < longer).to(tl.int32),
                sign_stride,
                ORDER,
                ORDER_2,
                DEGREE,
                POLYNOMIAL,
                PRIME,
                SQUARES,
                KEPT_2,
                CHUNKS,
            )
        # made by few threads, as the random parts are
        ones = spread(ones)
        if IS_DECODED:
            # Half of it, as the product with the sketch of g decodes it: some codes stand for more than float16 has.
            value = values_of_halves(
                codes,
                half_step[None, :],
                minus_half_offset[None, :],
                of_row[:, None],
                of_column[None, :],
                IS_FP8,
                INTERPRETED,
            )
            value = converted(value, DTYPE, INTERPRETED).to(tl.float32) * 2
        else:
            value = y - rest_of_sums(codes_and_rest) * (half_step * 2.0**-15)[None, :]
            # rests begin at 1 - 2**15
            taken_off += half_step * (tl.sum(ones, 0).to(tl.float32) * (32767.0 / 32768.0))
        if ORDER == 0:
            # of y itself, which is x about a mean
            value -= y
        taken_off += tl.sum(value * ones.to(tl.float32)[:, None], axis=0)
        # last: the other way round, it would take more registers
        store_codes(codes, CODES, width, row, first_column, is_row, is_column, BITS, CHUNK, BLOCK)
    if ORDER > 0:
        total = tl.zeros((BLOCK,), tl.float32)
        # some at a time: all would not fit the registers
        for start in range(0, SHARE, SOME_SUMS):
            share = group * SHARE + start + tl.arange(0, SOME_SUMS)
            sums = tl.load(
                SUMS + share.to(tl.int64)[:, None] * features + column[None, :],
                mask=(share < parts)[:, None] & is_column[None, :],
                other=0.0,
            )
            total += tl.sum(sums, axis=0)
    else:
        total = mean * (last_row + 1 - first_row).to(tl.float32)
    rest = (total - taken_off * scale) * (1.0 / rows)
    tl.store(REST + scales, rest, mask=is_column)


@lru_cache
def _constants(
    kind: str, group: int, order: int, kept: int, share: int, decoded: torch.dtype, has_mean: bool, aligned: bool
) -> Constants:
    """Constants of the kernel. Order 0 stands for S = I."""
    shared = quantize_constants(kind, group, has_mean, IS_INTERPRETED)
    matrix = matrix_constants(max(order, 1))
    values = {
        **shared.values,
        **matrix,
        "ORDER": order,
        # of Paley's matrices alone, whose columns are sorted
        "KEPT_2": triton.next_power_of_2(kept) if matrix["PRIME"] else 1,
        "CHUNKS": ceil_div(order, _CHUNK),
        "SHARE": share,
        "SOME_SUMS": min(share, _SOME_SUMS),
        "DTYPE": _TYPES[decoded],
    }
    # Paley's matrices are made an entry at a time, which takes registers; and many sums belong to few groups
    if matrix["PRIME"] or share > _SOME_SUMS:
        values["BLOCK"] = shared["BLOCK"] // 2
    warps = shared.num_warps
    if order == 0 and not aligned:
        # each number has an address of its own, which takes registers as well
        if warps < _MOST_WARPS:
            warps *= 2
        else:
            values["BLOCK"] = shared["BLOCK"] // 2
    return Constants(values, num_warps=warps)


def quantize_and_mean(
    y: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    sums: Tensor | None,
    *,
    rows: int,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
    decoded: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to a few bits, and return what is left of the mean of x next to that: y is read once.

    Args:
        y: The sketch of x, shape (blocks * kept, features), or x itself, float32, bfloat16 or float16, any strides.
        seed: The seed of both the sketch and the codes, 0-d int64.
        mean: Shape (features,), subtracted from every row of y, or None.
        sums: Sums of parts of x over their rows, shape (parts, features), float32, at least one part of any row; None
            where y is x itself.
        rows: Rows of x.
        blocks: Number of strided blocks K of the Hadamard sketch; 0 where y is x itself, S = I.
        kept: Hadamard rows kept of each block, p; 1 for S = I.
        scale: What X and S^T 1, as sums of +-1, are multiplied by: that of the sketch of g.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of y that share a step.
        decoded: Dtype that what the codes stand for is rounded to: bfloat16 or float16, or float32 for none.

    Returns:
        Codes, steps and offsets as `low_bit.quantize` returns them, bit for bit; and what `reference.mean_less_codes`
        does, (features,), float32; 0 of no rows.
    """
    rank, features = y.shape
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "kind": kind, "group": group}
    if y.numel() == 0:
        return reference.quantize_and_mean(y, seed, mean, sums, rows=rows, **options, decoded=decoded)
    groups, share = ceil_div(rank, group), 1
    if sums is not None:
        if sums.shape[0] > groups * _MOST_SUMS:
            sums = sums.sum(0, keepdim=True)
        share = triton.next_power_of_2(ceil_div(sums.shape[0], groups))
        sums = sums.contiguous()
    codes = empty(y, (rank, packed_width(features, kind)), torch.uint8)
    steps = empty(y, (groups, features), SCALE_DTYPE)
    offsets = empty(y, (0,) if kind == FP8 else (groups, features), SCALE_DTYPE)
    rest = empty(y, (groups, features), torch.float32)
    block_rows = ceil_div(rows, blocks) if blocks else 0
    order = hadamard.hadamard_order(block_rows) if blocks else 0
    constants = _constants(kind, group, order, kept, share, decoded, mean is not None, are_rows_aligned(y))
    arguments = (
        y,
        seed,
        mean,
        sums,
        codes,
        steps.view(torch.int16),
        offsets.view(torch.int16),
        rest,
        1 if sums is None else sums.shape[0],
        rows,
        rank,
        rows // blocks if blocks else 0,
        rows % blocks if blocks else 0,
        kept,
        hadamard.sign_stride(block_rows),
        features,
        codes.shape[1],
        *y.stride(),
        0 if mean is None else mean.stride(0),
        scale,
    )
    launch(_quantize_and_mean_kernel, (groups * ceil_div(features, constants["BLOCK"]), 1, 1), arguments, constants)
    # one part after the other: the same in every run, which atomic additions are not
    return codes, steps, offsets, rest.sum(0)
