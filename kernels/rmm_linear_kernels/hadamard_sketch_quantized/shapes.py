"""Which sketches one program can round without a copy in memory: known without triton, which a CPU need not have."""

from ..hadamard_sketch.reference import hadamard_order
from ..low_bit.reference import BITS

# Order of the Hadamard matrix of full blocks. Smaller ones belong to a few hundred rows, larger ones to small ratios.
ORDER = 64
# Rows kept of a block: ratios 0.5 and 0.25. Less would fill the matrix instructions with rows that are not there.
_KEPT = (16, 32)
# Rows of a group that the registers of a program hold for 64 features. 256, those of int4, would spill on gfx942, and
# 512, those of int2, everywhere.
_MOST_ROWS = 128


def holds(rows: int, *, blocks: int, kept: int, kind: str, group: int) -> bool:
    """Return whether the groups of a sketch are whole blocks, and few enough for the registers of a program.

    Args:
        rows: Rows of x.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        kind: A key of `low_bit.reference.BITS`.
        group: Rows of the sketch that share a step.

    Returns:
        True for int8 and fp8 at 32 or 16 rows of 64; false for the other kinds and all other numbers kept.
    """
    if kept not in _KEPT or BITS[kind] & (BITS[kind] - 1) or group & (group - 1) or not kept <= group <= _MOST_ROWS:
        return False
    return hadamard_order(-(-rows // blocks)) == ORDER
