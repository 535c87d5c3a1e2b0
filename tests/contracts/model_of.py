"""Small models that are written where they are used."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn


class ModelOf(nn.Module):
    """Modules, parameters and buffers by name, and a forward pass that is a function of the model and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            # a tensor that is no parameter is a buffer
            (self.register_buffer if type(part) is Tensor else partial(setattr, self))(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def linears(names: str, width: int) -> dict[str, nn.Module]:
    """Square layers by their names."""
    return {name: nn.Linear(width, width) for name in names.split()}
