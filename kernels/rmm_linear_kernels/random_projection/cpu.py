"""Dense random projections on a CPU: S slab by slab, each drawn by a generator of its own."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import cpu_generator
from ..philox.reference import PROJECTION_STREAM

# Elements of S that are drawn at a time: 8 MB of float32, beside products of at least as many.
_SLAB_ELEMENTS = 1 << 21
# Fewer rows make products of which most is reading and writing the result.
_LEAST_SLAB_ROWS = 128
_WORD_BITS = 32


def projection(seed: Tensor, *, rows: int, rank: int, gaussian: bool, dtype: torch.dtype) -> Tensor:
    """Return the whole unscaled projection: standard normals or fair signs.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        rows: Rows of S.
        rank: Columns of S.
        gaussian: Standard normals if true, signs otherwise.
        dtype: Floating dtype of the result (normals are formed in float32).

    Returns:
        Shape (..., rows, rank).
    """
    slabs = [slab.to(dtype) for _, slab in _slabs(seed, rows, rank, gaussian)]
    return torch.cat(slabs, -2) if slabs else torch.empty((*seed.shape, 0, rank), dtype=dtype, device="cpu")


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * R^T (x - 1 mean^T); see `reference.random_projection`.

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
    for first, slab in _slabs(seed, rows, rank, gaussian):
        # The factor goes on S: the bare sums of 1e30-sized rows could overflow.
        part = slab.to(compute).mul_(scale)
        out.addmm_(part.t(), x[first : first + part.shape[0]].to(compute))
        if mean is not None:
            ones += part.sum(0)
    if mean is not None:
        out.addr_(ones, mean.to(compute), alpha=-1)
    return out.to(dtype)


def projected_grad_weight(
    g: Tensor, seed: Tensor, sketched_x: Tensor, mean: Tensor | None, *, gaussian: bool, scale: float
) -> Tensor:
    """Return the weight's gradient out of g and the stored sketch of x, by the cheaper one of two orders of products.

    (R^T g)^T X, of rank out (rows + in) multiply-adds, or g^T (R X), of rows in (rank + out): at half of the rows and
    more, the second one takes up to a half less.

    Args:
        g: Gradient of the output, shape (rows, out), any float dtype.
        seed: 0-d int64, of the sketch of x.
        sketched_x: The stored sketch X, shape (rank, in), any float dtype.
        mean: Shape (out,), subtracted from every row of g, or None.
        gaussian: Standard normals if true, signs otherwise.
        scale: Factor on R.

    Returns:
        Shape (out, in), float32 (float64 for a float64 `g`).
    """
    (rows, out), (rank, features) = g.shape, sketched_x.shape
    compute = torch.float64 if g.dtype == torch.float64 else torch.float32
    sketched_x = sketched_x.to(compute)
    if rank * out * (rows + features) <= rows * features * (rank + out):
        options: dict[str, Any] = {"rank": rank, "gaussian": gaussian, "scale": scale, "dtype": compute}
        return random_projection(g, seed, mean, **options).t() @ sketched_x
    grad_weight = g.new_zeros((out, features), dtype=compute)
    ones = g.new_zeros((features,), dtype=compute)
    for first, slab in _slabs(seed, rows, rank, gaussian):
        part = slab.to(compute).mul_(scale) @ sketched_x
        grad_weight.addmm_(g[first : first + part.shape[0]].to(compute).t(), part)
        if mean is not None:
            ones += part.sum(0)
    return grad_weight if mean is None else grad_weight.addr_(mean.to(compute), ones, alpha=-1)


def _slabs(seed: Tensor, rows: int, rank: int, gaussian: bool) -> Iterator[tuple[int, Tensor]]:
    """Draw R; how many rows a slab has depends on nothing but the rank, as S is a function of its seed and its size."""
    step = max(_LEAST_SLAB_ROWS, _SLAB_ELEMENTS // max(1, rank))
    for number, first in enumerate(range(0, rows, step)):
        shape = (min(step, rows - first), rank)

        def draw(generator: torch.Generator, shape: tuple[int, int] = shape) -> Tensor:
            return _normals(generator, shape) if gaussian else _signs(generator, shape)

        # beyond the streams of other uses
        yield first, cpu_generator.for_each(seed, PROJECTION_STREAM + (number << 32), draw)


def _normals(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)


def _signs(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    """Fair signs; a random word has 32 of them."""
    count = shape[0] * shape[1]
    words = torch.empty(-(-count // _WORD_BITS), dtype=torch.int32, device="cpu")
    words.random_(-(1 << 31), 1 << 31, generator=generator)
    # Each bit goes where a float32 has its sign, the rest becomes the bits of 1.0.
    bits = words.unsqueeze(-1) << torch.arange(_WORD_BITS, dtype=torch.int32, device="cpu")
    signs = bits.bitwise_and_(-(1 << 31)).bitwise_or_(0x3F800000).view(torch.float32)
    return signs.flatten()[:count].view(shape)
