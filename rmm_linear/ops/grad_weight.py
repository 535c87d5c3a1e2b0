"""The product of the two sketches: the weight gradient."""

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import HALVES, chosen, odd_factor, product_scale, run, wants_half
from rmm_linear.ops.registration import define
from rmm_linear_kernels.sketched_grad_weight import reference as _grad_weight


def _shifted(mean: Tensor | None, stored: Tensor, ones: Tensor | None) -> Tensor | None:
    """Mean - stored^T ones, in the dtype of the mean."""
    if mean is None or ones is None:
        return mean
    if stored.is_cuda and stored.dtype in HALVES and mean.dtype == torch.float32:
        # No float32 copy of what is stored: the shift is small next to the noise of the sketch, its rounding smaller
        # by 2**-9 again. Times the rank, the ones are about as large as 1, and no float16 of them vanishes.
        rank = max(1, stored.shape[0])
        scaled = (ones * rank).to(stored.dtype).unsqueeze(0)
        return mean - torch.mm(scaled, stored, out_dtype=torch.float32).squeeze(0) / rank
    return mean - torch.mv(stored.to(mean.dtype).t(), ones.to(mean.dtype))


@define(
    "sketched_grad_weight(Tensor sketched_g, Tensor sketched_x, Tensor? column_sum, Tensor? mean, Tensor? ones,"
    " float scale, ScalarType? dtype, SymInt divisor=1) -> Tensor"
)
def _sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    ones: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    divisor: int = 1,
) -> Tensor:
    scale *= odd_factor(divisor)
    operands = sketched_g, sketched_x, column_sum, _shifted(mean, sketched_x, ones)
    # cuBLAS is the faster one until a measurement says otherwise: Triton's runs where it is asked for
    if chosen() == "triton" and sketched_g.dtype in HALVES and sketched_x.dtype == sketched_g.dtype:
        return run("sketched_grad_weight", _grad_weight.sketched_grad_weight, *operands, scale=scale, dtype=dtype)
    return _grad_weight.sketched_grad_weight(*operands, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::sketched_grad_weight")
def _(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    ones: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    divisor: int = 1,
) -> Tensor:
    return sketched_g.new_empty((sketched_g.shape[1], sketched_x.shape[1]), dtype=dtype)


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None = None,
    mean: Tensor | None = None,
    *,
    ones: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    divisor: int = 1,
) -> Tensor:
    """Return scale * (S^T g)^T (S^T x), plus column_sum (mean - (S^T x)^T ones)^T where the input was centred.

    Args:
        sketched_g: Shape (rank, out), float32 or float64, or in half precision on a GPU.
        sketched_x: Shape (rank, in), any float dtype.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.
        ones: S^T 1 over the rows, shape (rank,), where the sketch of g was not centred (see
            `rmm_linear.sketches.centered`), or None.
        scale: Factor of the first term.
        divisor: The first term is divided by it, and times the power of 2 next to it, which `sketched_g` is over
            already (see `odd_factor`): a whole number that may follow from the rows, as a factor may not.
        dtype: Dtype of the result; that of `sketched_g` if None.

    Returns:
        Shape (out, in).
    """
    return torch.ops.rmm_linear.sketched_grad_weight.default(
        sketched_g, sketched_x, column_sum, mean, ones, scale, dtype, divisor
    )


def as_operand(sketched: Tensor, g: Tensor, ratio: float) -> tuple[Tensor, float]:
    """Return a float32 sketch of g as the product takes it, and the factor that it lacks then.

    Args:
        sketched: S^T g over the storage scale, shape (rank, out), float32 or float64, memory that nobody else has.
        g: The gradient itself, which says what product it will be.
        ratio: Rows kept over rows.

    Returns:
        The sketch, in the gradient's own half precision where that is multiplied as it is, and the factor.
    """
    if not wants_half(g):
        return sketched, 1.0
    scale = product_scale(g.dtype, ratio)
    return sketched.mul_(1 / scale).to(g.dtype) if scale != 1 else sketched.to(g.dtype), scale


def product_operand(g: Tensor) -> Tensor:
    """Return rows of g as a sketch of themselves, for the product with stored rows.

    Args:
        g: Shape (rows, out), any float dtype.

    Returns:
        `g` where half precision is multiplied as it is; a copy in float32 otherwise (float32 and float64 as they are).
    """
    return g if wants_half(g) or g.dtype == torch.float64 else g.to(torch.float32)
