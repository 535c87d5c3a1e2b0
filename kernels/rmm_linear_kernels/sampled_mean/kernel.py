"""About the mean of all rows on a GPU, in one launch: a program takes some columns of all the rows that are read."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import empty
from ..device_functions import row_begins
from ..launching import Constants, ceil_div, launch
from ..strides import rows_of
from . import reference

# The constants of the reference, as a kernel may see them.
_SAMPLE = tl.constexpr(reference.SAMPLE)
_GROUPS = tl.constexpr(reference.GROUPS)
_PLACE_BITS = tl.constexpr(reference.PLACE_BITS)
_SHIFT = tl.constexpr(reference.PLACE_BITS + reference.SAMPLE.bit_length() - 1)
# Columns of a program: 32 bytes of half precision, the least that memory gives, so that there are many programs.
_COLUMNS = 16
_WARPS = 4


@triton.jit
def _sampled_row(part, rows):
    """See `reference.sampled_rows`."""
    word = (part + 1).to(tl.uint32)
    word = (word ^ (word >> 16)) * 0xD2511F53
    word = (word ^ (word >> 13)) * 0xCD9E8D57
    place = ((word ^ (word >> 16)) >> (32 - _PLACE_BITS)).to(tl.int64)
    return (((part.to(tl.int64) << _PLACE_BITS) + place) * rows) >> _SHIFT


@triton.jit(do_not_specialize=["rows", "run"])
def _sampled_mean_kernel(
    X, OUT, rows, features, row_stride, column_stride, run, gap, IS_WHOLE: tl.constexpr, COLUMNS: tl.constexpr
):
    # (rows of a group, groups, columns)
    turn = tl.arange(0, _SAMPLE // _GROUPS)[:, None, None]
    group = tl.arange(0, _GROUPS)[None, :, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = turn * _GROUPS + group
    # int64: row * stride passes 2**31 in large batches
    row = part.to(tl.int64) if IS_WHOLE else _sampled_row(part, rows)
    is_column = column < features
    x = tl.load(
        X + row_begins(row, row_stride, run, gap) + column[None, None, :].to(tl.int64) * column_stride,
        mask=(row < rows) & is_column[None, None, :],
        other=0.0,
    )
    sums = tl.sum(x.to(tl.float32), axis=0)  # (groups, columns)
    if IS_WHOLE:
        mean = tl.div_rn(tl.sum(sums, axis=0), (tl.zeros((COLUMNS,), tl.float32) + rows))
    else:
        # place of each group's sum among them all: as a sort, equal ones in the order of their numbers
        mine, other = sums[:, None, :], sums[None, :, :]
        number = tl.arange(0, _GROUPS)
        is_earlier = (number[None, :] < number[:, None])[:, :, None]
        rank = tl.sum(((other < mine) | ((other == mine) & is_earlier)).to(tl.int32), axis=1)
        is_middle = (rank == _GROUPS // 2 - 1) | (rank == _GROUPS // 2)
        mean = tl.sum(tl.where(is_middle, sums, 0.0), axis=0) * (_GROUPS / (2.0 * _SAMPLE))
    tl.store(OUT + column, mean, mask=is_column)


@lru_cache
def _constants(is_whole: bool) -> Constants:
    """Constants of the kernel."""
    return Constants({"IS_WHOLE": is_whole, "COLUMNS": _COLUMNS}, num_warps=_WARPS)


def sampled_mean(x: Tensor) -> Tensor:
    """Return about the column mean of x; the reference tells how near, and what for.

    Args:
        x: Shape (rows, features), float32, bfloat16 or float16, any strides; or in runs, see `strides.in_runs`.

    Returns:
        Shape (features,), float32.
    """
    if x.numel() == 0:
        return reference.sampled_mean(x)
    of_x = rows_of(x)
    out = empty(x, (of_x.features,), torch.float32)
    grid = (ceil_div(of_x.features, _COLUMNS), 1, 1)
    launch(_sampled_mean_kernel, grid, (x, out, *of_x), _constants(of_x.rows <= reference.SAMPLE))
    return out
