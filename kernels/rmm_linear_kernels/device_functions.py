"""What kernels of several ops do alike: functions that run in a kernel."""

import triton
import triton.language as tl


@triton.jit
def converted(value, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A float32 in another type, rounded to nearest even."""
    IS_CUT: tl.constexpr = INTERPRETED and TYPE.is_bf16()
    if IS_CUT:
        # by the interpreter
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


@triton.jit
def where_first(mask, place):
    """The mask of a program whose place is 0, and nothing of it in the others."""
    # A vector made of one truth value is int32 to the interpreter, of which that of triton 3.9 makes no mask. What is
    # compared is a truth value again; the compiler knows that one is its own comparison with 0.
    return (mask & (place == 0)) != 0


@triton.jit
def awaited(x, BACKEND: tl.constexpr):
    """Numbers of half precision out of the memory, which are waited for here and not where they are loaded."""
    # What a matrix product takes is handed to the shared memory as soon as it is loaded, which has to wait for it. The
    # compiler does not do so across a line of assembly, of which nothing is left in the end.
    if BACKEND == "cuda":
        bits = x.to(tl.int16, bitcast=True)
        bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], tl.int16, is_pure=False, pack=2)
        x = bits.to(x.dtype, bitcast=True)
    return x


@triton.jit
def row_begins(row, row_stride, run, gap):
    """Where rows begin, in elements from row 0; int64. See `strides.Rows`."""
    begins = row * row_stride
    if run is not None:
        # the number of a row is below 2**31, and dividing 64 bits takes several times as long
        begins += (row.to(tl.int32) // run).to(tl.int64) * gap
    return begins
