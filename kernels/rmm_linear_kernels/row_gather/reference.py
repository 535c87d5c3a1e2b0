"""Rows of a matrix, and their norms, in plain torch."""

import torch
from torch import Tensor

# Elements of x that are widened at a time.
_SLAB_ELEMENTS = 1 << 20


def gather_rows(
    x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None, *, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * scales_j * (x[index_j] - mean), row by row.

    Args:
        x: Input, shape (rows, features), any float dtype.
        index: Row numbers, shape (rank,), any integer dtype.
        mean: Shape (features,), or None.
        scales: Factor of each row, shape (rank,), or None for 1.
        scale: Factor of all rows.
        dtype: Dtype of the result; formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (rank, features).
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.index_select(0, index).to(compute)
    if mean is not None:
        out = out - mean.to(compute)
    if scales is not None:
        out = out * scales.to(compute).unsqueeze(1)
    return (out * scale).to(dtype)


def row_norms(x: Tensor, mean: Tensor | None) -> Tensor:
    """Return the Euclidean norm of every row of x - 1 mean^T.

    Args:
        x: Input, shape (rows, features), any float dtype.
        mean: Shape (features,), or None.

    Returns:
        Shape (rows,), float64.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float64)
    # float64: the squares of 1e-30 and 1e30 neither vanish nor overflow. By slabs: a wide copy of x would be large.
    slabs = x.split(max(1, _SLAB_ELEMENTS // x.shape[1]))
    wide = (slab.double() if mean is None else slab.double() - mean.double() for slab in slabs)
    return torch.cat([torch.linalg.vector_norm(slab, dim=1) for slab in wide])
