"""S itself, as the operators of its device draw it: for closed forms and tests, since no layer holds S as a whole."""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import is_on_cpu
from rmm_linear_kernels.hadamard_sketch import cpu as _hadamard_on_cpu
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.random_projection import cpu as _projection_on_cpu
from rmm_linear_kernels.random_projection import reference as _projection
from rmm_linear_kernels.trigonometric_sketch import cpu as _trigonometric_on_cpu
from rmm_linear_kernels.trigonometric_sketch import reference as _trigonometric


def hadamard_dense(seeds: Tensor, *, rows: int, blocks: int, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the Hadamard sketch's S for many seeds.

    Args:
        seeds: Shape (draws,), int64.
        rows: Rows of x.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        dtype: Dtype of the result.

    Returns:
        Shape (draws, rows, blocks * kept).
    """
    way = _hadamard_on_cpu if is_on_cpu(seeds) else _hadamard
    return way.hadamard_dense(seeds, rows=rows, blocks=blocks, kept=kept, dtype=dtype)


def projection_dense(seeds: Tensor, *, rows: int, rank: int, gaussian: bool, dtype: torch.dtype) -> Tensor:
    """Return a dense projection's S for many seeds.

    Args:
        seeds: Shape (draws,), int64.
        rows: Rows of x.
        rank: Columns of S.
        gaussian: Normal entries if true, signs otherwise.
        dtype: Dtype of the result.

    Returns:
        Shape (draws, rows, rank).
    """
    options: dict[str, Any] = {"rows": rows, "rank": rank, "gaussian": gaussian, "dtype": dtype}
    if is_on_cpu(seeds):
        entries = _projection_on_cpu.projection(seeds, **options)
    else:
        entries = _projection.projection_slab(seeds, first_row=0, **options)
    return entries / max(1, rank) ** 0.5


def trigonometric_dense(seeds: Tensor, *, rows: int, rank: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Return a trigonometric sketch's S for many seeds.

    Args:
        seeds: Shape (draws,), int64.
        rows: Rows of x.
        rank: Columns kept.
        kind: "dct" or "dft".
        dtype: Dtype of the result.

    Returns:
        Shape (draws, rows, rank).
    """
    way = _trigonometric_on_cpu if is_on_cpu(seeds) else _trigonometric
    return way.trigonometric_dense(seeds, rows=rows, rank=rank, kind=kind, dtype=dtype)
