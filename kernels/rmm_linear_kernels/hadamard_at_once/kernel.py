"""A small input's sketch and the gradient that it gives, on a GPU, in one launch each.

The sketch: a program takes some features of all rows, adds them up for the mean, and reads them again to sketch block
after block; what is left of the mean is whole then, and nothing has to be added up by others.

The gradient: a program takes a tile of it, sketches the tile's columns of g block after block, and multiplies what it
has by the stored sketch. Each of the tiles in a row of them sketches the same columns of g, and sums them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..device_functions import converted, where_first
from ..hadamard_sketch import reference as hadamard
from ..hadamard_sketch.entries import (
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
from ..hadamard_sketch.kernel import both_halves, column_sums, either, mixed
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, Prepared, ceil_div, prepared_by
from ..strides import Rows, rows_of
from . import reference

# The least that a matrix instruction takes.
_LEAST_KEPT = 16
# Rows of a block that words of signs are made for, 32 to a word.
_LEAST_CHUNK = 32
# Rows of three parts of float32 that four warps share in a way that spills; of twice as many, they don't.
_SPILLING_KEPT = 32
# Rows that the tensor cores make of a sum.
_SUM_ROWS = tl.constexpr(16)
# Features of a program of the sketch: few, for the sake of many programs.
_FEATURES = 32
_WARPS = 4
_STAGES = 2
# Constants of different launches.
_MOST_REMEMBERED = 4096


@triton.jit
def _matrix_rows(
    seed,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    KEPT_2: tl.constexpr,
):
    """The kept rows of H, and the words of `mixing_rows` where they are made of words."""
    if PRIME == 0:
        row, low, high = mixing_rows(seed, DEGREE, POLYNOMIAL, KEPT_2)
    else:
        row = ranked_columns(seed, ORDER, ORDER_2, KEPT_2)
        low, high = row, row
    return row, low, high


@triton.jit
def _entries(
    seed,
    matrix_row,
    low,
    high,
    block,
    DEGREE: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """H[columns] diag(signs) of both halves of a block of at most 64 rows, +-1; and the words that they are made of."""
    if PRIME == 0:
        low, high = block_words(seed, matrix_row, low, high, block, 0, 64, DEGREE)
        first, second = entries_of(low, high, CHUNK, DTYPE)
    else:
        first, second = paley_entries(seed, matrix_row, block, PRIME, SQUARES, CHUNK, DTYPE)
    return first, second, low, high


@triton.jit(do_not_specialize=["rows", "blocks", "shortest", "longer", "kept", "run", "scale"])
def _sketch_and_mean_at_once_kernel(
    X,
    SEED,
    OUT,
    REST,
    rows,
    features,
    blocks,
    shortest,
    longer,
    kept,
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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    feature = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_feature = feature < features
    place, kept_place = half_places(CHUNK), tl.arange(0, KEPT_2)
    is_kept = kept_place < kept
    x_columns = X + feature[None, :].to(tl.int64) * column_stride
    total = tl.zeros((_SUM_ROWS, TILE), tl.float32)
    # the interpreter wants a Python number, and makes a tensor of whatever has a name
    for block in range(blocks if STEPS is None else STEPS):
        x, more_of_x = both_halves(x_columns, place, block, blocks, rows, row_stride, run, gap, is_feature)
        total = column_sums(total, x, more_of_x, IS_WIDE, INTERPRETED, DTYPE)
    total = tl.reduce(total, 0, either)
    mean = tl.div_rn(total, tl.zeros((TILE,), tl.float32) + rows)
    seed = tl.load(SEED)
    matrix_row, low, high = _matrix_rows(seed, ORDER, ORDER_2, DEGREE, POLYNOMIAL, PRIME, KEPT_2)
    off = tl.zeros((TILE,), tl.float32)
    # read again, as what is held would not leave registers enough
    for block in range(blocks if STEPS is None else STEPS):
        x, more_of_x = both_halves(x_columns, place, block, blocks, rows, row_stride, run, gap, is_feature)
        present = shortest + tl.where(block < longer, 1, 0)
        first, second, signed_low, signed_high = _entries(
            seed, matrix_row, low, high, block, DEGREE, PRIME, SQUARES, CHUNK, DTYPE
        )
        if PRIME == 0:
            ones = sum_of_signs(signed_low, signed_high, present).to(tl.float32)
        else:
            ones = sums_of_entries(first, second, present, CHUNK, DTYPE)
        product = mixed(first, second, x, more_of_x, IS_WIDE, INTERPRETED) - ones[:, None] * mean[None, :]
        stored = converted(product * scale, OUT.dtype.element_ty, INTERPRETED)
        # the combinations that are not kept may have overflown
        off += tl.sum(tl.where(is_kept[:, None], stored.to(tl.float32) * ones[:, None], 0.0), axis=0)
        out_row = (block * kept + kept_place).to(tl.int64)
        tl.store(
            OUT + out_row[:, None] * features + feature[None, :], stored, mask=is_kept[:, None] & is_feature[None, :]
        )
    rest = (total - off * (1.0 / scale) * (1.0 / kept)) * (1.0 / rows)
    tl.store(REST + feature, rest, mask=is_feature)


@triton.jit(do_not_specialize=["rows", "blocks", "kept", "scale", "factor"])
def _grad_weight_at_once_kernel(
    G,
    SEED,
    X,
    MEAN,
    OUT,
    BIAS,
    rows,
    out_features,
    in_features,
    blocks,
    kept,
    g_row,
    g_column,
    x_row,
    x_column,
    mean_stride,
    scale,
    factor,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_out, is_column = out < out_features, column < in_features
    place, kept_place = half_places(CHUNK), tl.arange(0, KEPT_2)
    is_kept = kept_place < kept
    g_columns = G + out[None, :].to(tl.int64) * g_column
    x_columns = X + column[None, :].to(tl.int64) * x_column
    seed = tl.load(SEED)
    matrix_row, low, high = _matrix_rows(seed, ORDER, ORDER_2, DEGREE, POLYNOMIAL, PRIME, KEPT_2)
    product = tl.zeros((TILE, TILE), tl.float32)
    sums = tl.zeros((_SUM_ROWS, TILE), tl.float32)
    # the interpreter wants a Python number, and makes a tensor of whatever has a name
    for block in range(blocks if STEPS is None else STEPS):
        g, more_of_g = both_halves(g_columns, place, block, blocks, rows, g_row, None, None, is_out)
        x_rows = (block * kept + kept_place)[:, None].to(tl.int64) * x_row
        x = tl.load(x_columns + x_rows, mask=is_kept[:, None] & is_column[None, :], other=0.0)
        sums = column_sums(sums, g, more_of_g, IS_WIDE, INTERPRETED, DTYPE)
        first, second, _, _ = _entries(seed, matrix_row, low, high, block, DEGREE, PRIME, SQUARES, CHUNK, DTYPE)
        # rounded as a sketch in memory is; the combinations that are not kept may overflow
        sketched = converted(
            mixed(first, second, g, more_of_g, IS_WIDE, INTERPRETED) * scale, X.dtype.element_ty, INTERPRETED
        )
        sketched = tl.where(is_kept[:, None], sketched, 0.0)
        if INTERPRETED:
            sketched, x = sketched.to(tl.float32), x.to(tl.float32)
        product = tl.dot(tl.trans(sketched), x, product, input_precision="ieee")
    product *= factor
    sums = tl.reduce(sums, 0, either)
    if HAS_MEAN:
        mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)
        product += sums[:, None] * mean[None, :]
    if HAS_BIAS:
        is_first = where_first(is_out, tl.program_id(1))
        tl.store(BIAS + out, converted(sums, BIAS.dtype.element_ty, INTERPRETED), is_first)
    to = OUT + out.to(tl.int64)[:, None] * in_features + column[None, :]
    tl.store(to, converted(product, OUT.dtype.element_ty, INTERPRETED), is_out[:, None] & is_column[None, :])


def _matrix(order: int, kept: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of the Hadamard matrix, which both kernels have."""
    kept_2 = max(_LEAST_KEPT, triton.next_power_of_2(kept))
    if dtype == torch.float32 and kept_2 == _SPILLING_KEPT:
        kept_2 *= 2
    return {
        **matrix_constants(order),
        "KEPT_2": kept_2,
        "CHUNK": max(_LEAST_CHUNK, triton.next_power_of_2(order)),
        "IS_WIDE": dtype == torch.float32,
        "DTYPE": tl.float32 if IS_INTERPRETED else tl.float16 if dtype == torch.float16 else tl.bfloat16,
    }


# Of the number of rows, and not of the order: what is remembered is found with one question. For all numbers that there
# may be, at several ratios: batches of sentences have another one each.
@lru_cache(maxsize=_MOST_REMEMBERED)
def _sketch_constants(rows: int, blocks: int, kept: int, dtype: torch.dtype) -> Constants:
    """Constants of the sketch's kernel."""
    values = _matrix(hadamard.hadamard_order(ceil_div(rows, blocks)), kept, dtype)
    values |= {"TILE": _FEATURES, "STEPS": blocks if IS_INTERPRETED else None, "INTERPRETED": IS_INTERPRETED}
    return _equal(_WARPS, _STAGES, **values)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _gradient_constants(rows: int, blocks: int, kept: int, dtype: torch.dtype, mean: bool, bias: bool) -> Constants:
    """Constants of the gradient's kernel."""
    is_wide = dtype == torch.float32
    values = _matrix(hadamard.hadamard_order(ceil_div(rows, blocks)), kept, dtype)
    values |= {"TILE": reference.tile_of(dtype), "HAS_MEAN": mean, "HAS_BIAS": bias}
    values |= {"STEPS": blocks if IS_INTERPRETED else None, "INTERPRETED": IS_INTERPRETED}
    # of float32 neither a second stage nor four warps would leave registers enough
    return _equal(2 * _WARPS, 1, **values) if is_wide else _equal(_WARPS, _STAGES, **values)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _equal(warps: int, stages: int, **values: Any) -> Constants:
    """One object for equal constants: a launch with another one would go through Triton."""
    return Constants(values, num_warps=warps, num_stages=stages)


def _prepared_sketch(
    x: Tensor, seed: Tensor, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> Prepared | None:
    """The launch of `sketch_and_mean_at_once` for tensors like these; None where nothing is to be launched."""
    if x.numel() == 0:
        return None
    return _sketch_launch(rows_of(x), blocks, kept, scale, (x.dtype, seed.dtype, dtype))


@prepared_by(_prepared_sketch)
def sketch_and_mean_at_once(
    x: Tensor, seed: Tensor, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sketch of the centred x, and what is left of the mean; see the reference.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides, or in runs (`strides.in_runs`);
            `reference.holds_input` of it.
        seed: 0-d int64 on x's device.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of the sketch, and not of what is taken off the mean.
        dtype: Dtype of the sketch.

    Returns:
        Sketch (blocks * kept, features) of x - 1 m^T, m the mean; mean (features,), float32.
    """
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": dtype}
    prepared = _prepared_sketch(x, seed, **options)
    if prepared is None:
        return reference.sketch_and_mean_at_once(x, seed, **options)
    out, rest = prepared(x, seed)
    return out, rest


@lru_cache(maxsize=_MOST_REMEMBERED)
def _sketch_launch(of_x: Rows, blocks: int, kept: int, scale: float, dtypes: tuple[torch.dtype, ...]) -> Prepared:
    """The launch of the sketch; `dtypes` are those of x, the seed and the sketch."""
    rows, features, *strides = of_x
    numbers = (rows, features, blocks, rows // blocks, rows % blocks, kept, *strides, scale)
    grid = (ceil_div(features, _FEATURES), 1, 1)
    constants = _sketch_constants(rows, blocks, kept, dtypes[0])
    results = ((blocks * kept, features), dtypes[2]), ((features,), torch.float32)
    return Prepared(_sketch_and_mean_at_once_kernel, grid, numbers, constants, results)


def _prepared_gradient(
    g: Tensor,
    seed: Tensor,
    sketched_x: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> Prepared | None:
    """The launch of `grad_weight_at_once` for tensors like these; None where nothing is to be launched."""
    if g.numel() == 0 or sketched_x.shape[1] == 0:
        return None
    return _gradient_launch(
        g.shape,
        sketched_x.shape[1],
        blocks,
        kept,
        (g.stride(), sketched_x.stride(), () if mean is None else mean.stride()),
        scale,
        factor,
        (
            g.dtype,
            seed.dtype,
            sketched_x.dtype,
            None if mean is None else mean.dtype,
            dtype or sketched_x.dtype,
            bias_dtype,
        ),
    )


@prepared_by(_prepared_gradient)
def grad_weight_at_once(
    g: Tensor,
    seed: Tensor,
    sketched_x: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight's gradient out of g and the stored sketch of x; and the sum of g. See the reference.

    Args:
        g: Gradient of the output, shape (rows, out), float32, bfloat16 or float16, any strides, in blocks of at most 64
            rows.
        seed: 0-d int64, of the sketch of x.
        sketched_x: S^T x as stored, shape (blocks * kept, in), dtype of `g`, any strides.
        mean: What goes with the sum of g, shape (in,), float32, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of g before they are rounded.
        factor: What their product with the sketch of x lacks.
        dtype: Dtype of the gradient, that of `sketched_x` by default.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), (0,) where it is not wanted.
    """
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "factor": factor}
    options |= {"dtype": dtype, "bias_dtype": bias_dtype}
    prepared = _prepared_gradient(g, seed, sketched_x, mean, **options)
    if prepared is None:
        return reference.grad_weight_at_once(g, seed, sketched_x, mean, **options)
    grad_weight, bias = prepared(g, seed, sketched_x, mean)
    return grad_weight, empty(g, (0,), sketched_x.dtype) if bias is None else bias


@lru_cache(maxsize=_MOST_REMEMBERED)
def _gradient_launch(
    shape: tuple[int, int],
    in_features: int,
    blocks: int,
    kept: int,
    strides: tuple[tuple[int, ...], ...],
    scale: float,
    factor: float,
    dtypes: tuple[torch.dtype | None, ...],
) -> Prepared:
    """The launch of the gradient; `shape` is that of g, and `dtypes` those of the tensors, None where there is none."""
    (rows, out_features), (of_g, of_x, of_mean) = shape, strides
    dtype, _, _, mean_dtype, out_dtype, bias_dtype = dtypes
    assert dtype is not None
    assert out_dtype is not None
    constants = _gradient_constants(rows, blocks, kept, dtype, mean_dtype is not None, bias_dtype is not None)
    tile = constants["TILE"]
    numbers = (rows, out_features, in_features, blocks, kept, *of_g, *of_x, *(of_mean or (0,)), scale, factor)
    grid = (ceil_div(out_features, tile), ceil_div(in_features, tile), 1)
    bias = None if bias_dtype is None else ((out_features,), bias_dtype)
    results = ((out_features, in_features), out_dtype), bias
    return Prepared(_grad_weight_at_once_kernel, grid, numbers, constants, results)
