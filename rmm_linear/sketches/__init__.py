"""Sketches: random compressions of the rows of x that leave g^T x unbiased. One file for each kind.

Importing this package fills the registry, `SKETCHES`.
"""

from rmm_linear.sketches.base import SKETCHES, SavedSketch, Sketch, available_sketches, register
from rmm_linear.sketches.centered import Centered
from rmm_linear.sketches.dense import Gaussian, Rademacher
from rmm_linear.sketches.hadamard import Hadamard
from rmm_linear.sketches.low_bit import STORAGES, LowBit
from rmm_linear.sketches.row_sampling import CRS, WTACRS, RowsWithoutReplacement
from rmm_linear.sketches.trigonometric import DCT, DFT

__all__ = [
    "CRS",
    "DCT",
    "DFT",
    "SKETCHES",
    "STORAGES",
    "WTACRS",
    "Centered",
    "Gaussian",
    "Hadamard",
    "LowBit",
    "Rademacher",
    "RowsWithoutReplacement",
    "SavedSketch",
    "Sketch",
    "available_sketches",
    "register",
]
