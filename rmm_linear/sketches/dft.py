"""Subsampled randomised Fourier transform (one of the sketches of Bershatsky et al. 2022), in its real form.

Column 0 is constant; columns 2 f - 1 and 2 f are sqrt(2 / n) times the cosine and the sine of 2 pi i f / n; for an even
n the last column is the alternating one. So `rank` counts stored reals.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.trigonometric import TrigonometricSketch


@register
@dataclass(frozen=True)
class DFT(TrigonometricSketch):
    """Random row signs, the orthonormal real DFT over the rows, `rank` random columns of it."""

    name: ClassVar[str] = "dft"

    def transformed(self, y: Tensor, columns: Tensor) -> Tensor:
        """Return rows of the real DFT, out of the spectrum's real and imaginary parts."""
        n, frequency = y.shape[0], (columns + 1) // 2
        spectrum = torch.fft.rfft(y, dim=0).index_select(0, frequency)
        factor = torch.full_like(columns, math.sqrt(2 / n), dtype=y.dtype)
        factor.masked_fill_((columns == 0) | (2 * frequency == n), math.sqrt(1 / n))
        is_cosine = ((columns % 2 == 1) | (columns == 0)).unsqueeze(1)
        return torch.where(is_cosine, spectrum.real, -spectrum.imag) * factor.unsqueeze(1)

    def partners(self, row: Tensor) -> list[Tensor]:
        """Return i and -i, and for an even n also i + n / 2 and n / 2 - i, modulo n."""
        n = row.numel()
        shifts = (0,) if n % 2 else (0, n // 2)
        return [(shift + sign * row) % n for shift in shifts for sign in (1, -1)]
