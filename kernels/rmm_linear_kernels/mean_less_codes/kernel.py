"""The mean of x, less what the codes of its sketch take of it, on a GPU: one reading of the codes.

A program decodes some rows of a group of codes, for a tile of features. It forms S^T 1 for these rows, multiplies, and
writes what they take off the sum of x; with its share of the sums of x, so that all programs' results add up to what is
left. They are added up one after the other: the same in every run, which atomic additions are not.

S^T 1 is a sum of +-1 for each row. For orders that are powers of two, 64 entries of a row of H are two words of bits,
which a few exclusive ors make of the row's number, and so are 64 signs: the sum is a count of bits.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..builds import TYPE_NAMES, Build
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
from ..hadamard_sketch.kernel import either
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..low_bit.kernel import decoded
from ..low_bit.reference import BITS, FP8
from . import reference

# Rows of codes and features of a program: enough programs for a large GPU, and 64 values a thread, each of which draws
# what belongs to one row; 32 of fp8, of which 64 would spill.
_ROWS, _TILE, _WARPS = 64, 64, 2
# Rows of a block whose sum of signs bfloat16 holds.
_EXACT_ROWS = 256
# Sums of parts of x that a program adds up; more are added up first.
_MOST_SUMS = 16
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
def _mean_less_codes_kernel(
    SUMS,
    CODES,
    STEPS,
    OFFSETS,
    SEED,
    OUT,
    parts,
    rows,
    rank,
    shortest,
    longer,
    kept,
    sign_stride,
    features,
    width,
    codes_row,
    codes_column,
    scale,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BY_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    PARTS_OF_GROUP: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    tiles = tl.cdiv(features, TILE)
    # programs next to each other in time read neighbouring parts of the same rows
    part = tl.program_id(0) // tiles
    first_feature = (tl.program_id(0) % tiles) * TILE
    feature = first_feature + tl.arange(0, TILE)
    is_feature = feature < features
    share = part * SHARE + tl.arange(0, SHARE)
    sums = tl.load(
        SUMS + share.to(tl.int64)[:, None] * features + feature[None, :],
        mask=(share < parts)[:, None] & is_feature[None, :],
        other=0.0,
    )
    group = part // PARTS_OF_GROUP
    first_row = group * GROUP + (part % PARTS_OF_GROUP) * ROWS
    row = first_row + tl.arange(0, ROWS)
    is_row = row < tl.minimum((group + 1) * GROUP, rank)
    seed = tl.load(SEED)
    value = decoded(
        CODES,
        STEPS,
        OFFSETS,
        seed,
        group,
        first_row,
        is_row,
        first_feature,
        rank,
        features,
        width,
        codes_row,
        codes_column,
        BITS,
        IS_FP8,
        ROWS,
        TILE,
        INTERPRETED,
    )
    # Half of it, as the product with the sketch of g decodes it: some codes stand for more than float16 has, and code 0
    # may be one of them, which is read where there is no row.
    value = converted(0.5 * value, DTYPE, INTERPRETED)
    ones = is_row.to(tl.int32)
    if ORDER > 0:
        block = row // kept
        present = shortest + (block < longer).to(tl.int32)
        ones *= _sums_of_rows(
            seed,
            block,
            row % kept,
            present,
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
    ones = spread(ones).to(tl.float32)
    if BY_DOT:
        # by the tensor cores, in 16 equal rows: values go there as they are rounded, and not back to float32
        equal = tl.broadcast_to(ones[None, :], (16, ROWS))
        if INTERPRETED:
            product = tl.dot(equal, value.to(tl.float32), input_precision="ieee")
        else:
            product = tl.dot(equal.to(DTYPE), value)
        taken_off = tl.reduce(product, 0, either)
    else:
        taken_off = tl.sum(value.to(tl.float32) * ones[:, None], axis=0)
    taken_off *= 2 * scale
    rest = (tl.sum(sums, axis=0) - taken_off) * (1.0 / rows)
    tl.store(OUT + part.to(tl.int64) * features + feature, rest, mask=is_feature)


@lru_cache
def _constants(kind: str, group: int, order: int, kept: int, share: int, dtype: torch.dtype) -> Constants:
    """Constants of the kernel; the launcher and `builds` share them. Order 0 stands for S = I."""
    matrix = matrix_constants(max(order, 1))
    values = {
        **matrix,
        "GROUP": group,
        "BITS": BITS[kind],
        "IS_FP8": kind == FP8,
        "ORDER": order,
        # of Paley's matrices alone, whose columns are sorted
        "KEPT_2": triton.next_power_of_2(kept) if matrix["PRIME"] else 1,
        "CHUNKS": ceil_div(order, _CHUNK),
        "SHARE": share,
        "ROWS": _ROWS,
        "TILE": _TILE,
        "BY_DOT": dtype != torch.float32 and order <= _EXACT_ROWS,
        "DTYPE": _TYPES[dtype],
        "INTERPRETED": IS_INTERPRETED,
    }
    return Constants(values, num_warps=2 * _WARPS if kind == FP8 else _WARPS)


def mean_less_codes(
    sums: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    *,
    rows: int,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
    decoded: torch.dtype,
) -> Tensor:
    """Return the mean of x less X^T (S^T 1) / rows, for what the codes stand for as X.

    Args:
        sums: Sums of parts of x over their rows, shape (parts, features), float32, at least one part of any row.
        codes: As `low_bit.quantize` returns them, shape (blocks * kept, ...), any strides.
        steps: As `low_bit.quantize` returns them.
        offsets: As `low_bit.quantize` returns them.
        seed: The seed of both the sketch and the codes, 0-d int64.
        rows: Rows of x.
        blocks: Number of strided blocks K of the Hadamard sketch; 0 where the codes are those of x itself, S = I.
        kept: Hadamard rows kept of each block, p; 1 for S = I.
        scale: What X and S^T 1, as sums of +-1, are multiplied by: that of the sketch of g.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share a step.
        decoded: Dtype that X is rounded to: bfloat16 or float16, or float32 for none.

    Returns:
        Shape (features,), float32; 0 of no rows.
    """
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "kind": kind, "group": group}
    if codes.numel() == 0:
        return reference.mean_less_codes(sums, codes, steps, offsets, seed, rows=rows, **options, decoded=decoded)
    rank, features = codes.shape[0], steps.shape[1]
    programs = ceil_div(rank, group) * ceil_div(group, _ROWS)
    if sums.shape[0] > programs * _MOST_SUMS:
        sums = sums.sum(0, keepdim=True)
    share = triton.next_power_of_2(ceil_div(sums.shape[0], programs))
    block_rows = ceil_div(rows, blocks) if blocks else 0
    order = hadamard.hadamard_order(block_rows) if blocks else 0
    rest = torch.empty((programs, features), dtype=torch.float32, device=codes.device)
    arguments = (
        sums.contiguous(),
        codes,
        steps.contiguous().view(torch.int16),
        offsets.contiguous().view(torch.int16),
        seed,
        rest,
        sums.shape[0],
        rows,
        rank,
        rows // blocks if blocks else 0,
        rows % blocks if blocks else 0,
        kept,
        hadamard.sign_stride(block_rows),
        features,
        codes.shape[1],
        *codes.stride(),
        scale,
    )
    constants = _constants(kind, group, order, kept, share, decoded)
    launch(_mean_less_codes_kernel, (programs * ceil_div(features, _TILE), 1, 1), arguments, constants)
    return rest.sum(0)


def builds() -> list[Build]:
    """Return what a training run compiles: ratio 0.5 of full blocks, for each kind; fp8 rounded to bfloat16.

    Returns:
        int8 also with sums of many blocks, for small and large blocks; and for x itself, in every dtype.
    """
    found = [_build(kind, torch.bfloat16 if kind == FP8 else torch.float32) for kind in BITS]
    for order, share in ((64, 16), (60, 2), (512, 1)):
        found.append(_build("int8", torch.float32, order=order, share=share))
    return [*found, *(_build("int8", dtype, order=0) for dtype in _TYPES)]


def _build(kind: str, dtype: torch.dtype, *, order: int = 64, share: int = 1) -> Build:
    shared = _constants(kind, 1024 // BITS[kind], order, 32, share, dtype)
    pointers = {"SUMS": "*fp32", "CODES": "*u8", "STEPS": "*i16", "OFFSETS": "*i16", "SEED": "*i64", "OUT": "*fp32"}
    sizes = ("features", "width", "codes_row")
    return Build(
        f"mean_less_codes {kind} {TYPE_NAMES[dtype]} order={order} share={share}",
        _mean_less_codes_kernel,
        pointers | dict.fromkeys((*_ANY_ROWS, *sizes), "i32") | {"scale": "fp32"},
        {"codes_column": 1, **shared.values},
        (*pointers, *sizes),
        num_warps=shared.num_warps,
        uses_tensor_cores=shared["BY_DOT"],
    )
