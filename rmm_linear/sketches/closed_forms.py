"""The sums that the closed-form variances are made of.

With P = ||x||^2, Q = ||g||^2, C = ||x^T g||^2 and s = sum_i ||x_i||^2 ||g_i||^2, every sketch's
E||estimate - g^T x||_F^2 is a combination of a few such sums; each sketch's `variance` derives its own.
"""

from typing import NamedTuple

from torch import Tensor


class GradientSums(NamedTuple):
    """Sums over one (x, g) pair, each 0-d float64.

    Attributes:
        rows: Number of rows n.
        x_squared: P = ||x||_F^2.
        g_squared: Q = ||g||_F^2.
        gradient_squared: C = ||x^T g||_F^2.
        row_products: s = sum_i ||x_i||^2 ||g_i||^2.
    """

    rows: int
    x_squared: Tensor
    g_squared: Tensor
    gradient_squared: Tensor
    row_products: Tensor


def gradient_sums(x: Tensor, g: Tensor) -> GradientSums:
    """Return P, Q, C and s.

    Args:
        x: Activations, shape (rows, in).
        g: Gradient of the output, shape (rows, out).

    Returns:
        The sums, in float64.
    """
    x, g = x.double(), g.double()
    x_rows, g_rows = x.square().sum(1), g.square().sum(1)
    gradient = g.t() @ x
    return GradientSums(x.shape[0], x_rows.sum(), g_rows.sum(), gradient.square().sum(), (x_rows * g_rows).sum())
