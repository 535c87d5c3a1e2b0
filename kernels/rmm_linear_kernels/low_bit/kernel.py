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

from ..builds import TYPE_NAMES, Build
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..philox.kernel import ROUNDING_STREAM, random_half
from .reference import _LARGEST_FP8, BITS, FP8, SCALE_DTYPE, packed_width

# Rows of y that the registers of a program hold; a group of more is read twice.
_MOST_ROWS = 512
_LARGEST_FP8_BITS = tl.constexpr(0x7E)
_FP8_NAN_BITS = tl.constexpr(0x7F)
_LARGEST_FP8_VALUE = tl.constexpr(_LARGEST_FP8)


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
def converted(value, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A float32 in another type, rounded to nearest even."""
    IS_CUT: tl.constexpr = INTERPRETED and TYPE.is_bf16()
    if IS_CUT:
        # by the interpreter
        bits = value.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(value == value, near, value)
    return value.to(TYPE)


@triton.jit
def spread(vector):
    """The vector, made by few threads and handed to the others."""
    # A vector that belongs to the rows or the columns of a tile is otherwise computed by every thread that holds a part
    # of the row or the column, which takes longer than the tile itself. The compiler looks through all but a gather.
    return tl.gather(vector, tl.arange(0, vector.shape[0]), 0)


@triton.jit
def random_part(seed, index):
    """A row's or a column's part of the dither, twice over: the bit below it stands for half an interval."""
    return spread(random_half(seed, index, ROUNDING_STREAM).to(tl.int32) * 2)


@triton.jit
def dither_above_64(of_row, of_column):
    """64 + u: u has 17 bits, which are laid into a float32 as they are. A conversion would be slower."""
    return (((of_row + of_column) & 0x1FFFE) | 0x4B000001).to(tl.float32, bitcast=True) * 0.00000762939453125


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
def half_value(codes, half_step, half_offset, of_row, of_column, IS_FP8: tl.constexpr):
    """Half of what codes stand for, float32, out of arguments that broadcast to each other."""
    # halves: a code times a step may overflow where the value itself does not
    if IS_FP8:
        value = fp8_value(codes) * half_step
    else:
        value = (codes.to(tl.float32) - (dither_above_64(of_row, of_column) - 64.5)) * half_step + half_offset
    return value


@triton.jit
def decoded(
    CODES,
    STEPS,
    OFFSETS,
    seed,
    group,
    row,
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
):
    """What the codes of some rows of a group stand for, float32; in rows that are not there, what code 0 does."""
    WORD_BYTES: tl.constexpr = 3 if BITS == 3 else 1
    WORDS: tl.constexpr = COLUMNS * BITS // (8 * WORD_BYTES)
    column = first_column + tl.arange(0, COLUMNS)
    is_column = column < features
    place = first_column * BITS // 8 + tl.arange(0, WORDS) * WORD_BYTES
    words = tl.zeros((ROWS, WORDS), tl.int32)
    for byte in tl.static_range(WORD_BYTES):
        inside = is_row[:, None] & (place + byte < width)[None, :]
        at = CODES + row.to(tl.int64)[:, None] * codes_row + (place + byte).to(tl.int64)[None, :] * codes_column
        words |= tl.load(at, inside, other=0).to(tl.int32) << (8 * byte)
    scales = group.to(tl.int64) * features + column
    half_step = widened(tl.load(STEPS + scales, is_column, other=0)) * 0.5
    half_offset = tl.zeros_like(half_step)
    if not IS_FP8:
        half_offset = widened(tl.load(OFFSETS + scales, is_column, other=0)) * 0.5

    # after the loads, which are on their way meanwhile
    of_row = random_part(seed, row)
    of_column = random_part(seed, rows + column)
    codes = words if BITS == 8 else unpacked(words, BITS)
    return 2 * half_value(codes, half_step[None, :], half_offset[None, :], of_row[:, None], of_column[None, :], IS_FP8)


@triton.jit
def _centred(Y, y_row, y_column, mean, row, column, is_column):
    """Rows of y - mean, float32; 0 - mean in columns that are not there."""
    at = Y + row.to(tl.int64)[:, None] * y_row + column.to(tl.int64)[None, :] * y_column
    y = tl.load(at, mask=is_column[None, :], other=0)
    return y.to(tl.float32) - mean[None, :]


@triton.jit
def _fused(a, b, c, INTERPRETED: tl.constexpr):
    """The sum a * b + c rounded once, where the interpreter would round twice."""
    if INTERPRETED:
        total = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        total = tl.fma(a, b, c)
    return total


@triton.jit
def _divisor(step):
    """Three numbers that `_divided` wants instead of the step: a power of two, the step times it, and one over that."""
    exponent = (step.to(tl.int32, bitcast=True) >> 23) & 0xFF
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    # 2**-127, whose exponent has no bits of its own
    factor = tl.where(exponent == 254, 5.877471754111438e-39, factor)
    # Divided by infinity, what is finite is 0, and infinity is NaN. A group without spread is its offset, 0 steps away.
    is_number = (step > 0) & (step < float("inf"))
    divisor = tl.where(is_number, step * factor, 1.0)
    factor = tl.where(is_number, factor, tl.where(step == step, 0.0, float("nan")))
    return factor, divisor, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), divisor)


@triton.jit
def _divided(y, factor, divisor, inverse, INTERPRETED: tl.constexpr):
    """The quotient of y and the step, rounded to nearest, in four instructions: the rest is computed once a group."""
    # The step is scaled to [1, 2), so that nothing overflows, and nothing but what is far below the dither underflows.
    # One correction is enough since a step has 8 bits: before it is rounded, the last sum is within 2**-22 ulp of the
    # quotient, and a quotient of 24 by 8 bits is at least 2**-9 ulp from where rounding changes.
    y = y * factor
    near = y * inverse
    return _fused(_fused(-near, divisor, y, INTERPRETED), inverse, near, INTERPRETED)


@triton.jit
def _codes(value, of_row, of_column, IS_FP8: tl.constexpr, LEVELS: tl.constexpr):
    """The codes of values in steps, int32; fp8's are bits of e4m3 numbers."""
    # 1 - u, compared with what is rounded off: to add u would round
    threshold = 65.0 - dither_above_64(of_row, of_column)
    if IS_FP8:
        # The spacing of the numbers around the value is 2**(exponent - 3), the exponent being -6 at least.
        exponent = tl.maximum(((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, -6)
        scaled = value * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
        below = tl.floor(scaled)
        number = below + (threshold < scaled - below).to(tl.float32)
        # 8 to 16 spacings, 16 being the first number of the next exponent; less than 8 at the least exponent only
        magnitude = tl.minimum(((exponent + 6) << 3) + tl.abs(number).to(tl.int32), _LARGEST_FP8_BITS)
        code = tl.where(number < 0, magnitude | 0x80, magnitude)
        code = tl.where(value != value, _FP8_NAN_BITS, code)
    else:
        # Clamping undoes what rounding the quotient may do at the ends. NaN becomes 0: the step tells.
        value = tl.minimum(tl.maximum(value, 0.0), LEVELS)
        below = tl.floor(value)
        code = below.to(tl.int32) + (threshold < value - below).to(tl.int32)
    return code


@triton.jit
def store_scales(
    low, high, total, STEPS, OFFSETS, is_column, LEVELS: tl.constexpr, IS_FP8: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the step and the offset of a group of each column; return what `codes_of` wants of them, and themselves."""
    # Low and high are the extremes, of the sizes for fp8, and total the sum of the sizes, over any parts of the rows.
    # Of a number and NaN, either extreme is the number. A sum of what is not negative is NaN where one of it is.
    total = tl.sum(total, 0)
    has_nan = total != total
    highest = spread(tl.where(has_nan, float("nan"), tl.max(high, 0)))
    if IS_FP8:
        step_bits = _rounded_outwards(tl.div_rn(highest, tl.full((BLOCK,), _LARGEST_FP8_VALUE, tl.float32)), True)
        offset = tl.zeros_like(highest)
    else:
        offset_bits = _rounded_outwards(spread(tl.where(has_nan, float("nan"), tl.min(low, 0))), False)
        offset = widened(offset_bits)
        # divided first: the difference of 3e38 and -3e38 overflows
        levels = tl.full((BLOCK,), LEVELS, tl.float32)
        step_bits = _rounded_outwards(tl.div_rn(highest, levels) - tl.div_rn(offset, levels), True)
        tl.store(OFFSETS, offset_bits.to(tl.int16), is_column)
    tl.store(STEPS, step_bits.to(tl.int16), is_column)
    step = widened(step_bits)
    factor, divisor, inverse = _divisor(step)
    # each divided by itself: the difference may overflow
    quotient = tl.where(step == 0, 0.0, tl.div_rn(offset, step))
    return spread(factor), spread(divisor), spread(inverse), spread(quotient), spread(step), spread(offset)


@triton.jit
def codes_of(
    y,
    factor,
    divisor,
    inverse,
    quotient,
    of_row,
    of_column,
    IS_FP8: tl.constexpr,
    LEVELS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The codes of some rows of a group, int32, out of what `store_scales` and `random_part` returned."""
    value = _divided(y, factor[None, :], divisor[None, :], inverse[None, :], INTERPRETED)
    if not IS_FP8:
        value -= quotient[None, :]
    return _codes(value, of_row[:, None], of_column[None, :], IS_FP8, LEVELS)


@triton.jit
def store_codes(
    codes, CODES, width, row, first_column, is_row, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Pack and store the codes of some rows and columns, int32."""
    words = _packed_words(codes, BITS, ROWS, COLUMNS)
    WORD_BYTES: tl.constexpr = 3 if BITS == 3 else 1
    WORDS: tl.constexpr = COLUMNS * BITS // (8 * WORD_BYTES)
    # 8 columns a thread, as many as a thread loads at once
    place = tl.max_contiguous(first_column * BITS // 8 + tl.arange(0, WORDS) * WORD_BYTES, 1 if BITS == 3 else BITS)
    for byte in tl.static_range(WORD_BYTES):
        inside = is_row[:, None] & (place + byte < width)[None, :]
        to = CODES + row.to(tl.int64)[:, None] * width + (place + byte)[None, :]
        tl.store(to, ((words >> (8 * byte)) & 0xFF).to(tl.uint8), inside)


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
    of_column = random_part(seed, rows + column)
    mean = tl.zeros((BLOCK,), tl.float32)
    if HAS_MEAN:
        mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)

    for start in tl.static_range(0, GROUP, CHUNK):
        row = first_row + start + tl.arange(0, CHUNK)
        # The last row stands in for those that are not there: it changes no extreme, and masks nothing.
        y = _centred(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        value = tl.abs(y) if IS_FP8 else y
        if start == 0:
            low, high, total = value, value, tl.abs(y)
        else:
            low, high, total = tl.minimum(low, value), tl.maximum(high, value), total + tl.abs(y)
    scales = group.to(tl.int64) * features + column
    factor, divisor, inverse, quotient, _, _ = store_scales(
        low, high, total, STEPS + scales, OFFSETS + scales, is_column, LEVELS, IS_FP8, BLOCK
    )

    for start in tl.static_range(0, GROUP, CHUNK):
        if GROUP > CHUNK:
            row = first_row + start + tl.arange(0, CHUNK)
            y = _centred(Y, y_row, y_column, mean, tl.minimum(row, last_row), column, is_column)
        of_row = random_part(seed, row)
        codes = codes_of(y, factor, divisor, inverse, quotient, of_row, of_column, IS_FP8, LEVELS, INTERPRETED)
        # A column that is not there is 0, and 0 are its codes: the bits that a row's last byte has left.
        store_codes(codes, CODES, width, row, first_column, row <= last_row, BITS, CHUNK, BLOCK)


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
    row = group * GROUP + (chunk % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    is_row = row < tl.minimum((group + 1) * GROUP, rows)
    column = first_column + tl.arange(0, BLOCK)
    is_column = column < features
    value = decoded(
        CODES,
        STEPS,
        OFFSETS,
        tl.load(SEED),
        group,
        row,
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
    )
    to = OUT + row.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(to, converted(value, OUT.dtype.element_ty, INTERPRETED), is_row[:, None] & is_column[None, :])


@lru_cache
def _quantize_constants(kind: str, group: int, has_mean: bool, interpreted: bool) -> Constants:
    """Also the rows and columns that a program holds at a time, and its warps: 64 elements a thread, 32 of fp8."""
    chunk = min(triton.next_power_of_2(group), _MOST_ROWS)
    block = 64 if chunk <= 128 else 32
    elements = 32 if kind == FP8 else 64
    tile = {"CHUNK": chunk, "BLOCK": block, "HAS_MEAN": has_mean, "INTERPRETED": interpreted}
    return Constants(_of_kind(kind, group) | tile, num_warps=max(4, chunk * block // (32 * elements)))


@lru_cache
def _dequantize_constants(kind: str, group: int, interpreted: bool) -> Constants:
    tile = {"CHUNK": min(triton.next_power_of_2(group), 32), "BLOCK": 128, "INTERPRETED": interpreted}
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
        shape and dtype, (0,) for fp8: bit for bit the reference's, but for the sign of a NaN.
    """
    rows, features = y.shape
    codes = y.new_empty((rows, packed_width(features, kind)), dtype=torch.uint8)
    steps = y.new_empty((ceil_div(rows, group), features), dtype=SCALE_DTYPE)
    offsets = steps.new_empty(0) if kind == FP8 else torch.empty_like(steps)
    constants = _quantize_constants(kind, group, mean is not None, IS_INTERPRETED)
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
    values = torch.empty((rows, features), dtype=dtype, device=codes.device)
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


def builds() -> list[Build]:
    """Return what a training run compiles: rows of 16-byte multiples, next to each other.

    Returns:
        Every kind in bfloat16; int8 and int4 in the other dtypes and centred as well.
    """
    found = []
    for kind in BITS:
        group = 1024 // BITS[kind]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = f"{kind} {TYPE_NAMES[dtype]}"
            for has_mean in (False, True):
                found.append(_quantize_build(f"quantize {name}{' centred' * has_mean}", kind, group, dtype, has_mean))
            found.append(_dequantize_build(f"dequantize {name}", kind, group, dtype))
    return found


def _quantize_build(name: str, kind: str, group: int, dtype: torch.dtype, has_mean: bool) -> Build:
    shared = _quantize_constants(kind, group, has_mean, False)
    types = {"Y": f"*{TYPE_NAMES[dtype]}", "SEED": "*i64", "CODES": "*u8", "STEPS": "*i16", "OFFSETS": "*i16"}
    sizes = ("rows", "features", "width", "y_row")
    constants = {"y_column": 1, **shared.values}
    if has_mean:
        types["MEAN"] = "*fp32"
        constants["mean_stride"] = 1
    else:
        constants["MEAN"] = None
        types["mean_stride"] = "i32"
    return Build(
        name,
        _quantize_kernel,
        types | dict.fromkeys(sizes, "i32"),
        constants,
        (*types, *sizes[1:]),
        num_warps=shared.num_warps,
    )


def _dequantize_build(name: str, kind: str, group: int, dtype: torch.dtype) -> Build:
    constants = _dequantize_constants(kind, group, False)
    pointers = {"CODES": "*u8", "STEPS": "*i16", "OFFSETS": "*i16", "SEED": "*i64", "OUT": f"*{TYPE_NAMES[dtype]}"}
    sizes = ("rows", "features", "width", "codes_row")
    return Build(
        name,
        _dequantize_kernel,
        pointers | dict.fromkeys(sizes, "i32"),
        {"codes_column": 1, **constants.values},
        (*pointers, *sizes[1:]),
        num_warps=constants.num_warps,
    )
