"""Train LoRA adapters: the model keeps their inputs for the backward pass, and a sketch keeps a part of them."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from rmm_linear import convert_linears
from rmm_linear.memory import SavedTensors


def kept_bytes(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Return the bytes that a training step's forward pass keeps beside the parameters."""
    with SavedTensors(model) as saved:
        loss = model(input_ids=tokens, labels=tokens).loss
    del loss
    return saved.bytes


def main(steps: int = 5) -> tuple[int, int]:
    """Train the adapters of a small Llama on random tokens; returns the bytes kept before and after."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    tokens = torch.randint(0, 100, (8, 64))

    before = kept_bytes(model, tokens)
    # the frozen layers around the adapters keep no input
    convert_linears(model, ratio=0.2, target_modules=["lora_A"])
    after = kept_bytes(model, tokens)

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return before, after


if __name__ == "__main__":
    exact, sketched = main()
    print(f"{exact / 2**20:.2f} MiB are kept with exact adapters, {sketched / 2**20:.2f} MiB with sketched adapters")
