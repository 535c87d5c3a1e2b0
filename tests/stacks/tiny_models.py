"""Models of few layers, made on the spot without dropout, their batches, and one training step of them."""

from dataclasses import dataclass

import torch
from tiny_transformers import tiny
from torch import Tensor

from rmm_linear import RMMConfig, RMMLinear

CONFIG = RMMConfig(ratio=0.3, min_rows=1)
SEQUENCES, LENGTH, VOCABULARY = 4, 40, 64

OF_TEXT = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "seed": 1}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def llama(layers=2):
    options = {**OF_TEXT, **TOKENS, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
    return tiny("LlamaForCausalLM", num_hidden_layers=layers, **options)


def roberta(layers=2):
    return tiny("RobertaForSequenceClassification", num_hidden_layers=layers, num_labels=3, **OF_TEXT)


def gpt2(layers=2):
    return tiny("GPT2LMHeadModel", num_hidden_layers=layers, use_cache=False, **OF_TEXT, **TOKENS)


def t5():
    options = {"d_kv": 8, "d_ff": 64, "num_decoder_layers": 2, "decoder_start_token_id": 0, "use_cache": False}
    return tiny("T5ForConditionalGeneration", **options, **OF_TEXT)


def vit():
    sizes = {"image_size": 24, "patch_size": 4, "num_attention_heads": 4, "num_labels": 3}
    return tiny("ViTForImageClassification", seed=1, **sizes)


def modernbert():
    return tiny("ModernBertForMaskedLM", pad_token_id=0, cls_token_id=1, sep_token_id=2, **OF_TEXT, **TOKENS)


def batch_of(kind, number=0):
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


def train_step(model, batches, *, run=None, autocast=False, seed=0):
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


def sketched_weights(model):
    """Names of the parameters whose gradients are estimates: attention keeps the input of its projection anyway."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, RMMLinear)
        and module.weight.requires_grad
        and not name.endswith(("self_attn.o_proj", "attention.output.dense"))
    }


def relative_error(estimate, exact):
    return float((estimate - exact).norm() / exact.norm())


def assert_estimates(found, exact, estimated, *, same=torch.equal, least=0.05):
    """Estimates are off by as much as their closed forms say, 0.2 to 3 for most layers, and others are the same."""
    assert found.keys() == exact.keys()
    assert estimated < found.keys()
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        if name in estimated:
            assert least < relative_error(gradient, exact[name]) < 6, name
        else:
            assert same(gradient, exact[name]), name
