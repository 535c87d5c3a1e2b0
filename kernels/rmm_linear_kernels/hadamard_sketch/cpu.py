"""The strided-block Hadamard sketch on a CPU: the reference's, drawn by torch's own generator.

H itself is the same at every step, and so are the rows that may be drawn of it. Where its order is b = 2^k, they are
the rows a^t, a^(t + 1), ... of a primitive element a of GF(2^k), from a random t of b - 1 on: a run of a constant
matrix, which no operation has to gather. This is the reference's way to draw, times a random power of a, and its proof
holds: a^(t + i) + a^(t + j) is uniform over all numbers but 0, so that each pair of rows is equally likely in the one
respect that the variance asks for. Row 0 is never drawn, unless all are. The rows of other orders are a uniform subset.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .. import cpu_generator
from ..philox.reference import SIGN_STREAM
from ..strides import as_matrix
from .reference import POLYNOMIALS, dense_of, hadamard_entries, hadamard_matrix, hadamard_order, mixed_rows

# Orders whose matrices are kept: those of all ratios from 1/32 on, 16 of them, and 0.1 MB in float32. Seven of them are
# powers of 2, whose runs take 0.04 MB more.
_MOST_REMEMBERED_ORDER = 64


@lru_cache
def _matrix(order: int, dtype: torch.dtype) -> Tensor:
    """A Hadamard matrix that nobody writes into; no inference tensor, whatever mode asks for it first."""
    with torch.inference_mode(False):
        return hadamard_matrix(order, dtype=dtype, device=torch.device("cpu"))


@lru_cache
def _powers(order: int, dtype: torch.dtype) -> Tensor:
    """The rows 1, a, a^2, ... of H, twice: a run may begin at any of them. (2 (order - 1), order)."""
    degree, number, numbers = order.bit_length() - 1, 1, []
    for _ in range(order - 1):
        numbers.append(number)
        number <<= 1
        number ^= (number >> degree) * POLYNOMIALS[degree]
    with torch.inference_mode(False):
        return _matrix(order, dtype)[torch.tensor(numbers * 2, device="cpu")]


def _mixing(seed: Tensor, rows: int, blocks: int, kept: int, dtype: torch.dtype) -> Tensor:
    """H[columns] diag(signs) for every block, unscaled; zero where a block has no row. (..., blocks, kept, m)."""
    block_rows = -(-rows // blocks)
    order = hadamard_order(block_rows)

    def draw(generator: torch.Generator) -> Tensor:
        chosen = _rows_of_matrix(generator, order, kept, block_rows, dtype)
        bits = torch.empty((blocks, 1, block_rows), dtype=dtype, device="cpu").random_(0, 2, generator=generator)
        if rows < blocks * block_rows:
            # The last stride does not reach all blocks: there, half a bit makes 0.
            bits[rows - (block_rows - 1) * blocks :, :, -1] = 0.5
        return torch.addcmul(chosen, chosen, bits, value=-2)

    return cpu_generator.for_each(seed, SIGN_STREAM, draw)


def _rows_of_matrix(generator: torch.Generator, order: int, kept: int, width: int, dtype: torch.dtype) -> Tensor:
    """The first entries of random rows of H, (kept, width)."""
    if order > _MOST_REMEMBERED_ORDER:
        columns = torch.randperm(order, generator=generator, device="cpu")[:kept]
        return hadamard_entries(columns, order=order, width=width, dtype=dtype)
    if kept == order:
        chosen = _matrix(order, dtype)
    elif order & (order - 1):
        chosen = _matrix(order, dtype)[torch.randperm(order, generator=generator, device="cpu")[:kept]]
    else:
        first = cpu_generator.number_below(order - 1, generator)
        chosen = _powers(order, dtype)[first : first + kept]
    return chosen if width == order else chosen[:, :width]


def hadamard_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * sqrt(kept) * S^T (x - 1 mean^T); see `reference.hadamard_sketch`.

    Args:
        x: Input, shape (rows, features), any float dtype, any strides; or in runs, see `strides.in_runs`.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations; `1 / sqrt(kept)` gives S^T x itself.
        dtype: Dtype of the result; sums are formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (blocks * kept, features); row k * kept + c is combination c of block k.
    """
    x = as_matrix(x)
    if x.shape[0] == 0:
        return x.new_empty((blocks * kept, x.shape[1]), dtype=dtype)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    mixing = _mixing(seed, x.shape[0], blocks, kept, compute)
    return mixed_rows(x, mixing, mean, scale=scale, dtype=dtype)


def hadamard_dense(seeds: Tensor, *, rows: int, blocks: int, kept: int, dtype: torch.dtype) -> Tensor:
    """Return S itself for many seeds.

    Args:
        seeds: Shape (draws,), int64.
        rows: Rows of x.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        dtype: Dtype of the result.

    Returns:
        Shape (draws, rows, blocks * kept).
    """
    if rows == 0:
        return torch.zeros((seeds.numel(), 0, blocks * kept), dtype=dtype)
    return dense_of(_mixing(seeds, rows, blocks, kept, dtype), rows)
