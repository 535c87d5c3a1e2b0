"""The Hadamard sketch by butterflies: what the kernel that ships, which has tensor cores, is compared with.

A fast Walsh-Hadamard transform of 64 rows takes 6 additions a number, whatever is kept of it; the product of the kept
rows of H with the block takes as many multiply-adds a number as rows are kept, which tensor cores make cheap. Here a
lane holds all 64 rows of two features, so that nothing is exchanged among lanes. `each_kernel.py` times both.

It has an easier task than the kernel that ships: whole blocks of 64 rows, features next to each other, no mean; and it
is given the place that each row of H has among those that are kept, which the other finds out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rmm_linear_kernels.builds import TYPE_NAMES, Build
from rmm_linear_kernels.hadamard_sketch import reference
from rmm_linear_kernels.hadamard_sketch.entries import sign_words
from rmm_linear_kernels.launching import Constants, ceil_div, launch
from rmm_linear_kernels.philox.reference import signs_and_keys

ORDER = 64
# Features of a program: two a lane, which is as many as the registers hold 64 rows of.
_TILE, _WARPS = 64, 1
_SIZES = ("features", "blocks", "kept", "row_stride")


@triton.jit(do_not_specialize=["blocks", "kept", "scale"])
def _butterflies_kernel(
    X,
    SEED,
    PLACES,
    OUT,
    SUMS,
    features,
    blocks,
    kept,
    row_stride,
    scale,
    HAS_SUMS: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_feature = feature < features
    source = X + block.to(tl.int64) * row_stride + feature
    step = blocks.to(tl.int64) * row_stride
    read = ()
    for _ in tl.static_range(64):
        read += (tl.load(source, mask=is_feature, other=0.0),)
        source += step
    low, high = sign_words(tl.load(SEED), block, 0, 64)
    if HAS_SUMS:
        total = read[0].to(tl.float32)
        for row in tl.static_range(1, 64):
            total += read[row].to(tl.float32)
        tl.store(SUMS + block.to(tl.int64) * features + feature, total, mask=is_feature)
    values = ()
    for row in tl.static_range(64):
        sign = ((low if row < 32 else high) << (31 - row % 32)) & 0x80000000
        bits = read[row].to(tl.float32).to(tl.uint32, bitcast=True) ^ sign
        values += (bits.to(tl.float32, bitcast=True),)
    for stage in tl.static_range(6):
        mixed = ()
        for row in tl.static_range(64):
            other = values[row ^ (1 << stage)]
            mixed += ((other - values[row]) if (row >> stage) & 1 else (values[row] + other),)
        values = mixed
    target = OUT + block.to(tl.int64) * kept * features + feature
    for row in tl.static_range(64):
        place = tl.load(PLACES + row)
        if place >= 0:
            tl.store(target + place * features, (values[row] * scale).to(OUT.dtype.element_ty), mask=is_feature)


def _constants(sums: bool) -> Constants:
    return Constants({"HAS_SUMS": sums, "TILE": _TILE}, num_warps=_WARPS)


_WITH_SUMS, _WITHOUT_SUMS = _constants(True), _constants(False)


def places_of_rows(seed: Tensor, kept: int) -> Tensor:
    """Return where the sketch has each row of H.

    Args:
        seed: 0-d int64.
        kept: Hadamard rows kept of each block, at most 64.

    Returns:
        (64,) int32 on the seed's device: the place among the kept ones, -1 for a row that is not kept.
    """
    _, words = signs_and_keys(seed, ORDER, reference.choice_words(ORDER), dtype=torch.float32)
    columns = reference.columns_of_words(words, order=ORDER, kept=kept)
    places = torch.full((ORDER,), -1, dtype=torch.int32, device=seed.device)
    places[columns] = torch.arange(kept, dtype=torch.int32, device=seed.device)
    return places


def hadamard_sketch_by_butterflies(
    x: Tensor, seed: Tensor, places: Tensor, *, blocks: int, kept: int, scale: float, dtype: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what `hadamard_sketch_and_sums` does for blocks of 64 rows.

    Args:
        x: Shape (64 * blocks, features), float32, bfloat16 or float16, features next to each other.
        seed: 0-d int64 on x's device.
        places: `places_of_rows(seed, kept)`.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        scale: Factor on the +-1 combinations.
        dtype: Dtype of the sketch.
        sums: Whether the blocks' column sums are wanted.

    Returns:
        Sketch (blocks * kept, features); the sums (blocks, features), float32, or None.

    Raises:
        ValueError: For other shapes and strides.
    """
    rows, features = x.shape
    if rows != ORDER * blocks or not features or x.stride(1) != 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}, of {blocks} blocks; pass {ORDER * blocks} rows of"
            " at least one feature, next to each other"
        )
    out = x.new_empty((blocks * kept, features), dtype=dtype)
    found = x.new_empty((blocks, features), dtype=torch.float32) if sums else None
    arguments = (x, seed, places, out, found, features, blocks, kept, x.stride(0), scale)
    grid = (blocks, ceil_div(features, _TILE), 1)
    launch(_butterflies_kernel, grid, arguments, _WITH_SUMS if sums else _WITHOUT_SUMS)
    return out, found


def builds() -> list[Build]:
    """Return what is launched for bfloat16, to be compiled without a GPU.

    Returns:
        The sketch of x; and that of g, with sums.
    """
    return [_build("x", _WITHOUT_SUMS), _build("g", _WITH_SUMS)]


def _build(of: str, constants: Constants) -> Build:
    half = f"*{TYPE_NAMES[torch.bfloat16]}"
    types = {"X": half, "SEED": "*i64", "PLACES": "*i32", "OUT": half}
    types |= {"SUMS": "*fp32"} if constants["HAS_SUMS"] else {}
    pointers = tuple(types)
    absent = {} if constants["HAS_SUMS"] else {"SUMS": None}
    return Build(
        name=f"butterflies {of} bf16",
        kernel=_butterflies_kernel,
        types=types | dict.fromkeys(_SIZES, "i32") | {"scale": "fp32"},
        constants={**constants.values, **absent},
        divisible=(*pointers, "features", "row_stride"),
        num_warps=constants.num_warps,
    )
