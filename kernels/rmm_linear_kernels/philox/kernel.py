"""Random bits inside Triton kernels: the words of `reference.py`, bit for bit, made in registers.

Every function takes the 64-bit seed that the kernel loaded from memory, and indices of 32 bits: a stream of these
kernels ends at 2**32 counters, which is far beyond any number of rows.
"""

import triton
import triton.language as tl

from . import reference

SIGN_STREAM = tl.constexpr(reference.SIGN_STREAM)
CHOICE_STREAM = tl.constexpr(reference.CHOICE_STREAM)
PROJECTION_STREAM = tl.constexpr(reference.PROJECTION_STREAM)
ROUNDING_STREAM = tl.constexpr(reference.ROUNDING_STREAM)


@triton.jit
def words_of_counter(seed, counter, STREAM: tl.constexpr):
    """The four words of each counter of a stream, uint32; `counter` is int32 or uint32."""
    low = counter.to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, zero + STREAM, zero, zero)


@triton.jit
def random_word(seed, index, STREAM: tl.constexpr):
    """Word `index` of a stream, uint32: a whole counter is computed for each, so that any index may be asked for."""
    first, second, third, fourth = words_of_counter(seed, index >> 2, STREAM)
    lane = index & 3
    return tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))


@triton.jit
def sign_bit(seed, index, STREAM: tl.constexpr):
    """Bit `index` of a stream, uint32: 1 stands for the sign -1 (`reference.random_signs`)."""
    return (random_word(seed, index >> 5, STREAM) >> (index & 31).to(tl.uint32)) & 1


@triton.jit
def random_half(seed, index, STREAM: tl.constexpr):
    """16-bit number `index` of a stream, uint32 (`reference.random_halves`)."""
    return (random_word(seed, index >> 1, STREAM) >> ((index & 1) * 16).to(tl.uint32)) & 0xFFFF
