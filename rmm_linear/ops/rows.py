"""Sketches that keep rows: uniform ones, and those of column-row sampling."""

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import run
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.row_gather import reference as _rows
from rmm_linear_kernels.row_sampling import cpu as _sampling_on_cpu
from rmm_linear_kernels.row_sampling import reference as _sampling


def uniform_draws(x: Tensor, seed: Tensor, *, rank: int, replacement: bool) -> Tensor:
    """Draw rows of x uniformly: a part of `uniform_row_sketch`.

    Args:
        x: Shape (rows, features).
        seed: 0-d int64.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.

    Returns:
        Row numbers, shape (rank,), int64.
    """
    twin, on_cpu = _sampling.uniform_draws, _sampling_on_cpu.uniform_draws
    return run("uniform_draws", twin, x, seed, rank=rank, replacement=replacement, on_cpu=on_cpu)


def sampling_weights(x: Tensor, norms: Tensor) -> _sampling.Weights:
    """Return the integer sampling weights of the rows of x: a part of `importance_rows`.

    Args:
        x: Shape (rows, features), at least one row.
        norms: What they are proportional to, shape (rows,), float64, not negative.

    Returns:
        Weights and their cumulative sums, (rows,), int64; and what the squared entries of S are to be multiplied by,
        0-d float64: 1, or NaN where a norm is no finite number.
    """
    return run("sampling_weights", _sampling.sampling_weights, x, norms)


def weighted_draws(
    x: Tensor,
    seed: Tensor,
    weights: _sampling.Weights,
    order: Tensor | None = None,
    size: Tensor | None = None,
    *,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Draw rows of x by their weights: a part of `importance_rows`.

    Args:
        x: Shape (rows, features), at least one row.
        seed: 0-d int64.
        weights: What `sampling_weights` returned; weights and sums in falling order where there is one.
        order: Row numbers in the order of the weights, (rows,), int64, or None.
        size: With an order: how many of the first are kept as they are, 0-d int64.
        rank: Number of rows.

    Returns:
        Row numbers (rank,), int32, and squared entries of S (rank,), float32 (float64 for a float64 `x`).
    """
    twin, on_cpu = _sampling.weighted_draws, _sampling_on_cpu.weighted_draws
    return run("weighted_draws", twin, x, seed, *weights, order, size, rank=rank, on_cpu=on_cpu)


@define(
    "uniform_row_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt rank, bool replacement, bool gradient) -> Tensor"
)
def _uniform_row_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, replacement: bool, gradient: bool
) -> Tensor:
    index = uniform_draws(x, seed, rank=rank, replacement=replacement)
    scale = x.shape[0] / max(1, rank) if gradient else 1.0
    return run("gather_rows", _rows.gather_rows, x, index, mean, None, scale=scale, dtype=result_dtype(x, gradient))


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
    norms = run("row_norms", _rows.row_norms, x, mean)
    if grad_norms is not None:
        norms = norms * grad_norms.to(norms.dtype)
    weights = sampling_weights(x, norms)
    if not winner_take_all:
        return weighted_draws(x, seed, weights, rank=rank)
    order, each, ends, size = _sampling.winners(weights[0], rank=rank)
    return weighted_draws(x, seed, (each, ends, weights[2]), order, size, rank=rank)


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
    return run(
        "gather_rows", _rows.gather_rows, x, index, mean, scales, scale=1.0, dtype=result_dtype(x, scales is not None)
    )


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
