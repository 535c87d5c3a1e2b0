"""The weight gradient out of two sketches, in plain torch."""

import torch
from torch import Tensor


def sketched_grad_weight(
    sketched_g: Tensor, sketched_x: Tensor, column_sum: Tensor | None, mean: Tensor | None
) -> Tensor:
    """Return (S^T g)^T (S^T x), plus column_sum mean^T where the input was centred.

    Args:
        sketched_g: S^T g, shape (rank, out), float32 or float64: the dtype of the product and of the result.
        sketched_x: S^T x as stored, shape (rank, in), any float dtype.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.

    Returns:
        Shape (out, in).
    """
    compute = sketched_g.dtype
    grad_weight = torch.mm(sketched_g.t(), sketched_x.to(compute))
    if column_sum is not None and mean is not None:
        grad_weight.addr_(column_sum.to(compute), mean.to(compute))
    return grad_weight
