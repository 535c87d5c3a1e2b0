"""What CRS and WTA-CRS share: rows drawn by importance, kept with their numbers and the squared entries of S."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.sketches.base import SavedSketch, Sketch, accumulate_dtype

_INDEX_BYTES = 4


@dataclass(frozen=True)
class ColumnRowSampling(Sketch):
    """Rows sampled with probabilities proportional to their norms; S depends on x.

    The rows are stored as they are, and all of S's weight goes on the rows of g: nothing can overflow.
    """

    winner_take_all: ClassVar[bool]

    def compress(
        self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None, grad_norms: Tensor | None = None
    ) -> SavedSketch:
        """Sample rows; see `Sketch.compress`."""
        rank = self.rank(x.shape[0])
        if isinstance(rank, int) and rank == 0:
            return SavedSketch(
                seed,
                (
                    x.new_empty((0, x.shape[1])),
                    x.new_empty(0, dtype=torch.int32),
                    x.new_empty(0, dtype=accumulate_dtype(x.dtype)),
                ),
            )
        index, squared = ops.importance_rows(x, seed, mean, grad_norms, rank=rank, winner_take_all=self.winner_take_all)
        return SavedSketch(seed, (ops.gather_rows(x, index, mean), index, squared))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Return the drawn rows of g - 1 mean^T times the squared entries of S; see `Sketch.sketch_gradient`."""
        _, index, squared = saved.tensors
        return ops.gather_rows(g, index, mean, squared)

    def saved_bytes(self, rows: int, features: int, dtype: torch.dtype, valid_rows: int | None = None) -> int:
        """Return the bytes kept: rows, row numbers, squared entries of S, seed; see `Sketch.saved_bytes`."""
        kept = self.rank(rows if valid_rows is None else valid_rows)
        each = _INDEX_BYTES + accumulate_dtype(dtype).itemsize
        return super().saved_bytes(rows, features, dtype, valid_rows) + kept * each

    @abstractmethod
    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        """Draw rows.

        Args:
            norms: Row norms up to a common factor, shape (rows,), float64.
            seeds: Shape (draws,), int64.
            rank: Number of rows.

        Returns:
            Row numbers and squared entries of S, each (draws, rank).
        """

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S; see `Sketch.dense`."""
        rows, rank = x.shape[0], self.rank(x.shape[0])
        dense = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
        if rows == 0:
            return dense
        index, squared = self.sample(ops.row_norms(x, None), seeds, rank=rank)
        return dense.scatter_(1, index.unsqueeze(1), squared.sqrt().unsqueeze(1))
