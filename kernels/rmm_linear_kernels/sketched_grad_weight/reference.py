"""The weight gradient out of two sketches, in plain torch."""

import torch
from torch import Tensor

from ..low_bit.reference import dequantize

_HALVES = (torch.bfloat16, torch.float16)


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return scale (S^T g)^T (S^T x), plus column_sum mean^T where the input was centred.

    Args:
        sketched_g: S^T g, shape (rank, out), any float dtype: that of the product's factors. Half-precision products
            are summed in float32.
        sketched_x: S^T x as stored, shape (rank, in), any float dtype.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.
        scale: Factor of the product, not of what the mean adds: it undoes the headroom of a float16 sketch.
        dtype: Dtype of the result, that of `sketched_g` by default.

    Returns:
        Shape (out, in).
    """
    dtype = dtype or sketched_g.dtype
    is_half = sketched_g.dtype in _HALVES
    if is_half and sketched_g.is_cuda:
        return _by_half_precision_gemm(sketched_g, sketched_x, column_sum, mean, scale, dtype)
    compute = torch.float32 if is_half else sketched_g.dtype
    grad_weight = torch.mm(sketched_g.t().to(compute), sketched_x.to(compute))
    return _finished(grad_weight, column_sum, mean, scale).to(dtype)


def _finished(grad_weight: Tensor, column_sum: Tensor | None, mean: Tensor | None, scale: float) -> Tensor:
    """Scale a product in place and add the mean's part."""
    if scale != 1:
        grad_weight.mul_(scale)
    if column_sum is not None and mean is not None:
        grad_weight.addr_(column_sum.to(grad_weight.dtype), mean.to(grad_weight.dtype))
    return grad_weight


def _by_half_precision_gemm(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The same by one product of cuBLAS, which sums in float32, without wider copies of the sketches."""
    sketched_x = sketched_x.to(sketched_g.dtype)
    if dtype != sketched_g.dtype:
        product = torch.mm(sketched_g.t(), sketched_x, out_dtype=torch.float32)
        return _finished(product, column_sum, mean, scale).to(dtype)
    grad_weight = sketched_g.new_empty((sketched_g.shape[1], sketched_x.shape[1]))
    if column_sum is None or mean is None:
        return grad_weight.addmm_(sketched_g.t(), sketched_x, beta=0, alpha=scale)
    # multiplied in float32 and rounded once: a column sum may exceed float16 where its product with the mean does not
    torch.mul(column_sum.float().unsqueeze(1), mean.float(), out=grad_weight)
    return grad_weight.addmm_(sketched_g.t(), sketched_x, alpha=scale)


def sketched_grad_weight_low_bit(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    *,
    kind: str,
    group: int,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `sketched_grad_weight` does for a sketch of x in low bits.

    Args:
        sketched_g: S^T g, shape (rank, out), any float dtype.
        codes: As `low_bit.quantize` returns them.
        steps: As `low_bit.quantize` returns them.
        offsets: As `low_bit.quantize` returns them.
        seed: The seed that `low_bit.quantize` had.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        scale: Factor of the product, not of what the mean adds.
        dtype: Dtype of the result, that of `sketched_g` by default.

    Returns:
        Shape (out, in).
    """
    # on a GPU the product would round the values anyway
    stored = sketched_g.dtype if sketched_g.dtype in _HALVES and sketched_g.is_cuda else torch.float32
    values = dequantize(codes, steps, offsets, seed, kind=kind, group=group, features=steps.shape[-1], dtype=stored)
    return sketched_grad_weight(sketched_g, values, column_sum, mean, scale=scale, dtype=dtype)
