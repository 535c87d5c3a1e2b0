"""Sketches that keep rows: uniform ones, and those of column-row sampling."""

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import is_on_cpu
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.row_sampling import cpu as _sampling_on_cpu
from rmm_linear_kernels.row_sampling import reference as _sampling


def uniform_rows(seeds: Tensor, *, rows: int, rank: int, replacement: bool) -> Tensor:
    """Draw row numbers uniformly, for one seed or many.

    Args:
        seeds: Shape (...,), int64.
        rows: Number of rows to draw from.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.

    Returns:
        Row numbers, shape (..., rank), int64.
    """
    way = _sampling_on_cpu if is_on_cpu(seeds) else _sampling
    return way.uniform_rows(seeds, rows=rows, rank=rank, replacement=replacement)


def sample_rows(norms: Tensor, seeds: Tensor, *, rank: int, winner_take_all: bool) -> tuple[Tensor, Tensor]:
    """Draw rows by their norms, for one seed or many.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64, at least one row.
        seeds: Shape (...,), int64.
        rank: Number of rows.
        winner_take_all: Keep the heaviest rows as they are (WTA-CRS) if true, plain CRS otherwise.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, (..., rank), float64.
    """
    way = _sampling_on_cpu if is_on_cpu(seeds) else _sampling
    sample = way.sample_rows_winner_take_all if winner_take_all else way.sample_rows
    return sample(norms, seeds, rank=rank)


@define(
    "uniform_row_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt rank, bool replacement, bool gradient) -> Tensor"
)
def _uniform_row_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, replacement: bool, gradient: bool
) -> Tensor:
    index = uniform_rows(seed, rows=x.shape[0], rank=rank, replacement=replacement)
    scale = x.shape[0] / max(1, rank) if gradient else 1.0
    return _sampling.gather_rows(x, index, mean, None, scale=scale, dtype=result_dtype(x, gradient))


@torch.library.register_fake("rmm_linear::uniform_row_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, replacement: bool, gradient: bool) -> Tensor:
    return x.new_empty((rank, x.shape[1]), dtype=result_dtype(x, gradient))


def uniform_row_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, replacement: bool, gradient: bool
) -> Tensor:
    """Return uniformly drawn rows of x - 1 mean^T, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        Shape (rank, features).
    """
    return _uniform_row_sketch(x, seed, mean, rank, replacement, gradient)


@define(
    "importance_rows(Tensor x, Tensor seed, Tensor? mean, Tensor? grad_norms, SymInt rank, bool winner_take_all)"
    " -> (Tensor, Tensor)"
)
def _importance_rows(
    x: Tensor, seed: Tensor, mean: Tensor | None, grad_norms: Tensor | None, rank: int, winner_take_all: bool
) -> tuple[Tensor, Tensor]:
    norms = _sampling.row_norms(x, mean)
    if grad_norms is not None:
        norms = norms * grad_norms.to(norms.dtype)
    index, squared = sample_rows(norms, seed, rank=rank, winner_take_all=winner_take_all)
    return index.to(torch.int32), squared.to(result_dtype(x, True))


@torch.library.register_fake("rmm_linear::importance_rows")
def _(
    x: Tensor, seed: Tensor, mean: Tensor | None, grad_norms: Tensor | None, rank: int, winner_take_all: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty((rank,), dtype=torch.int32), x.new_empty((rank,), dtype=result_dtype(x, True))


def importance_rows(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    grad_norms: Tensor | None,
    *,
    rank: int,
    winner_take_all: bool,
) -> tuple[Tensor, Tensor]:
    """Draw rows of x - 1 mean^T with probabilities proportional to their norms.

    Args:
        x: Shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        grad_norms: Norms of the rows of g, shape (rows,), to multiply the norms with, or None.
        rank: Number of rows.
        winner_take_all: Keep the heaviest rows as they are (WTA-CRS) if true, plain CRS otherwise.

    Returns:
        Row numbers (rank,), int32, and squared entries of S (rank,), float32 (float64 for a float64 `x`).
    """
    return _importance_rows(x, seed, mean, grad_norms, rank, winner_take_all)


@define("gather_rows(Tensor x, Tensor index, Tensor? mean, Tensor? scales) -> Tensor")
def _gather_rows(x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None) -> Tensor:
    return _sampling.gather_rows(x, index, mean, scales, scale=1.0, dtype=result_dtype(x, scales is not None))


@torch.library.register_fake("rmm_linear::gather_rows")
def _(x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]), dtype=result_dtype(x, scales is not None))


def gather_rows(x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """Return x[index_j] - mean, each row times scales_j where scales are given.

    Args:
        x: Shape (rows, features), any float dtype.
        index: Row numbers, shape (rank,), int32 or int64.
        mean: Shape (features,), or None.
        scales: Shape (rank,), or None.

    Returns:
        Shape (rank, features); in x's dtype without scales, else in float32 (float64 for float64).
    """
    return _gather_rows(x, index, mean, scales)
