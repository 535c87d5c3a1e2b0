"""What users have without a planner: `torch.utils.checkpoint` a block, and torch's `activation_memory_budget`.

The budget is a share of the bytes saved for the backward pass, and belongs to torch.compile's partitioner. Here the
partitioned graphs run op by op (backend "aot_eager": boxed arguments, values freed after their last use, no fusion),
so that peaks, FLOPs and times are those of the decision alone, and compare with a planned program that fuses nothing
either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

EAGER, BLOCKS, BUDGET = "eager", "torch checkpoint", "torch budget"
BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)


@contextmanager
def checkpointed_blocks(model: nn.Module, pattern: str | None) -> Iterator[int]:
    """Let blocks of a model keep their inputs alone, not reentrant.

    Args:
        model: The model.
        pattern: Regular expression of the names of modules that are blocks; None for a model of Hugging Face, which
            knows its own.
    """
    if pattern is None:
        enabled: Any = model
        enabled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            from transformers.modeling_layers import GradientCheckpointingLayer

            yield sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
        finally:
            enabled.gradient_checkpointing_disable()
        return
    blocks = [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]
    for block in blocks:
        block.__dict__["forward"] = _again(block.forward)
    try:
        yield len(blocks)
    finally:
        for block in blocks:
            del block.__dict__["forward"]


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    return run


@contextmanager
def memory_budget(step: Callable[..., Tensor], budget: float) -> Iterator[Callable[..., Tensor]]:
    """Compile a step with a budget; it has to run within, once before it is measured.

    Args:
        step: The step.
        budget: Share of the bytes that are saved for the backward pass.
    """
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=budget):
        yield torch.compile(step, backend="aot_eager")
    torch._dynamo.reset()
