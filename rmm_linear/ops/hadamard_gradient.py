"""From the gradient of the output to that of the weight, for the Hadamard sketch: one operator, one reading of g."""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import odd_factor, product_dtype, product_scale, run, wants_half
from rmm_linear.ops.grad_weight import empty_results, product
from rmm_linear.ops.projections import gradient_scale
from rmm_linear.ops.registration import define
from rmm_linear_kernels.hadamard_at_once import reference as _at_once
from rmm_linear_kernels.hadamard_sketch import reference as _hadamard


@define(
    "hadamard_grad_weight(Tensor g, Tensor seed, Tensor sketched_x, Tensor? mean, SymInt blocks, SymInt kept,"
    " float ratio, ScalarType? dtype, ScalarType? bias_dtype) -> (Tensor, Tensor)"
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
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    half = wants_half(g)
    over = product_scale(g.dtype, ratio) if half else 1.0
    scale = gradient_scale(g.shape[0], blocks, kept, half) / over
    factor = over * odd_factor(kept) if half else 1.0
    options: dict[str, Any] = {"blocks": blocks, "kept": kept, "scale": scale}
    (rows, out), features = g.shape, sketched_x.shape[1]
    stored_dtype = product_dtype(g, half)
    if rows and sketched_x.dtype == stored_dtype and _at_once.holds_gradient(rows, blocks, out, features, g.dtype):
        options |= {"factor": factor, "dtype": dtype or stored_dtype, "bias_dtype": bias_dtype}
        return run("grad_weight_at_once", _at_once.grad_weight_at_once, g, seed, sketched_x, mean, **options)
    twin = _hadamard.hadamard_sketch_and_sums
    sketched, sums = run("hadamard_sketch_and_sums", twin, g, seed, None, **options, dtype=stored_dtype)
    return product(sketched, sketched_x, sums, mean, factor, dtype or stored_dtype, bias_dtype)


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
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    sketched_g = g.new_empty(g.shape, dtype=product_dtype(g, wants_half(g)))
    return empty_results(sketched_g, sketched_x.shape[1], True, dtype, bias_dtype)


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
    bias_dtype: torch.dtype | None = None,
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
        dtype: Dtype of the gradient; that of the product of the sketches if None.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), (0,) where it is not wanted.
    """
    return _hadamard_grad_weight(g, seed, sketched_x, mean, blocks, kept, ratio, dtype, bias_dtype)
