"""The compared models and their batches: published shapes, random weights and inputs.

The bytes kept for a backward pass depend on shapes, dtypes and the model's code, and on no value.

torch's fused attention for CPUs has no dropout, and falls back to an unfused one that keeps the scores, which no GPU
would: models that can do without have none in their attention here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.command_line import HarnessError
from rmm_linear.integrations.hf_models import build_model, random_batch

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        name: Its name in the results.
        config: Name of its configuration in `models/`.
        batch: Sequences, or images, of the batch.
        length: Tokens of a sequence; of an image, its patches and the class token.
        dtype: Of the parameters.
        attention: Its `attn_implementation`.
        changes: Values that differ from the published configuration.
        lora: Whether the model is frozen, with LoRA adapters (PEFT's defaults) beside all linear layers but the head.
    """

    name: str
    config: str
    batch: int
    length: int
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    changes: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False

    def build(self) -> nn.Module:
        """Make the model, in training mode and with the dropout of its configuration."""
        model = build_model(
            str(MODELS / f"{self.config}.json"),
            dtype=self.dtype,
            attn_implementation=self.attention,
            **self.changes,
        )
        if not self.lora:
            return model
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise HarnessError("LoRA needs PEFT: pip install peft, or choose other models with --models") from error
        return get_peft_model(model, LoraConfig(target_modules="all-linear")).train()

    def sample(self, model: nn.Module) -> dict[str, Tensor]:
        unwrapped = model.get_base_model() if self.lora else model  # type: ignore[operator]
        batch = random_batch(unwrapped, batch=self.batch, length=self.length, device="cpu")
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in batch.items()}


WORKLOADS = (
    Workload("roberta-base", "roberta-base", 8, 128, changes={"attention_probs_dropout_prob": 0.0}),
    Workload("roberta-base-eager", "roberta-base", 8, 128, attention="eager"),
    Workload("gpt2", "gpt2", 2, 512, changes={"attn_pdrop": 0.0}),
    Workload("vit-b-16", "vit-b-16", 8, 197),
    Workload("t5-small", "t5-small", 8, 128),
    Workload("llama-1b", "llama-1b", 1, 512, dtype=torch.bfloat16),
    Workload("llama-1b-lora", "llama-1b", 1, 512, dtype=torch.bfloat16, lora=True),
)
