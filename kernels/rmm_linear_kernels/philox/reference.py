"""Philox 4x32-10 in plain torch, bit-equal to `tl.randint4x` (Salmon et al. 2011, "Parallel random numbers").

A counter-based generator has no state: the words of stream `stream` are a pure function of a 64-bit seed and the
index, so forward and backward, every block of a kernel, and a kernel and its reference agree on S without storing it.
(A CPU draws by torch's generator: `rmm_linear_kernels.random`.)

    word w of a stream  =  output w % 4 of Philox(key = seed, counter = (w // 4, stream, 0, 0))
                        =  lane w % 4 of tl.randint4x(seed, stream << 32 | w // 4)

The layout of the streams is a versioned promise: the same version and the same seed give the same S.
Words are held in int64 tensors with values in [0, 2**32), since torch has no complete uint32 arithmetic.
"""

import math

import torch
from torch import Tensor

# One stream for each purpose, so that no two draws of a sketch share bits.
SIGN_STREAM = 0
CHOICE_STREAM = 1
PROJECTION_STREAM = 2
ROUNDING_STREAM = 3

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
# Multipliers and key increments in the order (lane c0, lane c2) and (k0, k1).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def randint4x(seed: Tensor, offset: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the four 32-bit words of each Philox counter, as `tl.randint4x` does.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        offset: Counters, shape (count,), int64; the low and high 32 bits are the counter's first two words.
        other: The counter's third word, shape (count,), int64 in [0, 2**32), or None for 0, as in `tl.randint4x`.

    Returns:
        Words in [0, 2**32), shape (4, ..., count), int64.
    """
    key = torch.stack((seed & _MASK32, (seed >> 32) & _MASK32)).unsqueeze(-1)  # (2, ..., 1): k0, k1
    lanes_shape = (2, *seed.shape, offset.numel())
    column = (2,) + (1,) * (seed.dim() + 1)
    multipliers = _pair(_MULTIPLIERS, seed.device).view(column)
    increments = _pair(_KEY_INCREMENTS, seed.device).view(column)
    rounds = torch.arange(_ROUNDS, device=seed.device).view(_ROUNDS, *(1 for _ in column))
    keys = (key + rounds * increments).bitwise_and_(_MASK32)  # (rounds, 2, ..., 1)
    zero = torch.zeros_like(offset)
    third = zero if other is None else other
    # The two multiplied lanes (c0, c2) and the two other lanes (c1, c3) are pairs in one tensor: half the torch calls.
    even = torch.stack((offset & _MASK32, third)).view(2, *((1,) * seed.dim()), -1).expand(lanes_shape)
    odd = torch.stack(((offset >> 32) & _MASK32, zero)).view(2, *((1,) * seed.dim()), -1).expand(lanes_shape)
    for key in keys.unbind(0):
        # The product of two 32-bit words wraps in int64, but all of its 64 bits are right; the mask undoes the sign.
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_and_(_MASK32).bitwise_xor_(odd).bitwise_xor_(key)
        odd = product.bitwise_and_(_MASK32)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def cell_counters(first: int, groups: int, columns: int, *, stream: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the counters of the cells of a matrix of any size, one for each cell.

    Cell (group, column) has the counter (group + column, stream, group, 0), the sum modulo 2**32. (With the column
    alone in the first word, the compiler would keep the first round's results in too many registers.)

    Args:
        first: First group of rows, all groups being below 2**32.
        groups: Number of groups.
        columns: Number of columns, at most 2**32.
        stream: The stream's number, in [0, 2**32).
        device: Device of the result.

    Returns:
        The `offset` and `other` of `randint4x` for all cells, row by row: two vectors.
    """
    group = torch.arange(first, first + groups, device=device).unsqueeze(1)
    sums = (group + torch.arange(columns, device=device)) & _MASK32
    return (sums + (stream << 32)).flatten(), group.expand_as(sums).flatten()


def _pair(values: tuple[int, int], device: torch.device) -> Tensor:
    """Two constants, computed on the device: a copy from the host would make a CUDA stream wait."""
    return torch.arange(2, device=device) * (values[1] - values[0]) + values[0]


def random_words(seed: Tensor, count: int, *, stream: int) -> Tensor:
    """Return the first `count` 32-bit words of a stream.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        count: Number of words a seed.
        stream: Which stream to read, in [0, 2**32).

    Returns:
        Words in [0, 2**32), shape (..., count), int64.
    """
    offset = torch.arange(math.ceil(count / 4), device=seed.device) + (stream << 32)
    return _in_order(randint4x(seed, offset))[..., :count]


def _in_order(words: Tensor) -> Tensor:
    """(4, ..., counters) to (..., 4 * counters), with the four words of each counter together."""
    return words.movedim(0, -1).flatten(-2)


def signs_and_keys(seed: Tensor, signs: int, keys: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `random_signs` and the keys of `choose_without_replacement` from one pass over the counters.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        signs: Number of signs a seed.
        keys: Number of keys a seed.
        dtype: Floating dtype of the signs.

    Returns:
        Signs (..., signs) and keys (..., keys), int64.
    """
    sign_counters, key_counters = math.ceil(signs / 128), math.ceil(keys / 4)
    offset = torch.arange(sign_counters + key_counters, device=seed.device)
    offset[sign_counters:] += (CHOICE_STREAM << 32) - sign_counters
    words = _in_order(randint4x(seed, offset))
    return _signs(words[..., : 4 * sign_counters], signs, dtype), words[..., 4 * sign_counters :][..., :keys]


def _signs(words: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device)) & 1
    return (1 - 2 * bits.flatten(-2)[..., :count]).to(dtype)


def random_signs(seed: Tensor, count: int, *, dtype: torch.dtype) -> Tensor:
    """Return independent fair signs, 32 to a word and 128 to a counter, least significant bit first.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        count: Number of signs a seed.
        dtype: Floating dtype of the result.

    Returns:
        Entries +1 (bit 0) and -1 (bit 1), shape (..., count).
    """
    return _signs(random_words(seed, math.ceil(count / 32), stream=SIGN_STREAM), count, dtype)


def randn4x(seed: Tensor, offset: Tensor, other: Tensor | None = None) -> Tensor:
    """Return four independent standard normals of each counter by Box-Muller, as `tl.randn4x` does (up to rounding).

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        offset: Counters, shape (count,), int64, as in `randint4x`.
        other: As in `randint4x`.

    Returns:
        Normals, shape (4, ..., count), float32.
    """
    words = randint4x(seed, offset, other)
    # Triton folds the sign bit: u = (w < 2**31 ? w : ~w) * 2**-31, slightly less than 1 at most.
    words = torch.where(words >= 1 << 31, words.bitwise_xor(_MASK32), words)
    uniform = words.to(torch.float32).mul_(4.6566127342e-10)
    radius = uniform[::2].clamp_(min=1e-7).log_().mul_(-2.0).sqrt_()
    angle = uniform[1::2].mul_(6.283185307179586)
    return torch.stack((angle.cos(), angle.sin()), 1).mul_(radius.unsqueeze(1)).flatten(0, 1)


def choose_without_replacement(seed: Tensor, population: int, chosen: int) -> Tensor:
    """Choose `chosen` of `population` items, every subset equally likely, without a host synchronisation.

    Each item gets a random 32-bit key, and the items with the smallest keys are chosen. Two equal keys (probability
    below population**2 / 2**33) are ordered by the item's number.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        population: Number of items.
        chosen: Number of items to choose, at most `population`.

    Returns:
        Item numbers, shape (..., chosen), int64, in random order.
    """
    return smallest_keys(random_words(seed, population, stream=CHOICE_STREAM), chosen)


def smallest_keys(keys: Tensor, chosen: int) -> Tensor:
    """Return the positions of the `chosen` smallest keys, the earlier of two equal keys first.

    Args:
        keys: Shape (..., population), int64.
        chosen: Number of positions, at most the population.

    Returns:
        Positions, shape (..., chosen), int64.
    """
    return torch.argsort(keys, dim=-1, stable=True)[..., :chosen]


def random_halves(seed: Tensor, count: int, *, stream: int) -> Tensor:
    """Return the first 16-bit numbers of a stream, two to a word and eight to a counter, the low half first.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        count: Number of 16-bit numbers a seed.
        stream: The stream's number.

    Returns:
        Numbers in [0, 2**16), shape (..., count), int64.
    """
    words = random_words(seed, math.ceil(count / 2), stream=stream)
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-2)[..., :count]


def random_fractions(seed: Tensor, count: int) -> Tensor:
    """Return independent uniforms with 53 random bits each.

    Args:
        seed: 64-bit seeds, shape (...,), int64.
        count: Number of uniforms a seed.

    Returns:
        Multiples of 2**-53 in [0, 1), shape (..., count), float64.
    """
    words = random_words(seed, 2 * count, stream=CHOICE_STREAM)
    high, low = words.unflatten(-1, (-1, 2)).unbind(-1)
    return (((high >> 5) << 26) | (low >> 6)).to(torch.float64) * 2.0**-53
