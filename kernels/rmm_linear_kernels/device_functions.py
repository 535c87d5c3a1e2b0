"""Functions that kernels of several ops call."""

import triton
import triton.language as tl


@triton.jit
def converted(value, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A float32 in another type, rounded to nearest even."""
    # the interpreter cuts the lower half of a float32 off
    IS_CUT: tl.constexpr = INTERPRETED and TYPE.is_bf16()
    if IS_CUT:
        bits = value.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(value == value, near, value)
    return value.to(TYPE)


@triton.jit
def spread(vector):
    """The vector, made by few threads and handed to the others."""
    # A vector that belongs to the rows or the columns of a tile is otherwise computed by every thread that holds a part
    # of the row or the column, which takes longer than the tile itself. The compiler looks through all but a gather.
    return tl.gather(vector, tl.arange(0, vector.shape[0]), 0)
