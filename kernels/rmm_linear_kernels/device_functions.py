"""Functions that kernels of several ops call."""

import triton
import triton.language as tl


@triton.jit
def converted(value, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A float32 in another type, rounded to nearest even."""
    # the interpreter would truncate a float32 to bfloat16
    IS_CUT: tl.constexpr = INTERPRETED and TYPE.is_bf16()
    if IS_CUT:
        bits = value.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(value == value, near, value)
    return value.to(TYPE)


@triton.jit
def spread(vector):
    """The vector, computed by few threads and distributed to the other threads."""
    # Otherwise every thread that holds a part of a row (or column) of a tile computes the row's element of the vector,
    # which takes longer than the tile itself. A gather is the only way to prevent this that the compiler does not undo.
    return tl.gather(vector, tl.arange(0, vector.shape[0]), 0)
