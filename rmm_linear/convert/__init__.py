"""Convert the linear layers of a model to sketched layers and back, and list the conversion."""

from rmm_linear.convert.conversion import convert_linears, revert_linears
from rmm_linear.convert.conversion_summary import ConversionSummary, LayerSummary, describe, summary
from rmm_linear.convertible import why_not

__all__ = [
    "ConversionSummary",
    "LayerSummary",
    "convert_linears",
    "describe",
    "revert_linears",
    "summary",
    "why_not",
]
