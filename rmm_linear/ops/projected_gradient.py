"""From the gradient of the output to that of the weight, for dense projections: one operator."""

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import is_on_cpu
from rmm_linear.ops.grad_weight import product
from rmm_linear.ops.projections import projection_scale, random_projection
from rmm_linear.ops.registration import define, result_dtype
from rmm_linear_kernels.random_projection import cpu as _projection_on_cpu


@define("projected_grad_weight(Tensor g, Tensor seed, Tensor sketched_x, Tensor? mean, bool gaussian) -> Tensor")
def _projected_grad_weight(g: Tensor, seed: Tensor, sketched_x: Tensor, mean: Tensor | None, gaussian: bool) -> Tensor:
    if not is_on_cpu(g):
        sketched = random_projection(g, seed, mean, rank=sketched_x.shape[0], gaussian=gaussian, gradient=True)
        return product(sketched, sketched_x, None, None, 1.0, None, None)[0]
    scale = projection_scale(g.shape[0], sketched_x.shape[0], gradient=True)
    return _projection_on_cpu.projected_grad_weight(g, seed, sketched_x, mean, gaussian=gaussian, scale=scale)


@torch.library.register_fake("rmm_linear::projected_grad_weight")
def _(g: Tensor, seed: Tensor, sketched_x: Tensor, mean: Tensor | None, gaussian: bool) -> Tensor:
    return g.new_empty((g.shape[1], sketched_x.shape[1]), dtype=result_dtype(g, True))


def projected_grad_weight(
    g: Tensor, seed: Tensor, sketched_x: Tensor, mean: Tensor | None, *, gaussian: bool
) -> Tensor:
    """Return (S^T (g - 1 mean^T))^T X for the stored projection X, by the cheaper one of two orders of products.

    What `random_projection` and `sketched_grad_weight` make of g, and no more than that but where `is_on_cpu`.

    Args:
        g: Gradient of the output, shape (rows, out), any float dtype.
        seed: 0-d int64, that X was made with.
        sketched_x: X as `random_projection` returned it, shape (rank, in).
        mean: Shape (out,), or None.
        gaussian: Normal entries if true, signs otherwise.

    Returns:
        Shape (out, in), float32 (float64 for float64).
    """
    return _projected_grad_weight(g, seed, sketched_x, mean, gaussian)
