"""Sketches that mix all rows: Hadamard, dense random projections, trigonometric transforms; and what is taken off."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import MOST_REMEMBERED, is_on_cpu, near_power_of_2, product_dtype, run, run_settled
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.hadamard_at_once import reference as _at_once
from rmm_linear_kernels.hadamard_sketch import cpu as _hadamard_on_cpu
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.random_projection import cpu as _projection_on_cpu
from rmm_linear_kernels.random_projection import reference as _projection
from rmm_linear_kernels.sampled_mean import reference as _sampled_mean
from rmm_linear_kernels.strides import ALIGNMENT, number_of_rows
from rmm_linear_kernels.trigonometric_sketch import cpu as _trigonometric_on_cpu
from rmm_linear_kernels.trigonometric_sketch import reference as _trigonometric


@lru_cache(maxsize=MOST_REMEMBERED)
def hadamard_scales(rows: int, blocks: int, kept: int) -> tuple[float, float]:
    """Return the factors of the +-1 combinations of x and of g.

    Returns:
        A power of 2 for x, and for g what makes their product 1 / kept.
    """
    # The size of a combination is the root of the number of rows: x's are stored at about the size of its elements.
    # Without a rounding of its own by this factor: one that all combinations of a lonely row would share.
    stored = near_power_of_2((max(1, rows) / max(1, blocks)) ** -0.5)
    return stored, 1 / (kept * stored)


@lru_cache(maxsize=MOST_REMEMBERED)
def gradient_scale(rows: int, blocks: int, kept: int, half: bool) -> float:
    """Return the factor of the +-1 combinations of g in the dtype that they are multiplied in.

    Args:
        rows: Rows of g.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        half: Whether that is half precision, where the product takes care of what is no power of 2: `odd_factor`.

    Returns:
        That of `hadamard_scales`, or a power of 2 near it.
    """
    stored, scale = hadamard_scales(rows, blocks, kept)
    return 1 / (near_power_of_2(kept) * stored) if half else scale


@define("hadamard_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, bool gradient) -> Tensor")
def _hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    key = None
    if mean is None:
        # Where it begins decides as well, on how many features a program has. Not asked for here is the address, which
        # would make a lazy copy a real one for a twin, too. A storage from elsewhere may begin at any byte: a launch
        # looks at the address once more.
        place = x.get_device(), x.storage_offset() % ALIGNMENT
        key = "hadamard_sketch", place, x.dtype, x.shape, x.stride(), seed.dtype, blocks, kept, gradient
        found = run_settled(key, x, seed, None)
        if found is not None:
            sketched: Tensor = found[0]
            return sketched
    scale = hadamard_scales(number_of_rows(x), blocks, kept)[gradient]
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": result_dtype(x, gradient)}
    twin, on_cpu = _hadamard.hadamard_sketch, _hadamard_on_cpu.hadamard_sketch
    return run("hadamard_sketch", twin, x, seed, mean, key=key, on_cpu=on_cpu, **options)


@torch.library.register_fake("rmm_linear::hadamard_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    return x.new_empty((blocks * kept, x.shape[-1]), dtype=result_dtype(x, gradient))


def hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, gradient: bool) -> Tensor:
    """Return S^T (x - 1 mean^T) for the strided-block Hadamard S, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype; or in runs, as `in_runs` returns it.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        gradient: False for the stored sketch of x, true for that of g (see the module's docstring).

    Returns:
        Shape (blocks * kept, features).
    """
    return _hadamard_sketch(x, seed, mean, blocks, kept, gradient)


@define("hadamard_sketch_and_mean(Tensor x, Tensor seed, SymInt blocks, SymInt kept) -> (Tensor, Tensor)")
def _hadamard_sketch_and_mean(x: Tensor, seed: Tensor, blocks: int, kept: int) -> tuple[Tensor, Tensor]:
    key = "hadamard_sketch_and_mean", x.get_device(), x.dtype, x.shape, x.stride(), seed.dtype, blocks, kept
    found = run_settled(key, x, seed)
    if found is not None:
        return found[0], found[1]
    rows = number_of_rows(x)
    scale, _ = hadamard_scales(rows, blocks, kept)
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": x.dtype}
    if _at_once.holds_input(rows, blocks):
        return run("sketch_and_mean_at_once", _at_once.sketch_and_mean_at_once, x, seed, key=key, **options)
    mean = _sampled_mean.sampled_mean(x)
    return run("hadamard_sketch_and_mean", _hadamard.hadamard_sketch_and_mean, x, seed, mean, **options)


@torch.library.register_fake("rmm_linear::hadamard_sketch_and_mean")
def _(x: Tensor, seed: Tensor, blocks: int, kept: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((blocks * kept, x.shape[-1])), x.new_empty((x.shape[-1],), dtype=result_dtype(x, True))


def hadamard_sketch_and_mean(x: Tensor, seed: Tensor, *, blocks: int, kept: int) -> tuple[Tensor, Tensor]:
    """Read x once, for the sketch of x - 1 m^T and for what is left of its mean, m being its `sampled_mean`.

    Args:
        x: Input, shape (rows, features), any float dtype; or in runs, as `in_runs` returns it.
        seed: 0-d int64.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.

    Returns:
        The stored sketch (blocks * kept, features), times the storage scale, in x's dtype; and the column mean of x
        less X^T (S^T 1) / rows, for X = S^T (x - 1 m^T), (features,), float32 (float64 for float64): what the column
        sum of g is multiplied by where S^T g is not centred.
    """
    return _hadamard_sketch_and_mean(x, seed, blocks, kept)


@define(
    "hadamard_sketch_and_sums(Tensor g, Tensor seed, SymInt blocks, SymInt kept, bool half, float over)"
    " -> (Tensor, Tensor)"
)
def _hadamard_sketch_and_sums(
    g: Tensor, seed: Tensor, blocks: int, kept: int, half: bool, over: float
) -> tuple[Tensor, Tensor]:
    rows, _ = g.shape
    scale = gradient_scale(rows, blocks, kept, half) / over
    twin = _hadamard.hadamard_sketch_and_sums
    dtype = product_dtype(g.dtype, half)
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": dtype}
    return run("hadamard_sketch_and_sums", twin, g, seed, None, **options)


@torch.library.register_fake("rmm_linear::hadamard_sketch_and_sums")
def _(g: Tensor, seed: Tensor, blocks: int, kept: int, half: bool, over: float) -> tuple[Tensor, Tensor]:
    sketched = g.new_empty((blocks * kept, g.shape[1]), dtype=product_dtype(g.dtype, half))
    return sketched, g.new_empty((blocks, g.shape[1]), dtype=result_dtype(g, True))


def hadamard_sketch_and_sums(
    g: Tensor, seed: Tensor, *, blocks: int, kept: int, half: bool = False, over: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Read g once, for its sketch and its column sum.

    Args:
        g: Gradient, shape (rows, features), any float dtype.
        seed: 0-d int64.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        half: Hold the sketch of a half-precision gradient in its own dtype, for a product on the tensor cores, and
            leave a factor to the product: `odd_factor` of `kept`.
        over: A factor that the sketch is divided by, `product_scale`.

    Returns:
        The sketch (blocks * kept, features), over the storage scale and over what is left to the product; and the
        column sums of the blocks (blocks, features), float32 (float64 for float64), which add up to that of g.
    """
    return _hadamard_sketch_and_sums(g, seed, blocks, kept, half, over)


@define("sampled_mean(Tensor x) -> Tensor")
def _sampled_mean_of(x: Tensor) -> Tensor:
    return _sampled_mean.sampled_mean(x)


@torch.library.register_fake("rmm_linear::sampled_mean")
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[-1],), dtype=result_dtype(x, True))


def sampled_mean(x: Tensor) -> Tensor:
    """Return about the column mean of x, out of at most 256 of its rows; always the same ones of so many.

    Args:
        x: Shape (rows, features), any float dtype; or in runs, as `in_runs` returns it.

    Returns:
        Shape (features,), float32 (float64 for float64); the mean itself of 256 rows and fewer.
    """
    return _sampled_mean_of(x)


def projection_scale(rows: int, rank: int, *, gradient: bool) -> float:
    """Return the factor of a dense projection.

    Args:
        rows: Rows of x.
        rank: Columns of S.
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        What is near the storage scale, for x, and what makes the product of the two 1 / rank.
    """
    rows = max(1, rows)
    return rows**0.5 / max(1, rank) if gradient else rows**-0.5


@define("random_projection(Tensor x, Tensor seed, Tensor? mean, SymInt rank, bool gaussian, bool gradient) -> Tensor")
def _random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, gaussian: bool, gradient: bool
) -> Tensor:
    scale = projection_scale(x.shape[0], rank, gradient=gradient)
    options: dict[str, Any] = {"rank": rank, "gaussian": gaussian, "scale": scale, "dtype": result_dtype(x, gradient)}
    twin, on_cpu = _projection.random_projection, _projection_on_cpu.random_projection
    return run("random_projection", twin, x, seed, mean, on_cpu=on_cpu, **options)


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
    return _random_projection(x, seed, mean, rank, gaussian, gradient)


@define("trigonometric_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt rank, str kind, bool gradient) -> Tensor")
def _trigonometric_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, kind: str, gradient: bool) -> Tensor:
    scale = x.shape[0] / max(1, rank) if gradient else 1.0
    way = _trigonometric_on_cpu if is_on_cpu(x) else _trigonometric
    dtype = result_dtype(x, gradient)
    return way.trigonometric_sketch(x, seed, mean, rank=rank, kind=kind, scale=scale, dtype=dtype)


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
    return _trigonometric_sketch(x, seed, mean, rank, kind, gradient)
