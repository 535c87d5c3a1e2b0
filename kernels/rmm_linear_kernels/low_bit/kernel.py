"""Low-bit storage as Triton kernels: the codes, steps and offsets of `reference.py`, bit for bit.

A program of `_quantize_kernel` holds a group of rows of some columns in registers, so that y is read once. The dither
is made in registers too, in both directions.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..device_functions import converted, spread
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..philox.kernel import ROUNDING_STREAM, random_half
from .reference import _LARGEST_FP8, BITS, CENTRE, FP8, MARGIN, SCALE_DTYPE, packed_width

# Rows of y that the registers of a program hold; a group of more is read twice.
_MOST_ROWS = 512
_LARGEST_FP8_BITS = tl.constexpr(0x7E)
_FP8_NAN_BITS = tl.constexpr(0x7F)
_LARGEST_FP8_VALUE = tl.constexpr(_LARGEST_FP8)
_MARGIN = tl.constexpr(MARGIN)
_CENTRE = tl.constexpr(CENTRE)


@triton.jit
def _rounded_outwards(value, UP: tl.constexpr):
    """The nearest bfloat16 that is not below (UP) or not above a float32, as 16 bits in an int32."""
    # A bfloat16 is the upper half of a float32: to cut the lower half off rounds towards zero, one more rounds away.
    bits = value.to(tl.int32, bitcast=True)
    is_away = (bits >= 0) if UP else (bits < 0)
    upper = ((bits >> 16) & 0xFFFF) + (is_away & ((bits & 0xFFFF) != 0)).to(tl.int32)
    return tl.where(value != value, 0x7FC0, upper)


@triton.jit
def widened(upper):
    """The float32 of a bfloat16's 16 bits: the interpreter knows no bfloat16 arithmetic, and no type is needed here."""
    return (upper.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fused(a, b, c, INTERPRETED: tl.constexpr):
    """The sum a * b + c rounded once, where the interpreter would round twice."""
    if INTERPRETED:
        total = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        total = tl.fma(a, b, c)
    return total


@triton.jit
def random_part(seed, index):
    """A row's or a column's part of the dither, of which the lowest 15 bits count."""
    return spread(random_half(seed, index, ROUNDING_STREAM).to(tl.int32))


@triton.jit
def _twice_the_dither(twice_of_row, twice_of_column):
    """2 d, of parts times 2."""
    return (twice_of_row + twice_of_column) & 0xFFFE


@triton.jit
def _packed_words(codes, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Join neighbouring columns until whole bytes are full: two codes of int4, four of int2, eight of int3 a word."""
    words = codes
    if BITS < 8:
        even, odd = tl.split(tl.reshape(words, (ROWS, COLUMNS // 2, 2)))
        words = even | (odd << BITS)
    if BITS < 4:
        even, odd = tl.split(tl.reshape(words, (ROWS, COLUMNS // 4, 2)))
        words = even | (odd << 2 * BITS)
    if BITS == 3:
        even, odd = tl.split(tl.reshape(words, (ROWS, COLUMNS // 8, 2)))
        words = even | (odd << 4 * BITS)
    return words


@triton.jit
def unpacked(words, BITS: tl.constexpr):
    """The codes of words of `_packed_words`, in the order of the columns."""
    if BITS == 4:
        words = tl.interleave(words, words >> 4)
    elif BITS == 2:
        words = tl.interleave(tl.interleave(words, words >> 4), tl.interleave(words >> 2, words >> 6))
    elif BITS == 3:
        first = tl.interleave(tl.interleave(words, words >> 12), tl.interleave(words >> 6, words >> 18))
        second = tl.interleave(tl.interleave(words >> 3, words >> 15), tl.interleave(words >> 9, words >> 21))
        words = tl.interleave(first, second)
    return words & ((1 << BITS) - 1)


@triton.jit
def fp8_value(bits):
    """The float32 of an e4m3 number's bits, by integer arithmetic: not every GPU knows the type."""
    magnitude = bits & 0x7F
    # the exponents' biases are 7 and 127; the lowest numbers, without a leading 1, are multiples of 2**-9
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == _FP8_NAN_BITS, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def values_of_codes(codes, step, offset, of_row, of_column, IS_FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """What codes stand for, times the factor of `scales_of`, float32, out of arguments that broadcast to each other."""
    if IS_FP8:
        value = fp8_value(codes) * step
    else:
        steps = ((codes << 15) - ((of_row + of_column) & 0x7FFF)).to(tl.float32)
        # rounded once: a code times a step may overflow where the value itself does not
        value = fused(steps, step, offset, INTERPRETED)
    return value


@triton.jit
def values_of_halves(
    codes, half_step, minus_half_offset, of_row, of_column, IS_FP8: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Half of what codes stand for, out of what `store_scales` returned: to the bit that of `scales_of` times 1/2."""
    offset = half_step * _CENTRE - minus_half_offset
    step = half_step if IS_FP8 else half_step * 2.0**-15
    return values_of_codes(codes, step, offset, of_row, of_column, IS_FP8, INTERPRETED)


@triton.jit
def scales_of(STEPS, OFFSETS, scales, is_column, FACTOR: tl.constexpr, IS_FP8: tl.constexpr):
    """What `values_of_codes` wants of the steps and offsets of a group, for values times a factor."""
    step = widened(tl.load(STEPS + scales, is_column, other=0)) * FACTOR
    offset = tl.zeros_like(step)
    if not IS_FP8:
        offset = widened(tl.load(OFFSETS + scales, is_column, other=0)) * FACTOR + step * _CENTRE
        # in units of the dither; no bit is lost, as the least step is 2**-126, of 8 bits
        step *= 2.0**-15
    return step, offset


@triton.jit
def decoded(
    CODES,
    STEPS,
    OFFSETS,
    seed,
    group,
    first_row,
    is_row,
    first_column,
    rows,
    features,
    width,
    codes_row,
    codes_column,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What the codes of some rows of a group stand for, float32; in rows that are not there, what code 0 does."""
    WORD_BYTES: tl.constexpr = 3 if BITS == 3 else 1
    WORDS: tl.constexpr = COLUMNS * BITS // (8 * WORD_BYTES)
    column = first_column + tl.arange(0, COLUMNS)
    row = first_row + tl.arange(0, ROWS)
    is_column = column < features
    place = first_column * BITS // 8 + tl.arange(0, WORDS) * WORD_BYTES
    words = tl.zeros((ROWS, WORDS), tl.int32)
    for byte in tl.static_range(WORD_BYTES):
        inside = is_row[:, None] & (place + byte < width)[None, :]
        at = CODES + row.to(tl.int64)[:, None] * codes_row + (place + byte).to(tl.int64)[None, :] * codes_column
        words |= tl.load(at, inside, other=0).to(tl.int32) << (8 * byte)
    scales = group.to(tl.int64) * features + column
    step, offset = scales_of(STEPS, OFFSETS, scales, is_column, 1.0, IS_FP8)
    # after the loads, which are on their way meanwhile
    of_row, of_column = random_part(seed, row), random_part(seed, rows + column)
    codes = words if BITS == 8 else unpacked(words, BITS)
    return values_of_codes(
        codes, step[None, :], offset[None, :], of_row[:, None], of_column[None, :], IS_FP8, INTERPRETED
    )


@triton.jit
def centred_rows(Y, y_row, y_column, mean, row, column, is_column):
    """Rows of y - mean, float32; 0 - mean in columns that are not there."""
    at = Y + row.to(tl.int64)[:, None] * y_row + column.to(tl.int64)[None, :] * y_column
    y = tl.load(at, mask=is_column[None, :], other=0)
    return y.to(tl.float32) - mean[None, :]


@triton.jit
def _fp8_codes(value, twice_the_dither):
    """The bits of one of the two e4m3 numbers around each value."""
    uniform = (twice_the_dither | 0x43000001).to(tl.float32, bitcast=True) - 128.0
    # The spacing of the numbers around the value is 2**(exponent - 3), the exponent being -6 at least.
    exponent = tl.maximum(((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, -6)
    scaled = value * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(scaled)
    number = below + (uniform < scaled - below).to(tl.float32)
    # 8 to 16 spacings, 16 being the first number of the next exponent; less than 8 at the least exponent only
    magnitude = tl.minimum(((exponent + 6) << 3) + tl.abs(number).to(tl.int32), _LARGEST_FP8_BITS)
    code = tl.where(number < 0, magnitude | 0x80, magnitude)
    return tl.where(value != value, _FP8_NAN_BITS, code)


@triton.jit
def _least(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def extremes(value, low, high, IS_FIRST: tl.constexpr, IS_FP8: tl.constexpr):
    """The extremes of what there was and of one value more, and NaN once there is one; of sizes for fp8."""
    if IS_FP8:
        value = tl.abs(value)
    if IS_FIRST:
        low, high = value, value
    else:
        # NaN in either will do
        low, high = _least(low, value), tl.maximum(high, value)
    return low, high


@triton.jit
def store_scales(
    low, high, scale, STEPS, OFFSETS, is_column, LEVELS: tl.constexpr, IS_FP8: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the step and the offset of a group of each column.

    Low and high are the `extremes`, over any parts of the rows, and scale is what they and all values are multiplied
    by.

    Returns:
        What `sums_of_codes` wants: one over the step, of fp8, or half of it; half of the offset with a minus. And half
        of the step.
    """
    low = tl.reduce(low, 0, _least)
    highest = spread(tl.where(low != low, low, tl.max(high, 0)) * scale)
    if IS_FP8:
        offset = tl.zeros_like(highest)
    else:
        offset_bits = _rounded_outwards(spread(low * scale), False)
        offset = widened(offset_bits)
        tl.store(OFFSETS, offset_bits.to(tl.int16), is_column)
    # halves: the difference of 3e38 and -3e38 overflows
    over_range: tl.constexpr = 2.0 / (_LARGEST_FP8_VALUE if IS_FP8 else LEVELS - 2 * _MARGIN)
    step_bits = _rounded_outwards((highest * 0.5 - offset * 0.5) * over_range, True)
    # 2**-126 is the least but 0
    step_bits = tl.where(step_bits == 0, 0, tl.maximum(step_bits, 0x80))
    tl.store(STEPS, step_bits.to(tl.int16), is_column)
    step = widened(step_bits)
    # a group without spread is its offset, whatever its codes
    inverse = tl.where(step == 0, 0.0, tl.div_rn(tl.full((BLOCK,), 1.0 if IS_FP8 else 2.0, tl.float32), step))
    return spread(inverse), spread(offset * -0.5), spread(step * 0.5)


@triton.jit
def sums_of_codes(
    y,
    scale,
    inverse,
    minus_half_offset,
    twice_of_row,
    twice_of_column,
    IS_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes of scale * y from bit 16 on, int32, with what is rounded off in 15 of the bits below, of integer kinds.

    Returns:
        Those out of what `store_scales` returned, and parts of the dither times 2: arguments that broadcast to each
        other.
    """
    dither = _twice_the_dither(twice_of_row, twice_of_column)
    if IS_FP8:
        sums = _fp8_codes(y * scale * inverse, dither) << 16
    else:
        # the quotient in units of 2**-15 is the lower bits of a number in [256, 512)
        halves = fused(y, scale * 0.5, minus_half_offset, INTERPRETED)
        quotient = fused(halves, inverse, 256.0 + _MARGIN, INTERPRETED)
        sums = (quotient.to(tl.int32, bitcast=True) << 1) + dither
    return sums


@triton.jit
def codes_of_sums(sums, BITS: tl.constexpr):
    """The codes, int32: whatever NaN has become, other columns' bits are left alone."""
    return (sums >> 16) & ((1 << BITS) - 1)


@triton.jit
def rest_of_sums(sums):
    """What was rounded off integer codes: y less what they stand for, in steps / 2**16, and 2**15 - 1 more, float32."""
    return sums.to(tl.uint16).to(tl.float32)


@triton.jit
def store_codes(
    codes,
    CODES,
    width,
    row,
    first_column,
    is_row,
    is_column,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Pack and store the codes of some rows and columns, int32."""
    if BITS < 8:
        # the bits that a row's last byte has left are 0
        codes = tl.where(is_column[None, :], codes, 0)
    words = _packed_words(codes, BITS, ROWS, COLUMNS)
    WORD_BYTES: tl.constexpr = 3 if BITS == 3 else 1
    WORDS: tl.constexpr = COLUMNS * BITS // (8 * WORD_BYTES)
    # 8 columns a thread, as many as a thread loads at once
    place = tl.max_contiguous(first_column * BITS // 8 + tl.arange(0, WORDS) * WORD_BYTES, 1 if BITS == 3 else BITS)
    for byte in tl.static_range(WORD_BYTES):
        inside = is_row[:, None] & (place + byte < width)[None, :]
        to = CODES + row.to(tl.int64)[:, None] * width + (place + byte)[None, :]
        tl.store(to, ((words >> (8 * byte)) & 0xFF).to(tl.uint8), inside)


@triton.jit
def extremes_of_group(
    Y,
    y_row,
    y_column,
    mean,
    first_row,
    last_row,
    column,
    is_column,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Read a group of rows, CHUNK at a time: the last ones that were read, centred, and the extremes of all."""
    for start in tl.static_range(0, GROUP, CHUNK):
        row = first_row + start + tl.arange(0, CHUNK)
        # The last row stands in for those that are not there: it changes no extreme, and masks nothing.
        y = centred_rows(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        if start == 0:
            low, high = extremes(y, y, y, True, IS_FP8)
        else:
            low, high = extremes(y, low, high, False, IS_FP8)
    return y, low, high


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
    mean_stride,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    blocks = tl.cdiv(features, BLOCK)
    group = tl.program_id(0) // blocks
    first_column = (tl.program_id(0) % blocks) * BLOCK
    first_row = group * GROUP
    last_row = tl.minimum(first_row + GROUP, rows) - 1
    column = first_column + tl.arange(0, BLOCK)
    is_column = column < features
    seed = tl.load(SEED)
    twice_of_column = 2 * random_part(seed, rows + column)
    mean = tl.zeros((BLOCK,), tl.float32)
    if HAS_MEAN:
        mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)

    y, low, high = extremes_of_group(
        Y, y_row, y_column, mean, first_row, last_row, column, is_column, GROUP, CHUNK, IS_FP8
    )
    scales = group.to(tl.int64) * features + column
    inverse, minus_half_offset, _ = store_scales(
        low, high, 1.0, STEPS + scales, OFFSETS + scales, is_column, LEVELS, IS_FP8, BLOCK
    )

    for start in tl.static_range(0, GROUP, CHUNK):
        row = first_row + start + tl.arange(0, CHUNK)
        if GROUP > CHUNK:
            y = centred_rows(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        of_row = random_part(seed, row)
        sums = sums_of_codes(
            y,
            1.0,
            inverse[None, :],
            minus_half_offset[None, :],
            2 * of_row[:, None],
            twice_of_column[None, :],
            IS_FP8,
            INTERPRETED,
        )
        codes = codes_of_sums(sums, BITS)
        store_codes(codes, CODES, width, row, first_column, row <= last_row, is_column, BITS, CHUNK, BLOCK)


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
    codes_row,
    codes_column,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    CHUNKS: tl.constexpr = (GROUP + CHUNK - 1) // CHUNK
    blocks = tl.cdiv(features, BLOCK)
    chunk = tl.program_id(0) // blocks
    first_column = (tl.program_id(0) % blocks) * BLOCK
    group = chunk // CHUNKS
    first_row = group * GROUP + (chunk % CHUNKS) * CHUNK
    row = first_row + tl.arange(0, CHUNK)
    is_row = row < tl.minimum((group + 1) * GROUP, rows)
    column = first_column + tl.arange(0, BLOCK)
    is_column = column < features
    value = decoded(
        CODES,
        STEPS,
        OFFSETS,
        tl.load(SEED),
        group,
        first_row,
        is_row,
        first_column,
        rows,
        features,
        width,
        codes_row,
        codes_column,
        BITS,
        IS_FP8,
        CHUNK,
        BLOCK,
        INTERPRETED,
    )
    to = OUT + row.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(to, converted(value, OUT.dtype.element_ty, INTERPRETED), is_row[:, None] & is_column[None, :])


@lru_cache
def quantize_constants(kind: str, group: int, has_mean: bool, interpreted: bool) -> Constants:
    """Also the rows and columns that a program holds at a time, and its warps: 64 elements a thread, or 32."""
    chunk = min(triton.next_power_of_2(group), _MOST_ROWS)
    block = 64 if chunk <= 128 else 32
    elements = 32 if kind in (FP8, "int3") else 64
    tile = {"CHUNK": chunk, "BLOCK": block, "HAS_MEAN": has_mean, "INTERPRETED": interpreted}
    return Constants(_of_kind(kind, group) | tile, num_warps=max(4, chunk * block // (32 * elements)))


@lru_cache
def _dequantize_constants(kind: str, group: int, interpreted: bool) -> Constants:
    # of fp8 and int3, 64 rows would take too many registers
    rows = 32 if kind in (FP8, "int3") else 64
    tile = {"CHUNK": min(triton.next_power_of_2(group), rows), "BLOCK": 128, "INTERPRETED": interpreted}
    return Constants(_of_kind(kind, group) | tile, num_warps=4)


def _of_kind(kind: str, group: int) -> dict[str, Any]:
    return {"GROUP": group, "BITS": BITS[kind], "IS_FP8": kind == FP8}


def quantize(y: Tensor, seed: Tensor, mean: Tensor | None, *, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to 8, 4, 3 or 2 bits an element, at random and without bias.

    Args:
        y: Shape (rows, features), float32, bfloat16 or float16, any strides.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of a column that share a step and an offset.

    Returns:
        Codes (rows, ceil(features * bits / 8)), uint8, steps (groups, features), bfloat16, and offsets of the same
        shape and dtype, (0,) for fp8: bit for bit the reference's, but for the codes of groups with NaN or an infinity.
    """
    rows, features = y.shape
    codes = empty(y, (rows, packed_width(features, kind)), torch.uint8)
    steps = empty(y, (ceil_div(rows, group), features), SCALE_DTYPE)
    offsets = empty(y, (0,) if kind == FP8 else tuple(steps.shape), SCALE_DTYPE)
    constants = quantize_constants(kind, group, mean is not None, IS_INTERPRETED)
    programs = steps.shape[0] * ceil_div(features, constants["BLOCK"])
    if programs:
        arguments = (
            y,
            seed,
            mean,
            codes,
            steps.view(torch.int16),
            offsets.view(torch.int16),
            rows,
            features,
            codes.shape[1],
            *y.stride(),
            0 if mean is None else mean.stride(0),
        )
        launch(_quantize_kernel, (programs, 1, 1), arguments, constants)
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
    """Return what the codes stand for.

    Args:
        codes: As `quantize` returns them, any strides.
        steps: As `quantize` returns them.
        offsets: As `quantize` returns them.
        seed: The seed that `quantize` had.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        features: Columns of y.
        dtype: Dtype of the result: float32, bfloat16 or float16.

    Returns:
        Shape (rows, features).
    """
    rows = codes.shape[0]
    values = empty(codes, (rows, features), dtype)
    constants = _dequantize_constants(kind, group, IS_INTERPRETED)
    chunks = ceil_div(rows, group) * ceil_div(group, constants["CHUNK"])
    programs = chunks * ceil_div(features, constants["BLOCK"])
    if programs:
        arguments = (
            codes,
            steps.contiguous().view(torch.int16),
            offsets.contiguous().view(torch.int16),
            seed,
            values,
            rows,
            features,
            codes.shape[1],
            *codes.stride(),
        )
        launch(_dequantize_kernel, (programs, 1, 1), arguments, constants)
    return values
