"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators: two a multiply-add.

As of torch's own operators, products alone are counted: what draws, gathers, rounds or adds up has no formula.
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

# the operators have to exist
from rmm_linear.ops import (  # noqa: F401
    grad_weight,
    hadamard_gradient,
    projected_gradient,
    projections,
    quantized_sketch,
)

_OPS = torch.ops.rmm_linear
_Shape = tuple[int, ...]


@register_flop_formula([_OPS.hadamard_sketch, _OPS.hadamard_sketch_quantized])
def _hadamard_sketch(
    x: _Shape, seed: _Shape, mean: _Shape | None, blocks: int, kept: int, *args: Any, **kwargs: Any
) -> int:
    return 2 * math.prod(x) * kept


@register_flop_formula([_OPS.hadamard_sketch_and_mean, _OPS.hadamard_sketch_and_sums])
def _hadamard_sketch_with_more(x: _Shape, seed: _Shape, blocks: int, kept: int, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * kept


@register_flop_formula(_OPS.hadamard_grad_weight)
def _hadamard_grad_weight(
    g: _Shape, seed: _Shape, sketched_x: _Shape, mean: _Shape | None, blocks: int, kept: int, *args: Any, **kwargs: Any
) -> int:
    return 2 * g[1] * (g[0] * kept + sketched_x[0] * sketched_x[1])


@register_flop_formula([_OPS.random_projection, _OPS.trigonometric_sketch])
def _dense_sketch(x: _Shape, seed: _Shape, mean: _Shape | None, rank: int, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * rank * x[1]


@register_flop_formula(_OPS.projected_grad_weight)
def _projected_grad_weight(g: _Shape, seed: _Shape, sketched_x: _Shape, *args: Any, **kwargs: Any) -> int:
    (rows, out), (rank, features) = g, sketched_x
    return 2 * min(rank * out * (rows + features), rows * features * (rank + out))


@register_flop_formula(_OPS.sketched_grad_weight_low_bit)
def _sketched_grad_weight_low_bit(sketched_g: _Shape, codes: _Shape, steps: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * sketched_g[0] * sketched_g[1] * steps[1]


@register_flop_formula(_OPS.sketched_grad_weight)
def _sketched_grad_weight(sketched_g: _Shape, sketched_x: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * sketched_g[0] * sketched_g[1] * sketched_x[1]
