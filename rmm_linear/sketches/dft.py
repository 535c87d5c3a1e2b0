"""Subsampled randomised Fourier transform (one of the sketches of Bershatsky et al. 2022), in its real form.

The real and the imaginary part of a frequency are two columns, so that `rank` counts stored reals.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.trigonometric import TrigonometricSketch


@register
@dataclass(frozen=True)
class DFT(TrigonometricSketch):
    """Random row signs, the orthonormal real DFT over the rows, `rank` random columns of it."""

    name: ClassVar[str] = "dft"
    kind: ClassVar[str] = "dft"

    def partners(self, row: Tensor) -> list[Tensor]:
        """Return i and -i, and for an even n also i + n / 2 and n / 2 - i, modulo n."""
        n = row.numel()
        shifts = (0,) if n % 2 else (0, n // 2)
        return [(shift + sign * row) % n for shift in shifts for sign in (1, -1)]
