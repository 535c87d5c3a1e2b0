"""Subsampled randomised cosine transform (one of the sketches of Bershatsky et al. 2022)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.trigonometric import TrigonometricSketch


@register
@dataclass(frozen=True)
class DCT(TrigonometricSketch):
    """Random row signs, the orthonormal DCT-II over the rows, `rank` random columns of it."""

    name: ClassVar[str] = "dct"

    def transformed(self, y: Tensor, columns: Tensor) -> Tensor:
        """Return rows of the DCT-II by one FFT of the even rows and the reversed odd ones (Makhoul 1980)."""
        n = y.shape[0]
        spectrum = torch.fft.fft(torch.cat((y[::2], y[1::2].flip(0))), dim=0).index_select(0, columns)
        angle = columns.to(y.dtype).mul_(-math.pi / (2 * n))
        factor = torch.full_like(angle, math.sqrt(2 / n)).masked_fill_(columns == 0, math.sqrt(1 / n))
        return (spectrum * torch.polar(factor, angle).unsqueeze(1)).real

    def partners(self, row: Tensor) -> list[Tensor]:
        """Return i and n - 1 - i; see `TrigonometricSketch.partners`."""
        return [row, row.flip(0)]
