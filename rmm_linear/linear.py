"""RMMLinear: the module that `convert_linears` turns an `nn.Linear` into; and what all such modules have in common."""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.errors import TracingError
from rmm_linear.functional import compute_dtype, linear
from rmm_linear.padding import RowsCheck, current_valid_rows
from rmm_linear.sharing import shared_sketch


class SketchedLayer(nn.Module):
    """What every converted layer is, beside an instance of the class that it was before.

    Attributes:
        rmm_config: How the layer sketches; may be replaced at any time.
    """

    rmm_config: RMMConfig
    # nn.Module does not declare them: every class of converted layers has them, as parameters
    weight: Tensor
    bias: Tensor | None
    _rows_check: RowsCheck | None = None

    def _sketched(self, input: Tensor, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """Apply the layer in training mode, as it is configured.

        Raises:
            ValueError: If the input does not fit the weight.
            TracingError: If the model is traced or exported.
        """
        if isinstance(input, torch.fx.Proxy):
            raise TracingError(
                "torch.fx would trace a sketched linear layer in training mode into an exact one. Use model.eval(),"
                " revert_linears(model), or a Tracer whose is_leaf_module is true for sketched layers"
            )
        if not isinstance(input, Tensor):
            # which says what it thinks of it
            return F.linear(input, weight, self.bias)
        config = self.rmm_config
        x = input if rows is None else rows
        valid = current_valid_rows(input) if config.skip_padding else None
        if torch.compiler.is_compiling():
            return linear(x, weight, self.bias, config=config, valid_rows=valid)
        if valid is not None and self._rows_check is None:
            # not in __init__, which a converted layer has not gone through
            self._rows_check = RowsCheck()
        shared = None
        if config.share_sketch:
            # weakly: a group lives as long as its input
            key = config, None if valid is None else weakref.ref(valid)
            shared = shared_sketch(input, self, key, compute_dtype(input))
        return linear(
            x,
            weight,
            self.bias,
            config=config,
            valid_rows=valid,
            rows_check=self._rows_check if valid is not None else None,
            shared=shared,
        )

    def _describe_config(self) -> str:
        """The configuration, as `print(model)` shows it."""
        config = self.rmm_config
        storage = f", storage={config.storage!r}" if config.storage is not None else ""
        padding = ", skip_padding=True" if config.skip_padding else ""
        tokens = f", keep_tokens={config.keep_tokens}" if config.keep_tokens else ""
        return f"ratio={config.ratio:g}, sketch={config.sketch!r}, center={config.center}{storage}{padding}{tokens}"


class RMMLinear(SketchedLayer, nn.Linear):
    """A linear layer that keeps a sketch of its input for the weight gradient, in training mode.

    Parameters, state_dict and output are those of `nn.Linear`, so are all gradients but the weight's, which is an
    unbiased estimate (see `rmm_linear.functional`). Layers that are called with the same tensor keep one sketch of it
    (see `rmm_linear.sharing`). In eval mode it is an `nn.Linear` in every respect.

    Example:
        >>> import torch
        >>> from rmm_linear import RMMConfig, RMMLinear
        >>> layer = RMMLinear(16, 8, config=RMMConfig(ratio=0.25))
        >>> layer(torch.randn(4, 64, 16)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([8, 16])

    Attributes:
        rmm_config: How the layer sketches; may be replaced at any time.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: RMMConfig | None = None,
    ) -> None:
        """Make a layer with fresh parameters; `convert_linears` is the way to change those of a model.

        Raises:
            ValueError: If `config` is not an RMMConfig.
        """
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.rmm_config = checked_config(config)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer.

        Raises:
            ValueError: If the input does not fit the weight, in training mode.
            TracingError: If the model is traced or exported, in training mode.
        """
        if not self.training:
            return F.linear(input, self.weight, self.bias)
        return self._sketched(input, self.weight)

    def extra_repr(self) -> str:
        """Return the layer's line in `print(model)`."""
        return f"{super().extra_repr()}, {self._describe_config()}"


def checked_config(config: RMMConfig | None) -> RMMConfig:
    """Return the configuration of a layer that is made with one.

    Args:
        config: The configuration, or None.

    Raises:
        ValueError: If it is something else.
    """
    if config is not None and not isinstance(config, RMMConfig):
        raise ValueError(f"config is a {type(config).__name__}; pass an RMMConfig, such as RMMConfig(ratio=0.5)")
    return config if config is not None else RMMConfig()
