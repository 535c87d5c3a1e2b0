"""Subsampled randomised cosine and Fourier transforms (two of the sketches of Bershatsky et al. 2022).

S = sqrt(n / r) D Q[:, columns] with random signs D and an orthonormal Q. The DFT is in its real form: column 0 is
constant; columns 2 f - 1 and 2 f are sqrt(2 / n) times the cosine and the sine of 2 pi i f / n; for an even n the last
column alternates. So `rank` counts stored real numbers.

Variance. Let A = S S^T without the signs, f = n (n - r) / (r (n - 1)) and M_ij = sum_c Q_ic^2 Q_jc^2. Drawing r of the
n columns without replacement gives, with G = g g^T and X = x x^T,

    E[A_ij^2] = f M_ij for i != j,      Cov(A_ii, A_kk) = f (M_ik - 1 / n),

and the row signs make different pairs uncorrelated, so that

    E||estimate - g^T x||^2 = f [ sum_ij M_ij (||g_i||^2 ||x_j||^2 + 2 G_ij X_ij) - 2 sum_i M_ii s_i - C / n ].

For both transforms the sums have a closed form: M_ij = alpha + (1 / 2n) * #{partners q : q(i) = j}, where the partners
of row i are, modulo n: the DCT's i and n - 1 - i; the DFT's i and -i and, for an even n, i + n / 2 and n / 2 - i.
alpha makes the rows of M add up to 1. (All |Q_ij|^2 equal to 1 / n gives the Hadamard sketch's form.)
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches.base import ObliviousSketch, accumulate_dtype, register
from rmm_linear.sketches.closed_forms import gradient_sums, product_dtype, row_inner_products

# Elements of x that are transformed at a time.
_SLAB_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class TrigonometricSketch(ObliviousSketch):
    """Random row signs, and `rank` random columns of an orthonormal trigonometric transform over the rows."""

    def project(self, y: Tensor, seed: Tensor, mean: Tensor | None, *, gradient: bool) -> Tensor:
        (rows, features), rank, compute = y.shape, self.rank(y.shape[0]), accumulate_dtype(y.dtype)
        scale, dtype = (rows / max(1, rank), compute) if gradient else (1.0, y.dtype)
        if rows == 0:
            return y.new_empty((rank, features), dtype=dtype)
        # The factor multiplies the signs: unscaled sums of rows near 1e30 could overflow.
        signs = backend.random.signs(seed, rows, dtype=compute).mul_(scale).unsqueeze(1)
        columns = backend.random.subset(seed, rows, rank)
        out = y.new_empty((rank, features), dtype=dtype)
        step = max(1, _SLAB_ELEMENTS // rows)
        for first in range(0, features, step):
            slab = y[:, first : first + step].to(compute)
            if mean is not None:
                slab = slab - mean[first : first + step].to(compute)
            out[:, first : first + step] = self.transformed(slab * signs, columns)
        return out

    @abstractmethod
    def transformed(self, y: Tensor, columns: Tensor) -> Tensor:
        """Return the rows `columns` (rank,) of Q^T y, shape (rank, features), of y (n, features), n at least 1."""

    @abstractmethod
    def partners(self, row: Tensor) -> list[Tensor]:
        """Return for each row 0 .. n - 1 the rows of Q whose squared entries correlate with its own, itself first."""

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        n, rank = x.shape[0], self.rank(x.shape[0])
        if rank == n:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        sums = gradient_sums(x, g)
        x_rows, g_rows = sums.x_rows, sums.g_rows
        dtype = product_dtype(x, g)
        row = torch.arange(n, device=x.device)
        partners = self.partners(row)
        alpha = (1 - len(partners) / (2 * n)) / n
        total = alpha * (sums.x_squared * sums.g_squared + 2 * sums.gradient_squared - 2 * sums.row_products)
        for partner in partners:
            gram = row_inner_products(g, partner, dtype) * row_inner_products(x, partner, dtype)
            fixed = (partner == row) * x_rows * g_rows
            total = total + ((g_rows * x_rows[partner]).sum() + 2 * gram.sum() - 2 * fixed.sum()) / (2 * n)
        # rounding may give a value slightly below 0
        return n * (n - rank) / (rank * (n - 1)) * (total - sums.gradient_squared / n).clamp(min=0)

    def dense(self, x: Tensor, seeds: Tensor) -> Tensor:
        rows, rank = x.shape[0], self.rank(x.shape[0])
        if rows == 0:
            return torch.zeros((seeds.numel(), 0, rank), dtype=torch.float64, device=x.device)
        signs = backend.random.signs(seeds, rows, dtype=torch.float64)
        columns = backend.random.subset(seeds, rows, rank)
        identity = torch.eye(rows, dtype=torch.float64, device=x.device)
        transposed = self.transformed(identity, torch.arange(rows, device=x.device))
        chosen = transposed[columns] * signs.unsqueeze(1) * math.sqrt(rows / rank)  # (draws, rank, rows)
        return chosen.transpose(1, 2)


@register
@dataclass(frozen=True)
class DCT(TrigonometricSketch):
    """Random row signs, and `rank` random columns of the orthonormal DCT-II over the rows."""

    name: ClassVar[str] = "dct"

    def transformed(self, y: Tensor, columns: Tensor) -> Tensor:
        """Return rows of the DCT-II by one FFT of the even rows and the reversed odd rows (Makhoul 1980)."""
        n = y.shape[0]
        spectrum = torch.fft.fft(torch.cat((y[::2], y[1::2].flip(0))), dim=0).index_select(0, columns)
        angle = columns.to(y.dtype).mul_(-math.pi / (2 * n))
        factor = torch.full_like(angle, math.sqrt(2 / n)).masked_fill_(columns == 0, math.sqrt(1 / n))
        return (spectrum * torch.polar(factor, angle).unsqueeze(1)).real

    def partners(self, row: Tensor) -> list[Tensor]:
        return [row, row.flip(0)]


@register
@dataclass(frozen=True)
class DFT(TrigonometricSketch):
    """Random row signs, and `rank` random columns of the orthonormal real DFT over the rows."""

    name: ClassVar[str] = "dft"

    def transformed(self, y: Tensor, columns: Tensor) -> Tensor:
        n, frequency = y.shape[0], (columns + 1) // 2
        spectrum = torch.fft.rfft(y, dim=0).index_select(0, frequency)
        factor = torch.full_like(columns, math.sqrt(2 / n), dtype=y.dtype)
        factor.masked_fill_((columns == 0) | (2 * frequency == n), math.sqrt(1 / n))
        is_cosine = ((columns % 2 == 1) | (columns == 0)).unsqueeze(1)
        return torch.where(is_cosine, spectrum.real, -spectrum.imag) * factor.unsqueeze(1)

    def partners(self, row: Tensor) -> list[Tensor]:
        n = row.numel()
        shifts = (0,) if n % 2 else (0, n // 2)
        return [(shift + sign * row) % n for shift in shifts for sign in (1, -1)]
