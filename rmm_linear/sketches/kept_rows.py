"""KeptRows: rows that are not sketched, kept in their dtype or, beside a low-bit sketch, in 8 bits.

They are few and carry much of the gradient (`rmm_linear.rows`): next to values of 2 or 4 bits, 8 make their noise
vanish; next to unrounded ones they are exact. Steps and offsets of 8 bits belong to 128 rows of a column: where there
are so few rows that these take more than the rows do, they are kept as they are.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import SEED_BYTES, SavedSketch, Stored
from rmm_linear.sketches.low_bit import LowBit

# Of the rows beside a low-bit sketch.
_STORAGE = "int8"
# The rounding of the sketch's values and that of the kept rows draw from one seed, and must not draw the same.
_OTHER_SEED = 0x5DEECE66D2B5A1F3


@dataclass(frozen=True)
class KeptRows:
    """How the rows beside a sketch are kept.

    Attributes:
        storage: Low-bit storage of the sketch of the other rows, or None.
    """

    storage: str | None
    _low_bit: LowBit | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_low_bit", None if self.storage is None else LowBit(None, _STORAGE))

    def compress(self, x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that `grad_weight` needs of x (kept, in), whose memory must not change.

        That is `x` itself without a storage, and where it takes no more. `seed` is the sketch's.
        """
        low_bit = self._rounding(x.shape[0], x.dtype)
        return (x,) if low_bit is None else low_bit.compress(x, seed ^ _OTHER_SEED).tensors

    def grad_weight(self, g: Tensor, tensors: tuple[Tensor, ...], seed: Tensor) -> Tensor:
        """Return the kept rows' part of g^T x, float32 (float64 for float64): exact, or unbiased with a storage."""
        if self._low_bit is None or len(tensors) == 1:
            return backend.estimate(g, tensors[0], backend.product_dtype(g))
        return self._low_bit.grad_weight(g, SavedSketch(seed ^ _OTHER_SEED, tensors))

    def is_rounding(self, rows: int, dtype: torch.dtype) -> bool:
        """Tell whether so many rows are kept in low bits, and not as they are."""
        return self._rounding(rows, dtype) is not None

    def stored(self, rows: int, features: int, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Return the shapes and dtypes of the tensors that `compress` returns; see `Sketch.stored`."""
        low_bit = self._rounding(rows, dtype)
        return (((rows, features), dtype),) if low_bit is None else low_bit.stored(rows, features, dtype)

    def saved_bytes(self, rows: int, features: int, dtype: torch.dtype) -> int:
        """Return the bytes of kept rows; the seed is the sketch's."""
        low_bit = self._rounding(rows, dtype)
        if low_bit is None:
            return rows * features * dtype.itemsize
        return low_bit.saved_bytes(rows, features, dtype) - SEED_BYTES

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return E||estimate - g^T x||_F^2 over the rounding, in closed form; 0 without a storage."""
        low_bit = self._rounding(x.shape[0], x.dtype)
        return torch.zeros((), dtype=torch.float64, device=x.device) if low_bit is None else low_bit.variance(x, g)

    def _rounding(self, rows: int, dtype: torch.dtype) -> LowBit | None:
        # per column, which is all the same for any number of them
        if self._low_bit is None or self._low_bit.saved_bytes(rows, 1, dtype) - SEED_BYTES >= rows * dtype.itemsize:
            return None
        return self._low_bit
