"""Strided-block Hadamard sketch, the default: as cheap as one skinny matmul, and orthogonal.

In each block of b rows, S_k^T = H[columns] diag(signs) / sqrt(p): random signs, and p rows of a Hadamard matrix of
order b, each pair of rows equally likely. The sketch takes rows * p * in multiply-adds instead of a dense sketch's
rows * rank * in, and since H is orthogonal its variance vanishes with p -> b, unlike a dense Gaussian's.

Variance. For i != j of one block, the entry of S S^T is s_i s_j / p times a sum of p of the b values H_ci H_cj = +-1,
which add up to 0; a sample of p values in which each pair is equally likely has the mean square p (b - p) / (b - 1).
The diagonal of S S^T is 1 in every draw, and the signs make different pairs uncorrelated, across blocks too. Hence

    (b - p) / (p (b - 1)) * sum over blocks of (P_k Q_k + C_k - 2 s_k)
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import ObliviousSketch, accumulate_dtype, larger, register
from rmm_linear.sketches.closed_forms import SLAB_ELEMENTS, product, product_dtype

_BLOCK = 64


def _block_grams(y: Tensor, blocks: int, block_rows: int) -> Tensor:
    """Gram matrices of the blocks, (blocks, block_rows, block_rows), smaller than each block's x^T g."""
    rows, features = y.shape
    dtype = product_dtype(y)
    grams = torch.empty((blocks, block_rows, block_rows), dtype=torch.float64, device=y.device)
    step = max(1, SLAB_ELEMENTS // max(1, block_rows * features))
    for start in range(0, blocks, step):
        block = torch.arange(start, min(start + step, blocks), device=y.device)
        row = block.unsqueeze(1) + blocks * torch.arange(block_rows, device=y.device)
        part = y.index_select(0, row.clamp(max=rows - 1).flatten()).to(dtype).view(*row.shape, features)
        if blocks * block_rows > rows:
            part.masked_fill_((row >= rows).unsqueeze(-1), 0.0)
        grams[start : start + step] = product(part, part.transpose(1, 2))
    return grams


@register
@dataclass(frozen=True)
class Hadamard(ObliviousSketch):
    """Strided blocks of at most 64 rows, each mixed by random signs and random rows of a Hadamard matrix.

    `rows` rows form K = ceil(rows / 64) blocks (block k holds rows k, k + K, k + 2K, ...). Of each block,
    p = floor(ratio * rows / K) combinations are kept, at least one: in all at most round(ratio * rows) rows,
    and 6 of 64 for a ratio of 0.1. Below a ratio of 1/32 the blocks are larger, 2 / ratio rounded up to a power of 2.
    """

    name: ClassVar[str] = "hadamard"

    @cached_property
    def block(self) -> int:
        """The most rows of a block."""
        needed = -(-2 * self.denominator // self.numerator)
        return max(_BLOCK, 1 << (needed - 1).bit_length())

    def geometry(self, rows: int) -> tuple[int, int]:
        """Return the number of blocks and the kept combinations of each; `rows` may be a SymInt."""
        if isinstance(rows, int) and rows == 0:
            return 0, 1
        blocks = (rows + self.block - 1) // self.block
        return blocks, larger(1, (self.numerator * rows) // (self.denominator * blocks))

    def rank(self, rows: int) -> int:
        blocks, kept = self.geometry(rows)
        return blocks * kept

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        rows = y.shape[0]
        blocks, kept = self.geometry(rows)
        # A combination with signs is about sqrt(rows of a block) times as large as an element of x. The scale of x, a
        # power of 2, which does not round, undoes this. The product of the scales of x and g is 1 / kept.
        scale = 2.0 ** round(math.log2((max(1, rows) / max(1, blocks)) ** -0.5))
        dtype = y.dtype
        if gradient:
            scale, dtype = 1 / (kept * scale), accumulate_dtype(dtype)
        return backend.run("hadamard_sketch", y, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype)

    def multiply_adds(self, rows: int) -> int:
        return rows * self.geometry(rows)[1]

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        rows = x.shape[0]
        blocks, kept = self.geometry(rows)
        block_rows = -(-rows // max(1, blocks))
        order = backend.hadamard_order(block_rows) if rows else kept
        if order == kept:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        x_gram, g_gram = (_block_grams(y, blocks, block_rows) for y in (x, g))
        x_rows, g_rows = x_gram.diagonal(dim1=1, dim2=2), g_gram.diagonal(dim1=1, dim2=2)
        pairs = x_rows.sum(1) * g_rows.sum(1) + (x_gram * g_gram).sum((1, 2)) - 2 * (x_rows * g_rows).sum(1)
        # rounding may give a value slightly below 0
        return (order - kept) / (kept * (order - 1)) * pairs.sum().clamp(min=0)

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        blocks, kept = self.geometry(x.shape[0])
        return backend.hadamard_dense(seeds, rows=x.shape[0], blocks=blocks, kept=kept, dtype=torch.float64)
