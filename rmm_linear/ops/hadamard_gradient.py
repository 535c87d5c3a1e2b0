"""From the gradient of the output to that of the weight, for the Hadamard sketch: one operator, one reading of g."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import (
    MOST_REMEMBERED,
    odd_factor,
    product_dtype,
    product_scale,
    run,
    run_settled,
    wants_half,
)
from rmm_linear.ops.grad_weight import empty_results, product
from rmm_linear.ops.projections import gradient_scale
from rmm_linear.ops.registration import define
from rmm_linear_kernels.allocation import empty
from rmm_linear_kernels.hadamard_at_once import reference as _at_once
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard


class _Options(NamedTuple):
    """What follows from sizes and dtypes.

    Attributes:
        stored_dtype: Dtype that g is sketched into.
        sketching: Options of the sketch of g.
        factor: What the product of that with the sketch of x lacks.
        at_once: Options of both in one.
    """

    stored_dtype: torch.dtype
    sketching: dict[str, Any]
    factor: float
    at_once: dict[str, Any]


@lru_cache(maxsize=MOST_REMEMBERED)
def _options(
    rows: int,
    blocks: int,
    kept: int,
    ratio: float,
    g_dtype: torch.dtype,
    half: bool,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> _Options:
    """The same at every step: to be found with one question."""
    over = product_scale(g_dtype, ratio) if half else 1.0
    factor = over * odd_factor(kept) if half else 1.0
    stored_dtype = product_dtype(g_dtype, half)
    sizes: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": gradient_scale(rows, blocks, kept, half) / over}
    at_once = {**sizes, "factor": factor, "dtype": dtype, "bias_dtype": bias_dtype}
    return _Options(stored_dtype, {**sizes, "dtype": stored_dtype}, factor, at_once)


# A dtype takes torch half a microsecond to hand over: the usual ones are None and a truth value.
@define(
    "hadamard_grad_weight(Tensor g, Tensor seed, Tensor sketched_x, Tensor? mean, SymInt blocks, SymInt kept,"
    " float ratio, ScalarType? dtype, bool need_bias) -> (Tensor, Tensor)"
)
def _hadamard_grad_weight(
    g: Tensor,
    seed: Tensor,
    sketched_x: Tensor,
    mean: Tensor | None,
    blocks: int,
    kept: int,
    ratio: float,
    dtype: torch.dtype | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor]:
    of_x = sketched_x.dtype, sketched_x.shape, sketched_x.stride()
    of_mean = None if mean is None else (mean.dtype, mean.stride())
    wanted = blocks, kept, ratio, dtype, need_bias
    key = "hadamard_grad_weight", g.get_device(), g.dtype, g.shape, g.stride(), of_x, of_mean, seed.dtype, wanted
    found = run_settled(key, g, seed, sketched_x, mean)
    if found is not None:
        return found[0], found[1] if need_bias else empty(g, (0,), sketched_x.dtype)
    (rows, out), features, g_dtype = g.shape, sketched_x.shape[1], g.dtype
    dtype, bias_dtype = dtype or g_dtype, g_dtype if need_bias else None
    options = _options(rows, blocks, kept, ratio, g_dtype, wants_half(g), dtype, bias_dtype)
    is_stored_alike = sketched_x.dtype == options.stored_dtype
    if rows and is_stored_alike and _at_once.holds_gradient(rows, blocks, out, features, g_dtype):
        twin: Any = _at_once.grad_weight_at_once
        return run("grad_weight_at_once", twin, g, seed, sketched_x, mean, key=key, **options.at_once)
    twin = _hadamard.hadamard_sketch_and_sums
    sketched, sums = run("hadamard_sketch_and_sums", twin, g, seed, None, **options.sketching)
    return product(sketched, sketched_x, sums, mean, options.factor, dtype, bias_dtype)


@torch.library.register_fake("rmm_linear::hadamard_grad_weight")
def _(
    g: Tensor,
    seed: Tensor,
    sketched_x: Tensor,
    mean: Tensor | None,
    blocks: int,
    kept: int,
    ratio: float,
    dtype: torch.dtype | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor]:
    sketched_g = g.new_empty(g.shape, dtype=product_dtype(g.dtype, wants_half(g)))
    return empty_results(sketched_g, sketched_x.shape[1], True, dtype or g.dtype, g.dtype if need_bias else None)


def hadamard_grad_weight(
    g: Tensor,
    seed: Tensor,
    sketched_x: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    ratio: float,
    dtype: torch.dtype | None = None,
    need_bias: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (S^T g)^T X for the stored Hadamard sketch X, plus (sum of g) mean^T; and the sum of g.

    What `hadamard_sketch_and_sums` and `sketched_grad_weight` make of g, in one launch where it has few rows.

    Args:
        g: Gradient of the output, shape (rows, out), any float dtype.
        seed: 0-d int64, that X was made with.
        sketched_x: X as `hadamard_sketch` or `hadamard_sketch_and_mean` returned it, shape (blocks * kept, in).
        mean: What goes with the sum of g, shape (in,), as `hadamard_sketch_and_mean` left it; None for an input that
            was not centred.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        ratio: Rows kept over rows, by which the sketch of a float16 gradient is kept from overflowing.
        dtype: Dtype of the gradient; that of g if None.
        need_bias: Whether the sum of g is wanted.

    Returns:
        Gradient (out, in); sum of g (out,) in its dtype, (0,) where it is not wanted.
    """
    return _hadamard_grad_weight(
        g, seed, sketched_x, mean, blocks, kept, ratio, None if dtype == g.dtype else dtype, need_bias
    )
