"""`RMMLinear` and `RMMConv1D`, the layers that `convert_linears` makes, and the exact classes that it converts.

The `Conv1D` of transformers is a linear layer whose weight has shape (in, out). `RMMConv1D` is defined at its first
use, since the library does not require transformers.
"""

import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmm_linear.config import RMMConfig, config_for
from rmm_linear.errors import TracingError
from rmm_linear.functional import compute_dtype, linear
from rmm_linear.norm_cache import current_norms
from rmm_linear.padding import RowsCheck, current_valid_rows
from rmm_linear.sharing import current_groups


class SketchedLayer(nn.Module):
    """The base class of converted layers, which stay instances of their former class.

    Attributes:
        rmm_config: How the layer sketches; may be replaced at any time.
    """

    rmm_config: RMMConfig
    # nn.Module does not declare these parameters; every converted class has them
    weight: Tensor
    bias: Tensor | None
    _rows_check: RowsCheck | None = None

    def _sketched(self, input: Tensor, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """Apply the layer in training mode, as it is configured."""
        if isinstance(input, torch.fx.Proxy):
            raise TracingError(
                "torch.fx would trace a sketched linear layer in training mode into an exact one. Use model.eval(),"
                " revert_linears(model), or a Tracer whose is_leaf_module is true for sketched layers"
            )
        if not isinstance(input, Tensor):
            # F.linear raises torch's own error
            return F.linear(input, weight, self.bias)
        config = self.rmm_config
        x = input if rows is None else rows
        valid = current_valid_rows(input) if config.skip_padding else None
        if torch.compiler.is_compiling():
            return linear(x, weight, self.bias, config=config, valid_rows=valid)
        if valid is not None and self._rows_check is None:
            # not in __init__, which conversion does not call
            self._rows_check = RowsCheck()
        shared = None
        if config.share_sketch:
            # a weak reference: the key must not keep the mask alive as long as the input
            key = config, None if valid is None else weakref.ref(valid)
            shared = current_groups.find(input, self, key, compute_dtype(input))
        return linear(
            x,
            weight,
            self.bias,
            config=config,
            valid_rows=valid,
            rows_check=self._rows_check if valid is not None else None,
            shared=shared,
            row_norms=current_norms(self, input),
        )

    def _describe_config(self) -> str:
        config = self.rmm_config
        storage = f", storage={config.storage!r}" if config.storage is not None else ""
        padding = ", skip_padding=True" if config.skip_padding else ""
        tokens = f", keep_tokens={config.keep_tokens}" if config.keep_tokens else ""
        return f"ratio={config.ratio:g}, sketch={config.sketch!r}, center={config.center}{storage}{padding}{tokens}"


class RMMLinear(SketchedLayer, nn.Linear):
    """A linear layer that keeps a sketch of its input for the weight gradient, in training mode.

    Parameters, state_dict and output are those of `nn.Linear`, so are all gradients but the weight's, which is an
    unbiased estimate (see `rmm_linear.functional`). Layers that are called with the same tensor keep one sketch of it
    (see `rmm_linear.sharing`). In eval mode the layer computes as an `nn.Linear` does.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig, RMMLinear
        >>> layer = RMMLinear(16, 8, config=RMMConfig(ratio=0.25))
        >>> layer(torch.randn(4, 64, 16)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([8, 16])
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
        """Make a layer with fresh parameters; `convert_linears` is the way to change those of a model."""
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.rmm_config = config_for(None, config)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; in training mode raises the errors of `rmm_linear.functional.linear`, or `TracingError`."""
        return self._sketched(input, self.weight) if self.training else F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._describe_config()}"


def _make_conv1d() -> type[SketchedLayer]:
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise ImportError('RMMConv1D needs transformers: pip install "rmm-linear[hf]"') from error

    class RMMConv1D(SketchedLayer, Conv1D):
        """A `Conv1D` of transformers that keeps a sketch of its input for the weight gradient, in training mode.

        Parameters, state_dict and output are those of `Conv1D`: weight (in, out), bias (out,). Gradients, sharing and
        eval mode are those of `RMMLinear`.
        """

        weight: nn.Parameter
        bias: nn.Parameter

        def __init__(self, nf: int, nx: int, *, config: RMMConfig | None = None) -> None:
            """Make a layer with fresh parameters; `convert_linears` is the way to change those of a model."""
            super().__init__(nf, nx)
            self.rmm_config = config_for(None, config)

        def forward(self, x: Tensor) -> Tensor:
            """Apply the layer; in training mode raises the errors of `RMMLinear.forward`."""
            if not self.training:
                return super().forward(x)
            # Conv1D flattens x to a matrix; F.linear takes another path for an x that has no flat view
            rows = x if not isinstance(x, Tensor) or x.dim() == 2 else x.contiguous()
            return self._sketched(x, self.weight.t(), rows)

        def __repr__(self) -> str:
            return f"RMMConv1D(nf={self.nf}, nx={self.nx}, {self._describe_config()})"

    # pickle finds the class by this name
    RMMConv1D.__qualname__ = "RMMConv1D"
    return RMMConv1D


if TYPE_CHECKING:
    RMMConv1D: type[SketchedLayer]


def __getattr__(name: str) -> Any:
    if name == "RMMConv1D":
        # later look-ups find the attribute without this function
        return globals().setdefault(name, _make_conv1d())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def convertible_classes() -> tuple[type[nn.Module], ...]:
    """Return the exact classes that have a sketched counterpart."""
    # until transformers is imported, no model can hold a Conv1D
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (nn.Linear,) if conv1d is None else (nn.Linear, conv1d)


def sketched_class(exact: type[nn.Module]) -> type[SketchedLayer]:
    """Return the sketched class for an exact class of `convertible_classes()`."""
    # through the module, so that `__getattr__` defines RMMConv1D at its first use
    return RMMLinear if exact is nn.Linear else sys.modules[__name__].RMMConv1D


def is_linear_layer(module: nn.Module) -> bool:
    """Tell whether a module is an `nn.Linear`, a `Conv1D` of transformers, or an instance of a subclass of either."""
    return isinstance(module, convertible_classes())


def features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    values: Any = layer
    return values.nx, values.nf


def layer_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input that a linear layer was called with, by position or keyword; None if there is none."""
    return args[0] if args else kwargs.get("input", kwargs.get("x"))
