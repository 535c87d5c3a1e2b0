"""How a kernel reads the rows of a matrix: known without triton, which a CPU need not have.

Rows that no single stride leads through, such as those of `batch[:, 1:]`, may come in runs: within each they are one
stride apart, and so are the runs. Such a matrix is a tensor (runs, rows of a run, features), of any strides.
"""

from typing import NamedTuple

from torch import Tensor

# The multiple of bytes that an address may be known to be.
ALIGNMENT = 16


class Rows(NamedTuple):
    """Where row r and column c of a matrix lie: at r * row_stride + r // run * gap + c * column_stride.

    Attributes:
        rows: Number of rows.
        features: Number of columns.
        row_stride: From a row to the next one of its run, in elements.
        column_stride: From a column to the next one.
        run: Rows of a run; None where there is but one.
        gap: What comes on top of the row stride between the last row of a run and the first of the next one; None with
            a single run.
    """

    rows: int
    features: int
    row_stride: int
    column_stride: int
    run: int | None
    gap: int | None


def rows_of(x: Tensor) -> Rows:
    """Return where the rows of a matrix lie.

    Args:
        x: Shape (rows, features), or (runs, rows of a run, features) as `in_runs` returned it.

    Raises:
        ValueError: If it has another number of dimensions.
    """
    if x.dim() == 2:
        (rows, features), (row_stride, column_stride) = x.shape, x.stride()
        return Rows(rows, features, row_stride, column_stride, None, None)
    rows = number_of_rows(x)
    (_, run, features), (of_run, row_stride, column_stride) = x.shape, x.stride()
    return Rows(rows, features, row_stride, column_stride, run, of_run - run * row_stride)


def number_of_rows(x: Tensor) -> int:
    """Return how many rows a matrix has.

    Args:
        x: As `rows_of` takes it.

    Returns:
        The number; may be a SymInt.

    Raises:
        ValueError: If it has another number of dimensions.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)}; pass (rows, features), or what in_runs makes of it")
    return x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]


def in_runs(x: Tensor) -> Tensor:
    """Return the rows of a tensor where they lie, in runs if need be.

    Args:
        x: Shape (..., features); rows are all dimensions but the last.

    Returns:
        A view of shape (rows, features) or (runs, rows of a run, features); a copy of shape (rows, features) where it
        takes more than two strides to lead through the rows.
    """
    features = x.shape[-1]
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = levels[-1][0] * size, stride
        else:
            levels.append((size, stride))
    if len(levels) != 2 or not x.numel():
        return x.reshape(x.shape[:-1].numel(), features)
    (runs, _), (run, _) = levels
    return x.view(runs, run, features)


def as_matrix(x: Tensor) -> Tensor:
    """Return the rows of a matrix one after the other, as what is no kernel takes them.

    Args:
        x: As `rows_of` takes it.

    Returns:
        Shape (rows, features): `x`, or a copy of rows in runs.
    """
    return x if x.dim() == 2 else x.reshape(number_of_rows(x), x.shape[-1])


def are_rows_aligned(x: Tensor) -> bool:
    """Tell whether a kernel reads rows of a matrix, and writes rows as long, in pieces of 16 bytes.

    Where it does not, each number has an address of its own, which takes registers.

    Args:
        x: The matrix, as `rows_of` takes it.

    Returns:
        True if Triton knows that all rows begin at multiples of 16 bytes, and have their elements next to each other.
    """
    found = rows_of(x)
    places = found.row_stride | found.features | x.data_ptr() | (found.gap or 0)
    return found.column_stride == 1 and places % ALIGNMENT == 0
