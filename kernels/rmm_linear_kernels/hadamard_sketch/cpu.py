"""The strided-block Hadamard sketch on a CPU: the reference's, drawn by torch's own generator.

The kept rows of H are a uniform subset here, which a generator draws at once. H itself is the same at every step.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .. import cpu_generator
from ..philox.reference import SIGN_STREAM
from ..strides import as_matrix
from .reference import dense_of, hadamard_entries, hadamard_matrix, hadamard_order, mixed, mixed_rows

# Orders whose matrices are kept: those of all ratios from 1/32 on, 16 of them, and 0.1 MB in float32.
_MOST_REMEMBERED_ORDER = 64


@lru_cache
def _matrix(order: int, dtype: torch.dtype) -> Tensor:
    """A Hadamard matrix that nobody writes into; no inference tensor, whatever mode asks for it first."""
    with torch.inference_mode(False):
        return hadamard_matrix(order, dtype=dtype, device=torch.device("cpu"))


def _mixing(seed: Tensor, rows: int, blocks: int, kept: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Scale H[columns] diag(signs) for every block; zero where a block has no row. (..., blocks, kept, m)."""
    block_rows = -(-rows // blocks)
    order = hadamard_order(block_rows)

    def draw(generator: torch.Generator) -> Tensor:
        columns = torch.randperm(order, generator=generator, device="cpu")[:kept]
        signs = cpu_generator.random_signs(generator, (blocks, 1, block_rows), dtype=dtype, size=scale)
        return mixed(_rows_of_matrix(columns, order, block_rows, dtype), signs, rows)

    return cpu_generator.for_each(seed, SIGN_STREAM, draw)


def _rows_of_matrix(columns: Tensor, order: int, width: int, dtype: torch.dtype) -> Tensor:
    """The first entries of some rows of H, (kept, width)."""
    if order > _MOST_REMEMBERED_ORDER:
        return hadamard_entries(columns, order=order, width=width, dtype=dtype)
    chosen = _matrix(order, dtype)[columns]
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
    return mixed_rows(x, _mixing(seed, x.shape[0], blocks, kept, compute, scale), mean, dtype=dtype)


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
