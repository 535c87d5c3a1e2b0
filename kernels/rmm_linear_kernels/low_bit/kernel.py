"""Low-bit storage as Triton kernels: the codes, steps and offsets of `reference.py`, bit for bit.

A program of `_quantize_kernel` holds a group of rows of some columns in registers, so that y is read once. Both kernels
generate the dither in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device_functions import converted, spread
from ..interpreter import IS_INTERPRETED
from ..philox.kernel import ROUNDING_STREAM, random_half
from .reference import BITS, CENTRE, MARGIN, SCALE_DTYPE, packed_width

# Rows of y that a program's registers hold; a larger group is read twice.
_MOST_ROWS = 512
_DECODED_COLUMNS = 128
_MARGIN = tl.constexpr(MARGIN)
_CENTRE = tl.constexpr(CENTRE)


@triton.jit
def _rounded_outwards(value, UP: tl.constexpr):
    """The nearest bfloat16 that is not below (UP) or not above a float32, as 16 bits in an int32."""
    # A bfloat16 is the upper half of a float32: truncation rounds towards zero, and adding 1 rounds away from zero.
    bits = value.to(tl.int32, bitcast=True)
    is_away = (bits >= 0) if UP else (bits < 0)
    upper = ((bits >> 16) & 0xFFFF) + (is_away & ((bits & 0xFFFF) != 0)).to(tl.int32)
    return tl.where(value != value, 0x7FC0, upper)


@triton.jit
def _widened(upper):
    """The float32 of a bfloat16's 16 bits, as integers, since the interpreter has no bfloat16 arithmetic."""
    return (upper.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fused(a, b, c, INTERPRETED: tl.constexpr):
    """Return a * b + c, rounded once in the interpreter too."""
    if INTERPRETED:
        total = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        total = tl.fma(a, b, c)
    return total


@triton.jit
def _random_part(seed, index):
    """A row's or a column's part of the dither, in the lowest 15 bits."""
    return spread(random_half(seed, index, ROUNDING_STREAM).to(tl.int32))


@triton.jit
def _packed_words(codes, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Join neighbouring columns until a byte is full: two codes of int4, four of int2."""
    words = codes
    if BITS < 8:
        even, odd = tl.split(tl.reshape(words, (ROWS, COLUMNS // 2, 2)))
        words = even | (odd << BITS)
    if BITS < 4:
        even, odd = tl.split(tl.reshape(words, (ROWS, COLUMNS // 4, 2)))
        words = even | (odd << 2 * BITS)
    return words


@triton.jit
def _unpacked(words, BITS: tl.constexpr):
    """The codes of words of `_packed_words`, in the order of the columns."""
    if BITS == 4:
        words = tl.interleave(words, words >> 4)
    elif BITS == 2:
        words = tl.interleave(tl.interleave(words, words >> 4), tl.interleave(words >> 2, words >> 6))
    return words & ((1 << BITS) - 1)


@triton.jit
def _least(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _centred_rows(Y, y_row, y_column, mean, row, column, is_column):
    """Rows of y - mean, float32; 0 - mean in columns beyond the last."""
    at = Y + row.to(tl.int64)[:, None] * y_row + column.to(tl.int64)[None, :] * y_column
    return tl.load(at, mask=is_column[None, :], other=0).to(tl.float32) - mean[None, :]


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(
    Y,
    SEED,
    MEAN,
    CODES,
    STEPS,
    OFFSETS,
    rows,
    features,
    width,
    y_row,
    y_column,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    blocks = tl.cdiv(features, BLOCK)
    group = tl.program_id(0) // blocks
    first_column = (tl.program_id(0) % blocks) * BLOCK
    first_row = group * GROUP
    last_row = tl.minimum(first_row + GROUP, rows) - 1
    column = first_column + tl.arange(0, BLOCK)
    is_column = column < features
    seed = tl.load(SEED)
    of_column = _random_part(seed, rows + column)
    mean = tl.zeros((BLOCK,), tl.float32)
    if MEAN is not None:
        mean = tl.load(MEAN + column, is_column, other=0).to(tl.float32)

    # the least and the largest element of the group, or NaN if an element is NaN
    for start in tl.static_range(0, GROUP, CHUNK):
        row = first_row + start + tl.arange(0, CHUNK)
        # Rows beyond the last one are loaded as copies of it, which change neither extreme.
        y = _centred_rows(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        if start == 0:
            low, high = y, y
        else:
            low, high = _least(low, y), tl.maximum(high, y)
    low = tl.reduce(low, 0, _least)
    high = spread(tl.where(low != low, low, tl.max(high, 0)))

    scales = group.to(tl.int64) * features + column
    offset_bits = _rounded_outwards(spread(low), False)
    offset = _widened(offset_bits)
    tl.store(OFFSETS + scales, offset_bits.to(tl.int16), is_column)
    # halves: the difference of 3e38 and -3e38 overflows
    over_range: tl.constexpr = 2.0 / (2**BITS - 1 - 2 * _MARGIN)
    step_bits = _rounded_outwards((high * 0.5 - offset * 0.5) * over_range, True)
    # 2**-126 is the least step but 0
    step_bits = tl.where(step_bits == 0, 0, tl.maximum(step_bits, 0x80))
    tl.store(STEPS + scales, step_bits.to(tl.int16), is_column)
    step = _widened(step_bits)
    # in a group of equal elements, each value is the offset for any code
    inverse = tl.where(step == 0, 0.0, tl.div_rn(tl.full((BLOCK,), 2.0, tl.float32), step))
    inverse, minus_half_offset = spread(inverse), spread(offset * -0.5)

    # 8 columns a thread, the width of a thread's load
    place = tl.max_contiguous(first_column * BITS // 8 + tl.arange(0, BLOCK * BITS // 8), BITS)
    for start in tl.static_range(0, GROUP, CHUNK):
        row = first_row + start + tl.arange(0, CHUNK)
        if GROUP > CHUNK:
            y = _centred_rows(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        twice_the_dither = (2 * _random_part(seed, row)[:, None] + 2 * of_column[None, :]) & 0xFFFE
        # the quotient in units of 2**-15 is the lower bits of a number in [256, 512)
        halves = _fused(y, 0.5, minus_half_offset[None, :], INTERPRETED)
        quotient = _fused(halves, inverse[None, :], 256.0 + _MARGIN, INTERPRETED)
        codes = ((quotient.to(tl.int32, bitcast=True) << 1) + twice_the_dither) >> 16
        # The mask keeps a code made of NaN within its own bits. Unused bits of the last byte of a row are 0.
        codes = tl.where(is_column[None, :], codes & ((1 << BITS) - 1), 0)
        words = _packed_words(codes, BITS, CHUNK, BLOCK)
        inside = (row <= last_row)[:, None] & (place < width)[None, :]
        to = CODES + row.to(tl.int64)[:, None] * width + place[None, :]
        tl.store(to, (words & 0xFF).to(tl.uint8), inside)


@triton.jit(do_not_specialize=["rows"])
def _dequantize_kernel(
    CODES,
    STEPS,
    OFFSETS,
    SEED,
    OUT,
    rows,
    features,
    width,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    CHUNKS: tl.constexpr = (GROUP + CHUNK - 1) // CHUNK
    blocks = tl.cdiv(features, BLOCK)
    chunk = tl.program_id(0) // blocks
    first_column = (tl.program_id(0) % blocks) * BLOCK
    group = chunk // CHUNKS
    row = group * GROUP + (chunk % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    is_row = row < tl.minimum((group + 1) * GROUP, rows)
    column = first_column + tl.arange(0, BLOCK)
    is_column = column < features
    seed = tl.load(SEED)

    place = first_column * BITS // 8 + tl.arange(0, BLOCK * BITS // 8)
    inside = is_row[:, None] & (place < width)[None, :]
    at = CODES + row.to(tl.int64)[:, None] * width + place.to(tl.int64)[None, :]
    words = tl.load(at, inside, other=0).to(tl.int32)
    codes = words if BITS == 8 else _unpacked(words, BITS)

    scales = group.to(tl.int64) * features + column
    step = _widened(tl.load(STEPS + scales, is_column, other=0))
    offset = _widened(tl.load(OFFSETS + scales, is_column, other=0)) + step * _CENTRE
    of_row, of_column = _random_part(seed, row), _random_part(seed, rows + column)
    steps = ((codes << 15) - ((of_row[:, None] + of_column[None, :]) & 0x7FFF)).to(tl.float32)
    # In units of the dither the product is exact: the least step is 2**-126, and a step has 8 bits. The sum is rounded
    # once, since a code times a step may overflow for a finite value.
    value = _fused(steps, (step * 2.0**-15)[None, :], offset[None, :], INTERPRETED)
    to = OUT + row.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(to, converted(value, OUT.dtype.element_ty, INTERPRETED), is_row[:, None] & is_column[None, :])


def quantize(y: Tensor, seed: Tensor, mean: Tensor | None, *, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T as the reference does, bit for bit, except for codes of groups with NaN or an infinity.

    y is a matrix of float32, bfloat16 or float16, of any strides.
    """
    rows, features = y.shape
    codes = y.new_empty((rows, packed_width(features, kind)), dtype=torch.uint8)
    steps = y.new_empty((triton.cdiv(rows, group), features), dtype=SCALE_DTYPE)
    offsets = torch.empty_like(steps)
    chunk = min(triton.next_power_of_2(group), _MOST_ROWS)
    block = 64 if chunk <= 128 else 32
    programs = steps.shape[0] * triton.cdiv(features, block)
    if programs:
        _quantize_kernel[(programs,)](
            y,
            seed,
            None if mean is None else mean.contiguous(),
            codes,
            steps.view(torch.int16),
            offsets.view(torch.int16),
            rows,
            features,
            codes.shape[1],
            *y.stride(),
            GROUP=group,
            BITS=BITS[kind],
            CHUNK=chunk,
            BLOCK=block,
            INTERPRETED=IS_INTERPRETED,
            # 64 elements a thread
            num_warps=max(4, chunk * block // (32 * 64)),
        )
    return codes, steps, offsets


def dequantize(
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    *,
    kind: str,
    group: int,
    features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values that the codes stand for, (rows, features), in float32, bfloat16 or float16."""
    rows = codes.shape[0]
    values = codes.new_empty((rows, features), dtype=dtype)
    # for int2, 64 rows would take too many registers
    chunk = min(triton.next_power_of_2(group), 64 if kind in ("int8", "int4") else 32)
    programs = triton.cdiv(rows, group) * triton.cdiv(group, chunk) * triton.cdiv(features, _DECODED_COLUMNS)
    if programs:
        _dequantize_kernel[(programs,)](
            codes.contiguous(),
            steps.contiguous().view(torch.int16),
            offsets.contiguous().view(torch.int16),
            seed,
            values,
            rows,
            features,
            codes.shape[1],
            GROUP=group,
            BITS=BITS[kind],
            CHUNK=chunk,
            BLOCK=_DECODED_COLUMNS,
            INTERPRETED=IS_INTERPRETED,
            num_warps=4,
        )
    return values
