"""The strided-block Hadamard sketch on a GPU: one pass over x, with the mixing matrix generated in registers.

A program takes one block of rows and a tile of features. It draws the block's signs and the kept rows of H, forms the
(kept, rows of the block) matrix of +-1, and multiplies the rows by it on the tensor cores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device_functions import converted, spread
from ..interpreter import IS_INTERPRETED
from ..philox.kernel import CHOICE_STREAM, SIGN_STREAM, random_word, sign_bit
from . import reference

# Rows of a block that are multiplied at a time; a product on the tensor cores needs at least 16.
_CHUNK = 64
_LEAST = 16
_TILE = 128


@triton.jit
def _parity(bits):
    """The number of 1 bits of each 32-bit number, modulo 2."""
    bits = bits ^ (bits >> 16)
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return bits & 1


@triton.jit
def _is_nonsquare(number, SQUARES: tl.constexpr):
    """1 if a number modulo the prime is no square: bit `number` of SQUARES is 1 for squares other than 0."""
    return 1 - ((tl.full(number.shape, SQUARES, tl.int64) >> number.to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def _is_paley_negative(row, column, PRIME: tl.constexpr, SQUARES: tl.constexpr):
    """1 where the entry of Paley's matrix is -1: order PRIME + 1 if PRIME % 4 is 3, 2 (PRIME + 1) if it is 1."""
    if PRIME % 4 == 3:
        outside = _is_nonsquare((row - column + PRIME) % PRIME, SQUARES)
        outside = tl.where(column == 0, 1, outside)
        return tl.where((row == column) | (row == 0), 0, outside)
    i, j = row // 2, column // 2
    core = _is_nonsquare((i - j + PRIME) % PRIME, SQUARES)
    core = tl.where((i == 0) | (j == 0), 0, core)
    is_odd_row, is_odd_column = row % 2, column % 2
    # where the core is 0, on the diagonal, the entries are [[1, -1], [-1, -1]]; elsewhere [[c, c], [c, -c]]
    return tl.where(i == j, is_odd_row | is_odd_column, core ^ (is_odd_row & is_odd_column))


@triton.jit
def _is_negative(row, column, PRIME: tl.constexpr, SQUARES: tl.constexpr):
    """1 where the entry of H is -1 (`reference.hadamard_entries`)."""
    if PRIME == 0:
        return _parity(row & column)
    base: tl.constexpr = PRIME + 1 if PRIME % 4 == 3 else 2 * (PRIME + 1)
    return _parity((row // base) & (column // base)) ^ _is_paley_negative(row % base, column % base, PRIME, SQUARES)


@triton.jit
def _sylvester_rows(seed, combination, ORDER: tl.constexpr, DEGREE: tl.constexpr, POLYNOMIAL: tl.constexpr):
    """The row of H of each combination: `reference.columns_of_words` for powers of 2."""
    word = random_word(seed, combination * 0, CHOICE_STREAM)
    power = 1 + ((word.to(tl.uint64) * (ORDER - 1)) >> 32).to(tl.int32)
    number = (combination * (combination + 1)) >> 1
    row = number * 0
    for bit in tl.static_range(DEGREE):
        row ^= power & -((number >> bit) & 1)
        power = (power << 1) ^ (-(power >> (DEGREE - 1)) & POLYNOMIAL)
    return row


@triton.jit
def _ranked_rows(seed, ORDER: tl.constexpr, ORDER_2: tl.constexpr, KEPT_2: tl.constexpr):
    """The rows of H in the order of their keys, for orders that are no power of 2, unlike ORDER_2 and KEPT_2."""
    item = tl.arange(0, ORDER_2)
    key = random_word(seed, item, CHOICE_STREAM)
    mine, other = key[:, None], key[None, :]
    is_before = (other < mine) | ((other == mine) & (item[None, :] < item[:, None]))
    rank = tl.sum((is_before & (item[None, :] < ORDER)).to(tl.int32), axis=1)
    rank = tl.where(item < ORDER, rank, ORDER_2 + KEPT_2)
    place = tl.arange(0, KEPT_2)
    return tl.sum(tl.where(rank[None, :] == place[:, None], item[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["rows", "blocks", "kept", "sign_stride", "scale"])
def _hadamard_sketch_kernel(
    X,
    SEED,
    MEAN,
    OUT,
    rows,
    features,
    blocks,
    kept,
    sign_stride,
    row_stride,
    column_stride,
    scale,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(0)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_feature = feature < features
    seed = tl.load(SEED)
    combination = tl.arange(0, KEPT_2)
    if PRIME == 0:
        chosen = _sylvester_rows(seed, combination, ORDER, DEGREE, POLYNOMIAL)
    else:
        chosen = _ranked_rows(seed, ORDER, ORDER_2, KEPT_2)
    sums = tl.zeros((KEPT_2, TILE), tl.float32)
    ones = tl.zeros((KEPT_2,), tl.float32)
    for chunk in range(CHUNKS):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        # int64: row * stride passes 2**31 in large batches
        row = (place * blocks + block).to(tl.int64)
        x = tl.load(
            X + row[:, None] * row_stride + feature[None, :].to(tl.int64) * column_stride,
            mask=(row < rows)[:, None] & is_feature[None, :],
            other=0.0,
        )
        if INTERPRETED:
            # the interpreter computes with numpy, which has no bfloat16
            x = x.to(tl.float32)
        # one counter for each row, which one thread computes for all threads
        sign = spread(sign_bit(seed, block * sign_stride + place, SIGN_STREAM).to(tl.int32))
        negative = _is_negative(chosen[:, None], place[None, :], PRIME, SQUARES) ^ sign[None, :]
        entries = (1 - 2 * negative).to(tl.float32)
        if MEAN is not None:
            ones += tl.sum(tl.where((row < rows)[None, :], entries, 0.0), axis=1)
        sums = tl.dot(entries.to(x.dtype), x, sums, input_precision=PRECISION)
    if MEAN is not None:
        mean = tl.load(MEAN + feature, mask=is_feature, other=0.0).to(tl.float32)
        sums -= ones[:, None] * mean[None, :]
    out_row = (block * kept + combination).to(tl.int64)
    tl.store(
        OUT + out_row[:, None] * features + feature[None, :],
        converted(sums * scale, OUT.dtype.element_ty, INTERPRETED),
        mask=(combination < kept)[:, None] & is_feature[None, :],
    )


def hadamard_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * sqrt(kept) * S^T (x - 1 mean^T) for float32, bfloat16 or float16; see the reference."""
    rows, features = x.shape
    out = x.new_empty((blocks * kept, features), dtype=dtype)
    if x.numel() == 0:
        return out
    block_rows = -(-rows // blocks)
    order = reference.hadamard_order(block_rows)
    prime = reference.paley_prime(order)
    degree = order.bit_length() - 1
    # float32 takes three products of tf32 parts, and three times the registers
    is_wide = x.dtype == torch.float32
    chunk = max(_LEAST, triton.next_power_of_2(min(order, _CHUNK // 2 if is_wide else _CHUNK)))
    _hadamard_sketch_kernel[blocks, triton.cdiv(features, _TILE)](
        x,
        seed,
        None if mean is None else mean.contiguous(),
        out,
        rows,
        features,
        blocks,
        kept,
        reference.sign_stride(block_rows),
        *x.stride(),
        float(scale),
        ORDER=order,
        ORDER_2=triton.next_power_of_2(order),
        DEGREE=degree,
        POLYNOMIAL=reference.POLYNOMIALS[degree],
        PRIME=prime,
        SQUARES=sum(1 << square for square in {number * number % prime for number in range(1, prime)}),
        KEPT_2=max(_LEAST, triton.next_power_of_2(kept)),
        CHUNK=chunk,
        CHUNKS=triton.cdiv(order, chunk),
        TILE=_TILE,
        PRECISION="tf32x3" if is_wide else "ieee",
        INTERPRETED=IS_INTERPRETED,
        num_warps=8 if is_wide else 4,
    )
    return out
