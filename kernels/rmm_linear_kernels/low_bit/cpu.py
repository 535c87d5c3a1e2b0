"""Low-bit storage on a CPU: few passes over tiles that stay in its cache.

Codes, steps and offsets have the layout and the meaning of the reference's. The arithmetic is in float32 (float64 for
float64), where the reference is exact: an error's mean is 0 up to 2**-15 of a step. torch's own generator draws the
dither.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import random
from ..philox.reference import ROUNDING_STREAM
from .reference import DITHER_BITS, LEVELS, MARGIN, SCALE_DTYPE, over, packed, packed_width, scales_of, unpacked

# Elements of a tile: two buffers of a tile are 1 MB of float32. Smaller tiles have more overhead of operations.
_TILE_ELEMENTS = 1 << 17


class _Tile(NamedTuple):
    """Rows that are rounded at a time: whole groups, or a part of one group.

    Attributes:
        rows: The rows of y.
        groups: The groups' numbers.
        size: Rows of each group in the tile.
    """

    rows: slice
    groups: slice
    size: int


def _tiles(rows: int, features: int, group: int) -> Iterator[_Tile]:
    """Cut the rows into tiles; a last group that is not full gets separate tiles."""
    most = max(1, _TILE_ELEMENTS // max(1, features))
    whole = rows // group * group
    if group <= most:
        step = most // group * group
        for top in range(0, whole, step):
            bottom = min(top + step, whole)
            yield _Tile(slice(top, bottom), slice(top // group, bottom // group), group)
        starts = [whole] if whole < rows else []
    else:
        starts = list(range(0, rows, group))
    for start in starts:
        for top in range(start, min(start + group, rows), most):
            bottom = min(top + most, start + group, rows)
            yield _Tile(slice(top, bottom), slice(start // group, start // group + 1), bottom - top)


def _extremes(y: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The least and the largest values of each group, (groups, features)."""
    whole = y.shape[0] // group * group
    parts = [y[:whole].unflatten(0, (-1, group))] if whole else []
    parts += [y[whole:].unsqueeze(0)] if whole < y.shape[0] else []
    low, high = ([extreme(part, 1) for part in parts] for extreme in (torch.amin, torch.amax))
    return (low[0], high[0]) if len(parts) == 1 else (torch.cat(low), torch.cat(high))


def _dither(seed: Tensor, rows: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The random parts of rows (rows, 1) and of columns (features,); u is the fractional part of their sum."""

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randint(1 << DITHER_BITS, (rows + features,), generator=generator, device="cpu")

    parts = random.for_each(seed, ROUNDING_STREAM, draw).to(dtype).mul_(2.0**-DITHER_BITS)
    # the midpoints of 2**15 intervals
    return parts[:rows].add_(2.0 ** -(DITHER_BITS + 1)).unsqueeze(1), parts[rows:]


def _uniform(dither: tuple[Tensor, Tensor], tile: _Tile) -> Tensor:
    """The tile's u, (groups, size, features)."""
    of_rows, of_columns = dither
    return (of_rows[tile.rows] + of_columns).frac_().unflatten(0, (-1, tile.size))


def quantize(y: Tensor, seed: Tensor, mean: Tensor | None, *, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to 8, 4 or 2 bits an element; see `reference.quantize`."""
    rows, features = y.shape
    codes = y.new_empty((rows, packed_width(features, kind)), dtype=torch.uint8)
    if y.numel() == 0:
        steps = y.new_empty(((rows + group - 1) // group, features), dtype=SCALE_DTYPE)
        return codes, steps, torch.empty_like(steps)
    compute = torch.float64 if y.dtype == torch.float64 else torch.float32
    mean = None if mean is None else mean.to(compute)
    low, high = (extreme.to(compute) for extreme in _extremes(y, group))
    # subtracting the mean from the extremes gives the bits of the centred values
    steps, offsets = scales_of(*((low, high) if mean is None else (low - mean, high - mean)), kind)
    # halves: the difference of 3e38 and -3e38 overflows
    over_half_step = over(steps.to(compute), 2.0).unsqueeze(1)
    minus_half_offset = offsets.to(compute).mul_(-0.5).unsqueeze(1)
    dither = _dither(seed, rows, features, compute)
    for tile in _tiles(rows, features, group):
        part = y[tile.rows].unflatten(0, (-1, tile.size))
        part = part.to(compute) if mean is None else part - mean
        value = torch.add(minus_half_offset[tile.groups], part, alpha=0.5)
        value.mul_(over_half_step[tile.groups]).add_(_uniform(dither, tile).add_(MARGIN))
        # through a second integer type, since torch's conversion from float to uint8 is not vectorised
        codes[tile.rows] = packed(value.to(torch.int16).to(torch.uint8).flatten(0, 1), kind)
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
    """Return the values of codes; see `reference.dequantize`."""
    rows = codes.shape[0]
    values = torch.empty((rows, features), dtype=dtype, device=codes.device)
    dither = _dither(seed, rows, features, torch.float32)
    # relative to the middle of code - u: otherwise the product with the step may overflow for a finite value
    middle = (LEVELS[kind] - 1) / 2
    step = steps.float().unsqueeze(1)
    offset = torch.add(offsets.float().unsqueeze(1), step, alpha=middle + 0.5 - MARGIN)
    for tile in _tiles(rows, features, group):
        code = unpacked(codes[tile.rows], features, kind).float().unflatten(0, (-1, tile.size))
        code.sub_(_uniform(dither, tile).add_(middle))
        values[tile.rows] = torch.addcmul(offset[tile.groups], code, step[tile.groups]).flatten(0, 1)
    return values
