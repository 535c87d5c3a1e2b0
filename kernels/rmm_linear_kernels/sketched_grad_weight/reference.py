"""The weight gradient out of two sketches, in plain torch."""

import torch
from torch import Tensor

from ..low_bit.reference import dequantize

_HALVES = (torch.bfloat16, torch.float16)


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scale (S^T g)^T (S^T x), plus (sum of g) mean^T where the input was centred; and the sum of g.

    Args:
        sketched_g: S^T g, shape (rank, out), any float dtype: that of the product's factors. Half-precision products
            are summed in float32.
        sketched_x: S^T x as stored, shape (rank, in), any float dtype.
        sums: Sums of parts of g over their rows, shape (parts, out), at least one part; or None.
        mean: What goes with the sum of g, shape (in,), or None.
        scale: Factor of the product, not of what the mean adds: it undoes the headroom of a float16 sketch.
        dtype: Dtype of the gradient, that of `sketched_g` by default.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), (0,) where it is not wanted or there are no parts to form it of.
    """
    dtype = dtype or sketched_g.dtype
    if has_half_precision_product(sketched_g, dtype):
        mean_part, bias = None, None
        if sums is not None:
            mean_part, bias = outer_product_of_sums(sums, mean, dtype=dtype, bias_dtype=bias_dtype or dtype)
        product = with_half_precision_product(mean_part, sketched_g, sketched_x, scale)
        return product, sketched_g.new_empty(0) if bias is None or bias_dtype is None else bias
    total = None if sums is None else sums.squeeze(0) if sums.shape[0] == 1 else sums.sum(0)
    if sketched_g.dtype in _HALVES and sketched_g.is_cuda:
        # by cuBLAS, which sums in float32, without wider copies of the sketches
        grad_weight = torch.mm(sketched_g.t(), sketched_x.to(sketched_g.dtype), out_dtype=torch.float32)
    else:
        compute = torch.float32 if sketched_g.dtype in _HALVES else sketched_g.dtype
        grad_weight = torch.mm(sketched_g.t().to(compute), sketched_x.to(compute))
    if scale != 1:
        grad_weight.mul_(scale)
    if total is not None and mean is not None:
        grad_weight.addr_(total.to(grad_weight.dtype), mean.to(grad_weight.dtype))
    if total is None or bias_dtype is None:
        return grad_weight.to(dtype), sketched_g.new_empty(0)
    return grad_weight.to(dtype), total.to(bias_dtype)


def has_half_precision_product(sketched_g: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the gradient is formed in the dtype of the sketches, by cuBLAS, onto the mean's part.

    Returns:
        True for half precision on a GPU where the gradient has it as well.
    """
    return sketched_g.is_cuda and sketched_g.dtype in _HALVES and dtype == sketched_g.dtype


def outer_product_of_sums(
    sums: Tensor, mean: Tensor | None, *, dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """Return the mean's part of a gradient, and the sum of g: both out of the sums of parts of g.

    Args:
        sums: Sums of parts of g over their rows, shape (parts, out), float32, at least one part.
        mean: What goes with their sum, shape (in,), float32, or None.
        dtype: Dtype of the outer product.
        bias_dtype: Dtype of the sum of g.

    Returns:
        (sum of g) mean^T, multiplied in float32 and rounded once: a sum may exceed float16 where its product with the
        mean does not; None without a mean. Sum of g (out,).
    """
    total = sums.sum(0)
    bias = total.to(bias_dtype)
    if mean is None:
        return None, bias
    outer = torch.empty((total.shape[0], mean.shape[0]), dtype=dtype, device=total.device)
    return torch.mul(total.float().unsqueeze(1), mean.float(), out=outer), bias


def with_half_precision_product(
    mean_part: Tensor | None, sketched_g: Tensor, sketched_x: Tensor, scale: float
) -> Tensor:
    """Return scale (S^T g)^T (S^T x) by one product of cuBLAS, which sums in float32 and rounds once.

    Args:
        mean_part: What it is added to, shape (out, in), dtype of `sketched_g`, which takes the result; or None.
        sketched_g: S^T g, shape (rank, out), half precision.
        sketched_x: S^T x, shape (rank, in), any float dtype.
        scale: Factor of the product.

    Returns:
        Shape (out, in).
    """
    sketched_x = sketched_x.to(sketched_g.dtype)
    if mean_part is not None:
        return mean_part.addmm_(sketched_g.t(), sketched_x, alpha=scale)
    grad_weight = sketched_g.new_empty((sketched_g.shape[1], sketched_x.shape[1]))
    return grad_weight.addmm_(sketched_g.t(), sketched_x, beta=0, alpha=scale)


def sketched_grad_weight_low_bit(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    *,
    kind: str,
    group: int,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `sketched_grad_weight` does for a sketch of x in low bits.

    Args:
        sketched_g: S^T g, shape (rank, out), any float dtype.
        codes: As `low_bit.quantize` returns them.
        steps: As `low_bit.quantize` returns them.
        offsets: As `low_bit.quantize` returns them.
        seed: The seed that `low_bit.quantize` had.
        sums: Sums of parts of g over their rows, shape (parts, out), or None.
        mean: What goes with the sum of g, shape (in,), or None.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        scale: Factor of the product, not of what the mean adds.
        dtype: Dtype of the gradient, that of `sketched_g` by default.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), or (0,).
    """
    # on a GPU the product would round the values anyway
    stored = sketched_g.dtype if sketched_g.dtype in _HALVES and sketched_g.is_cuda else torch.float32
    values = dequantize(codes, steps, offsets, seed, kind=kind, group=group, features=steps.shape[-1], dtype=stored)
    return sketched_grad_weight(sketched_g, values, sums, mean, scale=scale, dtype=dtype, bias_dtype=bias_dtype)
