"""Dense Rademacher sketch: S has independent entries +-1 / sqrt(rank).

Variance. The diagonal of S S^T is 1 in every draw, and two entries off it are uncorrelated unless they are the same
pair, with mean square 1 / r: E||estimate - g^T x||^2 = (P Q + C - 2 s) / r. Slightly less than the Gaussian's.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rmm_linear.sketches.base import register
from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.sketches.dense_projection import DenseProjection


@register
@dataclass(frozen=True)
class Rademacher(DenseProjection):
    """Independent fair signs over sqrt(rank). Costs what the Gaussian costs; 32 of its entries take one random word."""

    name: ClassVar[str] = "rademacher"
    gaussian: ClassVar[bool] = False

    def variance(self, x: Tensor, g: Tensor) -> Tensor:
        """Return (P Q + C - 2 s) / r."""
        sums = gradient_sums(x, g)
        pairs = sums.x_squared * sums.g_squared + sums.gradient_squared - 2 * sums.row_products
        # rounding may leave a little less than nothing
        return pairs.clamp(min=0) / max(1, self.rank(sums.rows))
