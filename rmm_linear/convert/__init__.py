"""Turn the linear layers of a model into sketched ones, back again, and say what was done."""

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
