"""Row sampling on a CPU: the reference's, drawn by torch's own generator."""

import torch
from torch import Tensor

from .. import cpu_generator
from ..philox.reference import CHOICE_STREAM
from .reference import draw_after_winners, draw_by_weight, weights_and_ends


def uniform_rows(seed: Tensor, *, rows: int, rank: int, replacement: bool) -> Tensor:
    """Draw row numbers uniformly.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        rows: Number of rows to draw from.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.

    Returns:
        Row numbers, shape (..., rank), int64.
    """

    def draw(generator: torch.Generator) -> Tensor:
        if replacement:
            return torch.randint(max(1, rows), (rank,), generator=generator, device="cpu")
        return torch.randperm(rows, generator=generator, device="cpu")[:rank]

    return cpu_generator.for_each(seed, CHOICE_STREAM, draw)


def sample_rows(norms: Tensor, seed: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """Draw rows for many seeds; see `reference.sample_rows`.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64.
        seed: 64-bit seeds, shape (...,), int64.
        rank: Number of draws.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, (..., rank), float64.
    """
    return draw_by_weight(_fractions(seed, rank), weights_and_ends(norms))


def sample_rows_winner_take_all(norms: Tensor, seed: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """Draw rows for many seeds, after the heaviest; see `reference.sample_rows_winner_take_all`.

    Args:
        norms: Row norms up to a common factor, shape (rows,), float64.
        seed: 64-bit seeds, shape (...,), int64.
        rank: Number of rows to keep in all.

    Returns:
        Row numbers (..., rank), int64, and squared entries of S, (..., rank), float64.
    """
    return draw_after_winners(norms, _fractions(seed, rank))


def _fractions(seed: Tensor, rank: int) -> Tensor:
    """Uniforms in [0, 1) with 53 random bits each, (..., rank)."""

    def draw(generator: torch.Generator) -> Tensor:
        return torch.rand(rank, generator=generator, dtype=torch.float64, device="cpu")

    return cpu_generator.for_each(seed, CHOICE_STREAM, draw)
