"""Train within a budget of bytes: plan the step, print the plan, train as before with exact gradients."""

import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model


class Block(nn.Module):
    """A block of a small Transformer, without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's part to x, shape (rows, width)."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(steps: int = 20, budget: str = "60%") -> int:
    """Train some blocks on random data; returns the bytes of the plan's peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(6)), nn.Linear(64, 1))
    inputs = torch.randn(512, 64)

    # op by op, with the bits of eager mode; torch.compile(model, backend="rmm_linear", ...) is the fused way
    plan = checkpoint_model(model, inputs, budget=budget)
    print(plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return plan.peak_bytes


if __name__ == "__main__":
    print(f"the step's peak is {main() / 2**20:.2f} MiB")
