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

from ..builds import TYPE_NAMES, Build
from ..interpreter import IS_INTERPRETED
from ..launching import Constants, ceil_div, launch
from ..philox.kernel import CHOICE_STREAM, SIGN_STREAM, random_word, sign_bit, words_of_counter
from . import reference

# Rows of a block that are multiplied at a time; blocks are no larger but for ratios below 1/32.
_CHUNK = 64
# The least that a matrix instruction takes.
_LEAST_KEPT = 16
# Features of a tile and tiles of a program: the matrix of a block is made once for all of its tiles.
_TILE = 128
_WIDE_TILE = 64
_MOST_TILES = 4
# As many programs fill the largest GPU twice.
_PROGRAMS = 4096
_WARPS = 4
# Arguments that follow from the number of rows: a kernel compiled for one number serves all.
_ANY_ROWS = ("rows", "blocks", "shortest", "longer", "kept", "sign_stride")


@triton.jit
def parity(bits):
    """The number of ones of each 32-bit number, modulo 2."""
    bits = bits ^ (bits >> 16)
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return bits & 1


@triton.jit
def _is_nonsquare(number, SQUARES: tl.constexpr):
    """1 where a number modulo the prime is no square: bit `number` of SQUARES is 1 for squares other than 0."""
    return 1 - ((tl.full(number.shape, SQUARES, tl.int64) >> number.to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def is_paley_negative(row, column, PRIME: tl.constexpr, SQUARES: tl.constexpr):
    """1 where the entry of Paley's matrix is -1: order PRIME + 1 if PRIME % 4 is 3, 2 (PRIME + 1) if it is 1."""
    if PRIME % 4 == 3:
        outside = _is_nonsquare((row - column + PRIME) % PRIME, SQUARES)
        outside = tl.where(column == 0, 1, outside)
        return tl.where((row == column) | (row == 0), 0, outside)
    i, j = row // 2, column // 2
    core = _is_nonsquare((i - j + PRIME) % PRIME, SQUARES)
    core = tl.where((i == 0) | (j == 0), 0, core)
    is_odd_row, is_odd_column = row % 2, column % 2
    # where the core is 0, on the diagonal, the entries are [[1, -1], [-1, -1]]; elsewhere [[c, c], [c, -c]]
    return tl.where(i == j, is_odd_row | is_odd_column, core ^ (is_odd_row & is_odd_column))


@triton.jit
def ranked_columns(seed, ORDER: tl.constexpr, ORDER_2: tl.constexpr, KEPT_2: tl.constexpr):
    """The rows of H in the order of their keys, for orders that are no power of 2; ORDER_2 and KEPT_2 are."""
    item = tl.arange(0, ORDER_2)
    key = random_word(seed, item, CHOICE_STREAM)
    mine, other = key[:, None], key[None, :]
    is_before = (other < mine) | ((other == mine) & (item[None, :] < item[:, None]))
    rank = tl.sum((is_before & (item[None, :] < ORDER)).to(tl.int32), axis=1)
    rank = tl.where(item < ORDER, rank, ORDER_2 + KEPT_2)
    place = tl.arange(0, KEPT_2)
    return tl.sum(tl.where(rank[None, :] == place[:, None], item[None, :], 0), axis=1)


@triton.jit
def _sign_bits(seed, place, first, block, stride):
    """Bits of the signs of 64 rows of a block, `place` counted from `first`, a multiple of 64: one counter for all."""
    index = block * stride + first
    one, two, three, four = words_of_counter(seed, index >> 7, SIGN_STREAM)
    is_second_half = ((index >> 6) & 1) == 1
    low, high = tl.where(is_second_half, three, one), tl.where(is_second_half, four, two)
    return ((tl.where(place < 32, low, high) >> (place & 31).to(tl.uint32)) & 1).to(tl.int32)


@triton.jit
def _multiplied_places(seed, place, DEGREE: tl.constexpr, POLYNOMIAL: tl.constexpr):
    """Numbers j' with parity(c_i & j) = parity(u_i & j'), where c_i = a u_i in GF(2^DEGREE) are the columns."""
    # Bit b of j' is parity((a x^b) & j). The multiplication is moved from the columns, of which a thread has many, to
    # the places, of which it has one or two.
    word, _, _, _ = words_of_counter(seed, tl.full((), 0, tl.int32), CHOICE_STREAM)
    power = 1 + ((word.to(tl.uint64) * ((1 << DEGREE) - 1)) >> 32).to(tl.int32)
    found = place * 0
    for bit in tl.static_range(DEGREE):
        found |= parity(power & place) << bit
        power = (power << 1) ^ (-(power >> (DEGREE - 1)) & POLYNOMIAL)
    return found


@triton.jit
def block_entries(
    seed,
    first,
    block,
    stride,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """H[columns] diag(signs) at CHUNK places of a block from `first` on: +-1, also where there is no row."""
    sign = _sign_bits(seed, tl.arange(0, CHUNK), first, block, stride)
    return signed_entries(seed, sign, first, DEGREE, POLYNOMIAL, KEPT_2, CHUNK, DTYPE)


@triton.jit
def signed_entries(
    seed,
    sign,
    first,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The entries of `block_entries`, out of the bits of the signs at these places."""
    kept_place, place = tl.arange(0, KEPT_2), tl.arange(0, CHUNK)
    # the sign is one more bit of the place, which every column has
    number = _multiplied_places(seed, first + place, DEGREE, POLYNOMIAL) | (sign << DEGREE)
    fixed = (((kept_place * (kept_place + 1)) >> 1) & ((1 << DEGREE) - 1)) | (1 << DEGREE)
    bits = fixed[:, None] & number[None, :]
    if DEGREE >= 16:
        bits ^= bits >> 16
    if DEGREE >= 8:
        bits ^= bits >> 8
    bits = (bits ^ (bits >> 4)) & 15
    # bit t of 0x6996 is the parity of t; shifted to where the sign of a number is, which spares conversions
    if DTYPE == tl.bfloat16:
        entries = (((0x6996 << 15) >> bits) & 0x8000 | 0x3F80).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float16:
        entries = (((0x6996 << 15) >> bits) & 0x8000 | 0x3C00).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        entries = (1 - 2 * ((0x6996 >> bits) & 1)).to(tl.float32)
    return entries


@triton.jit
def paley_entries(
    seed, columns, block, PRIME: tl.constexpr, SQUARES: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr
):
    """As `block_entries` for an order with a factor of Paley's: blocks of less than 64 rows, one element at a time."""
    place = tl.arange(0, CHUNK)
    base: tl.constexpr = PRIME + 1 if PRIME % 4 == 3 else 2 * (PRIME + 1)
    negative = parity((columns // base)[:, None] & (place // base)[None, :])
    negative ^= is_paley_negative((columns % base)[:, None], (place % base)[None, :], PRIME, SQUARES)
    sign = sign_bit(seed, block * 64 + place, SIGN_STREAM).to(tl.int32)
    return (1 - 2 * (negative ^ sign[None, :])).to(DTYPE)


@triton.jit
def sums_of_entries(entries, present, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Sums of the rows of the entries at the first `present` places, float32: S^T 1, unscaled."""
    # by the tensor cores, with 16 equal columns: sums along a row would be many shuffles
    place = tl.arange(0, CHUNK)[:, None] + tl.zeros((1, 16), tl.int32)
    is_row = tl.where(place < present, 1.0, 0.0).to(DTYPE)
    return tl.sum(tl.dot(entries, is_row), axis=1) * 0.0625


@triton.jit
def mixed(mixing, x, IS_WIDE: tl.constexpr, UPCAST: tl.constexpr):
    """Mixing @ x with float32 sums; x in its own dtype, or cut into three if it is float32."""
    if UPCAST:
        # the interpreter's arithmetic is that of numpy, which has no bfloat16
        product = tl.dot(mixing, x.to(tl.float32), input_precision="ieee")
    elif IS_WIDE:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # the small parts first: the large one's rounding is then the only one
        product = tl.dot(mixing, low)
        product = tl.dot(mixing, middle, acc=product)
        product = tl.dot(mixing, high, acc=product)
    else:
        product = tl.dot(mixing, x)
    return product


@triton.jit(do_not_specialize=[*_ANY_ROWS, "scale"])
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
    scale,
    ORDER: tl.constexpr,
    ORDER_2: tl.constexpr,
    DEGREE: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    PRIME: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT_2: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_REST: tl.constexpr,
    IS_WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
):
    block = tl.program_id(0)
    first_tile = tl.program_id(1) * TILES
    seed = tl.load(SEED)
    place = tl.arange(0, CHUNK)
    kept_place = tl.arange(0, KEPT_2)
    # int64: row * stride passes 2**31 in large batches
    row = (place * blocks + block).to(tl.int64)
    x_rows = X + row[:, None] * row_stride
    feature = first_tile * TILE + tl.arange(0, TILE)
    # the first tile is on its way while the signs and columns are drawn
    x = tl.load(
        x_rows + feature[None, :].to(tl.int64) * column_stride,
        mask=(row < rows)[:, None] & (feature < features)[None, :],
        other=0.0,
    )
    # rows of this block
    present = shortest + (block < longer).to(tl.int32)
    if PRIME == 0:
        mixing = block_entries(seed, 0, block, sign_stride, DEGREE, POLYNOMIAL, KEPT_2, CHUNK, DTYPE)
    else:
        columns = ranked_columns(seed, ORDER, ORDER_2, KEPT_2)
        mixing = paley_entries(seed, columns, block, PRIME, SQUARES, CHUNK, DTYPE)
    if HAS_MEAN:
        ones = sums_of_entries(mixing, present, CHUNK, DTYPE)
    for tile in tl.static_range(TILES):
        feature = (first_tile + tile) * TILE + tl.arange(0, TILE)
        is_feature = feature < features
        tile_of_x = x
        if tile + 1 < TILES:
            following = feature + TILE
            x = tl.load(
                x_rows + following[None, :].to(tl.int64) * column_stride,
                mask=(row < rows)[:, None] & (following < features)[None, :],
                other=0.0,
            )
        # either order would spill where the other does not
        if HAS_SUMS and CHUNKS > 1:
            sums = tl.sum(tile_of_x.to(tl.float32), axis=0)
        product = mixed(mixing, tile_of_x, IS_WIDE, UPCAST)
        if HAS_SUMS and CHUNKS == 1:
            sums = tl.sum(tile_of_x.to(tl.float32), axis=0)
        # blocks of more than CHUNK rows, which have one tile a program
        for chunk in range(1, CHUNKS):
            further = ((chunk * CHUNK + place) * blocks + block).to(tl.int64)
            part = tl.load(
                X + further[:, None] * row_stride + feature[None, :].to(tl.int64) * column_stride,
                mask=(further < rows)[:, None] & is_feature[None, :],
                other=0.0,
            )
            signs = block_entries(seed, chunk * CHUNK, block, sign_stride, DEGREE, POLYNOMIAL, KEPT_2, CHUNK, DTYPE)
            product += mixed(signs, part, IS_WIDE, UPCAST)
            if HAS_MEAN:
                ones += sums_of_entries(signs, present - chunk * CHUNK, CHUNK, DTYPE)
            if HAS_SUMS:
                sums += tl.sum(part.to(tl.float32), axis=0)
        if HAS_MEAN:
            mean = tl.load(MEAN + feature, mask=is_feature, other=0.0).to(tl.float32)
            product -= ones[:, None] * mean[None, :]
        stored = (product * scale).to(OUT.dtype.element_ty)
        if HAS_REST:
            # Of what is stored, whose rounding is then as centred as all else. The combinations that are not kept may
            # have overflown.
            of_mean = tl.where((kept_place < kept)[:, None], stored.to(tl.float32) * ones[:, None], 0.0)
            sums = (sums - tl.sum(of_mean, axis=0) * (1.0 / scale) * (1.0 / kept)) * (1.0 / rows)
        out_row = (block * kept + kept_place).to(tl.int64)
        tl.store(
            OUT + out_row[:, None] * features + feature[None, :],
            stored,
            mask=(kept_place < kept)[:, None] & is_feature[None, :],
        )
        if HAS_SUMS:
            tl.store(SUMS + block.to(tl.int64) * features + feature, sums, mask=is_feature)


def matrix_constants(order: int) -> dict[str, int]:
    """Return the constants of a kernel that say which Hadamard matrix it makes.

    Args:
        order: A value of `reference.hadamard_order`.

    Returns:
        ORDER, ORDER_2, DEGREE, POLYNOMIAL, PRIME and SQUARES.
    """
    prime = reference.paley_prime(order)
    degree = order.bit_length() - 1
    return {
        "ORDER": order,
        "ORDER_2": triton.next_power_of_2(order),
        "DEGREE": degree,
        "POLYNOMIAL": reference.POLYNOMIALS[degree],
        "PRIME": prime,
        "SQUARES": sum(1 << square for square in {number * number % prime for number in range(1, prime)}),
    }


# without keywords, which take the cache a microsecond
@lru_cache
def _constants(
    order: int, kept: int, tile: int, tiles: int, dtype: torch.dtype, mean: bool, sums: bool, rest: bool
) -> Constants:
    """Constants of the kernel for a geometry and a tile; the launcher and `builds` share them."""
    values: dict[str, Any] = {
        **matrix_constants(order),
        "KEPT_2": max(_LEAST_KEPT, triton.next_power_of_2(kept)),
        "CHUNK": max(_LEAST_KEPT, triton.next_power_of_2(min(order, _CHUNK))),
        "CHUNKS": _chunks(order),
        "TILE": tile,
        "TILES": tiles,
        "HAS_MEAN": mean,
        "HAS_SUMS": sums,
        "HAS_REST": rest,
        "IS_WIDE": dtype == torch.float32,
        "UPCAST": IS_INTERPRETED,
        "DTYPE": tl.float32 if IS_INTERPRETED else tl.float16 if dtype == torch.float16 else tl.bfloat16,
    }
    return Constants(values, num_warps=_WARPS)


def _chunks(order: int) -> int:
    return ceil_div(order, _CHUNK)


def _tile_of(order: int, kept: int, blocks: int, features: int, dtype: torch.dtype) -> tuple[int, int]:
    """Features of a tile, and tiles of a program."""
    wide, chunks = dtype == torch.float32, _chunks(order)
    tile = _WIDE_TILE if wide else _TILE
    if (wide and chunks > 1) or kept > _CHUNK // 2:
        # three parts, a loop and the sums, or twice as many results: more would not fit the registers
        tile //= 2
    tiles = 1
    # more than one tile a program as soon as there are programs enough
    while tiles < _MOST_TILES and chunks == 1 and blocks * ceil_div(features, tile * tiles * 2) >= _PROGRAMS // 4:
        tiles *= 2
    return tile, tiles


def _launch(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    dtype: torch.dtype,
    sums: Tensor | None,
    rest: bool = False,
) -> Tensor:
    rows, features = x.shape
    out = torch.empty((blocks * kept, features), dtype=dtype, device=x.device)
    block_rows = ceil_div(rows, blocks)
    order = reference.hadamard_order(block_rows)
    tile, tiles = _tile_of(order, kept, blocks, features, x.dtype)
    constants = _constants(order, kept, tile, tiles, x.dtype, mean is not None, sums is not None, rest)
    arguments = (
        x,
        seed,
        None if mean is None else mean.contiguous(),
        out,
        sums,
        rows,
        features,
        blocks,
        rows // blocks,
        rows % blocks,
        kept,
        reference.sign_stride(block_rows),
        *x.stride(),
        scale,
    )
    launch(_hadamard_sketch_kernel, (blocks, ceil_div(features, tile * tiles), 1), arguments, constants)
    return out


def hadamard_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * sqrt(kept) * S^T (x - 1 mean^T) for the strided-block Hadamard S.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides.
        seed: 0-d int64 on x's device.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations; `1 / sqrt(kept)` gives S^T x itself.
        dtype: Dtype of the result; sums are formed in float32.

    Returns:
        Shape (blocks * kept, features); row k * kept + c is combination c of block k.
    """
    if x.numel() == 0:
        return reference.hadamard_sketch(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype)
    return _launch(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype, sums=None)


def hadamard_sketch_and_mean(
    x: Tensor, seed: Tensor, mean: Tensor, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sketch of x - 1 mean^T and what is left of the mean of x: x is read once.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides.
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
    if x.numel() == 0:
        return reference.hadamard_sketch_and_mean(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype)
    sums = torch.empty((blocks, x.shape[1]), dtype=torch.float32, device=x.device)
    out = _launch(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype, sums=sums, rest=True)
    # one sum after the other: the same in every run, which atomic additions are not
    return out, sums.sum(0)


def hadamard_sketch_and_sums(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sketch of x - 1 mean^T and the column sums of the blocks of x itself: x is read once.

    Args:
        x: Input, shape (rows, features), float32, bfloat16 or float16, any strides.
        seed: 0-d int64 on x's device.
        mean: Shape (features,), subtracted from every row before it is sketched, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of the sketch.
        dtype: Dtype of the sketch.

    Returns:
        Sketch (blocks * kept, features); sums (blocks, features), float32, whose own sum is that of x.
    """
    if x.numel() == 0:
        return reference.hadamard_sketch_and_sums(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype)
    sums = torch.empty((blocks, x.shape[1]), dtype=torch.float32, device=x.device)
    return _launch(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype, sums=sums), sums


def _build(name: str, x: torch.dtype, out: torch.dtype, constants: Constants) -> Build:
    optional = {
        "MEAN": "*fp32" if constants["HAS_MEAN"] else None,
        "SUMS": "*fp32" if constants["HAS_SUMS"] else None,
    }
    types = {"X": f"*{TYPE_NAMES[x]}", "SEED": "*i64", "OUT": f"*{TYPE_NAMES[out]}"}
    types |= {name: kind for name, kind in optional.items() if kind is not None}
    pointers = tuple(types)
    types |= dict.fromkeys((*_ANY_ROWS, "features", "row_stride"), "i32") | {"scale": "fp32"}
    absent = {name: None for name, kind in optional.items() if kind is None}
    return Build(
        name=name,
        kernel=_hadamard_sketch_kernel,
        types=types,
        constants={**constants.values, **absent, "column_stride": 1},
        divisible=(*pointers, "features", "row_stride"),
        num_warps=constants.num_warps,
        uses_tensor_cores=True,
    )


def builds() -> list[Build]:
    """Return the specialisations that training compiles.

    Returns:
        For ratios 0.5, 0.25 and 0.1 of full blocks: the sketch of x with what is left of its mean, and the one of g
        with its sums; and the other dtypes, small and large blocks, large ratios, x without centring, and x with a mean
        and its sums, for codes.
    """
    found = []
    for kept in (32, 16, 6):
        found.append(_named("x", torch.bfloat16, 64, kept, 768))
        found.append(_named("g", torch.bfloat16, 64, kept, 3072))
    for dtype in (torch.float16, torch.float32):
        found.append(_named("x", dtype, 64, 32, 768))
        found.append(_named("g", dtype, 64, 32, 3072))
    found.extend(_named("x", torch.bfloat16, order, kept, 768) for order, kept in ((64, 58), (60, 30), (128, 2)))
    found.append(_named("g", torch.float32, 128, 2, 3072))
    # what takes the most registers: float32 at a large ratio, with programs of several tiles
    found.extend(_named(of, torch.float32, order, kept, 4096) for of, order, kept in (("x", 64, 58), ("g", 60, 54)))
    found.append(_named("uncentred x", torch.bfloat16, 64, 32, 768))
    found.append(_named("x for codes", torch.bfloat16, 64, 32, 768))
    return found


def _named(of: str, dtype: torch.dtype, order: int, kept: int, features: int) -> Build:
    """The sketch of 8192 rows: of x with a mean and what is left of it, with a mean and its sums, or without; of g."""
    tile, tiles = _tile_of(order, kept, 8192 // order, features, dtype)
    has_mean, has_sums = of in ("x", "x for codes"), of != "uncentred x"
    constants = _constants(order, kept, tile, tiles, dtype, has_mean, has_sums, of == "x")
    return _build(f"hadamard_sketch {of} {TYPE_NAMES[dtype]} order={order} kept={kept}", dtype, dtype, constants)
