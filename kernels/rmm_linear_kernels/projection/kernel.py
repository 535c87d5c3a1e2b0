"""Dense random projections on a GPU: S is made in registers, a tile at a time, and multiplied on the tensor cores.

A program generates the tile of S for its columns of S and its next rows of x, and drops the tile after the product:
each entry is generated once for every BLOCK_FEATURES features. Signs are exact in every dtype. For half-precision rows
a normal is split into the sum of two half-precision numbers, which together hold 16 to 18 of its bits, so that x and g
of every dtype have the same S; a normal rounded to bfloat16 would differ by 2**-9. Both parts lie beside each other in
one tile, and the matching rows of x are read twice: one product, since two consecutive products would move the sums to
and from the tensor cores' memory on Blackwell GPUs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device_functions import converted
from ..interpreter import IS_INTERPRETED
from ..philox.kernel import PROJECTION_STREAM, normals_of_cell, words_of_cell

# Stages of the pipeline: x of the next step is loaded while this step's tile of S is generated.
_STAGES = 2
# The number of programs that fills a large GPU, and the least rows of a program.
_PROGRAMS = 128
_LEAST_ROWS = 512
# A multiple of every BLOCK_ROWS.
_STEP = 64


@triton.jit
def _count_ones(word):
    """The number of 1 bits of each 32-bit number, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _sum_of_signs(word, present):
    """Sum of the signs of the first `present` bits of each word."""
    present = tl.minimum(tl.maximum(present, 0), 32)
    # 64 bits, since a shift by 32 is undefined in 32 bits
    is_row = ((tl.full((), 1, tl.uint64) << present.to(tl.uint64)) - 1).to(tl.uint32)
    return present - 2 * _count_ones(word & is_row)


@triton.jit
def _sign_words(seed, first, column):
    """Bits of the signs of 64 rows of each column, two words, for the aligned 64 rows around `first`."""
    one, two, three, four = words_of_cell(seed, first // 128, column, PROJECTION_STREAM)
    is_second_half = (first & 64) != 0
    return tl.where(is_second_half, three, one), tl.where(is_second_half, four, two)


@triton.jit
def _signs(low, high, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Signs of BLOCK_ROWS = 32 or 64 rows from one or two words a column, float32 (BLOCK_RANK, BLOCK_ROWS)."""
    if BLOCK_ROWS == 64:
        word = tl.join(low, high)
    else:
        word = low
    # tl.join keeps the halves in the thread that computed the column's counter. Bit b becomes the sign bit of a float.
    word = tl.join(word << 16, word)
    word = tl.join(word << 8, word)
    word = tl.join(word << 4, word)
    word = tl.join(word << 2, word)
    word = tl.join(word << 1, word)
    signs = (word & 0x80000000) | 0x3F800000
    return signs.reshape(BLOCK_RANK, BLOCK_ROWS).to(tl.float32, bitcast=True)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows", "rank", "steps", "scale"])
def _random_projection_kernel(
    X,
    SEED,
    MEAN,
    OUT,
    rows,
    rank,
    features,
    row_stride,
    column_stride,
    scale,
    steps,
    GAUSSIAN: tl.constexpr,
    IN_HALVES: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    split = tl.program_id(2)
    is_feature = feature < features
    seed = tl.load(SEED)
    # int64: row * stride passes 2**31 in large batches
    x_columns = X + feature[None, :].to(tl.int64) * column_stride
    # Rows of x for the columns of a tile of S: in order, or each row twice.
    if IN_HALVES:
        place = tl.arange(0, 2 * BLOCK_ROWS) // 2
    else:
        place = tl.arange(0, BLOCK_ROWS)
    sums = tl.zeros((BLOCK_RANK, BLOCK_FEATURES), tl.float32)
    ones = tl.zeros((BLOCK_RANK, BLOCK_ROWS // 4), tl.float32)
    # only a loop over `range` is pipelined; the interpreter needs a Python int there
    for step in range(steps if STEPS is None else STEPS):
        first = (split * steps + step) * BLOCK_ROWS
        row = first + place
        x = tl.load(
            x_columns + row[:, None].to(tl.int64) * row_stride,
            mask=(row < rows)[:, None] & is_feature[None, :],
            other=0.0,
        )
        if INTERPRETED:
            # the interpreter computes with numpy, which has no bfloat16
            x = x.to(tl.float32)
        if GAUSSIAN:
            group = first // 4 + tl.arange(0, BLOCK_ROWS // 4)
            one, two, three, four = normals_of_cell(seed, group[None, :], column[:, None], PROJECTION_STREAM)
            if MEAN is not None:
                present = (rows - 4 * group)[None, :]
                ones += tl.where(present > 0, one, 0.0) + tl.where(present > 1, two, 0.0)
                ones += tl.where(present > 2, three, 0.0) + tl.where(present > 3, four, 0.0)
            entries = tl.join(tl.join(one, three), tl.join(two, four)).reshape(BLOCK_RANK, BLOCK_ROWS)
            if IN_HALVES:
                # rounded to 8 bits, which both half types hold; a conversion to and from the type would take longer
                bits = entries.to(tl.uint32, bitcast=True) + 0x8000
                high = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
                low = entries - high
                entries = tl.join(high.to(x.dtype), low.to(x.dtype)).reshape(BLOCK_RANK, 2 * BLOCK_ROWS)
        else:
            low, high = _sign_words(seed, first, column)
            if BLOCK_ROWS == 32:
                low = tl.where((first & 32) != 0, high, low)
            entries = _signs(low, high, BLOCK_RANK, BLOCK_ROWS)
        sums = tl.dot(entries.to(x.dtype), x, sums, input_precision=PRECISION)
    if MEAN is not None:
        mean = tl.load(MEAN + feature, mask=is_feature, other=0.0).to(tl.float32)
        if GAUSSIAN:
            total = tl.sum(ones, axis=1)
        else:
            # the sum in a separate loop, with a counter for 64 rows: in the loop above it would need too many registers
            count = tl.zeros((BLOCK_RANK,), tl.int32)
            for step in range((steps if STEPS is None else STEPS) * BLOCK_ROWS // 64):
                first = split * steps * BLOCK_ROWS + step * 64
                low, high = _sign_words(seed, first, column)
                count += _sum_of_signs(low, rows - first) + _sum_of_signs(high, rows - first - 32)
            total = count.to(tl.float32)
        sums -= total[:, None] * mean[None, :]
    first_column = tl.program_id(0) * BLOCK_RANK
    out_tile = OUT + (split.to(tl.int64) * rank + first_column) * features
    tl.store(
        out_tile + (column - first_column)[:, None] * features + feature[None, :],
        converted(sums * scale, OUT.dtype.element_ty, INTERPRETED),
        mask=(column < rank)[:, None] & is_feature[None, :],
    )


def _splits(rows: int, tiles: int) -> tuple[int, int]:
    """The number of parts into which the rows are split if the result has few tiles, and the rows of each part."""
    splits = max(1, min(_PROGRAMS // max(1, tiles), rows // _LEAST_ROWS))
    rows_of_split = triton.cdiv(triton.cdiv(rows, splits), _STEP) * _STEP
    return max(1, triton.cdiv(rows, max(1, rows_of_split))), rows_of_split


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * R^T (x - 1 mean^T) for float32, bfloat16 or float16; see the reference."""
    rows, features = x.shape
    out = x.new_empty((rank, features), dtype=dtype)
    if out.numel() == 0:
        return out
    wide = x.dtype == torch.float32
    # Larger tiles spill registers on some GPUs, and smaller tiles generate S more often.
    block_rank, block_features, block_rows, warps = (
        (64, 128, 32, 8) if wide else (64, 256, 16, 4) if gaussian else (128, 128, 64, 4)
    )
    grid = triton.cdiv(rank, block_rank), triton.cdiv(features, block_features)
    splits, rows_of_split = _splits(rows, grid[0] * grid[1])
    steps = rows_of_split // block_rows
    parts = out if splits == 1 else x.new_empty((splits, rank, features), dtype=torch.float32)
    _random_projection_kernel[(*grid, splits)](
        x,
        seed,
        None if mean is None else mean.contiguous(),
        parts,
        rows,
        rank,
        features,
        *x.stride(),
        float(scale),
        steps,
        GAUSSIAN=gaussian,
        IN_HALVES=gaussian and not wide,
        BLOCK_RANK=block_rank,
        BLOCK_FEATURES=block_features,
        BLOCK_ROWS=block_rows,
        # Float32 takes three products of tf32 parts, not "ieee": if a factor is not loaded from memory as float32,
        # triton 3.7 computes a plain tf32 product on Blackwell GPUs.
        PRECISION="tf32x3" if wide else "ieee",
        INTERPRETED=IS_INTERPRETED,
        STEPS=steps if IS_INTERPRETED else None,
        num_warps=warps,
        num_stages=_STAGES,
    )
    # partial sums in a fixed order, so that all runs have equal bits, unlike with atomic additions
    return out if splits == 1 else parts.sum(0).to(dtype)
