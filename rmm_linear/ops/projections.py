"""Sketches that mix all rows: Hadamard, dense random projections, trigonometric transforms."""

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import product_dtype, run
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.random_projection import reference as _projection
from rmm_linear_kernels.trigonometric_sketch import reference as _trigonometric


@define("hadamard_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, bool gradient) -> Tensor")
def _hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    block_rows = max(1, x.shape[0]) / max(1, blocks)
    scale = block_rows**0.5 / kept if gradient else block_rows**-0.5
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
    "hadamard_gradient(Tensor g, Tensor seed, SymInt blocks, SymInt kept, bool half, float over)"
    " -> (Tensor, Tensor, Tensor)"
)
def _hadamard_gradient(
    g: Tensor, seed: Tensor, blocks: int, kept: int, half: bool, over: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = max(1, g.shape[0])
    scale = (rows / max(1, blocks)) ** 0.5 / kept
    dtype = product_dtype(g, half)
    twin = _hadamard.hadamard_sketch_and_sums
    options = {"blocks": blocks, "kept": kept, "scale": scale / over, "dtype": dtype}
    sketched, column_sum, ones = run("hadamard_sketch_and_sums", twin, g, seed, **options)
    return sketched, column_sum, ones.mul_(scale / rows)


@torch.library.register_fake("rmm_linear::hadamard_gradient")
def _(g: Tensor, seed: Tensor, blocks: int, kept: int, half: bool, over: float) -> tuple[Tensor, Tensor, Tensor]:
    sketched = g.new_empty((blocks * kept, g.shape[1]), dtype=product_dtype(g, half))
    sums = result_dtype(g, True)
    return sketched, g.new_empty((g.shape[1],), dtype=sums), g.new_empty((blocks * kept,), dtype=sums)


def hadamard_gradient(
    g: Tensor, seed: Tensor, *, blocks: int, kept: int, half: bool, over: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Read g once, for its sketch and its column sum.

    Args:
        g: Gradient of the output, shape (rows, out), any float dtype.
        seed: 0-d int64.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        half: Hold the sketch of a half-precision gradient in its own dtype, for a product on the tensor cores; float32
            otherwise.
        over: A factor that the sketch is divided by, `product_scale`.

    Returns:
        S^T g over the storage scale and `over`, (blocks * kept, out); the column sum of g, (out,); and S^T 1 over the
        storage scale and the rows, (blocks * kept,); the two in float32 (float64 for float64).
    """
    return torch.ops.rmm_linear.hadamard_gradient.default(g, seed, blocks, kept, half, over)


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
