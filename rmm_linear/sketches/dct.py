"""Subsampled randomised cosine transform (one of the sketches of Bershatsky et al. 2022)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.trigonometric import TrigonometricSketch


@register
@dataclass(frozen=True)
class DCT(TrigonometricSketch):
    """Random row signs, the orthonormal DCT-II over the rows, `rank` random columns of it."""

    name: ClassVar[str] = "dct"
    kind: ClassVar[str] = "dct"

    def partners(self, row: Tensor) -> list[Tensor]:
        """Return i and n - 1 - i; see `TrigonometricSketch.partners`."""
        return [row, row.flip(0)]
