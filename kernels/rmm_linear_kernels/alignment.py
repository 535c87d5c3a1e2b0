"""How Triton reads the rows of a matrix: known without triton, which a CPU need not have."""

from torch import Tensor

# The multiple of bytes that an address may be known to be.
ALIGNMENT = 16


def are_rows_aligned(x: Tensor) -> bool:
    """Tell whether a kernel reads rows of a matrix, and writes rows as long, in pieces of 16 bytes.

    Where it does not, each number has an address of its own, which takes registers.

    Args:
        x: The matrix.

    Returns:
        True if Triton knows that all rows begin at multiples of 16 bytes, and have their elements next to each other.
    """
    row_stride, column_stride = x.stride()
    return column_stride == 1 and (row_stride | x.shape[1] | x.data_ptr()) % ALIGNMENT == 0
