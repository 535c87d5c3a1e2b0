"""Train Transformers with less activation memory: sketched linear layers, codes, and planned steps.

    model = convert_linears(model, ratio=0.5)

`rmm_linear.functional` opens with the method in a page.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rmm_linear.backend import use_kernels
from rmm_linear.config import RMMConfig
from rmm_linear.convert import ConversionSummary, convert_linears, revert_linears, summary
from rmm_linear.errors import DoubleBackwardError, PaddingGradientError, RMMError, TracingError
from rmm_linear.layer import RMMLinear, SketchedLayer
from rmm_linear.norm_cache import NormCache
from rmm_linear.padding import valid_rows
from rmm_linear.sketches import Sketch, available_sketches

if TYPE_CHECKING:
    from rmm_linear.fitting import fit
    from rmm_linear.integrations.hf_trainer import RMMCallback

__version__ = "0.3.0"

__all__ = [
    "ConversionSummary",
    "DoubleBackwardError",
    "NormCache",
    "PaddingGradientError",
    "RMMCallback",
    "RMMConfig",
    "RMMError",
    "RMMLinear",
    "Sketch",
    "SketchedLayer",
    "TracingError",
    "available_sketches",
    "convert_linears",
    "fit",
    "revert_linears",
    "summary",
    "use_kernels",
    "valid_rows",
]


def __getattr__(name: str) -> Any:
    # Imported on demand: only the callback needs transformers, and only `fit` the compiler.
    folder = {"fit": "fitting", "RMMCallback": "integrations.hf_trainer"}.get(name)
    if folder is not None:
        return getattr(importlib.import_module(f"rmm_linear.{folder}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
