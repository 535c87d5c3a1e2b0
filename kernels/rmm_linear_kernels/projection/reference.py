"""Dense random projections in plain torch: S with independent Gaussian or +-1 entries, made a slab of rows at a time.

On a GPU, a counter of Philox's projection stream serves neighbouring rows of one column, so that a kernel that makes a
tile of S computes few counters, and may begin at any row that is a multiple of theirs. Both indices are in the counter:
S may be of any size, and has the same first columns whatever its rank:

    signs     element (row, column) = bit row % 32 of word row % 128 // 32 of cell (row // 128, column)
    normals   element (row, column) = normal row % 4 of cell (row // 4, column)

`philox.reference.cell_counters` returns the Philox counter of a cell. On a CPU each slab has its own generator.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import random
from ..philox.reference import PROJECTION_STREAM, cell_counters, randint4x, randn4x

# Rows of a column that one counter serves.
SIGN_ROWS = 128
NORMAL_ROWS = 4
# Elements of S generated at a time: by Philox, and by a CPU, beside products of at least as many.
_SLAB_ELEMENTS = 1 << 20
_CPU_SLAB_ELEMENTS = 1 << 21
# Fewer rows make products of which most is reading and writing the result.
_LEAST_CPU_SLAB_ROWS = 128
# Counters that normals are made of at a time: the integers of one large piece would not fit a processor's cache.
_PIECE = 1 << 13
_WORD_BITS = 32
_SIGN_BIT = -(1 << 31)
_ONE_BITS = 0x3F800000


def projection_slab(
    seed: Tensor, *, first_row: int, rows: int, rank: int, gaussian: bool, dtype: torch.dtype
) -> Tensor:
    """Return rows of the unscaled projection by Philox: standard normals or fair signs, (..., rows, rank).

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        first_row: First row of the slab, a multiple of 4 for normals and of 128 for signs.
        rows: Rows of the slab.
        rank: Columns of S.
        gaussian: Standard normals if true, signs otherwise.
        dtype: Floating dtype of the result (normals are formed in float32).
    """
    per_counter = NORMAL_ROWS if gaussian else SIGN_ROWS
    assert first_row % per_counter == 0
    make = _normals_of_cells if gaussian else _signs_of_cells
    slab = make(seed, first_row // per_counter, math.ceil(rows / per_counter), rank, dtype)
    return slab.flatten(-3, -2)[..., :rows, :]


def _normals_of_cells(seed: Tensor, first: int, groups: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Normals of some groups of rows, shape (..., groups, 4, rank)."""
    entries = torch.empty((*seed.shape, groups, NORMAL_ROWS, rank), dtype=dtype, device=seed.device)
    step = max(1, _PIECE // max(1, rank))
    for start in range(0, groups, step):
        count = min(step, groups - start)
        counters = cell_counters(first + start, count, rank, stream=PROJECTION_STREAM, device=seed.device)
        normals = randn4x(seed, *counters).unflatten(-1, (count, rank))
        entries[..., start : start + count, :, :] = normals.movedim(0, -2)
    return entries


def _signs_of_cells(seed: Tensor, first: int, groups: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Signs of some groups of rows, shape (..., groups, 128, rank)."""
    counters = cell_counters(first, groups, rank, stream=PROJECTION_STREAM, device=seed.device)
    words = randint4x(seed, *counters).unflatten(-1, (groups, rank)).movedim(0, -2)
    # Bit b of a word goes where a float32 has its sign, the rest becomes the bits of 1.0.
    shift = torch.arange(_WORD_BITS - 1, -1, -1, dtype=torch.int32, device=seed.device).unsqueeze(1)
    bits = words.to(torch.int32).unsqueeze(-2) << shift
    signs = bits.bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE_BITS).view(torch.float32)
    return signs.flatten(-3, -2).to(dtype)


def _slabs(
    seed: Tensor, rows: int, rank: int, features: int, gaussian: bool, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Make S, unscaled, slab by slab: first row, and rows."""
    if not random.is_drawn_on_cpu(seed):
        # a multiple of the rows that a counter serves, of either kind
        step = max(1, _SLAB_ELEMENTS // (max(rank, features, 1) * SIGN_ROWS)) * SIGN_ROWS
        options: dict[str, Any] = {"rank": rank, "gaussian": gaussian, "dtype": dtype}
        for first in range(0, rows, step):
            yield first, projection_slab(seed, first_row=first, rows=min(step, rows - first), **options)
        return
    # by the rank alone: S is a function of its seed and its size
    step = max(_LEAST_CPU_SLAB_ROWS, _CPU_SLAB_ELEMENTS // max(1, rank))
    for number, first in enumerate(range(0, rows, step)):
        shape = (min(step, rows - first), rank)

        def draw(generator: torch.Generator, shape: tuple[int, int] = shape) -> Tensor:
            if gaussian:
                return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
            return _signs_of_generator(generator, shape)

        # beyond the streams of other uses
        yield first, random.for_each(seed, PROJECTION_STREAM + (number << 32), draw).to(dtype)


def _signs_of_generator(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    """Fair signs; a random word has 32 of them."""
    count = shape[0] * shape[1]
    words = torch.empty(-(-count // _WORD_BITS), dtype=torch.int32, device="cpu")
    words.random_(-(1 << 31), 1 << 31, generator=generator)
    bits = words.unsqueeze(-1) << torch.arange(_WORD_BITS, dtype=torch.int32, device="cpu")
    return bits.bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE_BITS).view(torch.float32).flatten()[:count].view(shape)


def projection_dense(seeds: Tensor, *, rows: int, rank: int, gaussian: bool, dtype: torch.dtype) -> Tensor:
    """Return S itself for seeds of shape (draws,): (draws, rows, rank)."""
    slabs = [slab for _, slab in _slabs(seeds, rows, rank, 0, gaussian, dtype)]
    entries = torch.cat(slabs, -2) if slabs else torch.empty((*seeds.shape, 0, rank), dtype=dtype, device=seeds.device)
    return entries / max(1, rank) ** 0.5


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * R^T (x - 1 mean^T), R having independent standard normal or +-1 entries.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        rank: Columns of R.
        gaussian: Standard normals if true, signs otherwise.
        scale: Factor; `1 / sqrt(rank)` makes it an unbiased sketch.
        dtype: Dtype of the result; sums are formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (rank, features).
    """
    rows, features = x.shape
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_zeros((rank, features), dtype=compute)
    ones = x.new_zeros((rank,), dtype=compute)
    for first, slab in _slabs(seed, rows, rank, features, gaussian, compute):
        # The factor goes on S: the bare sums of 1e30-sized rows could overflow.
        part = slab.mul_(scale)
        out.addmm_(part.t(), x[first : first + part.shape[0]].to(compute))
        if mean is not None:
            ones += part.sum(0)
    if mean is not None:
        out.addr_(ones, mean.to(compute), alpha=-1)
    return out.to(dtype)


def projected_grad_weight(
    g: Tensor, seed: Tensor, sketched_x: Tensor, mean: Tensor | None, *, gaussian: bool, scale: float
) -> Tensor:
    """Return the weight's gradient out of g and the stored sketch X, by the cheaper one of two orders of products.

    (R^T g)^T X, of rank out (rows + in) multiply-adds, or g^T (R X), of rows in (rank + out): at half of the rows and
    more, the second one takes up to a half less.

    Args:
        g: Gradient of the output, shape (rows, out), any float dtype.
        seed: 0-d int64, of the sketch of x.
        sketched_x: X, shape (rank, in), any float dtype.
        mean: Shape (out,), subtracted from every row of g, or None.
        gaussian: Standard normals if true, signs otherwise.
        scale: Factor on R.

    Returns:
        Shape (out, in), float32 (float64 for a float64 `g`).
    """
    (rows, out), (rank, features) = g.shape, sketched_x.shape
    compute = torch.float64 if g.dtype == torch.float64 else torch.float32
    sketched_x = sketched_x.to(compute)
    if rank * out * (rows + features) <= rows * features * (rank + out):
        options: dict[str, Any] = {"rank": rank, "gaussian": gaussian, "scale": scale, "dtype": compute}
        return random_projection(g, seed, mean, **options).t() @ sketched_x
    grad_weight = g.new_zeros((out, features), dtype=compute)
    ones = g.new_zeros((features,), dtype=compute)
    for first, slab in _slabs(seed, rows, rank, features, gaussian, compute):
        part = slab.mul_(scale) @ sketched_x
        grad_weight.addmm_(g[first : first + part.shape[0]].to(compute).t(), part)
        if mean is not None:
            ones += part.sum(0)
    return grad_weight if mean is None else grad_weight.addr_(mean.to(compute), ones, alpha=-1)
