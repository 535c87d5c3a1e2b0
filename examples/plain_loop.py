"""Train with a loop of your own: convert the model, print the kept bytes, train as before."""

import torch
from torch import nn

from rmm_linear import RMMConfig, convert_linears, summary
from rmm_linear.memory import profile


def main(steps: int = 50) -> float:
    """Train an MLP on random data; returns the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    inputs = torch.randn(512, 64)
    targets = inputs[:, :1] * inputs[:, 1:2]

    # 8 bits for each number of the inputs of linear layers, and no other noise
    convert_linears(model, config=RMMConfig(ratio=1.0, storage="int8"))
    print(summary(model))
    print(profile(model, inputs))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(f"loss {main():.3f}")
