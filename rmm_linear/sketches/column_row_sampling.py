"""The base of CRS and WTA-CRS: rows drawn by importance, kept with their numbers and the squared entries of S."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.sketches.base import SavedSketch, Sketch, Stored, accumulate_dtype
from rmm_linear.sketches.row_sampling import gather_rows, row_norms


@dataclass(frozen=True)
class ColumnRowSampling(Sketch):
    """Rows sampled with probabilities proportional to their norms; S depends on x.

    The rows are stored as they are, and all of S's weight goes on the rows of g: nothing can overflow.
    """

    def stored(self, rows: int, features: int, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Return rows, row numbers and squared entries of S; see `Sketch.stored`."""
        kept = (self.rank(rows),)
        return *super().stored(rows, features, dtype), (kept, torch.int32), (kept, accumulate_dtype(dtype))

    def compress(
        self, x: Tensor, seed: Tensor, *, mean: Tensor | None = None, grad_norms: Tensor | None = None
    ) -> SavedSketch:
        """Sample rows; see `Sketch.compress`.

        Args:
            x: Activations, shape (rows, in).
            seed: 0-d int64.
            mean: Shape (in,), or None.
            grad_norms: Norms of the rows of g, shape (rows,), to multiply x's with, or None.
        """
        rank = self.rank(x.shape[0])
        if rank == 0:
            empty = (x.new_empty(shape, dtype=dtype) for shape, dtype in self.stored(0, x.shape[1], x.dtype))
            return SavedSketch(seed, tuple(empty))
        norms = row_norms(x, mean)
        if grad_norms is not None:
            norms = norms * grad_norms.to(norms.dtype)
        index, squared = self.sample(norms, seed, rank=rank)
        index = index.to(torch.int32)
        rows = gather_rows(x, index, mean, dtype=x.dtype)
        return SavedSketch(seed, (rows, index, squared.to(accumulate_dtype(x.dtype))))

    def sketch_gradient(self, g: Tensor, saved: SavedSketch, *, mean: Tensor | None = None) -> Tensor:
        """Return the drawn rows of g - 1 mean^T times the squared entries of S; see `Sketch.sketch_gradient`."""
        _, index, squared = saved.tensors
        return gather_rows(g, index, mean, scales=squared, dtype=accumulate_dtype(g.dtype))

    @abstractmethod
    def sample(self, norms: Tensor, seeds: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        """Draw rows.

        Args:
            norms: Row norms up to a common factor, shape (rows,), float64.
            seeds: Shape (...,), int64.
            rank: Number of rows.

        Returns:
            Row numbers and squared entries of S, each (..., rank).
        """

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Return S; see `Sketch.dense`."""
        rows, rank = x.shape[0], self.rank(x.shape[0])
        dense = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
        if rows == 0:
            return dense
        index, squared = self.sample(row_norms(x, None), seeds, rank=rank)
        return dense.scatter_(1, index.unsqueeze(1), squared.sqrt().unsqueeze(1))
