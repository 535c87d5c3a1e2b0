"""Row sampling on a GPU: the rows that were drawn, and the norms to draw by, in one reading each.

The drawing itself is a handful of sums and sorts over the rows, which torch does without waiting for the device.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..launching import Constants, ceil_div, launch
from . import reference

# Elements of a tile, fewer where they are widened to float64.
_TILE = 2048
_WIDE_TILE = 1024
# Rows of a tile: few where a row lies in one piece, many where a column does.
_ROWS_OF_A_TILE = 4
_ROWS_OF_A_TILE_OF_COLUMNS = 32
_WARPS = 4
_STAGES = 1
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("rows",)


@triton.jit(do_not_specialize=[*_ANY_ROWS, "scale"])
def _gather_rows_kernel(
    X,
    INDEX,
    MEAN,
    SCALES,
    OUT,
    rows,
    features,
    row_stride,
    column_stride,
    index_stride,
    mean_stride,
    scales_stride,
    scale,
    HAS_MEAN: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    is_row, is_feature = row < rows, feature < features
    is_element = is_row[:, None] & is_feature[None, :]
    # int64: row * stride passes 2**31 in large batches
    drawn = tl.load(INDEX + row * index_stride, mask=is_row, other=0).to(tl.int64)
    x = tl.load(
        X + drawn[:, None] * row_stride + feature[None, :].to(tl.int64) * column_stride, mask=is_element, other=0.0
    ).to(tl.float32)
    # in the twin's order, which gives the twin's rounding
    if HAS_MEAN:
        x -= tl.load(MEAN + feature * mean_stride, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALES:
        x *= tl.load(SCALES + row * scales_stride, mask=is_row, other=0.0).to(tl.float32)[:, None]
    tl.store(OUT + row[:, None] * features + feature[None, :], (x * scale).to(OUT.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=_ANY_ROWS)
def _row_norms_kernel(
    X,
    MEAN,
    OUT,
    rows,
    row_stride,
    column_stride,
    mean_stride,
    FEATURES: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    squares = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float64)
    for first in range(0, FEATURES, BLOCK_FEATURES):
        feature = first + tl.arange(0, BLOCK_FEATURES)
        is_element = is_row[:, None] & (feature < FEATURES)[None, :]
        x = tl.load(
            X + row[:, None] * row_stride + feature[None, :].to(tl.int64) * column_stride, mask=is_element, other=0.0
        )
        # float64: the squares of 1e-30 and 1e30 neither vanish nor overflow
        wide = x.to(tl.float32).to(tl.float64)
        if HAS_MEAN:
            mean = tl.load(MEAN + feature * mean_stride, mask=feature < FEATURES, other=0.0)
            # beyond the last feature both are 0
            wide -= mean.to(tl.float32).to(tl.float64)[None, :]
        squares += wide * wide
    tl.store(OUT + row, tl.sqrt(tl.sum(squares, axis=1)), mask=is_row)


def _tile(elements: int, features: int, *, lies_in_rows: bool) -> tuple[int, int]:
    """Rows and features of a tile of so many elements, where the elements of a row or of a column are neighbours."""
    rows = _ROWS_OF_A_TILE if lies_in_rows else _ROWS_OF_A_TILE_OF_COLUMNS
    return rows, min(elements // rows, max(16, triton.next_power_of_2(features)))


@lru_cache
def _gather_constants(features: int, lies_in_rows: bool, mean: bool, scales: bool) -> Constants:
    """Constants of the kernel."""
    rows, columns = _tile(_TILE, features, lies_in_rows=lies_in_rows)
    values = {"HAS_MEAN": mean, "HAS_SCALES": scales, "BLOCK_ROWS": rows, "BLOCK_FEATURES": columns}
    return Constants(values, num_warps=_WARPS, num_stages=_STAGES)


@lru_cache
def _norms_constants(features: int, lies_in_rows: bool, mean: bool) -> Constants:
    """Constants of the kernel."""
    rows, columns = _tile(_WIDE_TILE, features, lies_in_rows=lies_in_rows)
    values = {"FEATURES": features, "HAS_MEAN": mean, "BLOCK_ROWS": rows, "BLOCK_FEATURES": columns}
    return Constants(values, num_warps=_WARPS, num_stages=_STAGES)


def _stride(vector: Tensor | None) -> int:
    return 1 if vector is None else vector.stride(0)


def gather_rows(
    x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None, *, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * scales_j * (x[index_j] - mean), row by row.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides.
        index: Row numbers, shape (rank,), any integer dtype; a number beyond the rows is not refused.
        mean: Shape (features,), or None.
        scales: Factor of each row, shape (rank,), or None for 1.
        scale: Factor of all rows.
        dtype: Dtype of the result; formed in float32.

    Returns:
        Shape (rank, features).
    """
    rank, features = index.shape[0], x.shape[1]
    out = empty(x, (rank, features), dtype)
    if out.numel() == 0:
        return out
    row_stride, column_stride = x.stride()
    constants = _gather_constants(features, column_stride <= row_stride, mean is not None, scales is not None)
    grid = (ceil_div(rank, constants["BLOCK_ROWS"]), ceil_div(features, constants["BLOCK_FEATURES"]), 1)
    arguments = (
        x,
        index,
        mean,
        scales,
        out,
        rank,
        features,
        row_stride,
        column_stride,
        index.stride(0),
        _stride(mean),
        _stride(scales),
        scale,
    )
    launch(_gather_rows_kernel, grid, arguments, constants)
    return out


def row_norms(x: Tensor, mean: Tensor | None) -> Tensor:
    """Return the Euclidean norm of every row of x - 1 mean^T.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides.
        mean: Shape (features,), or None.

    Returns:
        Shape (rows,), float64.
    """
    if x.numel() == 0:
        return reference.row_norms(x, mean)
    rows, features = x.shape
    out = empty(x, (rows,), torch.float64)
    row_stride, column_stride = x.stride()
    constants = _norms_constants(features, column_stride <= row_stride, mean is not None)
    grid = (ceil_div(rows, constants["BLOCK_ROWS"]), 1, 1)
    launch(_row_norms_kernel, grid, (x, mean, out, rows, row_stride, column_stride, _stride(mean)), constants)
    return out
