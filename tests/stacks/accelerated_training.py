"""A training script as a user of accelerate writes it; `python accelerated_training.py FOLDER` runs it on two ranks."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, debug_launcher
from tiny_models import CONFIG, batch_of, llama, sketched_weights
from torch.utils.data import DataLoader

from rmm_linear import convert_linears

STEPS = 30


def train(folder):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    batch = batch_of(llama)
    rows = [{name: value[number] for name, value in batch.items()} for number in range(4)]
    model = convert_linears(llama(), config=CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows * STEPS, batch_size=2))
    torch.manual_seed(0)
    losses = []
    for micro_batch in loader:
        with accelerator.accumulate(model):
            loss = model(**micro_batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    plain = accelerator.unwrap_model(model)
    found = {
        "ranks": accelerator.num_processes,
        "kind": type(model).__name__,
        "losses": losses,
        "weights": {name: value.detach().clone() for name, value in plain.named_parameters()},
        "sketched": len(sketched_weights(plain)),
    }
    torch.save(found, Path(folder, f"{accelerator.process_index}.pt"))


if __name__ == "__main__":
    # accelerate's own launcher of several processes on a CPU
    debug_launcher(train, args=(sys.argv[1],), num_processes=2)
