"""Which sketches one program can round without a copy in memory: known without triton, which a CPU need not have."""

from ..backends import triton_backend
from ..hadamard_sketch.reference import hadamard_order
from ..low_bit.reference import BITS

# Order of the Hadamard matrix of full blocks. Smaller ones belong to a few hundred rows, larger ones to small ratios.
ORDER = 64
# Rows kept of a block, by triton's names of the backends: ratios 0.5 and 0.25. Less would fill the matrix instructions
# with rows that are not there. 32 would spill on gfx942 where a mean is taken off.
KEPT = {"cuda": (16, 32), "hip": (16,)}
# Rows of a group that the registers of a program hold for 64 features. 256 are those of int4, which would spill on
# gfx942. 512, those of int2, would spill everywhere.
MOST_ROWS = {"cuda": 256, "hip": 128}


def holds(rows: int, *, blocks: int, kept: int, kind: str, group: int) -> bool:
    """Return whether the groups of a sketch are whole blocks, and few enough for the registers of a program.

    Of one that this torch may start: it is made either for NVIDIA's GPUs or for AMD's.

    Args:
        rows: Rows of x.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        kind: A key of `low_bit.reference.BITS`.
        group: Rows of the sketch that share a step.

    Returns:
        True for int8, fp8 and int4 at 32 or 16 rows of 64, on AMD's GPUs for int8 and fp8 at 16; false for the other
        kinds and all other numbers kept.
    """
    backend = triton_backend()
    # two blocks and more: one counter gives the signs of two
    if kept not in KEPT[backend] or not 2 * kept <= group <= MOST_ROWS[backend]:
        return False
    if BITS[kind] & (BITS[kind] - 1) or group & (group - 1):
        return False
    return hadamard_order(-(-rows // blocks)) == ORDER
