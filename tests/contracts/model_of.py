"""Small models that are written where they are used."""

from collections.abc import Callable
from typing import Any

from torch import nn


class ModelOf(nn.Module):
    """Parts by name, and a forward pass that is a function of the model and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def linears(names: str, width: int) -> dict[str, nn.Module]:
    """Square layers by their names."""
    return {name: nn.Linear(width, width) for name in names.split()}
