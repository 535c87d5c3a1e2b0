"""RMMConv1D: what `convert_linears` turns the linear layers of GPT-2 into.

The `Conv1D` of transformers is a linear layer whose weight is held as (in, out). `RMMConv1D` is made at its first use,
from the class that transformers has: the library itself does without that package.
"""

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.linear import SketchedLayer, checked_config

_MATRIX = 2
_HOME = "transformers.pytorch_utils"


def conv1d_class() -> type[nn.Module] | None:
    """Return the `Conv1D` of transformers.

    Returns:
        The class, or None as long as nobody has imported it: then no model holds one.
    """
    return getattr(sys.modules.get(_HOME), "Conv1D", None)


def _make() -> type[SketchedLayer]:
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise ImportError('RMMConv1D needs transformers: pip install "rmm-linear[hf]"') from error

    class RMMConv1D(SketchedLayer, Conv1D):
        """A `Conv1D` of transformers that keeps a sketch of its input for the weight gradient, in training mode.

        Parameters, state_dict and output are those of `Conv1D`: weight (in, out), bias (out,). Otherwise it is to
        `Conv1D` what `RMMLinear` is to `nn.Linear`.

        Attributes:
            rmm_config: How the layer sketches; may be replaced at any time.
        """

        weight: nn.Parameter
        bias: nn.Parameter

        def __init__(self, nf: int, nx: int, *, config: RMMConfig | None = None) -> None:
            """Make a layer with fresh parameters; `convert_linears` is the way to change those of a model.

            Raises:
                ValueError: If `config` is not an RMMConfig.
            """
            super().__init__(nf, nx)
            self.rmm_config = checked_config(config)

        def forward(self, x: Tensor) -> Tensor:
            """Apply the layer.

            Raises:
                ValueError: If the input does not fit the weight, in training mode.
                TracingError: If the model is traced or exported, in training mode.
            """
            if not self.training:
                return super().forward(x)
            # Conv1D flattens to a matrix; F.linear would take another path for tensors that it can't flatten
            rows = x if not isinstance(x, Tensor) or x.dim() == _MATRIX else x.contiguous()
            return self._sketched(x, self.weight.t(), rows)

        def __repr__(self) -> str:
            return f"RMMConv1D(nf={self.nf}, nx={self.nx}, {self._describe_config()})"

    # where pickle looks for it
    RMMConv1D.__qualname__ = "RMMConv1D"
    return RMMConv1D


if TYPE_CHECKING:
    RMMConv1D: type[SketchedLayer]


def __getattr__(name: str) -> Any:
    if name == "RMMConv1D":
        # from here on it is an attribute like any other
        return globals().setdefault(name, _make())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
