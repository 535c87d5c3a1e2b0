"""The sums in the closed-form variances.

With P = ||x||^2, Q = ||g||^2, C = ||x^T g||^2 and s = sum_i ||x_i||^2 ||g_i||^2, every sketch's
E||estimate - g^T x||_F^2 is a combination of a few such sums; each sketch's `variance` derives its own.

Precision. Products of rows are formed in float32, slab by slab; sums over slabs, squares and differences are float64.
Float64 products would take twice the time on a CPU and up to 64 times on a GPU, for digits that no estimate of a
variance needs: the sums agree with float64's to about 1e-6. Products are float64 for float64 inputs, and for inputs
whose squares exceed the range of float32 (`product_dtype`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The most elements that a closed form copies or casts at a time.
SLAB_ELEMENTS = 1 << 22
# Range of magnitudes whose squares, and long sums of squares, float32 holds.
_LEAST, _MOST = 1e-15, 1e12


class GradientSums(NamedTuple):
    """Sums over one (x, g) pair, float64; all but the last two are 0-d.

    Attributes:
        rows: Number of rows n.
        x_squared: P = ||x||_F^2.
        g_squared: Q = ||g||_F^2.
        gradient_squared: C = ||x^T g||_F^2.
        row_products: s = sum_i ||x_i||^2 ||g_i||^2.
        x_rows: ||x_i||^2, shape (rows,).
        g_rows: ||g_i||^2, shape (rows,).
    """

    rows: int
    x_squared: Tensor
    g_squared: Tensor
    gradient_squared: Tensor
    row_products: Tensor
    x_rows: Tensor
    g_rows: Tensor


def product_dtype(*operands: Tensor) -> torch.dtype:
    """Return the dtype in which to form products of rows. Synchronises the device.

    The dtype is float64 if an operand is float64, or has squares outside the range of float32; else float32.
    """
    if any(y.dtype == torch.float64 for y in operands):
        return torch.float64
    for y in operands:
        if y.numel():
            low, high = torch.stack(y.aminmax()).tolist()
            largest = max(-low, high)
            # a comparison with NaN is False
            if largest != 0 and not _LEAST <= largest <= _MOST:
                return torch.float64
    return torch.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the operands' own dtype, under autocast as well."""
    with torch.autocast(device_type=a.device.type, enabled=False):
        return a @ b


def row_squares(y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the squared norm of every row, shape (rows,), float64; formed in `product_dtype(y)` by default."""
    dtype = product_dtype(y) if dtype is None else dtype
    return torch.linalg.vector_norm(y, dim=1, dtype=dtype).double().square()


def row_inner_products(y: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inner product of every row i with row others[i], shape (rows,), float64."""
    step = max(1, SLAB_ELEMENTS // max(1, y.shape[1]))
    found = [
        (y.index_select(0, other).to(dtype) * y[start : start + step].to(dtype)).sum(1).double()
        for start, other in zip(range(0, y.shape[0], step), others.split(step), strict=True)
    ]
    return torch.cat(found) if found else y.new_zeros(0, dtype=torch.float64)


def gradient_sums(x: Tensor, g: Tensor) -> GradientSums:
    """Return P, Q, C and s of x (rows, in) and g (rows, out), in float64."""
    dtype = product_dtype(x, g)
    x_rows, g_rows = row_squares(x, dtype), row_squares(g, dtype)
    # Rows without a gradient, most often padding, contribute nothing to the product.
    rows = g_rows.nonzero().squeeze(1)
    gradient = torch.zeros(g.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    step = max(1, SLAB_ELEMENTS // max(1, x.shape[1] + g.shape[1]))
    for some in rows.split(step):
        gradient += product(g.index_select(0, some).to(dtype).t(), x.index_select(0, some).to(dtype))
    return GradientSums(
        rows=x.shape[0],
        x_squared=x_rows.sum(),
        g_squared=g_rows.sum(),
        gradient_squared=gradient.square().sum(),
        row_products=(x_rows * g_rows).sum(),
        x_rows=x_rows,
        g_rows=g_rows,
    )
