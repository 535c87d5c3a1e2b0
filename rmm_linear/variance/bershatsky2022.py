"""The variances and the bound of Bershatsky et al. 2022 (arXiv 2201.13195), as published, and their errors.

The paper compares the noise of its sketch with that of SGD by

    D2_SGD = (n s - C) / (n - 1)                  the minibatch's, rows independent: as `gradient_noise` has it
    D2_RMM = (P Q - C) / r                        the sketch's
    (r / (n - 1)) D2_RMM / D2_SGD <= (alpha + 1) / alpha,      alpha = C / (P Q)

with P = ||x||^2, Q = ||g||^2, C = ||g^T x||^2, s = sum_i ||x_i||^2 ||g_i||^2, r the rank, n the rows. Two things to
know before using them:

- D2_RMM is the variance of none of its sketches. A Gaussian's is (P Q + C) / r, a Rademacher's (P Q + C - 2 s) / r.
- With these definitions the bound does not hold. Rows of different sizes whose products g_i x_i^T are equal have
  D2_SGD = 0 and D2_RMM > 0, with alpha near 1: the left side is infinite, the right side near 2.

This module reproduces the paper's figure; use `gradient_noise` for all other purposes.
"""

from dataclasses import dataclass

from torch import Tensor

from rmm_linear.sketches.closed_forms import gradient_sums
from rmm_linear.variance.gradient_noise import _ratio, _rows


@dataclass(frozen=True)
class PaperQuantities:
    """The quantities of the paper's figure, by its own definitions; see the module's docstring for their errors.

    Attributes:
        paper_sgd_variance: D2_SGD.
        paper_sketch_variance: D2_RMM, (P Q - C) / r.
        paper_ratio: (r / (n - 1)) D2_RMM / D2_SGD.
        paper_bound: (alpha + 1) / alpha, the paper's upper bound of `paper_ratio`.
        alpha: C / (P Q).
    """

    paper_sgd_variance: float
    paper_sketch_variance: float
    paper_ratio: float
    paper_bound: float
    alpha: float


def paper_quantities(x: Tensor, g: Tensor, *, rank: int) -> PaperQuantities:
    """Return the paper's quantities for one layer's x (..., in) and g (..., out) and a sketch of this rank.

    Raises:
        ValueError: If shapes do not fit, there are fewer than two rows, or the rank is not positive.
    """
    x, g = _rows(x, g)
    sums = gradient_sums(x, g)
    if sums.rows < 2 or rank < 1:
        raise ValueError(f"{sums.rows} rows and rank={rank}; the paper's quantities need two rows and a positive rank")
    p_q, c = float(sums.x_squared * sums.g_squared), float(sums.gradient_squared)
    sgd = (sums.rows * float(sums.row_products) - c) / (sums.rows - 1)
    sketch = (p_q - c) / rank
    alpha = _ratio(c, p_q)
    return PaperQuantities(
        paper_sgd_variance=sgd,
        paper_sketch_variance=sketch,
        paper_ratio=_ratio(rank / (sums.rows - 1) * sketch, sgd),
        paper_bound=_ratio(alpha + 1, alpha),
        alpha=alpha,
    )
