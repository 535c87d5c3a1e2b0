"""Low-bit storage in plain torch: dithered rounding, unbiased element by element.

Each column of y is cut into groups of neighbouring rows, and each group has its own step and offset:

    y ~ offset + step * (code + 1/2 - u),  code = floor((y - offset) / step + u), about

with u uniform on (0, 1). This is subtractive dither (Roberts 1962, Schuchman 1964): u is drawn again from the seed when
the code is read, and subtracted. The error is then uniform on +-step / 2 for any y: unbiased, with variance
step^2 / 12. Stochastic rounding to the same code without the subtraction has variance step^2 f (1 - f), with f the
rounded-off part: twice as much on average.

Groups are parts of columns because the columns of activations differ in size and mean far more than the rows (a few
features of a Transformer are a hundred times larger than the others).

Steps and offsets are kept in bfloat16, rounded outwards, so that no element is out of range: clipping would be a bias.
In a group with NaN or an infinity the step is not finite, and the codes have no meaning. Values beyond 3.4e38 less half
a step become infinity or NaN.

u = (d + 1/2) / 2**15 with d = a_row + b_column mod 2**15, of 15 random bits each, from the Philox stream
`ROUNDING_STREAM`: the u of any two elements are independent, as the variance requires, and only rows + columns random
numbers are drawn instead of rows times columns.

In exact bits: with v the multiple of 2**-15 next to (y - offset) / step + 2**-12, code = floor(v + d / 2**15), whose
value is offset + step * (code - d / 2**15 + 1/2 - 2**-16 - 2**-12). So the code and the rounded-off part are the upper
and the lower bits of one sum of integers; for v, the error's mean is exactly 0. The margin of 2**-12, with the same
margin at the upper end, covers rounding errors of the arithmetic.

A row's codes are a string of bits: the code of column j begins at bit bits * j, counted from the lowest bit of the
first byte. The row ends with the byte of its last code, padded with 0 bits. A byte holds two columns of int4 or four of
int2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..philox.reference import ROUNDING_STREAM, random_halves

SCALE_DTYPE = torch.bfloat16
# Elements that are cast at a time.
_SLAB_ELEMENTS = 1 << 20
# kind -> bits an element
BITS = {"int8": 8, "int4": 4, "int2": 2}
# kind -> number of steps between the lowest and the highest code
LEVELS = {kind: 2**bits - 1 for kind, bits in BITS.items()}
# kind -> a word with one code in each byte, and the steps that gather the codes in its lowest bits: shifts to the
# right, with the masks of the codes before and after each shift.
_FOLDS = {
    "int4": (torch.int16, ((4, 0x0F0F, 0x00FF),)),
    "int2": (torch.int32, ((6, 0x03030303, 0x000F000F), (12, 0x000F000F, 0x000000FF))),
}
# Random bits of the dither.
DITHER_BITS = 15
# The margin at both ends of the codes, in steps.
MARGIN = 2.0**-12
# The term that is added to code - d / 2**15, so that the error's mean is 0.
CENTRE = 0.5 - 2.0**-16 - MARGIN
# Least step but 0: the inverse of half of this step is finite in float32.
LEAST_STEP = 2.0**-126


def _rounded(value: Tensor, *, up: bool) -> Tensor:
    """Round to the dtype of the scales, upwards or downwards."""
    near = value.to(SCALE_DTYPE)
    wrong = near.to(value.dtype) < value if up else near.to(value.dtype) > value
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, torch.inf if up else -torch.inf)), near)


def scales_of(low: Tensor, high: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return steps and offsets, bfloat16, of groups with these least and largest values."""
    offset = _rounded(low, up=False)
    # halves: the difference of 3e38 and -3e38 overflows
    spread = high * 0.5 - offset.to(low.dtype) * 0.5
    # the step over half of the extent is 2 / (number of steps - margins)
    step = _rounded(spread * (2 / (LEVELS[kind] - 2 * MARGIN)), up=True)
    return torch.where(step > 0, step.clamp(min=LEAST_STEP), step), offset


def over(step: Tensor, numerator: float) -> Tensor:
    """Return numerator / step, and 0 for a step of 0: in a group of equal elements, each value is the offset."""
    return torch.where(step == 0, 0.0, numerator / step)


def _codes(group: Tensor, step: Tensor, offset: Tensor, dither: Tensor) -> Tensor:
    """The codes of (..., rows, features)."""
    step, offset = step.to(group.dtype).unsqueeze(-2), offset.to(group.dtype).unsqueeze(-2)
    halves = (group * 0.5 - offset * 0.5).double()
    # rounded once: a product of two float32 numbers is a float64 number
    value = halves * over(step, 2.0).double() + MARGIN
    grid = (value * (1 << DITHER_BITS)).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int32)
    return ((grid + dither) >> DITHER_BITS).to(torch.uint8)


def _dither(seed: Tensor, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """The random parts of rows (..., rows, 1) and of columns (..., 1, features), int32, in the lowest 15 bits."""
    halves = random_halves(seed, rows + features, stream=ROUNDING_STREAM).int()
    return halves[..., :rows].unsqueeze(-1), halves[..., rows:].unsqueeze(-2)


def _sum_of(of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """The dither d from its parts, in [0, 2**15)."""
    return (of_rows + of_columns) & ((1 << DITHER_BITS) - 1)


def packed_width(features: int, kind: str) -> int:
    """Return the bytes that the codes of one row take: ceil(features * bits / 8)."""
    return (features * BITS[kind] + 7) // 8


def _slabs(rows: int, group: int, features: int) -> Iterator[tuple[int, int, int]]:
    """Cut rows into slabs of whole groups; the last, ragged group is a slab of its own.

    A float32 copy of all of y would exceed the saving; a slab for each group would take many small operations.
    """
    step = max(1, _SLAB_ELEMENTS // max(1, group * features)) * group
    whole = rows // group * group
    for start in range(0, whole, step):
        yield start, min(start + step, whole), group
    if whole < rows:
        yield whole, rows, rows - whole


def _scaled_slabs(
    y: Tensor, mean: Tensor | None, kind: str, group: int
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Rows of slabs, their y - 1 mean^T of shape (..., groups, rows of a group, features), steps, and offsets."""
    compute = torch.float64 if y.dtype == torch.float64 else torch.float32
    for start, end, size in _slabs(y.shape[-2], group, y.shape[-1]):
        part = y[..., start:end, :].to(compute)
        part = (part if mean is None else part - mean.to(compute)).unflatten(-2, (-1, size))
        yield start, end, part, *scales_of(part.amin(-2), part.amax(-2), kind)


def packed(codes: Tensor, kind: str) -> Tensor:
    """Pack codes that are given one per byte, shape (..., features), in the layout of the module's docstring."""
    if kind not in _FOLDS:
        return codes
    width = packed_width(codes.shape[-1], kind)
    word, folds = _FOLDS[kind]
    words = _as_words(codes, word)
    for shift, _, after in folds:
        # move the codes of one half of a word next to those of the other half
        words = ((words >> shift) | words).bitwise_and_(after)
    return words.unsqueeze(-1).view(torch.uint8)[..., : BITS[kind] * word.itemsize // 8].flatten(-2)[..., :width]


def unpacked(codes: Tensor, features: int, kind: str) -> Tensor:
    """Return packed codes one per byte, shape (..., features), uint8."""
    if kind not in _FOLDS:
        return codes
    word, folds = _FOLDS[kind]
    size = BITS[kind] * word.itemsize // 8
    in_bytes = _padded(codes, size)
    words = _as_words(in_bytes.unflatten(-1, (in_bytes.shape[-1] // size, size)), word).squeeze(-1)
    for shift, before, _ in reversed(folds):
        words = ((words << shift) | words).bitwise_and_(before)
    return words.view(torch.uint8)[..., :features]


def _as_words(values: Tensor, word: torch.dtype) -> Tensor:
    """Bytes as words, with zeros at the end of the last word."""
    values = _padded(values, word.itemsize)
    # contiguous first: a dimension of size 0 or 1 may have any stride
    return values.flatten().view(word).view(*values.shape[:-1], values.shape[-1] // word.itemsize)


def _padded(values: Tensor, multiple: int) -> Tensor:
    """The values, with zeros in the last dimension up to a multiple."""
    missing = -values.shape[-1] % multiple
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def quantize(y: Tensor, seed: Tensor, mean: Tensor | None, *, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to 8, 4 or 2 bits an element, stochastically and without bias.

    Args:
        y: Shape (..., rows, features), any float dtype; NaN and infinities leave no finite value in their group.
        seed: 64-bit seeds, shape (...,), int64, for the leading dimensions of `y`.
        mean: Shape (features,), subtracted from every row, or None.
        kind: "int8", "int4" or "int2".
        group: Rows of a column that share a step and an offset.

    Returns:
        Codes (..., rows, ceil(features * bits / 8)), uint8, in the layout of the module's docstring. Steps
        (..., groups, features), bfloat16. Offsets of the same shape and dtype.
    """
    *batch, rows, features = y.shape
    codes = y.new_empty((*batch, rows, packed_width(features, kind)), dtype=torch.uint8)
    steps = y.new_empty((*batch, (rows + group - 1) // group, features), dtype=SCALE_DTYPE)
    offsets = torch.empty_like(steps)
    of_rows, of_columns = _dither(seed, rows, features)
    for start, end, part, step, offset in _scaled_slabs(y, mean, kind, group):
        dither = _sum_of(of_rows[..., start:end, :], of_columns).unflatten(-2, (-1, part.shape[-2]))
        codes[..., start:end, :] = packed(_codes(part, step, offset, dither), kind).flatten(-3, -2)
        numbers = slice(start // group, -(-end // group))
        steps[..., numbers, :], offsets[..., numbers, :] = step, offset
    return codes, steps, offsets


def dequantize(
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    *,
    kind: str,
    group: int,
    features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values that the codes stand for.

    Args:
        codes: As `quantize` returns them.
        steps: As `quantize` returns them.
        offsets: As `quantize` returns them.
        seed: The seeds that `quantize` was given.
        kind: "int8", "int4" or "int2".
        group: Rows that share a step.
        features: Columns of y.
        dtype: Dtype of the result; the arithmetic is in float32.

    Returns:
        Shape (..., rows, features).
    """
    rows = codes.shape[-2]
    values = torch.empty((*codes.shape[:-1], features), dtype=torch.float32, device=codes.device)
    of_rows, of_columns = _dither(seed, rows, features)
    for start, end, size in _slabs(rows, group, features):
        part = codes[..., start:end, :]
        numbers = slice(start // group, -(-end // group))
        step = steps[..., numbers, :].float().unsqueeze(-2)
        part = unpacked(part, features, kind).float()
        dither = _sum_of(of_rows[..., start:end, :], of_columns)
        part = part.sub_(dither.to(torch.float32).mul_(2.0**-DITHER_BITS)).unflatten(-2, (-1, size))
        offset = offsets[..., numbers, :].float().unsqueeze(-2) + step * CENTRE
        # rounded once: a code times a step may overflow for a finite value
        part = part.double().mul_(step).add_(offset)
        values[..., start:end, :] = part.flatten(-3, -2)
    return values.to(dtype)


def rounding_variance(y: Tensor, mean: Tensor | None, *, kind: str, group: int) -> Tensor:
    """Return the variance of each element of the dequantized y - 1 mean^T: step^2 / 12.

    Args:
        y: Shape (..., rows, features), any float dtype.
        mean: Shape (features,), or None.
        kind: "int8", "int4" or "int2".
        group: Rows that share a step.

    Returns:
        Shape (..., rows, features), float64.
    """
    variance = torch.empty(y.shape, dtype=torch.float64, device=y.device)
    for start, end, part, step, _ in _scaled_slabs(y, mean, kind, group):
        elements = (step.double().square() / 12).unsqueeze(-2).expand(part.shape)
        variance[..., start:end, :] = elements.flatten(-3, -2)
    return variance
