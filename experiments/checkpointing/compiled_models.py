"""What the comparison of compiled steps measures: models without dropout, budgets, rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .compiled_report import EXACT, INDUCTOR
from .models import WORKLOADS, Shape, Workload


def _sample(_: nn.Module, batch: int, size: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, size, size), torch.randint(0, 2, (batch,))


def _vit(**options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**options))


def _labelled_images(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=images, labels=labels).loss


VIT = Workload(
    "vit",
    _vit,
    _sample,
    _labelled_images,
    Shape({}, 64, 224),
    Shape({"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "image_size": 64}, 8, 64),
    is_hugging_face=True,
)
_TEXT = {"vocab_size": 512}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# a model that finds it out in its first step is compiled a second time
_LABELS = {"problem_type": "single_label_classification"}
_ROBERTA = _TEXT | _NO_DROPOUT | _LABELS | {"max_position_embeddings": 130}
_GPT2 = _TEXT | {"n_positions": 128, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA = _TEXT | {"num_key_value_heads": 2}
_VIT = _NO_DROPOUT | _LABELS | {"image_size": 96, "patch_size": 8}
_WIDE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """A model at two sizes.

    Attributes:
        name: Its name in tables.
        workload: The model.
        shape: The size that is measured: a step takes about a second on two cores.
        tiny: The size of `--quick`.
        blocks: How many blocks are checkpointed; None for as many as the model's configuration says.
    """

    name: str
    workload: Workload
    shape: Shape
    tiny: Shape
    blocks: int | None = None


_KNOWN = {workload.name: workload for workload in WORKLOADS}
CASES = (
    Case("roberta", _KNOWN["roberta-base"], Shape(_WIDE | _ROBERTA, 16, 128), Shape(_TINY | _ROBERTA, 4, 64)),
    Case(
        "gpt-2",
        _KNOWN["gpt-2"],
        Shape(_GPT2 | {"n_layer": 6, "n_embd": 256}, 14, 128),
        Shape(_GPT2 | {"n_layer": 2, "n_embd": 32}, 4, 64),
    ),
    Case(
        "llama",
        _KNOWN["llama, 16 blocks"],
        Shape(_WIDE | _LLAMA | {"intermediate_size": 768}, 12, 128),
        Shape(_TINY | _LLAMA, 4, 64),
    ),
    Case("vit", VIT, Shape(_WIDE | _VIT, 16, 96), Shape(_TINY | _VIT, 4, 96)),
    Case("u-net", _KNOWN["u-net"], Shape({"width": 0.25}, 4, 284), Shape({"width": 0.0625}, 1, 188), blocks=9),
)


@dataclass(frozen=True)
class Extent:
    """How much is measured of a model.

    Attributes:
        memory_budgets: Values of torch's `activation_memory_budget`.
        rivals: How many of the rivals' peaks plans get as their budget, from the least on; None for all.
        spread: How many budgets lie evenly between the plain peak and the least.
        rounds: How often each way is timed.
        backend: What compiles the rivals.
        executors: What runs the plans.
    """

    memory_budgets: Sequence[float] = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    rivals: int | None = None
    spread: int = 10
    rounds: int = 7
    backend: str = "inductor"
    executors: Sequence[str] = (EXACT, INDUCTOR)


QUICK = Extent(memory_budgets=(0.5, 0.1), rivals=1, spread=2, rounds=2)
