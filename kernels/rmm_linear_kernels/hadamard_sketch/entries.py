"""The matrix that mixes a block, H[columns] diag(signs), made in registers.

Of orders that are powers of two, 64 entries of a row of H are two words of bits, a one for -1, and so are the signs of
64 rows of a block: an exclusive or of both is 64 entries of the matrix. One shift of a word then brings two bits, 16
apart, to where the signs of two half precision numbers are.

A block is therefore taken in two halves, whose rows are 16 apart as well: places 0 to 15 and 32 to 47, and 16 more.
Each half is multiplied by half of the matrix. Paley's matrices, of small inputs, are made an entry at a time.
"""

import triton
import triton.language as tl

from ..device_functions import spread
from ..philox.kernel import CHOICE_STREAM, SIGN_STREAM, random_word, sign_bit, words_of_counter
from . import reference


@triton.jit
def parity(bits):
    """The number of ones of each 32-bit number, modulo 2."""
    bits = bits ^ (bits >> 16)
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return bits & 1


@triton.jit
def _is_nonsquare(number, SQUARES: tl.constexpr):
    """1 where a number modulo the prime is no square: bit `number` of SQUARES is 1 for squares other than 0."""
    return 1 - ((tl.full(number.shape, SQUARES, tl.int64) >> number.to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def is_paley_negative(row, column, PRIME: tl.constexpr, SQUARES: tl.constexpr):
    """1 where the entry of Paley's matrix is -1: order PRIME + 1 if PRIME % 4 is 3, 2 (PRIME + 1) if it is 1."""
    if PRIME % 4 == 3:
        outside = _is_nonsquare((row - column + PRIME) % PRIME, SQUARES)
        outside = tl.where(column == 0, 1, outside)
        return tl.where((row == column) | (row == 0), 0, outside)
    i, j = row // 2, column // 2
    core = _is_nonsquare((i - j + PRIME) % PRIME, SQUARES)
    core = tl.where((i == 0) | (j == 0), 0, core)
    is_odd_row, is_odd_column = row % 2, column % 2
    # where the core is 0, on the diagonal, the entries are [[1, -1], [-1, -1]]; elsewhere [[c, c], [c, -c]]
    return tl.where(i == j, is_odd_row | is_odd_column, core ^ (is_odd_row & is_odd_column))


@triton.jit
def ranked_columns(seed, ORDER: tl.constexpr, ORDER_2: tl.constexpr, KEPT_2: tl.constexpr):
    """The rows of H in the order of their keys, for orders that are no power of 2; ORDER_2 and KEPT_2 are."""
    item = tl.arange(0, ORDER_2)
    key = random_word(seed, item, CHOICE_STREAM)
    mine, other = key[:, None], key[None, :]
    is_before = (other < mine) | ((other == mine) & (item[None, :] < item[:, None]))
    rank = tl.sum((is_before & (item[None, :] < ORDER)).to(tl.int32), axis=1)
    rank = tl.where(item < ORDER, rank, ORDER_2 + KEPT_2)
    place = tl.arange(0, KEPT_2)
    return tl.sum(tl.where(rank[None, :] == place[:, None], item[None, :], 0), axis=1)


@triton.jit
def half_places(CHUNK: tl.constexpr):
    """Places of the first half of CHUNK rows of a block, 32 or 64; those of the second half are 16 more."""
    index = tl.arange(0, CHUNK // 2)
    return (index & 15) | ((index & 16) << 1)


@triton.jit
def choice_word(seed):
    """The word that chooses the kept rows of H of all blocks."""
    word, _, _, _ = words_of_counter(seed, tl.full((), 0, tl.int32), CHOICE_STREAM)
    return word


@triton.jit
def sylvester_rows(word, combination, DEGREE: tl.constexpr, POLYNOMIAL: tl.constexpr):
    """The rows of H that combinations are: `reference.columns_of_words`, for powers of two."""
    power = 1 + ((word.to(tl.uint64) * ((1 << DEGREE) - 1)) >> 32).to(tl.int32)
    number = (combination * (combination + 1)) >> 1
    row = number * 0
    for bit in tl.static_range(DEGREE):
        row ^= power & -((number >> bit) & 1)
        power = (power << 1) ^ (-(power >> (DEGREE - 1)) & POLYNOMIAL)
    return row


@triton.jit
def sylvester_words(row):
    """The first 64 entries of rows of H, as two words of signs: bit j is the parity of row & j."""
    low = row.to(tl.uint32) * 0
    for bit in tl.static_range(5):
        # the numbers below 32 that have this bit
        low ^= (0xFFFFFFFF // ((1 << (1 << bit)) + 1) << (1 << bit)) & (-((row >> bit) & 1)).to(tl.uint32)
    return low, low ^ (-((row >> 5) & 1)).to(tl.uint32)


@triton.jit
def mixing_rows(seed, DEGREE: tl.constexpr, POLYNOMIAL: tl.constexpr, KEPT_2: tl.constexpr):
    """The kept rows of H, and their first 64 entries as words of signs: made by few threads, handed to the others."""
    row = sylvester_rows(choice_word(seed), tl.arange(0, KEPT_2), DEGREE, POLYNOMIAL)
    low, high = sylvester_words(row)
    return spread(row), spread(low), spread(high)


@triton.jit
def sign_words(seed, block, chunk, stride):
    """The signs of 64 rows of a block, the `chunk`th so many, as two words."""
    index = block * stride + chunk * 64
    first, second, third, fourth = words_of_counter(seed, index >> 7, SIGN_STREAM)
    is_second_half = ((index >> 6) & 1) == 1
    return tl.where(is_second_half, third, first), tl.where(is_second_half, fourth, second)


@triton.jit
def block_words(seed, row, low, high, block, chunk, stride, DEGREE: tl.constexpr):
    """H[columns] diag(signs) at 64 places of a block, the `chunk`th so many: two words of signs a row."""
    sign_low, sign_high = sign_words(seed, block, chunk, stride)
    if DEGREE > 6:
        flipped = (-parity((row >> 6) & chunk)).to(tl.uint32)
        sign_low, sign_high = sign_low ^ flipped, sign_high ^ flipped
    return low ^ sign_low, high ^ sign_high


@triton.jit
def entries_of(low, high, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The +-1 that words of signs stand for, of both halves."""
    index = tl.arange(0, CHUNK // 2)
    word = tl.where((index < 16)[None, :], low[:, None], high[:, None])
    place = (index & 15).to(tl.uint32)[None, :]
    if DTYPE == tl.float32:
        first = 1.0 - 2.0 * ((word >> place) & 1).to(tl.float32)
        second = 1.0 - 2.0 * ((word >> (place + 16)) & 1).to(tl.float32)
    else:
        ONES: tl.constexpr = 0x3F803F80 if DTYPE == tl.bfloat16 else 0x3C003C00
        both = ((word << (15 - place)) & 0x80008000) | ONES
        first = both.to(tl.uint16).to(DTYPE, bitcast=True)
        second = (both >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return first, second


@triton.jit
def _paley_half(seed, row, block, place, PRIME: tl.constexpr, SQUARES: tl.constexpr, DTYPE: tl.constexpr):
    base: tl.constexpr = PRIME + 1 if PRIME % 4 == 3 else 2 * (PRIME + 1)
    negative = parity((row // base)[:, None] & (place // base)[None, :])
    negative ^= is_paley_negative((row % base)[:, None], (place % base)[None, :], PRIME, SQUARES)
    sign = sign_bit(seed, block * 64 + place, SIGN_STREAM).to(tl.int32)
    return (1 - 2 * (negative ^ sign[None, :])).to(DTYPE)


@triton.jit
def paley_entries(
    seed, row, block, PRIME: tl.constexpr, SQUARES: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr
):
    """H[columns] diag(signs) of both halves for an order with a factor of Paley's: blocks of less than 64 rows."""
    place = half_places(CHUNK)
    return (
        _paley_half(seed, row, block, place, PRIME, SQUARES, DTYPE),
        _paley_half(seed, row, block, place + 16, PRIME, SQUARES, DTYPE),
    )


@triton.jit
def _lowest_bits(count):
    """A word of so many ones, uint32: none for what is negative, 32 at most."""
    ones = (tl.full(count.shape, 1, tl.uint32) << tl.minimum(tl.maximum(count, 0), 31).to(tl.uint32)) - 1
    return tl.where(count >= 32, tl.full(count.shape, 0xFFFFFFFF, tl.uint32), ones)


@triton.jit
def _count(bits):
    """How many bits of a word are 1, int32: compilers know this pattern."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def sum_of_signs(low, high, present):
    """The sum of the first `present` of 64 signs, int32; 1 of the two words stands for -1."""
    return present - 2 * (_count(low & _lowest_bits(present)) + _count(high & _lowest_bits(present - 32)))


@triton.jit
def _sums_of_half(entries, place, present, DTYPE: tl.constexpr):
    # by the tensor cores, with 16 equal columns: sums along a row would be many shuffles
    is_row = tl.where((place < present)[:, None] & (tl.arange(0, 16) >= 0)[None, :], 1.0, 0.0).to(DTYPE)
    return tl.sum(tl.dot(entries, is_row), axis=1) * 0.0625


@triton.jit
def sums_of_entries(first, second, present, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Sums of the rows of both halves' entries at the first `present` places, float32: S^T 1, unscaled."""
    place = half_places(CHUNK)
    return _sums_of_half(first, place, present, DTYPE) + _sums_of_half(second, place + 16, present, DTYPE)


def matrix_constants(order: int) -> dict[str, int]:
    """Return the constants of a kernel that say which Hadamard matrix it makes.

    Args:
        order: A value of `reference.hadamard_order`.

    Returns:
        ORDER, ORDER_2, DEGREE, POLYNOMIAL, PRIME and SQUARES.
    """
    prime = reference.paley_prime(order)
    degree = order.bit_length() - 1
    return {
        "ORDER": order,
        "ORDER_2": triton.next_power_of_2(order),
        "DEGREE": degree,
        "POLYNOMIAL": reference.POLYNOMIALS[degree],
        "PRIME": prime,
        "SQUARES": sum(1 << square for square in {number * number % prime for number in range(1, prime)}),
    }
