"""The weight gradient out of two sketches as one matrix product, with what else belongs to it in the epilogue.

Both sketches lie as (rank, features): a block of each is loaded as it lies, and the first is transposed on the way to
the tensor cores. The second may be held in low bits, and is then unpacked on the way: every tile unpacks for itself,
which saves a copy of the sketch in memory, not time, unless few tiles share a column.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..builds import TYPE_NAMES, Build
from ..interpreter import IS_INTERPRETED
from ..low_bit import kernel as low_bit
from ..low_bit.kernel import converted, half_value, random_part, unpacked, widened
from ..low_bit.reference import BITS, FP8

# Rows of tiles that are computed together: their part of both sketches stays in the cache.
_GROUPED = 8
# Tiles that keep a large GPU busy.
_MANY_TILES = 128
# Shared memory that a program of the widest tile needs: sm_80 (163 KiB) holds a stage less than sm_90 and sm_100
# (227 KiB) do, and has room for it; other GPUs have 64 to 99 KiB.
_WIDEST_BYTES = 160 << 10
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
    SUM,
    MEAN,
    OUT,
    scale,
    sum_stride,
    mean_stride,
    row,
    column,
    out_features,
    in_features,
    HAS_MEAN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store a tile of the result, with the mean's part."""
    product = product * scale
    is_row, is_column = row < out_features, column < in_features
    if HAS_MEAN:
        column_sum = tl.load(SUM + row.to(tl.int64) * sum_stride, is_row, other=0).to(tl.float32)
        mean = tl.load(MEAN + column.to(tl.int64) * mean_stride, is_column, other=0).to(tl.float32)
        product += column_sum[:, None] * mean[None, :]
    to = OUT + row.to(tl.int64)[:, None] * in_features + column[None, :]
    tl.store(to, converted(product, OUT.dtype.element_ty, INTERPRETED), is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["rank", "scale"])
def _grad_weight_kernel(
    G,
    X,
    SUM,
    MEAN,
    OUT,
    rank,
    out_features,
    in_features,
    g_row,
    g_column,
    x_row,
    x_column,
    sum_stride,
    mean_stride,
    scale,
    HAS_MEAN: tl.constexpr,
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
        SUM,
        MEAN,
        OUT,
        scale,
        sum_stride,
        mean_stride,
        row,
        column,
        out_features,
        in_features,
        HAS_MEAN,
        INTERPRETED,
    )


@triton.jit(do_not_specialize=["rank", "scale"])
def _low_bit_grad_weight_kernel(
    G,
    CODES,
    LOW_STEPS,
    OFFSETS,
    SEED,
    SUM,
    MEAN,
    OUT,
    rank,
    out_features,
    in_features,
    width,
    g_row,
    g_column,
    codes_row,
    codes_column,
    sum_stride,
    mean_stride,
    scale,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_MEAN: tl.constexpr,
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
        half_step = widened(tl.load(LOW_STEPS + scales, is_column, other=0)) * 0.5
        half_offset = tl.zeros_like(half_step)
        if not IS_FP8:
            half_offset = widened(tl.load(OFFSETS + scales, is_column, other=0)) * 0.5
        # What lies beyond the rank is a finite number wherever its group is finite, and meets zeros of g.
        codes = words.to(tl.int32) if BITS == 8 else unpacked(words.to(tl.int32), BITS)
        of_row = random_part(seed, first + k)
        x = half_value(codes, half_step[None, :], half_offset[None, :], of_row[:, None], of_column[None, :], IS_FP8)
        x = converted(x, G.dtype.element_ty, INTERPRETED)
        if INTERPRETED:
            g, x = g.to(tl.float32), x.to(tl.float32)
        product = tl.dot(g, x, product)
        g_at += g_step
        codes_at += codes_step
    _finish(
        product,
        SUM,
        MEAN,
        OUT,
        2 * scale,
        sum_stride,
        mean_stride,
        row,
        column,
        out_features,
        in_features,
        HAS_MEAN,
        INTERPRETED,
    )


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; no query of the GPU, whose properties are cached."""
    if device.type != "cuda":
        return _WIDEST_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def _tile_of(dtype: torch.dtype, out_features: int, in_features: int, shared_bytes: int) -> dict[str, int]:
    """The largest tile of which there are enough to keep a GPU busy."""

    def enough(height: int, width: int) -> bool:
        return triton.cdiv(out_features, height) * triton.cdiv(in_features, width) >= _MANY_TILES

    tile = {"BLOCK_K": 64, "GROUPED": _GROUPED}
    if dtype == torch.float32:
        return tile | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 4, "num_stages": 3}
    if enough(128, 256) and shared_bytes >= _WIDEST_BYTES:
        return tile | {"BLOCK_M": 128, "BLOCK_N": 256, "num_warps": 8, "num_stages": 4}
    if enough(128, 128):
        return tile | {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    return tile | {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}


def _low_bit_tile_of(out_features: int, in_features: int, group: int, shared_bytes: int) -> dict[str, int]:
    """Tall tiles where there are enough of them: what is unpacked serves all of their rows."""
    tile = {"GROUPED": _GROUPED, "num_stages": 3}
    is_enough = triton.cdiv(out_features, 256) * triton.cdiv(in_features, 64) >= _MANY_TILES
    # in rows that don't begin at a multiple of 16 bytes, an address an element would not fit the registers
    if is_enough and out_features % 16 == in_features % 16 == group % 64 == 0 and shared_bytes >= _WIDEST_BYTES:
        return tile | {"BLOCK_M": 256, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 8}
    return tile | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": math.gcd(group, 64), "num_warps": 4}


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return scale (S^T g)^T (S^T x), plus column_sum mean^T where the input was centred, summed in float32.

    Args:
        sketched_g: S^T g, shape (rank, out), bfloat16, float16, or float32 without tensor cores; any strides.
        sketched_x: S^T x as stored, shape (rank, in), rounded to the dtype of `sketched_g` if it has another one.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.
        scale: Factor of the product, not of what the mean adds.
        dtype: Dtype of the result, that of `sketched_g` by default.

    Returns:
        Shape (out, in).
    """
    rank, out_features = sketched_g.shape
    in_features = sketched_x.shape[1]
    grad_weight = sketched_g.new_empty((out_features, in_features), dtype=dtype or sketched_g.dtype)
    tile = _tile_of(sketched_g.dtype, out_features, in_features, _shared_bytes(sketched_g.device))
    programs = triton.cdiv(out_features, tile["BLOCK_M"]) * triton.cdiv(in_features, tile["BLOCK_N"])
    if programs:
        _grad_weight_kernel[(programs,)](
            sketched_g,
            sketched_x,
            column_sum,
            mean,
            grad_weight,
            rank,
            out_features,
            in_features,
            *sketched_g.stride(),
            *sketched_x.stride(),
            0 if column_sum is None else column_sum.stride(0),
            0 if mean is None else mean.stride(0),
            float(scale),
            HAS_MEAN=mean is not None,
            STEPS=triton.cdiv(rank, tile["BLOCK_K"]) if IS_INTERPRETED else None,
            INTERPRETED=IS_INTERPRETED,
            **tile,
        )
    return grad_weight


def sketched_grad_weight_low_bit(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    *,
    kind: str,
    group: int,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
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
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        scale: Factor of the product, not of what the mean adds.
        dtype: Dtype of the result, that of `sketched_g` by default.

    Returns:
        Shape (out, in).
    """
    rank, out_features = sketched_g.shape
    in_features = steps.shape[1]
    if not supports(kind) or group % 16 or sketched_g.dtype == torch.float32:
        values = low_bit.dequantize(
            codes, steps, offsets, seed, kind=kind, group=group, features=in_features, dtype=sketched_g.dtype
        )
        return sketched_grad_weight(sketched_g, values, column_sum, mean, scale=scale, dtype=dtype)
    grad_weight = sketched_g.new_empty((out_features, in_features), dtype=dtype or sketched_g.dtype)
    tile = _low_bit_tile_of(out_features, in_features, group, _shared_bytes(codes.device))
    programs = triton.cdiv(out_features, tile["BLOCK_M"]) * triton.cdiv(in_features, tile["BLOCK_N"])
    if programs:
        _low_bit_grad_weight_kernel[(programs,)](
            sketched_g,
            codes,
            steps.contiguous().view(torch.int16),
            offsets.contiguous().view(torch.int16),
            seed,
            column_sum,
            mean,
            grad_weight,
            rank,
            out_features,
            in_features,
            codes.shape[1],
            *sketched_g.stride(),
            *codes.stride(),
            0 if column_sum is None else column_sum.stride(0),
            0 if mean is None else mean.stride(0),
            float(scale),
            GROUP=group,
            BITS=BITS[kind],
            IS_FP8=kind == FP8,
            HAS_MEAN=mean is not None,
            STEPS=triton.cdiv(rank, tile["BLOCK_K"]) if IS_INTERPRETED else None,
            INTERPRETED=IS_INTERPRETED,
            **tile,
        )
    return grad_weight


def builds() -> list[Build]:
    """Return what a training run compiles: sizes that are multiples of 16, rows next to each other.

    Returns:
        Each tile with and without a mean, into the dtype of the sketches and into float32; each kind of low bits.
    """
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for features in (4096, 1536, 768) if dtype != torch.float32 else (768,):
            tile = _tile_of(dtype, features, features, _WIDEST_BYTES)
            for result in (dtype, torch.float32) if dtype != torch.float32 else (dtype,):
                for has_mean in (False, True):
                    found.append(_build(dtype, result, tile, has_mean))
    for kind in _UNPACKED_KINDS:
        for dtype in (torch.bfloat16, torch.float16):
            for features in (4096, 768):
                tile = _low_bit_tile_of(features, features, 1024 // BITS[kind], _WIDEST_BYTES)
                found.append(_build(dtype, dtype, tile, True, kind=kind))
    return found


def _build(dtype: torch.dtype, result: torch.dtype, tile: dict[str, int], has_mean: bool, kind: str = "") -> Build:
    constants: dict[str, Any] = {"g_column": 1, "HAS_MEAN": has_mean, "STEPS": None, "INTERPRETED": False, **tile}
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    pointers = {"G": f"*{TYPE_NAMES[dtype]}", "OUT": f"*{TYPE_NAMES[result]}"}
    sizes = ["out_features", "in_features", "g_row"]
    if kind:
        pointers |= {"CODES": "*u8", "LOW_STEPS": "*i16", "OFFSETS": "*i16", "SEED": "*i64"}
        sizes += ["width", "codes_row"]
        constants |= {"codes_column": 1, "GROUP": 1024 // BITS[kind], "BITS": BITS[kind], "IS_FP8": kind == FP8}
    else:
        pointers["X"] = f"*{TYPE_NAMES[dtype]}"
        sizes += ["x_row"]
        constants["x_column"] = 1
    if has_mean:
        pointers |= {"SUM": "*fp32", "MEAN": "*fp32"}
        constants |= {"sum_stride": 1, "mean_stride": 1}
    else:
        constants |= {"SUM": None, "MEAN": None}
        sizes += ["sum_stride", "mean_stride"]
    shape = "x".join(str(tile[f"BLOCK_{side}"]) for side in "MNK")
    names = [TYPE_NAMES[dtype], *([kind] if kind else []), f"to {TYPE_NAMES[result]}", shape]
    return Build(
        " ".join(["sketched_grad_weight", *names, *(["centred"] if has_mean else [])]),
        _low_bit_grad_weight_kernel if kind else _grad_weight_kernel,
        pointers | dict.fromkeys(sizes, "i32") | {"rank": "i32", "scale": "fp32"},
        constants,
        (*pointers, *sizes),
        uses_tensor_cores=dtype != torch.float32,
        **launch,
    )
