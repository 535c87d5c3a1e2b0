"""Which sketches one program can round without a copy in memory: known without triton, which a CPU need not have."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import triton_backend
from ..hadamard_sketch.reference import hadamard_order
from ..low_bit.reference import BITS
from ..strides import are_rows_aligned, number_of_rows

# Order of the Hadamard matrix of full blocks. Smaller ones belong to a few hundred rows, larger ones to small ratios.
ORDER = 64


class Limits(NamedTuple):
    """What the registers of a program hold on one kind of GPU.

    Attributes:
        kept: Rows that may be kept of a block.
        rows: Rows of a group, for a tile of features.
        dtypes: Dtypes of x.
    """

    kept: tuple[int, ...]
    rows: int
    dtypes: tuple[torch.dtype, ...]


# Ratios 0.5 and 0.25: with less, and with any other number of rows, most of a matrix instruction or most of two blocks'
# rows would be thrown away, which takes longer than the way through the memory. 256 rows are those of int4; 512, those
# of int2, would spill everywhere. On gfx942, 256 rows would, 32 rows of a block about a mean, and float32.
LIMITS = {
    "cuda": Limits((16, 32), 256, (torch.bfloat16, torch.float16, torch.float32)),
    "hip": Limits((16,), 128, (torch.bfloat16, torch.float16)),
}


def fits(backend: str, *, kept: int, group: int, dtype: torch.dtype, aligned: bool) -> bool:
    """Return whether the registers of a program hold a group.

    Args:
        backend: Triton's name: "cuda" or "hip".
        kept: Hadamard rows kept of each block.
        group: Rows of the sketch that share a step.
        dtype: Dtype of x.
        aligned: Whether x is read in pieces of 16 bytes, see `are_rows_aligned`.

    Returns:
        True if it is no more than `LIMITS` says; for float32 that is not read so, of 32 rows kept, half as much.
    """
    limits = LIMITS[backend]
    # addresses of each number, and three parts of it, leave no more: 256 rows would spill on sm_80
    rows = limits.rows // 2 if dtype == torch.float32 and kept == 32 and not aligned else limits.rows
    return kept in limits.kept and group <= rows and dtype in limits.dtypes


def holds(x: Tensor, *, blocks: int, kept: int, kind: str, group: int) -> bool:
    """Return whether the groups of a sketch are whole blocks, and few enough for the registers of a program.

    Of one that this torch may start: it is made either for NVIDIA's GPUs or for AMD's.

    Args:
        x: Input, shape (rows, features), or in runs (`strides.in_runs`).
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        kind: A key of `low_bit.reference.BITS`.
        group: Rows of the sketch that share a step.

    Returns:
        True for int8, fp8 and int4 at 32 or 16 rows of 64, on AMD's GPUs for int8 and fp8 at 16 in half precision;
        false for int4 at 32 of float32 rows that begin anywhere, the other kinds, float64, all other numbers kept, and
        an x of no elements.
    """
    if not x.numel() or not fits(triton_backend(), kept=kept, group=group, dtype=x.dtype, aligned=are_rows_aligned(x)):
        return False
    # two blocks and more: one counter gives the signs of two
    if group < 2 * kept:
        return False
    if BITS[kind] & (BITS[kind] - 1) or group & (group - 1):
        return False
    return hadamard_order(-(-number_of_rows(x) // blocks)) == ORDER
