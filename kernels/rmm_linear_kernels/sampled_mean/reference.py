"""About the column mean of x, out of 256 of its rows: what is taken off x before it is sketched.

Any vector m may be taken off that S does not depend on (`rmm_linear.sketches.centered`): m only has to be so near to
the mean mu that rows ||m - mu||^2 is small next to the centred energy P = sum_i ||x_i - mu||^2. Up to 256 rows, m = mu.

Where the rows lie. One in each of 256 equal parts of all rows, at a place in it that a hash of the part's number
decides. A stride, or multiples of an irrational number, may fall into step with the length of a sequence and meet first
tokens only, whose activations are often a hundred times as large as others: floor(rows * frac(j * 0.618...)) does so
for batches of 233 or 610 sequences. The hash falls into step with nothing, and the parts keep the sample even.

What is made of them. The rows are dealt to 8 groups in turn, and m is, in every column, the mean of the two middle ones
of the groups' means. The plain mean of the 256 would do for rows alike, where it adds P / 256 to P; but one huge row
among them, which has 1 / rows of the weight in mu, would have 1 / 256 of it in m, and add up to rows / 256^2 of its own
energy: twelve percent for 8192 rows, four times itself for a quarter of a million. Up to three such rows, in three
groups, move the middle not beyond the means of the other five, however large they are. What that costs: 1.57 / 256 of P
in place of 1 / 256 at most for rows alike (0.6 %), and two percent at most for columns that are zero but in one row of
fifty, whose mean the middle misses. The bound for any rows and any coincidence: where m is above mu, four groups' means
are, and by Cauchy and Schwarz rows (m - mu)^2 is at most rows / 128 of the sampled rows' own energy.
"""

import torch
from torch import Tensor

from ..strides import as_matrix, number_of_rows

# Rows that are read. All of them, up to so many.
SAMPLE = 256
# In so many groups, dealt in turn.
GROUPS = 8
# Places have so many bits within a part.
PLACE_BITS = 24
_WORD = (1 << 32) - 1


def sampled_rows(rows: int, *, device: torch.device | None = None) -> Tensor:
    """Return the numbers of the rows that are read.

    Args:
        rows: Number of rows, more than `SAMPLE` and less than 2**31.
        device: Where.

    Returns:
        Shape (SAMPLE,), int64, ascending, one in each part of rows / SAMPLE rows.
    """
    part = torch.arange(SAMPLE, device=device)
    # Philox's factors; part 0 as well must not be at place 0, which is where a huge first token would be.
    word = part + 1
    for shift, factor in ((16, 0xD2511F53), (13, 0xCD9E8D57)):
        word = ((word ^ (word >> shift)) * factor) & _WORD
    place = (word ^ (word >> 16)) >> (32 - PLACE_BITS)
    return (((part << PLACE_BITS) + place) * rows) >> (PLACE_BITS + SAMPLE.bit_length() - 1)


def sampled_mean(x: Tensor) -> Tensor:
    """Return about the column mean of x; the module's docstring tells how near, and what for.

    Args:
        x: Shape (rows, features), any float dtype, any strides; or in runs, see `strides.in_runs`.

    Returns:
        Shape (features,), float32 (float64 for float64).
    """
    rows, features = number_of_rows(x), x.shape[-1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    if rows <= SAMPLE:
        return as_matrix(x).sum(0, dtype=compute) / max(1, rows)
    index = sampled_rows(rows, device=x.device)
    # in runs, from where they lie: in order, they would be a copy of x
    sample = x.index_select(0, index) if x.dim() == 2 else x[index // x.shape[1], index % x.shape[1]]
    means = sample.to(compute).view(SAMPLE // GROUPS, GROUPS, features).mean(0)
    return means.sort(0).values[GROUPS // 2 - 1 : GROUPS // 2 + 1].mean(0)
