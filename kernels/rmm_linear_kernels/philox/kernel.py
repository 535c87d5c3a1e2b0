"""Random bits inside Triton kernels: the words of `reference.py`, bit for bit, made in registers.

Every function takes the 64-bit seed that the kernel loaded from memory, and indices of 32 bits: a stream of these
kernels ends at 2**32 counters, which is far beyond any number of rows. A matrix may have more elements: its counters
have two indices.
"""

import triton
import triton.language as tl

from . import reference

SIGN_STREAM = tl.constexpr(reference.SIGN_STREAM)
CHOICE_STREAM = tl.constexpr(reference.CHOICE_STREAM)
PROJECTION_STREAM = tl.constexpr(reference.PROJECTION_STREAM)
ROUNDING_STREAM = tl.constexpr(reference.ROUNDING_STREAM)


@triton.jit
def words_of_cell(seed, group, column, STREAM: tl.constexpr):
    """The four words of each cell of a matrix, uint32 (`reference.cell_counters`); of shapes that broadcast."""
    third, stream = group.to(tl.uint32), tl.full((), STREAM, tl.uint32)
    return tl.philox(seed, third + column.to(tl.uint32), stream, third, stream * 0)


@triton.jit
def random_word(seed, index, STREAM: tl.constexpr):
    """Word `index` of a stream, uint32; a whole counter is computed for each word, so that any index is allowed."""
    counter = (index >> 2).to(tl.uint32)
    zero = counter * 0
    first, second, third, fourth = tl.philox(seed, counter, zero + STREAM, zero, zero)
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


@triton.jit
def normals_of_cell(seed, group, column, STREAM: tl.constexpr):
    """Four standard normals of each cell of a matrix, float32 (`reference.randn4x`, up to rounding)."""
    first, second, third, fourth = words_of_cell(seed, group, column, STREAM)
    cosine, sine = _box_muller(first, second)
    other_cosine, other_sine = _box_muller(third, fourth)
    return cosine, sine, other_cosine, other_sine


@triton.jit
def _folded(word):
    """The word, or its complement if the highest bit is set, below 2**31, as in `tl.rand`."""
    return word ^ (0 - (word >> 31))


@triton.jit
def _box_muller(first, second):
    """Two normals from two words."""
    uniform = _folded(first).to(tl.int32, bitcast=True).to(tl.float32) * 4.6566127342e-10
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(uniform, 1e-7)))
    # The angle is an integer multiple of a turn / 2**31, so that its quadrant is exact and takes no instruction. tl.cos
    # and tl.sin reduce any float32: more than twice the instructions, and local memory.
    turns = _folded(second)
    quadrant = (turns + (1 << 28)) >> 29
    rest = (turns - (quadrant << 29)).to(tl.int32, bitcast=True)
    angle = rest.to(tl.float32) * 2.9258361598967726e-09
    square = angle * angle
    # Minimax polynomials in [-pi / 4, pi / 4], with errors below 2e-8.
    sine = angle + angle * square * (
        -0.166666641831398 + square * (0.008332747966051102 + square * -0.00019587883434724063)
    )
    cosine = 1.0 + square * (
        -0.5 + square * (0.0416666641831398 + square * (-0.001388830249197781 + square * 2.4547915018047206e-05))
    )
    is_odd = (quadrant & 1) == 1
    return (
        radius * _negated(tl.where(is_odd, sine, cosine), (quadrant + 1) & 2),
        radius * _negated(tl.where(is_odd, cosine, sine), quadrant & 2),
    )


@triton.jit
def _negated(number, two):
    """-number if `two` is 2, the number itself if `two` is 0."""
    return (number.to(tl.uint32, bitcast=True) ^ (two << 30)).to(tl.float32, bitcast=True)
