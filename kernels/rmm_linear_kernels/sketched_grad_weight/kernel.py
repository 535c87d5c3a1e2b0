"""The weight gradient out of two sketches as one matrix product, with what else belongs to it in the epilogue.

Both sketches lie as (rank, features): a block of each is loaded as it lies, and the first is transposed on the way to
the tensor cores. The second may be held in low bits, and is then unpacked on the way: every tile unpacks for itself,
which saves a copy of the sketch in memory, not time, unless few tiles share a column.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..device_functions import converted, where_first
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..low_bit import kernel as low_bit
from ..low_bit.kernel import random_part, scales_of, unpacked, values_of_codes
from ..low_bit.reference import BITS, FP8
from . import reference

_HALVES = (torch.bfloat16, torch.float16)
# Rows of tiles that are computed together: their part of both sketches stays in the cache.
_GROUPED = 8
# Tiles that keep a large GPU busy.
_MANY_TILES = 128
# Shared memory that a program of the widest tile needs: sm_80 (163 KiB) holds a stage less than sm_90 and sm_100
# (227 KiB) do, and has room for it; other GPUs have 64 to 99 KiB.
_WIDEST_BYTES = 160 << 10
# Sums of parts of g that the programs of a product of small tiles add up, each for itself. More are added up first, and
# so are those of large tiles, which have no registers for it.
_MOST_PARTS = 8
_SMALL_TILE = 64 * 64
# Parts that a program of `_outer_product_of_sums_kernel` adds up at a time, and its tile.
_PARTS, _OUTER_ROWS, _OUTER_COLUMNS = 32, 16, 128
# Kinds that are unpacked on the way: those whose groups and words are powers of two.
_UNPACKED_KINDS = ("int8", "int4", "int2", FP8)


def supports(kind: str) -> bool:
    """Return whether `sketched_grad_weight_low_bit` unpacks this kind on the way, without a copy in memory.

    Args:
        kind: A key of `low_bit.reference.BITS`.

    Returns:
        False for int3: `sketched_grad_weight_low_bit` unpacks it into memory first.
    """
    return kind in _UNPACKED_KINDS


@triton.jit
def _tile(out_features, in_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPED: tl.constexpr):
    """First row and column of this program's part of the result; neighbours in time share rows and columns."""
    program = tl.program_id(0)
    down, across = tl.cdiv(out_features, BLOCK_M), tl.cdiv(in_features, BLOCK_N)
    group = program // (GROUPED * across)
    height = tl.minimum(down - group * GROUPED, GROUPED)
    inside = program % (GROUPED * across)
    return (group * GROUPED + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@triton.jit
def _finish(
    product,
    SUMS,
    MEAN,
    OUT,
    BIAS,
    scale,
    parts,
    sums_row,
    sums_column,
    mean_stride,
    row,
    column,
    first_column,
    out_features,
    in_features,
    PARTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store a tile of the result, with the mean's part; and, from the first tiles of the rows, the sum of g."""
    product = product * scale
    is_row, is_column = row < out_features, column < in_features
    if HAS_SUMS:
        sums_at = SUMS + row.to(tl.int64) * sums_column
        if PARTS == 1:
            total = tl.load(sums_at, is_row, other=0).to(tl.float32)
        else:
            part = tl.arange(0, PARTS)
            is_part = (part < parts)[:, None] & is_row[None, :]
            sums = tl.load(sums_at[None, :] + part.to(tl.int64)[:, None] * sums_row, is_part, other=0)
            total = tl.sum(sums.to(tl.float32), axis=0)
        if HAS_BIAS:
            is_first = where_first(is_row, first_column)
            tl.store(BIAS + row, converted(total, BIAS.dtype.element_ty, INTERPRETED), is_first)
        if HAS_MEAN:
            mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)
            product += total[:, None] * mean[None, :]
    to = OUT + row.to(tl.int64)[:, None] * in_features + column[None, :]
    tl.store(to, converted(product, OUT.dtype.element_ty, INTERPRETED), is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["parts"])
def _outer_product_of_sums_kernel(
    SUMS,
    MEAN,
    OUT,
    BIAS,
    parts,
    out_features,
    in_features,
    sums_row,
    mean_stride,
    HAS_MEAN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < out_features
    part = tl.arange(0, PARTS)
    sums_at = SUMS + part.to(tl.int64)[:, None] * sums_row + row[None, :]
    step_of_sums = tl.cast(sums_row, tl.int64) * PARTS
    sums = tl.zeros((PARTS, ROWS), tl.float32)
    # the interpreter wants a Python number, and makes a tensor of whatever has a name
    for step in range(tl.cdiv(parts, PARTS) if STEPS is None else STEPS):
        sums += tl.load(sums_at, (part < parts - step * PARTS)[:, None] & is_row[None, :], other=0)
        sums_at += step_of_sums
    total = tl.sum(sums, axis=0)
    is_first = where_first(is_row, tl.program_id(1))
    tl.store(BIAS + row, converted(total, BIAS.dtype.element_ty, INTERPRETED), is_first)
    if HAS_MEAN:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < in_features
        mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)
        to = OUT + row.to(tl.int64)[:, None] * in_features + column[None, :]
        outer = converted(total[:, None] * mean[None, :], OUT.dtype.element_ty, INTERPRETED)
        tl.store(to, outer, is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["rank", "parts", "scale"])
def _grad_weight_kernel(
    G,
    X,
    SUMS,
    MEAN,
    OUT,
    BIAS,
    rank,
    out_features,
    in_features,
    g_row,
    g_column,
    x_row,
    x_column,
    parts,
    sums_row,
    sums_column,
    mean_stride,
    scale,
    PARTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    first_row, first_column = _tile(out_features, in_features, BLOCK_M, BLOCK_N, GROUPED)
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    g_at = G + row.to(tl.int64)[:, None] * g_column + k.to(tl.int64)[None, :] * g_row
    x_at = X + k.to(tl.int64)[:, None] * x_row + column.to(tl.int64)[None, :] * x_column
    g_step, x_step = tl.cast(g_row, tl.int64) * BLOCK_K, tl.cast(x_row, tl.int64) * BLOCK_K
    is_row, is_column = (row < out_features)[:, None], (column < in_features)[None, :]
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # the interpreter wants a Python number, and makes a tensor of whatever has a name
    for step in range(tl.cdiv(rank, BLOCK_K) if STEPS is None else STEPS):
        is_inside = k < rank - step * BLOCK_K
        g = tl.load(g_at, is_row & is_inside[None, :], other=0)
        x = tl.load(x_at, is_inside[:, None] & is_column, other=0)
        if INTERPRETED:
            g, x = g.to(tl.float32), x.to(tl.float32)
        product = tl.dot(g, x.to(g.dtype), product, input_precision="ieee")
        g_at += g_step
        x_at += x_step
    _finish(
        product,
        SUMS,
        MEAN,
        OUT,
        BIAS,
        scale,
        parts,
        sums_row,
        sums_column,
        mean_stride,
        row,
        column,
        first_column,
        out_features,
        in_features,
        PARTS,
        HAS_SUMS,
        HAS_MEAN,
        HAS_BIAS,
        INTERPRETED,
    )


@triton.jit(do_not_specialize=["rank", "parts", "scale"])
def _low_bit_grad_weight_kernel(
    G,
    CODES,
    LOW_STEPS,
    OFFSETS,
    SEED,
    SUMS,
    MEAN,
    OUT,
    BIAS,
    rank,
    out_features,
    in_features,
    width,
    g_row,
    g_column,
    codes_row,
    codes_column,
    parts,
    sums_row,
    sums_column,
    mean_stride,
    scale,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    first_row, first_column = _tile(out_features, in_features, BLOCK_M, BLOCK_N, GROUPED)
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    byte = first_column * BITS // 8 + tl.arange(0, BLOCK_N * BITS // 8)
    k = tl.arange(0, BLOCK_K)
    g_at = G + row.to(tl.int64)[:, None] * g_column + k.to(tl.int64)[None, :] * g_row
    codes_at = CODES + k.to(tl.int64)[:, None] * codes_row + byte.to(tl.int64)[None, :] * codes_column
    g_step, codes_step = tl.cast(g_row, tl.int64) * BLOCK_K, tl.cast(codes_row, tl.int64) * BLOCK_K
    is_row, is_byte, is_column = (row < out_features)[:, None], (byte < width)[None, :], column < in_features
    seed = tl.load(SEED)
    of_column = random_part(seed, rank + column)
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(rank, BLOCK_K) if STEPS is None else STEPS):
        first = step * BLOCK_K
        is_inside = k < rank - first
        g = tl.load(g_at, is_row & is_inside[None, :], other=0)
        words = tl.load(codes_at, is_inside[:, None] & is_byte, other=0)
        # all rows of a block belong to one group
        scales = (first // GROUP).to(tl.int64) * in_features + column
        step_of_codes, offset = scales_of(LOW_STEPS, OFFSETS, scales, is_column, 0.5, IS_FP8)
        # What lies beyond the rank is a finite number wherever its group is finite, and meets zeros of g.
        codes = words.to(tl.int32) if BITS == 8 else unpacked(words.to(tl.int32), BITS)
        of_row = random_part(seed, first + k)
        x = values_of_codes(
            codes, step_of_codes[None, :], offset[None, :], of_row[:, None], of_column[None, :], IS_FP8, INTERPRETED
        )
        x = converted(x, G.dtype.element_ty, INTERPRETED)
        if INTERPRETED:
            g, x = g.to(tl.float32), x.to(tl.float32)
        product = tl.dot(g, x, product)
        g_at += g_step
        codes_at += codes_step
    _finish(
        product,
        SUMS,
        MEAN,
        OUT,
        BIAS,
        2 * scale,
        parts,
        sums_row,
        sums_column,
        mean_stride,
        row,
        column,
        first_column,
        out_features,
        in_features,
        PARTS,
        HAS_SUMS,
        HAS_MEAN,
        HAS_BIAS,
        INTERPRETED,
    )


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; no query of the GPU, whose properties are cached."""
    if device.type != "cuda":
        return _WIDEST_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


class _Tile(NamedTuple):
    """What a program makes of the result, and how."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int

    def programs(self, out_features: int, in_features: int) -> int:
        return ceil_div(out_features, self.height) * ceil_div(in_features, self.width)

    @property
    def most_parts(self) -> int:
        """Sums that its programs add up."""
        return _MOST_PARTS if self.height * self.width <= _SMALL_TILE else 1


def _is_room(out_features: int, in_features: int, shared_bytes: int) -> bool:
    """Tell whether there are shared memory and registers for the largest tiles."""
    # in rows that don't begin at a multiple of 16 bytes, an address an element would not fit the registers
    return out_features % 16 == in_features % 16 == 0 and shared_bytes >= _WIDEST_BYTES


def _tile_of(dtype: torch.dtype, out_features: int, in_features: int, shared_bytes: int) -> _Tile:
    """The largest tile of which there are enough to keep a GPU busy."""
    if dtype == torch.float32:
        return _Tile(64, 64, 16, warps=4, stages=3)
    tile = _Tile(128, 256, 64, warps=8, stages=4)
    is_enough = tile.programs(out_features, in_features) >= _MANY_TILES
    if is_enough and _is_room(out_features, in_features, shared_bytes):
        return tile
    tile = _Tile(128, 128, 64, warps=8, stages=3)
    if tile.programs(out_features, in_features) >= _MANY_TILES:
        return tile
    return _Tile(64, 64, 64, warps=4, stages=4)


def _low_bit_tile_of(out_features: int, in_features: int, group: int, shared_bytes: int) -> _Tile:
    """Tall tiles where there are enough of them: what is unpacked serves all of their rows."""
    tile = _Tile(256, 64, 64, warps=8, stages=3)
    is_enough = tile.programs(out_features, in_features) >= _MANY_TILES
    if is_enough and group % 64 == 0 and _is_room(out_features, in_features, shared_bytes):
        return tile
    return _Tile(64, 64, math.gcd(group, 64), warps=4, stages=3)


@lru_cache
def _constants(
    tile: _Tile,
    grouped: int,
    parts: int,
    steps: int | None,
    sums: bool,
    mean: bool,
    bias: bool,
    kind: str,
    group: int,
) -> Constants:
    """Constants of either product."""
    values: dict[str, Any] = {"GROUP": group, "BITS": BITS[kind], "IS_FP8": kind == FP8} if kind else {}
    values |= {"PARTS": parts, "HAS_SUMS": sums, "HAS_MEAN": mean, "HAS_BIAS": bias}
    values |= {"BLOCK_M": tile.height, "BLOCK_N": tile.width, "BLOCK_K": tile.depth, "GROUPED": grouped}
    values |= {"STEPS": steps, "INTERPRETED": IS_INTERPRETED}
    return Constants(values, num_warps=tile.warps, num_stages=tile.stages)


def _interpreted_steps(length: int, step: int) -> int | None:
    """The steps of a loop, which the interpreter wants to know beforehand."""
    return ceil_div(length, step) if IS_INTERPRETED else None


def _added_up(sums: Tensor | None, tile: _Tile) -> Tensor | None:
    """As many sums as programs of this tile add up by themselves."""
    return sums.sum(0, keepdim=True) if sums is not None and sums.shape[0] > tile.most_parts else sums


def _epilogue(
    tile: _Tile,
    sums: Tensor | None,
    mean: Tensor | None,
    bias: Tensor | None,
    rank: int,
    kind: str = "",
    group: int = 0,
) -> tuple[tuple[int, ...], Constants]:
    """Number of the sums, their strides and the mean's; and the constants."""
    parts = 1 if sums is None or sums.shape[0] == 1 else tile.most_parts
    steps = _interpreted_steps(rank, tile.depth)
    has_sums, has_mean, has_bias = sums is not None, mean is not None, bias is not None
    constants = _constants(tile, _GROUPED, parts, steps, has_sums, has_mean, has_bias, kind, group)
    of_sums = (0, 0, 0) if sums is None else (sums.shape[0], *sums.stride())
    return (*of_sums, 0 if mean is None else mean.stride(0)), constants


def _empty_results(
    sketched_g: Tensor, in_features: int, sums: Tensor | None, dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Memory for the gradient, and for the sum of g where it is wanted."""
    out_features = sketched_g.shape[1]
    grad_weight = empty(sketched_g, (out_features, in_features), dtype or sketched_g.dtype)
    if sums is None or bias_dtype is None:
        return grad_weight, None
    return grad_weight, empty(sketched_g, (out_features,), bias_dtype)


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scale (S^T g)^T (S^T x), plus (sum of g) mean^T where the input was centred; and the sum of g.

    Args:
        sketched_g: S^T g, shape (rank, out), bfloat16, float16, or float32 without tensor cores; any strides.
        sketched_x: S^T x as stored, shape (rank, in), rounded to the dtype of `sketched_g` if it has another one.
        sums: Sums of parts of g over their rows, shape (parts, out), at least one part; or None.
        mean: What goes with the sum of g, shape (in,), or None.
        scale: Factor of the product, not of what the mean adds.
        dtype: Dtype of the gradient, that of `sketched_g` by default.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), (0,) where it is not wanted or there are no parts to form it of.
    """
    rank, out_features = sketched_g.shape
    in_features = sketched_x.shape[1]
    if out_features == 0 or in_features == 0:
        return reference.sketched_grad_weight(
            sketched_g, sketched_x, sums, mean, scale=scale, dtype=dtype, bias_dtype=bias_dtype
        )
    tile = _tile_of(sketched_g.dtype, out_features, in_features, _shared_bytes(sketched_g.device))
    grad_weight, bias = _empty_results(sketched_g, in_features, sums, dtype, bias_dtype)
    sums = _added_up(sums, tile)
    strides, constants = _epilogue(tile, sums, mean, bias, rank)
    arguments = (
        sketched_g,
        sketched_x,
        sums,
        mean,
        grad_weight,
        bias,
        rank,
        out_features,
        in_features,
        *sketched_g.stride(),
        *sketched_x.stride(),
        *strides,
        float(scale),
    )
    launch(_grad_weight_kernel, (tile.programs(out_features, in_features), 1, 1), arguments, constants)
    return grad_weight, empty(sketched_g, (0,), sketched_g.dtype) if bias is None else bias


@lru_cache
def _outer_constants(mean: bool, steps: int | None) -> Constants:
    values = {"HAS_MEAN": mean, "PARTS": _PARTS, "ROWS": _OUTER_ROWS, "COLUMNS": _OUTER_COLUMNS}
    return Constants(values | {"STEPS": steps, "INTERPRETED": IS_INTERPRETED}, num_warps=4)


def outer_product_of_sums(
    sums: Tensor, mean: Tensor | None, *, dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """Return the mean's part of a gradient, and the sum of g, in one launch; see the reference.

    Args:
        sums: Sums of parts of g over their rows, shape (parts, out), float32, at least one part.
        mean: What goes with their sum, shape (in,), float32, or None.
        dtype: Dtype of the outer product.
        bias_dtype: Dtype of the sum of g.

    Returns:
        (sum of g) mean^T, shape (out, in), None without a mean; sum of g (out,).
    """
    parts, out_features = sums.shape
    in_features = 0 if mean is None else mean.shape[0]
    if out_features == 0:
        return reference.outer_product_of_sums(sums, mean, dtype=dtype, bias_dtype=bias_dtype)
    sums = sums.contiguous()
    outer = None if mean is None else empty(sums, (out_features, in_features), dtype)
    bias = empty(sums, (out_features,), bias_dtype)
    grid = (ceil_div(out_features, _OUTER_ROWS), max(1, ceil_div(in_features, _OUTER_COLUMNS)), 1)
    arguments = (
        sums,
        mean,
        outer,
        bias,
        parts,
        out_features,
        in_features,
        sums.stride(0),
        0 if mean is None else mean.stride(0),
    )
    constants = _outer_constants(mean is not None, _interpreted_steps(parts, _PARTS))
    launch(_outer_product_of_sums_kernel, grid, arguments, constants)
    return outer, bias


def sketched_grad_weight_low_bit(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    *,
    kind: str,
    group: int,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `sketched_grad_weight` does for a sketch of x in low bits, rounded to the dtype of `sketched_g`.

    The values that the codes stand for are rounded on their way to the tensor cores, as `dequantize` with that dtype
    would round them. Kinds that `supports` denies, groups that are no multiple of 16, and float32 are unpacked into
    memory first.

    Args:
        sketched_g: S^T g, shape (rank, out), bfloat16, float16 or float32, any strides.
        codes: As `low_bit.quantize` returns them, any strides.
        steps: As `low_bit.quantize` returns them.
        offsets: As `low_bit.quantize` returns them.
        seed: The seed that `low_bit.quantize` had.
        sums: Sums of parts of g over their rows, shape (parts, out), or None.
        mean: What goes with the sum of g, shape (in,), or None.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        scale: Factor of the product, not of what the mean adds.
        dtype: Dtype of the gradient, that of `sketched_g` by default.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), or (0,).
    """
    rank, out_features = sketched_g.shape
    in_features = steps.shape[1]
    is_empty = out_features == 0 or in_features == 0
    if is_empty or not supports(kind) or group % 16 or sketched_g.dtype == torch.float32:
        values = low_bit.dequantize(
            codes, steps, offsets, seed, kind=kind, group=group, features=in_features, dtype=sketched_g.dtype
        )
        return sketched_grad_weight(sketched_g, values, sums, mean, scale=scale, dtype=dtype, bias_dtype=bias_dtype)
    tile = _low_bit_tile_of(out_features, in_features, group, _shared_bytes(codes.device))
    grad_weight, bias = _empty_results(sketched_g, in_features, sums, dtype, bias_dtype)
    sums = _added_up(sums, tile)
    strides, constants = _epilogue(tile, sums, mean, bias, rank, kind, group)
    arguments = (
        sketched_g,
        codes,
        steps.contiguous().view(torch.int16),
        offsets.contiguous().view(torch.int16),
        seed,
        sums,
        mean,
        grad_weight,
        bias,
        rank,
        out_features,
        in_features,
        codes.shape[1],
        *sketched_g.stride(),
        *codes.stride(),
        *strides,
        float(scale),
    )
    launch(_low_bit_grad_weight_kernel, (tile.programs(out_features, in_features), 1, 1), arguments, constants)
    return grad_weight, empty(sketched_g, (0,), sketched_g.dtype) if bias is None else bias
