"""Models of few layers, made on the spot without dropout, their batches, and one training step of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from rmm_linear import RMMConfig, RMMLinear

CONFIG = RMMConfig(ratio=0.3, min_rows=1)
SEQUENCES, LENGTH, VOCABULARY = 4, 40, 64

Batch = dict[str, Tensor]


def llama(layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).train()


def roberta(layers: int = 2) -> nn.Module:
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.RobertaForSequenceClassification(config).train()


def gpt2(layers: int = 2) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(config).train()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(config).train()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=24, patch_size=4, num_channels=3, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.ViTForImageClassification(config).train()


def modernbert() -> nn.Module:
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.ModernBertForMaskedLM(config).train()


def batch_of(kind: Callable[[], nn.Module], number: int = 0) -> Batch:
    """A batch that one of the models above takes, another one for each number."""
    generator = torch.Generator().manual_seed(100 + number)
    if kind is vit:
        pixels = torch.randn(SEQUENCES, 3, 24, 24, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(SEQUENCES) % 3}
    ids = torch.randint(3, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    labels = torch.arange(SEQUENCES) % 3 if kind is roberta else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@dataclass(frozen=True)
class Step:
    """What a training step came to: each micro-batch's loss and logits, and the gradients that add up."""

    losses: list[Tensor]
    logits: list[Tensor]
    gradients: dict[str, Tensor]


def train_step(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    run: Callable[..., Any] | None = None,
    autocast: bool = False,
    seed: int = 0,
) -> Step:
    """Forward and backward over all micro-batches, from one seed; `run` is what is called in the model's place."""
    model.zero_grad()
    torch.manual_seed(seed)
    losses, logits = [], []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = (model if run is None else run)(**batch)
        (output.loss / len(batches)).backward()
        losses.append(output.loss.detach())
        logits.append(output.logits.detach())
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return Step(losses, logits, gradients)


def sketched_weights(model: nn.Module) -> set[str]:
    """Names of the parameters whose gradients are estimates: attention keeps the input of its projection anyway."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, RMMLinear)
        and module.weight.requires_grad
        and not name.endswith(("self_attn.o_proj", "attention.output.dense"))
    }


def relative_error(estimate: Tensor, exact: Tensor) -> float:
    return float((estimate - exact).norm() / exact.norm())
