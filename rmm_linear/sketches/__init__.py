"""Sketches: random compressions of the rows of x that leave g^T x unbiased. One file each.

Importing this package fills the registry, `SKETCHES`.
"""

from rmm_linear.sketches.base import SKETCHES, SavedSketch, Sketch, available_sketches, register
from rmm_linear.sketches.centered import Centered
from rmm_linear.sketches.crs import CRS
from rmm_linear.sketches.dct import DCT
from rmm_linear.sketches.dft import DFT
from rmm_linear.sketches.gaussian import Gaussian
from rmm_linear.sketches.hadamard import Hadamard
from rmm_linear.sketches.kept_rows import KeptRows
from rmm_linear.sketches.low_bit import STORAGES, LowBit
from rmm_linear.sketches.rademacher import Rademacher
from rmm_linear.sketches.uniform_rows import RowsWithoutReplacement
from rmm_linear.sketches.wta_crs import WTACRS

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
    "KeptRows",
    "LowBit",
    "Rademacher",
    "RowsWithoutReplacement",
    "SavedSketch",
    "Sketch",
    "available_sketches",
    "register",
]
