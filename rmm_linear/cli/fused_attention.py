"""Estimate the tensors that a GPU's fused attention kernels keep, since torch runs attention op by op on meta tensors.

The fused ops have shapes, and a backward pass, on the meta device as well. They keep query, key and value, the result,
one log-sum-exp a row in float32, and a mask as floats.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class fused_attention(TorchFunctionMode):  # noqa: N801 - a context manager
    """Within the context, `scaled_dot_product_attention` of tensors on the meta device is a fused op."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _fused(*args, **(kwargs or {})) if func is F.scaled_dot_product_attention else None
        return func(*args, **(kwargs or {})) if found is None else found


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not query.is_meta or query.dim() != 4:
        return None
    aten = torch.ops.aten
    if attn_mask is None:
        # flash attention takes keys and values of fewer heads without a copy
        result = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return result[0]
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    result = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )
    return result[0]
