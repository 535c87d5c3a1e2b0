"""Where the rows of a tensor lie: by its strides, element by element."""

import itertools

import pytest
import torch

from rmm_linear_kernels.strides import Rows, are_rows_aligned, as_matrix, in_runs, number_of_rows, rows_of

BASE = torch.arange(4 * 6 * 5 * 8, dtype=torch.float32).view(4, 6, 5, 8)
# whose rows one stride leads through, two, and more
ONE = {
    "as it is": BASE,
    "matrix": BASE[0, 0],
    "columns": BASE[0, 0].t(),
    "some columns": BASE[..., 2:],
    "part of the batch": BASE[1:],
    "expanded": torch.arange(8.0).expand(3, 4, 8),
    "one row": BASE[:1, :1, 2:3],
    "a vector": BASE[0, 0, 0],
    "nothing": BASE[:0, 1:],
    "no columns": BASE[:, 1:, :, :0],
}
TWO = {
    "without the first": BASE[0, :, 1:],
    "batches without the first": BASE[:, :, 1:],
    "without the first of the batch": BASE[:, 1:],
    "one of many": BASE[:, :1, 1:],
    "every other of a batch": BASE[::2, 0],
    "the other way round": BASE[0].transpose(0, 1),
    "channels first": BASE[0].transpose(1, 2),
    "pairs of batches": BASE.permute(2, 0, 1, 3),
    "the same runs": BASE[0, :, 1:2].expand(6, 3, 8)[:, :, ::2],
}
MORE = {"all reversed": BASE.permute(2, 1, 0, 3), "two without the first": BASE[:, 1:, 1:]}


def by_formula(x):
    """The matrix that `rows_of` describes, read from the memory."""
    found = rows_of(x)
    memory = torch.as_strided(x, (x.untyped_storage().nbytes() // 4,), (1,), 0)
    row, column = torch.arange(found.rows)[:, None], torch.arange(found.features)[None, :]
    place = x.storage_offset() + row * found.row_stride + column * found.column_stride
    if found.run is not None:
        place = place + row // found.run * found.gap
    return memory[place]


@pytest.mark.parametrize(("name", "x"), list({**ONE, **TWO, **MORE}.items()), ids=lambda value: str(value)[:30])
def test_rows_are_where_it_says(name, x):
    found = in_runs(x)
    expected = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    assert found.dim() == (3 if name in TWO else 2)
    if x.numel() and name not in MORE:
        assert found.data_ptr() == x.data_ptr()
    assert torch.equal(as_matrix(found), expected)
    assert number_of_rows(found) == expected.shape[0]
    assert torch.equal(by_formula(found), expected)


def test_all_orders_and_parts():
    for order, start in itertools.product(itertools.permutations(range(4)), itertools.product((0, 1), repeat=3)):
        x = BASE[start[0] :, start[1] :, start[2] :].permute(order)
        found = in_runs(x)
        assert torch.equal(by_formula(found), x.reshape(-1, x.shape[-1]))


@pytest.mark.parametrize("x", [BASE, BASE[0, 0, 0]], ids=["four dimensions", "one"])
def test_other_tensors_are_refused(x):
    for function in (number_of_rows, rows_of, as_matrix):
        with pytest.raises(ValueError, match="x has shape .*; pass"):
            function(x)


def test_alignment_asks_for_the_gap_as_well():
    memory = torch.zeros(4, 8, 32, dtype=torch.bfloat16)
    assert are_rows_aligned(in_runs(memory[:, 1:]))
    assert not are_rows_aligned(in_runs(memory[:, 1:, 1:17]))
    assert not are_rows_aligned(in_runs(memory.transpose(1, 2)))
    # rows and columns lie as they should, and the second run does not
    uneven = torch.zeros(4 * 264).as_strided((4, 7, 32), (264, 32, 1))
    assert rows_of(uneven) == Rows(28, 32, 32, 1, 7, 40)
    assert not are_rows_aligned(uneven)
