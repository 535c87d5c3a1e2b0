"""Inputs and gradients of sketched layers, by hooks that have nothing to do with a probe."""

from collections.abc import Callable

from torch import Tensor, nn

from rmm_linear import RMMLinear


def captured(network: nn.Module, step: Callable[[nn.Module], object]) -> dict[str, tuple[Tensor, Tensor]]:
    """(x, g) of every layer that gets a gradient in one step."""
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def hook(name: str):
        def write(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach()
            output.register_hook(lambda g: gradients.update({name: g}))

        return write

    for name, layer in network.named_modules():
        if isinstance(layer, RMMLinear):
            layer.register_forward_hook(hook(name))
    step(network)
    return {name: (inputs[name], g) for name, g in gradients.items()}
