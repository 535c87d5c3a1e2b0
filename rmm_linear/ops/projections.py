"""Sketches that mix all rows: Hadamard, dense random projections, trigonometric transforms; and what is taken off."""

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import near_power_of_2, product_dtype, run
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.random_projection import reference as _projection
from rmm_linear_kernels.sampled_mean import reference as _sampled_mean
from rmm_linear_kernels.trigonometric_sketch import reference as _trigonometric


def _hadamard_scales(rows: int, blocks: int, kept: int) -> tuple[float, float]:
    """Factors of the +-1 combinations of x and of g: their product is 1 / kept, and that of x a power of 2."""
    # The size of a combination is the root of the number of rows: x's are stored at about the size of its elements.
    # Without a rounding of its own by this factor: one that all combinations of a lonely row would share.
    stored = near_power_of_2((max(1, rows) / max(1, blocks)) ** -0.5)
    return stored, 1 / (kept * stored)


@define("hadamard_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, bool gradient) -> Tensor")
def _hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    scale = _hadamard_scales(x.shape[0], blocks, kept)[gradient]
    dtype = result_dtype(x, gradient)
    twin = _hadamard.hadamard_sketch
    return run("hadamard_sketch", twin, x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::hadamard_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    return x.new_empty((blocks * kept, x.shape[1]), dtype=result_dtype(x, gradient))


def hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, gradient: bool) -> Tensor:
    """Return S^T (x - 1 mean^T) for the strided-block Hadamard S, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        gradient: False for the stored sketch of x, true for that of g (see the module's docstring).

    Returns:
        Shape (blocks * kept, features).
    """
    return torch.ops.rmm_linear.hadamard_sketch.default(x, seed, mean, blocks, kept, gradient)


@define(
    "hadamard_sketch_and_sums(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, bool gradient,"
    " bool half, float over) -> (Tensor, Tensor, Tensor)"
)
def _hadamard_sketch_and_sums(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool, half: bool, over: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    stored, scale = _hadamard_scales(rows, blocks, kept)
    # in half precision, the product takes care of what is no power of 2
    factor = (scale if not half else 1 / (near_power_of_2(kept) * stored)) if gradient else stored
    dtype = product_dtype(x, half) if gradient else x.dtype
    twin = _hadamard.hadamard_sketch_and_sums
    options = {"blocks": blocks, "kept": kept, "scale": factor / over, "dtype": dtype}
    sketched, column_sum, ones = run("hadamard_sketch_and_sums", twin, x, seed, mean, **options)
    return sketched, column_sum, ones.mul_(scale / max(1, rows)) if gradient else ones.new_empty(0)


@torch.library.register_fake("rmm_linear::hadamard_sketch_and_sums")
def _(
    x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool, half: bool, over: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = product_dtype(x, half) if gradient else x.dtype
    sketched = x.new_empty((blocks * kept, x.shape[1]), dtype=dtype)
    sums = result_dtype(x, True)
    ones = x.new_empty((blocks * kept if gradient else 0,), dtype=sums)
    return sketched, x.new_empty((x.shape[1],), dtype=sums), ones


def hadamard_sketch_and_sums(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    gradient: bool,
    half: bool = False,
    over: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read x, or g, once, for its sketch and its column sum.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), taken off every row before it is sketched, or None. The sum is of `x` itself.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        gradient: False for the stored sketch of x, true for that of g (see the module's docstring).
        half: Hold the sketch of a half-precision gradient in its own dtype, for a product on the tensor cores, and
            leave a factor to the product: `odd_factor` of `kept`.
        over: A factor that the sketch is divided by, `product_scale`.

    Returns:
        The sketch (blocks * kept, features), over or times the storage scale, and over what is left to the product;
        the column sum (features,); and for g, S^T 1 over the storage scale and the rows, (blocks * kept,), nothing for
        x; the two in float32 (float64 for float64).
    """
    return torch.ops.rmm_linear.hadamard_sketch_and_sums.default(x, seed, mean, blocks, kept, gradient, half, over)


@define("sampled_mean(Tensor x) -> Tensor")
def _sampled_mean_of(x: Tensor) -> Tensor:
    return run("sampled_mean", _sampled_mean.sampled_mean, x)


@torch.library.register_fake("rmm_linear::sampled_mean")
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=result_dtype(x, True))


def sampled_mean(x: Tensor) -> Tensor:
    """Return about the column mean of x, out of at most 256 of its rows; always the same ones of so many.

    Args:
        x: Shape (rows, features), any float dtype.

    Returns:
        Shape (features,), float32 (float64 for float64); the mean itself of 256 rows and fewer.
    """
    return torch.ops.rmm_linear.sampled_mean.default(x)


@define("random_projection(Tensor x, Tensor seed, Tensor? mean, SymInt rank, bool gaussian, bool gradient) -> Tensor")
def _random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, gaussian: bool, gradient: bool
) -> Tensor:
    rows = max(1, x.shape[0])
    scale = rows**0.5 / max(1, rank) if gradient else rows**-0.5
    dtype = result_dtype(x, gradient)
    twin = _projection.random_projection
    options = {"rank": rank, "gaussian": gaussian, "scale": scale, "dtype": dtype}
    return run("random_projection", twin, x, seed, mean, **options)


@torch.library.register_fake("rmm_linear::random_projection")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, gaussian: bool, gradient: bool) -> Tensor:
    return x.new_empty((rank, x.shape[1]), dtype=result_dtype(x, gradient))


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, gradient: bool
) -> Tensor:
    """Return S^T (x - 1 mean^T) for a dense S of normal or +-1 entries, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        rank: Columns of S.
        gaussian: Normal entries if true, signs otherwise.
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        Shape (rank, features).
    """
    return torch.ops.rmm_linear.random_projection.default(x, seed, mean, rank, gaussian, gradient)


@define("trigonometric_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt rank, str kind, bool gradient) -> Tensor")
def _trigonometric_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, kind: str, gradient: bool) -> Tensor:
    scale = x.shape[0] / max(1, rank) if gradient else 1.0
    dtype = result_dtype(x, gradient)
    return _trigonometric.trigonometric_sketch(x, seed, mean, rank=rank, kind=kind, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::trigonometric_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, kind: str, gradient: bool) -> Tensor:
    return x.new_empty((rank, x.shape[1]), dtype=result_dtype(x, gradient))


def trigonometric_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, kind: str, gradient: bool
) -> Tensor:
    """Return S^T (x - 1 mean^T) for signed columns of the DCT-II or real DFT, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        rank: Columns of the transform kept.
        kind: "dct" or "dft".
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        Shape (rank, features).
    """
    return torch.ops.rmm_linear.trigonometric_sketch.default(x, seed, mean, rank, kind, gradient)
