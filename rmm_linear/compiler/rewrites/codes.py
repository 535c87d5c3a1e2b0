"""Codes: a tensor in 8 or 4 bits, from which it is read without bias.

A code of x holds floor(x / s + u), with u uniform in [-1/2, 1/2] and drawn anew in each step (subtractive dither). The
reading (code + 1/2 - u) s has the mean x and the variance s^2 / 12, for magnitudes from 1e-20 to 1e19. The step s is of
one column of a group of rows. The dither is a hash of the element's number and of a key, so that both passes compute
it, and nothing of it is kept but the key.

All functions are of plain tensor ops, which Inductor fuses with the ops around them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of a column that share a step.
_GROUP = 128
# Steps are of columns that are not zero, and a quotient of two float32 numbers must stay within its range.
_LEAST, _MARGIN = 1e-30, 1 + 1e-6
# Multipliers of hashes of 32 bits with a small bias (Wellons, "hash function prospector"), as signed numbers.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x21F0AAAD, 0x735A2D97)
_GOLDEN, _MASK = 0x9E3779B9, 0xFFFFFFFF


@dataclass(frozen=True)
class Layout:
    """How a tensor is laid out for its code: groups of rows of equally many columns.

    Each group has `group` rows, an even number; the last group may end with copies of the last row.
    """

    rows: int
    columns: int
    groups: int
    group: int

    @classmethod
    def of(cls, rows: int, columns: int) -> "Layout":
        """Divide rows into groups as equal as can be."""
        groups = max(1, -(-rows // _GROUP))
        group = max(1, -(-rows // groups))
        return cls(rows, columns, groups, group + group % 2)

    def code_bytes(self, bits: int) -> int:
        """Bytes of a code and its steps."""
        size = self.groups * self.columns
        return size * self.group * bits // 8 + 4 * size

    def in_groups(self, x: Tensor) -> Tensor:
        """Lay a tensor of (rows, columns) out as (groups, group, columns)."""
        count = self.groups * self.group
        if count > self.rows:
            # of a padded tensor, Inductor would compute each element anew wherever it is used
            rows = torch.arange(count, device=x.device).clamp_max(self.rows - 1)
            x = x[rows] if self.rows else x.new_zeros(count, self.columns)
        return x.reshape(self.groups, self.group, self.columns)

    def in_rows(self, grouped: Tensor) -> Tensor:
        """Lay (groups, group or 1, columns) out as (rows, columns)."""
        x = grouped.expand(self.groups, self.group, self.columns)
        x = x.reshape(self.groups * self.group, self.columns)
        return x if x.shape[0] == self.rows else x[: self.rows]


def encode(x: Tensor, key: Tensor, layout: Layout, *, bits: int) -> tuple[Tensor, Tensor]:
    """Code a tensor of shape (rows, columns), of any float dtype, in 8 or 4 bits.

    The key is a row of `draw_keys`, on the device of x: each code has its own.

    Returns:
        The code, uint8 of shape (groups, group * bits / 8, columns), and its steps, float32 of shape (groups, 1,
        columns).
    """
    x = layout.in_groups(x)
    half = _half_range(bits)
    steps = _steps(x.abs().amax(1, keepdim=True).to(torch.float32), half)
    parts = zip(in_parts(x, bits), in_parts(dither(x.shape, key), bits), strict=True)
    return pack([_rounded(part, steps, drawn, half) for part, drawn in parts], bits), steps


def decode(code: Tensor, steps: Tensor, key: Tensor, layout: Layout, *, bits: int) -> Tensor:
    """Read a code: the tensor, (rows, columns) in float32, with errors that are independent of it."""
    numbers = unpack(code, bits).to(torch.float32) - _half_range(bits)
    return layout.in_rows((numbers - dither(numbers.shape, key)) * steps)


def error_variance(steps: Tensor, layout: Layout) -> Tensor:
    """Variance of each element that is read from a code, shape (rows, columns)."""
    return layout.in_rows(steps * steps * (1 / 12))


def curved(x: Tensor, cube: float) -> Tensor:
    """Solve v + cube v^3 = x for v: equal steps of v are small steps of x near zero, and large steps far away.

    The error is below 1e-6 / cube^0.5, for x up to 4 / cube^0.5 in magnitude.
    """
    if not cube:
        return x
    root = cube**0.5
    y = x * root
    square = y * y
    v = y * (1 + 0.568 * square) / (1 + (1.266 + 0.032 * square) * square)
    # steps of Newton's method from a guess that is 0.011 off at most
    for _ in range(2):
        v = (2 * v * v * v + y) / (3 * v * v + 1)
    return v * (1 / root)


def straight(v: Tensor, cube: float) -> Tensor:
    """Undo `curved`."""
    return v + v * v * v * cube if cube else v


def encode_with_tail(
    x: Tensor, key: Tensor, layout: Layout, *, bits: int, tail: float, cube: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Code a tensor cut at +-tail, and its excess above tail in one more symbol: so no outlier makes steps larger.

    The excess is rounded at random to 0 or to the largest excess of its column and group, without bias. Elements that
    have an excess are at the cut, whose number is the highest or the second highest: a number two higher marks the
    excess. A column that has an element that is not finite is read as NaN. The tail is at least 1e-3, and of the cut
    tensor, `curved` is coded.

    Returns:
        The code and the steps, as `encode` returns them; the largest excesses, shaped as the steps.
    """
    x = layout.in_groups(x)
    half = _half_range(bits) - 1
    greatest, least = (each(1, keepdim=True).to(torch.float32) for each in (x.amax, x.amin))
    most = greatest.clamp_min(tail) - tail
    steps = _steps(torch.maximum(greatest, -least), half, tail, cube)
    numbers = []
    for part, drawn in zip(in_parts(x.to(torch.float32), bits), in_parts(dither(x.shape, key), bits), strict=True):
        within = _rounded(curved(part.clamp(-tail, tail), cube), steps, drawn, half)
        # one draw for both: their errors have opposite signs, and each has the mean 0
        has_excess = part.clamp_min(tail) - tail > (0.5 - drawn) * most
        numbers.append(within + torch.where(has_excess, 2.0, 0.0))
    return pack(numbers, bits), steps, most


def largest_step(bits: int, tail: float, cube: float) -> float:
    """Return the largest step that a code with a tail can have."""
    return curved(torch.tensor(tail, dtype=torch.float64), cube).item() * _MARGIN / (_half_range(bits) - 1)


def decode_with_tail(
    code: Tensor, steps: Tensor, most: Tensor, key: Tensor, layout: Layout, *, bits: int
) -> tuple[Tensor, Tensor]:
    """Read a code of `encode_with_tail`: the tensor as it was cut, and `curved`; and the excess.

    Both are of shape (rows, columns), float32.
    """
    numbers = unpack(code, bits).to(torch.float32)
    half = _half_range(bits) - 1
    has_excess = numbers > 2 * half
    within = (numbers - torch.where(has_excess, 2.0 + half, half) - dither(numbers.shape, key)) * steps
    return layout.in_rows(within), layout.in_rows(torch.where(has_excess, most, 0.0))


def in_parts(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Divide (groups, group, columns) into as many parts of the rows as numbers of so many bits share a byte."""
    count = 8 // bits
    parts = x.view(x.shape[0], count, x.shape[1] // count, x.shape[2])
    return tuple(parts[:, place] for place in range(count))


def pack(parts: Sequence[Tensor], bits: int) -> Tensor:
    """Put whole numbers of so many bits into bytes, uint8 of the shape of a part.

    Inductor computes the parts in the loop that packs them; of a tensor that is divided after its numbers are
    computed, it writes the numbers first.
    """
    packed = parts[0].to(torch.uint8)
    for place, part in enumerate(parts[1:], 1):
        packed = packed | (part.to(torch.uint8) << (bits * place))
    return packed


def unpack(code: Tensor, bits: int) -> Tensor:
    """Undo `pack`, to uint8 of shape (groups, group, columns)."""
    count = 8 // bits
    if count == 1:
        return code
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=code.device).view(1, count, 1, 1)
    return ((code.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).flatten(1, 2)


def draw_keys(seed: Tensor, count: int) -> Tensor:
    """Make keys of dithers, which are independent of each other: int32, shape (count, 2), of a 0-d int64 seed."""
    numbers = torch.arange(count, device=seed.device)
    # a seed is mixed first: seeds nearby have no key in common
    first = _mixed(_mixed(seed) ^ numbers)
    # of both halves: seeds that have one half in common would otherwise share it
    second = _mixed(_mixed((seed >> 32) + first) ^ first)
    return torch.stack([first, second], 1).to(torch.int32)


def dither(shape: tuple[int, ...], key: Tensor) -> Tensor:
    """Draw float32 numbers that are uniform in [-1/2, 1/2].

    The number of the element is mixed with one part of the key, a row of `draw_keys`, before a hash, and with the other
    one within it: two keys give two permutations, of which neither is the other one in another order.
    """
    first, second = key[0], key[1]
    columns, rows = shape[-1], math.prod(shape[:-1])
    # Inductor computes the part of the column once. Without ^, elements equally far apart would be correlated.
    begin = (torch.arange(rows, dtype=torch.int32, device=key.device) * columns).view(*shape[:-1], 1)
    bits = (begin + (torch.arange(columns, dtype=torch.int32, device=key.device) + first)) ^ second
    bits = _xorshift(bits * _MULTIPLIERS[2], 15) * _MULTIPLIERS[3] + second
    return (_xorshift(bits, 16) * _MULTIPLIERS[0]).to(torch.float32) * 2.0**-32


def _mixed(half: Tensor) -> Tensor:
    # 32 bits in int64, whose products with multipliers below 2^31 do not overflow
    key = (half & _MASK) + _GOLDEN
    for multiplier in (_MULTIPLIERS[0], _MULTIPLIERS[2]):
        key = (((key & _MASK) ^ ((key & _MASK) >> 16)) * multiplier) & _MASK
    return key ^ (key >> 15)


def _xorshift(bits: Tensor, by: int) -> Tensor:
    # a shift of a signed number fills up with its sign
    return bits ^ ((bits >> by) & ((1 << (32 - by)) - 1))


def _rounded(x: Tensor, steps: Tensor, drawn: Tensor, half: float) -> Tensor:
    """Numbers from 0 to 2 * half."""
    numbers = torch.floor(x.to(torch.float32) * (1 / steps) + drawn) + (half + 0.5)
    # Inductor leaves out a cast between two ops that it fuses: an element may exceed the largest element by the
    # rounding of its dtype
    return numbers.clamp(0, 2 * half)


def _half_range(bits: int) -> float:
    return ((1 << bits) - 1) / 2


def _steps(magnitude: Tensor, half: float, tail: float | None = None, cube: float = 0.0) -> Tensor:
    # a column with an element that is not finite is read as NaN: infinity less infinity is none
    magnitude = magnitude + (magnitude - magnitude)
    return curved(magnitude.clamp(_LEAST, tail), cube) * (_MARGIN / half)
