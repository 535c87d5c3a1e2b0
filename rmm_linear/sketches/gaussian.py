"""Dense Gaussian sketch: S has independent N(0, 1 / rank) entries (Bershatsky et al. 2022, the paper's main choice).

Variance. E||estimate - g^T x||^2 = (P Q + C) / r, by Isserlis' theorem on the products of four normals. It carries no
factor that vanishes at full rank: at ratio 1 the gradient is still noisy.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.sketches.dense_projection import DenseProjection


@register
@dataclass(frozen=True)
class Gaussian(DenseProjection):
    """Independent normal entries. Costs rows * rank * in multiply-adds, rows / 64 times what `Hadamard` needs."""

    name: ClassVar[str] = "gaussian"
    gaussian: ClassVar[bool] = True

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return (P Q + C) / r."""
        sums = gradient_sums(x, g)
        return (sums.x_squared * sums.g_squared + sums.gradient_squared) / max(1, self.rank(sums.rows))
