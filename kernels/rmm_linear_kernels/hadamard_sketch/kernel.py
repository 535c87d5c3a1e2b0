"""The strided-block Hadamard sketch on a GPU: one reading of x, the mixing matrix made in registers.

A program takes one block of rows and some tiles of features. It draws the block's signs and the kept rows of H, forms
the (kept, rows of the block) matrix of +-1 in registers, and multiplies the block by it on the tensor cores, with
float32 sums; +-1 is exact in every dtype. A float32 tile is cut into three bfloat16 parts, which together hold all of
its 24 bits.

In the same reading, where wanted: the block's part of the column sums, for the bias gradient; or of what is left of the
mean that is taken off (see `reference.hadamard_sketch_and_mean`), for which S^T 1 and the sketch itself are at hand.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import compiled_backend
from ..device_functions import awaited, row_begins
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, Prepared, ceil_div, prepared_by
from ..strides import Rows, are_rows_aligned, rows_of
from . import reference
from .entries import (
    block_words,
    entries_of,
    half_places,
    matrix_constants,
    mixing_rows,
    paley_entries,
    ranked_columns,
    sum_of_signs,
    sums_of_entries,
)

# Rows of a block that are multiplied at a time; blocks are no larger but for ratios below 1/32.
_CHUNK = 64
# The least that a matrix instruction takes.
_LEAST_KEPT = 16
# Rows of a block that words of signs are made for, 32 to a word.
_LEAST_CHUNK = 32
# Features of a tile and tiles of a program: the matrix of a block is made once for all of its tiles.
_TILE = 64
_MOST_TILES, _MOST_LARGE_TILES = 4, 2
# Three for each multiprocessor of a large GPU, which holds them at once. What is prepared remembers the choice.
_PROGRAMS = 384
_WARPS = 4
# Launches that are prepared: batches of sentences have another number of rows each.
_MOST_REMEMBERED = 4096
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("rows", "blocks", "shortest", "longer", "kept", "sign_stride")


@triton.jit
def both_halves(X, place, block, blocks, rows, row_stride, run, gap, is_feature):
    """The rows of a block from a first place on, of both halves; X points to the features of row 0."""
    # int64: row * stride passes 2**31 in large batches
    row = (place * blocks + block).to(tl.int64)
    following = row + 16 * blocks
    return (
        tl.load(
            X + row_begins(row, row_stride, run, gap)[:, None],
            mask=(row < rows)[:, None] & is_feature[None, :],
            other=0.0,
        ),
        tl.load(
            X + row_begins(following, row_stride, run, gap)[:, None],
            mask=(following < rows)[:, None] & is_feature[None, :],
            other=0.0,
        ),
    )


@triton.jit
def mixed(first, second, x, more_of_x, IS_WIDE: tl.constexpr, UPCAST: tl.constexpr, total=None):
    """First @ x + second @ more_of_x with float32 sums; x in its own dtype, or cut into three if it is float32."""
    if UPCAST:
        # the interpreter's arithmetic is that of numpy, which has no bfloat16
        total = tl.dot(first, x.to(tl.float32), total, input_precision="ieee")
        total = tl.dot(second, more_of_x.to(tl.float32), total, input_precision="ieee")
    elif IS_WIDE:
        high, middle, low = _parts(x)
        more_high, more_middle, more_low = _parts(more_of_x)
        # the small parts first: the large one's rounding is then the only one
        total = tl.dot(second, more_low, tl.dot(first, low, total))
        total = tl.dot(second, more_middle, tl.dot(first, middle, total))
        total = tl.dot(second, more_high, tl.dot(first, high, total))
    else:
        total = tl.dot(second, more_of_x, tl.dot(first, x, total))
    return total


@triton.jit
def _parts(x):
    """Three bfloat16 numbers whose sum is a float32 number."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def column_sums(total, x, more_of_x, IS_WIDE: tl.constexpr, UPCAST: tl.constexpr, DTYPE: tl.constexpr):
    """The total, of equal rows, and the sum of the rows of both halves."""
    if IS_WIDE:
        total += (tl.sum(x, axis=0) + tl.sum(more_of_x, axis=0))[None, :]
    else:
        # by the tensor cores, which have x for the sketch
        ones = tl.full((total.shape[0], x.shape[0]), 1.0, DTYPE)
        total = mixed(ones, ones, x, more_of_x, False, UPCAST, total)
    return total


@triton.jit
def either(one, other):
    """Either of two equal numbers."""
    return one


@triton.jit(do_not_specialize=[*_ANY_ROWS, "run", "scale"])
def _hadamard_sketch_kernel(
    X,
    SEED,
    MEAN,
    OUT,
    SUMS,
    rows,
    features,
    blocks,
    shortest,
    longer,
    kept,
    sign_stride,
    row_stride,
    column_stride,
    run,
    gap,
    scale,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    IS_FULL: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_REST: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
):
    block = tl.program_id(0)
    first_tile = tl.program_id(1) * TILES
    seed = tl.load(SEED)
    place, kept_place = half_places(CHUNK), tl.arange(0, KEPT_2)
    feature = first_tile * TILE + tl.arange(0, TILE)
    columns = X + feature[None, :].to(tl.int64) * column_stride
    # the first tile is on its way while the signs and columns are drawn
    x, more_of_x = both_halves(columns, place, block, blocks, rows, row_stride, run, gap, feature < features)
    # rows of this block
    present = shortest + (block < longer).to(tl.int32)
    if PRIME == 0:
        matrix_row, low, high = mixing_rows(seed, DEGREE, POLYNOMIAL, KEPT_2)
        signed_low, signed_high = block_words(seed, matrix_row, low, high, block, 0, sign_stride, DEGREE)
        first, second = entries_of(signed_low, signed_high, CHUNK, DTYPE)
        if HAS_MEAN:
            ones = sum_of_signs(signed_low, signed_high, present if CHUNKS == 1 else tl.minimum(present, CHUNK))
            ones = ones.to(tl.float32)
    else:
        matrix_row = ranked_columns(seed, ORDER, ORDER_2, KEPT_2)
        low, high = matrix_row, matrix_row
        first, second = paley_entries(seed, matrix_row, block, PRIME, SQUARES, CHUNK, DTYPE)
        if HAS_MEAN:
            ones = sums_of_entries(first, second, present, CHUNK, DTYPE)
    for tile in tl.static_range(TILES):
        feature = (first_tile + tile) * TILE + tl.arange(0, TILE)
        is_feature = feature < features
        tile_of_x, more_of_tile = x, more_of_x
        if tile + 1 < TILES:
            columns = X + (feature + TILE)[None, :].to(tl.int64) * column_stride
            x, more_of_x = both_halves(
                columns, place, block, blocks, rows, row_stride, run, gap, feature + TILE < features
            )
        # float32 is cut into parts in registers first
        if not IS_WIDE:
            tile_of_x, more_of_tile = awaited(tile_of_x, BACKEND), awaited(more_of_tile, BACKEND)
        product = mixed(first, second, tile_of_x, more_of_tile, IS_WIDE, UPCAST)
        if HAS_SUMS:
            sums = tl.zeros((SUM_ROWS, TILE), tl.float32)
            sums = column_sums(sums, tile_of_x, more_of_tile, IS_WIDE, UPCAST, DTYPE)
        # blocks of more than CHUNK rows, which have one tile a program; of Sylvester's matrix, as Paley's are smaller
        for chunk in range(1, CHUNKS):
            further, more = both_halves(
                columns, chunk * CHUNK + place, block, blocks, rows, row_stride, run, gap, is_feature
            )
            more_low, more_high = block_words(seed, matrix_row, low, high, block, chunk, sign_stride, DEGREE)
            one, other = entries_of(more_low, more_high, CHUNK, DTYPE)
            product = mixed(one, other, further, more, IS_WIDE, UPCAST, product)
            if HAS_MEAN:
                here = tl.minimum(tl.maximum(present - chunk * CHUNK, 0), CHUNK)
                ones += sum_of_signs(more_low, more_high, here).to(tl.float32)
            if HAS_SUMS:
                sums = column_sums(sums, further, more, IS_WIDE, UPCAST, DTYPE)
        if HAS_MEAN:
            mean = tl.load(MEAN + feature, mask=is_feature, other=0.0).to(tl.float32)
            product -= ones[:, None] * mean[None, :]
        stored = (product * scale).to(OUT.dtype.element_ty)
        if HAS_REST:
            # of what is stored, whose rounding is then as centred as all else
            of_mean = stored.to(tl.float32)
            if not IS_FULL:
                # the combinations that are not kept may have overflown
                of_mean = tl.where((kept_place < kept)[:, None], of_mean, 0.0)
            sums -= of_mean * (ones * (1.0 / scale) * (SUM_ROWS / kept))[:, None]
            total = tl.sum(sums, axis=0) * (1.0 / SUM_ROWS) * (1.0 / rows)
        elif HAS_SUMS:
            total = tl.reduce(sums, 0, either)
        out_row = (block * kept + kept_place).to(tl.int64)
        tl.store(
            OUT + out_row[:, None] * features + feature[None, :],
            stored,
            mask=(kept_place < kept)[:, None] & is_feature[None, :],
        )
        if HAS_SUMS:
            tl.store(SUMS + block.to(tl.int64) * features + feature, total, mask=is_feature)


# without keywords, which take the cache a microsecond
@lru_cache
def _constants(
    order: int, kept: int, tile: int, tiles: int, dtype: torch.dtype, mean: bool, sums: bool, rest: bool
) -> Constants:
    """Constants of the kernel for a geometry and a tile."""
    kept_2 = max(_LEAST_KEPT, triton.next_power_of_2(kept))
    values: dict[str, Any] = {
        **matrix_constants(order),
        "KEPT_2": kept_2,
        "IS_FULL": kept == kept_2,
        "CHUNK": max(_LEAST_CHUNK, triton.next_power_of_2(min(order, _CHUNK))),
        "CHUNKS": _chunks(order),
        "TILE": tile,
        "TILES": tiles,
        "HAS_MEAN": mean,
        "HAS_SUMS": sums,
        "HAS_REST": rest,
        "SUM_ROWS": kept_2 if rest else _LEAST_KEPT,
        "IS_WIDE": dtype == torch.float32,
        "UPCAST": IS_INTERPRETED,
        "DTYPE": tl.float32 if IS_INTERPRETED else tl.float16 if dtype == torch.float16 else tl.bfloat16,
        "BACKEND": compiled_backend(),
    }
    return Constants(values, num_warps=_WARPS)


def _chunks(order: int) -> int:
    return ceil_div(order, _CHUNK)


def _tile_of(order: int, kept: int, blocks: int, features: int, dtype: torch.dtype, aligned: bool) -> tuple[int, int]:
    """Features of a tile, and tiles of a program; fewer where each number has an address of its own."""
    wide, chunks = dtype == torch.float32, _chunks(order)
    # three parts, with a loop and the sums or with twice as many results, would not fit the registers
    tile = _TILE // 2 if wide and (chunks > 1 or kept > _CHUNK // 2) else _TILE
    tiles, most = 1, _MOST_LARGE_TILES if wide or kept > _CHUNK // 2 else _MOST_TILES
    if not aligned:
        most //= 2
    # more than one tile a program as soon as there are programs enough
    while tiles < most and chunks == 1 and blocks * ceil_div(features, tile * tiles * 2) >= _PROGRAMS:
        tiles *= 2
    return tile, tiles


def _prepared(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    dtype: torch.dtype,
    sums: bool = False,
    rest: bool = False,
) -> Prepared | None:
    """The launch for tensors like these, with a contiguous mean; None where nothing is to be launched."""
    if x.numel() == 0:
        return None
    dtypes = x.dtype, seed.dtype, None if mean is None else mean.dtype, dtype
    return _prepared_launch(rows_of(x), blocks, kept, are_rows_aligned(x), float(scale), dtypes, sums, rest)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _prepared_launch(
    of_x: Rows,
    blocks: int,
    kept: int,
    aligned: bool,
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype],
    sums: bool,
    rest: bool,
) -> Prepared:
    """The launch; `dtypes` are those of x, the seed, the mean if there is one, and the sketch."""
    x_dtype, _, mean_dtype, out_dtype = dtypes
    rows, features, *strides = of_x
    block_rows = ceil_div(rows, blocks)
    order = reference.hadamard_order(block_rows)
    tile, tiles = _tile_of(order, kept, blocks, features, x_dtype, aligned)
    constants = _constants(order, kept, tile, tiles, x_dtype, mean_dtype is not None, sums, rest)
    stride = reference.sign_stride(block_rows)
    numbers = (rows, features, blocks, rows // blocks, rows % blocks, kept, stride, *strides, scale)
    grid = (blocks, ceil_div(features, tile * tiles), 1)
    results = ((blocks * kept, features), out_dtype), ((blocks, features), torch.float32) if sums else None
    return Prepared(_hadamard_sketch_kernel, grid, numbers, constants, results)


@prepared_by(_prepared)
def hadamard_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * sqrt(kept) * S^T (x - 1 mean^T) for the strided-block Hadamard S.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides; or in runs, see `strides.in_runs`.
        seed: 0-d int64 on x's device.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations; `1 / sqrt(kept)` gives S^T x itself.
        dtype: Dtype of the result; sums are formed in float32.

    Returns:
        Shape (blocks * kept, features); row k * kept + c is combination c of block k.
    """
    how: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": dtype}
    mean = mean if mean is None else mean.contiguous()
    prepared = _prepared(x, seed, mean, **how)
    if prepared is None:
        return reference.hadamard_sketch(x, seed, mean, **how)
    out, _ = prepared(x, seed, mean)
    return out


def hadamard_sketch_and_mean(
    x: Tensor, seed: Tensor, mean: Tensor, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sketch of x - 1 mean^T and what is left of the mean of x: x is read once.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides; or in runs, see `strides.in_runs`.
        seed: 0-d int64 on x's device.
        mean: Shape (features,), subtracted from every row before it is sketched.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of the sketch, and not of what is taken off the mean.
        dtype: Dtype of the sketch.

    Returns:
        Sketch (blocks * kept, features); the mean of x less X^T (S^T 1) / rows, see the reference, (features,),
        float32.
    """
    how: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": dtype}
    mean = mean.contiguous()
    prepared = _prepared(x, seed, mean, **how, sums=True, rest=True)
    if prepared is None:
        return reference.hadamard_sketch_and_mean(x, seed, mean, **how)
    out, sums = prepared(x, seed, mean)
    # one sum after the other: the same in every run, which atomic additions are not
    return out, sums.sum(0)


def hadamard_sketch_and_sums(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sketch of x - 1 mean^T and the column sums of the blocks of x itself: x is read once.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides; or in runs, see `strides.in_runs`.
        seed: 0-d int64 on x's device.
        mean: Shape (features,), subtracted from every row before it is sketched, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of the sketch.
        dtype: Dtype of the sketch.

    Returns:
        Sketch (blocks * kept, features); sums (blocks, features), float32, whose own sum is that of x.
    """
    how: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": dtype}
    mean = mean if mean is None else mean.contiguous()
    prepared = _prepared(x, seed, mean, **how, sums=True)
    if prepared is None:
        return reference.hadamard_sketch_and_sums(x, seed, mean, **how)
    out, sums = prepared(x, seed, mean)
    return out, sums
