"""Dense random projections in plain torch: S with independent Gaussian or +-1 entries, never held as a whole.

Element (row, column) of S is draw row * rank + column of the projection stream, so that any slab of rows can be
generated on its own.
"""

import torch
from torch import Tensor

from ..philox.reference import PROJECTION_STREAM, random_normals, random_signs

# Elements of S generated at a time.
_SLAB_ELEMENTS = 1 << 20


def projection_slab(
    seed: Tensor, *, first_row: int, rows: int, rank: int, gaussian: bool, dtype: torch.dtype
) -> Tensor:
    """Return rows [first_row, first_row + rows) of the unscaled projection: standard normals or fair signs.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        first_row: First row of the slab.
        rows: Rows of the slab.
        rank: Columns of S.
        gaussian: Standard normals if true, signs otherwise.
        dtype: Floating dtype of the result (normals are formed in float32).

    Returns:
        Shape (..., rows, rank).
    """
    per_counter = 4 if gaussian else 128
    start = first_row * rank
    skip = start % per_counter
    count, first_counter = skip + rows * rank, start // per_counter
    if gaussian:
        entries = random_normals(seed, count, first_counter=first_counter).to(dtype)
    else:
        entries = random_signs(seed, count, dtype=dtype, stream=PROJECTION_STREAM, first_counter=first_counter)
    return entries[..., skip:].unflatten(-1, (rows, rank))


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * R^T (x - 1 mean^T), R having independent standard normal or +-1 entries.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        rank: Columns of R.
        gaussian: Standard normals if true, signs otherwise.
        scale: Factor; `1 / sqrt(rank)` makes it an unbiased sketch.
        dtype: Dtype of the result; sums are formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (rank, features).
    """
    rows, features = x.shape
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_zeros((rank, features), dtype=compute)
    ones = x.new_zeros((rank,), dtype=compute)
    step = max(1, _SLAB_ELEMENTS // max(rank, features, 1))
    for first in range(0, rows, step):
        slab = projection_slab(
            seed, first_row=first, rows=min(step, rows - first), rank=rank, gaussian=gaussian, dtype=compute
        )
        # The factor goes on S: the bare sums of 1e30-sized rows could overflow.
        slab = slab.mul_(scale)
        out.addmm_(slab.t(), x[first : first + step].to(compute))
        if mean is not None:
            ones += slab.sum(0)
    if mean is not None:
        out.addr_(ones, mean.to(compute), alpha=-1)
    return out.to(dtype)
