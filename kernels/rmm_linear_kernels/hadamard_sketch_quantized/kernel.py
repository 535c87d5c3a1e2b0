"""The Hadamard sketch in low bits on a GPU: x is read, codes are written, and the sketch stays in registers.

Row `block * kept + c` of the sketch is combination c of a block, so that a group of rows with a step of its own is a
whole number of neighbouring blocks, if `kept` divides it. A program sketches these blocks for a tile of features, one
after the other, finds the extremes of all, and rounds them. Where a mean is taken off, it also sums x over the blocks'
rows, and takes off what the codes stand for times S^T 1: its part of what is left of the mean of x.
"""

# a tuple of tiles grows in a loop that the compiler unrolls
# mypy: disable-error-code="assignment, misc"

import itertools
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..builds import TYPE_NAMES, Build
from ..hadamard_sketch import reference as hadamard
from ..hadamard_sketch.kernel import hadamard_sketch, hadamard_sketch_and_sums, mixed, signed_entries
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..low_bit import reference as low_bit
from ..low_bit.kernel import (
    codes_of,
    converted,
    half_value,
    quantize,
    random_part,
    spread,
    store_codes,
    store_scales,
)
from ..mean_less_codes.kernel import mean_less_codes, sum_of_signs, sylvester_column, sylvester_words
from ..philox.kernel import SIGN_STREAM, random_word
from .shapes import KEPT, MOST_ROWS, ORDER, holds

# Features of a program: more than rows are kept of a block, or the warps would share a product otherwise.
_TILE = 64
# Values of the sketch that a thread holds. 128 would take 11 to 16 % less instructions, as entries of H serve more of
# them, but all 255 registers, some of which are spilled.
_VALUES = 64
# float32, in three parts, would spill on gfx942.
_HALVES = (torch.bfloat16, torch.float16)
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("rows", "blocks", "shortest", "longer")


@triton.jit(do_not_specialize=[*_ANY_ROWS, "scale"])
def _hadamard_sketch_quantized_kernel(
    X,
    SEED,
    MEAN,
    CODES,
    STEPS,
    OFFSETS,
    REST,
    rows,
    features,
    width,
    blocks,
    shortest,
    longer,
    row_stride,
    column_stride,
    mean_stride,
    scale,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    tiles = tl.cdiv(features, TILE)
    # programs next to each other in time read neighbouring parts of the same rows
    group = tl.program_id(0) // tiles
    first_feature = (tl.program_id(0) % tiles) * TILE
    first_block = group * BLOCKS
    feature = first_feature + tl.arange(0, TILE)
    is_feature = feature < features
    place, kept_place = tl.arange(0, CHUNK), tl.arange(0, KEPT)
    seed = tl.load(SEED)
    x_columns = X + feature.to(tl.int64)[None, :] * column_stride
    mean = tl.zeros((TILE,), tl.float32)
    if HAS_MEAN:
        mean = tl.load(MEAN + feature.to(tl.int64) * mean_stride, mask=is_feature, other=0.0).to(tl.float32)
    of_column = random_part(seed, blocks * KEPT + feature)
    # of all rows at once: a thread or two a row, where every block's would be drawn by all threads
    of_rows = random_part(seed, first_block * KEPT + tl.arange(0, BLOCKS * KEPT))
    # The signs of all blocks, for the same reason: a word for 32 rows, CHUNK bits a block (`hadamard.sign_stride`).
    signs = random_word(seed, first_block * (CHUNK // 32) + tl.arange(0, BLOCKS * CHUNK // 32), SIGN_STREAM)
    if HAS_MEAN:
        sums = tl.zeros((KEPT, TILE), tl.float32)
    products = ()
    for index in tl.static_range(BLOCKS):
        # The last block stands in for those that are not there: it changes no extreme, and masks nothing.
        block = tl.minimum(first_block + index, blocks - 1)
        row = (place * blocks + block).to(tl.int64)
        x = tl.load(x_columns + row[:, None] * row_stride, mask=(row < rows)[:, None] & is_feature[None, :], other=0.0)
        word = tl.gather(signs, (block - first_block) * (CHUNK // 32) + place // 32, 0)
        sign = ((word >> (place & 31).to(tl.uint32)) & 1).to(tl.int32)
        entries = signed_entries(seed, sign, 0, DEGREE, POLYNOMIAL, KEPT, CHUNK, DTYPE)
        if HAS_MEAN:
            present = shortest + (block < longer).to(tl.int32)
            entries = tl.where(place[None, :] < present, entries, 0.0)
        product = mixed(entries, x, False, UPCAST)
        if HAS_MEAN:
            # By the tensor cores, in as many equal rows as the sketch has: x is there for them in the same layout. Sums
            # along its columns would take 12 to 24 % more instructions, most of them to exchange parts of sums.
            with_block = sums + mixed(tl.full((KEPT, CHUNK), 1.0, DTYPE), x, False, UPCAST)
            sums = tl.where(first_block + index < blocks, with_block, sums)
            # As many columns of S^T 1 as there are features: what is equal to the other product in shape is shared by
            # the warps in the same way, and nothing has to be exchanged.
            product -= tl.dot(entries, tl.full((CHUNK, TILE), 1.0, DTYPE)) * mean[None, :]
        product *= scale
        value = tl.abs(product) if IS_FP8 else product
        if index == 0:
            low, high = value, value
        else:
            low, high = tl.minimum(low, value), tl.maximum(high, value)
        products += (product,)
    # last, as what is held through the products takes registers
    total = tl.abs(products[0])
    for index in tl.static_range(1, BLOCKS):
        total += tl.abs(products[index])
    scales = group.to(tl.int64) * features + feature
    factor, divisor, inverse, quotient, step, offset = store_scales(
        low, high, total, STEPS + scales, OFFSETS + scales, is_feature, LEVELS, IS_FP8, TILE
    )
    if HAS_MEAN:
        # S^T 1 of all rows at once
        index_of_row = tl.arange(0, BLOCKS * KEPT) // KEPT
        block_of_row = first_block + index_of_row
        low_entries, high_entries = sylvester_words(
            sylvester_column(seed, tl.arange(0, BLOCKS * KEPT) % KEPT, DEGREE, POLYNOMIAL)
        )
        ones = sum_of_signs(
            low_entries ^ tl.gather(signs, index_of_row * (CHUNK // 32), 0),
            high_entries ^ tl.gather(signs, index_of_row * (CHUNK // 32) + 1, 0),
            shortest + (block_of_row < longer).to(tl.int32),
        )
        # Of halves, for KEPT equal rows, and over what the codes lack: 1 / (KEPT scale). A block that stands in for
        # another one counts for nothing.
        ones = spread(tl.where(block_of_row < blocks, ones, 0).to(tl.float32) * (2.0 / scale))
        half_step, half_offset = step * 0.5, offset * 0.5
    for index in tl.static_range(BLOCKS):
        block = first_block + index
        row = block * KEPT + kept_place
        of_row = tl.gather(of_rows, index * KEPT + kept_place, 0)
        codes = codes_of(products[index], factor, divisor, inverse, quotient, of_row, of_column, IS_FP8, LEVELS, UPCAST)
        if HAS_MEAN:
            value = half_value(
                codes, half_step[None, :], half_offset[None, :], of_row[:, None], of_column[None, :], IS_FP8
            )
            # as it will be multiplied by the sketch of g
            value = converted(value, X.dtype.element_ty, UPCAST).to(tl.float32)
            sums -= value * tl.gather(ones, index * KEPT + kept_place, 0)[:, None]
        # A feature that is not there is 0, and 0 are its codes: the bits that a row's last byte has left.
        is_row = tl.zeros((KEPT,), tl.int32) + block < blocks
        store_codes(codes, CODES, width, row, first_feature, is_row, BITS, KEPT, TILE)
    if HAS_MEAN:
        tl.store(REST + scales, tl.sum(sums, 0) * (1.0 / KEPT) * (1.0 / rows), mask=is_feature)


@lru_cache
def _constants(kept: int, dtype: torch.dtype, kind: str, group: int, mean: bool) -> Constants:
    """Constants of the kernel; the launcher and `builds` share them."""
    degree = ORDER.bit_length() - 1
    values = {
        "DEGREE": degree,
        "POLYNOMIAL": hadamard.POLYNOMIALS[degree],
        "KEPT": kept,
        "BLOCKS": group // kept,
        "CHUNK": ORDER,
        "TILE": _TILE,
        "BITS": low_bit.BITS[kind],
        "IS_FP8": kind == low_bit.FP8,
        "HAS_MEAN": mean,
        "UPCAST": IS_INTERPRETED,
        "DTYPE": tl.float32 if IS_INTERPRETED else tl.float16 if dtype == torch.float16 else tl.bfloat16,
    }
    # 8 warps for the 256 rows of int4's groups, 4 for fewer
    return Constants(values, num_warps=max(4, group * _TILE // (32 * _VALUES)))


def hadamard_sketch_quantized(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    kind: str,
    group: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round scale * sqrt(kept) * S^T (x - 1 mean^T) to 8, 4, 3 or 2 bits an element, for the Hadamard S.

    What `shapes.holds` denies, and what comes in float32, is sketched into memory first, in float32.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides.
        seed: 0-d int64 on x's device, of the sketch and of the rounding.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of the sketch that share, in a column, a step and an offset.

    Returns:
        Codes (blocks * kept, ceil(features * bits / 8)), uint8, steps (groups, features), bfloat16, and offsets of the
        same shape and dtype, (0,) for fp8: those of the reference, but where a sum that is rounded otherwise falls on
        the other side of an edge. With a mean, the mean of x less X^T (S^T 1) / rows, with X what the codes stand for,
        rounded to x's dtype, (features,), otherwise (0,), float32.
    """
    rows, features = x.shape
    if x.numel() == 0 or x.dtype not in _HALVES or not holds(rows, blocks=blocks, kept=kept, kind=kind, group=group):
        options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": torch.float32}
        if mean is None:
            sketch = hadamard_sketch(x, seed, None, **options)
            return *quantize(sketch, seed, None, kind=kind, group=group), x.new_empty(0, dtype=torch.float32)
        sketch, sums = hadamard_sketch_and_sums(x, seed, mean, **options)
        stored = quantize(sketch, seed, None, kind=kind, group=group)
        options = {"blocks": blocks, "kept": kept, "scale": 1 / (kept * scale), "kind": kind, "group": group}
        return *stored, mean_less_codes(sums, *stored, seed, rows=rows, **options, decoded=x.dtype)
    rank = blocks * kept
    codes = torch.empty((rank, low_bit.packed_width(features, kind)), dtype=torch.uint8, device=x.device)
    steps = torch.empty((ceil_div(rank, group), features), dtype=low_bit.SCALE_DTYPE, device=x.device)
    offsets = steps.new_empty(0) if kind == low_bit.FP8 else torch.empty_like(steps)
    rest = None if mean is None else torch.empty(steps.shape, dtype=torch.float32, device=x.device)
    arguments = (
        x,
        seed,
        mean,
        codes,
        steps.view(torch.int16),
        offsets.view(torch.int16),
        rest,
        rows,
        features,
        codes.shape[1],
        blocks,
        rows // blocks,
        rows % blocks,
        *x.stride(),
        0 if mean is None else mean.stride(0),
        scale,
    )
    grid = (steps.shape[0] * ceil_div(features, _TILE), 1, 1)
    constants = _constants(kept, x.dtype, kind, group, mean is not None)
    launch(_hadamard_sketch_quantized_kernel, grid, arguments, constants)
    # one part after the other: the same in every run, which atomic additions are not
    left = torch.empty(0, dtype=torch.float32, device=x.device) if rest is None else rest.sum(0)
    return codes, steps, offsets, left


def builds() -> list[Build]:
    """Return what a training run compiles: ratios 0.5 and 0.25 of full blocks.

    Returns:
        All kinds in bfloat16, with a mean and without; int8 and int4 in float16 at one ratio, with one. int4, and ratio
        0.5, for NVIDIA's GPUs alone, see `shapes`.
    """
    found = []
    for kind, kept in itertools.product(("int8", low_bit.FP8, "int4"), (32, 16)):
        found += [_build(kind, kept, torch.bfloat16, centred) for centred in (False, True)]
    return [*found, *(_build(kind, 32, torch.float16, True) for kind in ("int8", "int4"))]


def _build(kind: str, kept: int, dtype: torch.dtype, centred: bool) -> Build:
    group = 1024 // low_bit.BITS[kind]
    types = {"X": f"*{TYPE_NAMES[dtype]}", "SEED": "*i64", "CODES": "*u8", "STEPS": "*i16", "OFFSETS": "*i16"}
    shared = _constants(kept, dtype, kind, group, centred)
    constants: dict[str, Any] = {"column_stride": 1, **shared.values}
    if centred:
        types |= {"MEAN": "*fp32", "REST": "*fp32"}
        constants["mean_stride"] = 1
    else:
        constants |= {"MEAN": None, "REST": None}
    pointers, sizes = tuple(types), ("features", "width", "row_stride")
    types |= dict.fromkeys((*_ANY_ROWS, *sizes), "i32") | {"scale": "fp32"}
    if not centred:
        types["mean_stride"] = "i32"
    return Build(
        f"hadamard_sketch_quantized {kind} {TYPE_NAMES[dtype]} kept={kept}{' centred' * centred}",
        _hadamard_sketch_quantized_kernel,
        types,
        constants,
        (*pointers, *sizes),
        num_warps=shared.num_warps,
        uses_tensor_cores=True,
        backends=tuple(backend for backend, most in MOST_ROWS.items() if group <= most and kept in KEPT[backend]),
    )
