"""The closed-form variances against every outcome of tiny sketches, enumerated from their definitions.

Nothing here is random and nothing is drawn by the library: each S of a sketch is written down with its probability, and
mean and variance are sums. Of the library only `variance` is used, and the geometry of the Hadamard sketch.
"""

import math
from itertools import combinations, product

import pytest
import torch
from sketch_contract import structured_pair

from rmm_linear.sketches import SKETCHES, Centered


def pair(rows):
    return structured_pair(rows, 3, 2, seed=rows)


def enumerated(outcomes, x, g):
    """E[S S^T], and the variance of g^T S S^T x, over (probability, S)."""
    exact = g.t() @ x
    mean, variance, total = torch.zeros(x.shape[0], x.shape[0], dtype=torch.float64), 0.0, 0.0
    for probability, s in outcomes:
        product_ = s @ s.t()
        mean += probability * product_
        variance += probability * (g.t() @ product_ @ x - exact).square().sum()
        total += probability
    assert abs(total - 1) < 1e-12
    return mean, variance


def check(name, ratio, x, g, outcomes, tolerance=1e-11):
    mean, variance = enumerated(outcomes, x, g)
    torch.testing.assert_close(mean, torch.eye(x.shape[0], dtype=torch.float64), rtol=0, atol=tolerance)
    scale = (x.norm() * g.norm()).square().item()
    closed_form = SKETCHES[name](ratio=ratio).variance(x, g)
    assert closed_form.dtype == torch.float64
    assert closed_form.dim() == 0
    assert abs(closed_form - variance) <= tolerance * scale, (name, x.shape[0], ratio)


def signed(matrices, rows):
    """Every pattern of row signs in front of equally likely matrices."""
    matrices = list(matrices)
    for signs in product((1.0, -1.0), repeat=rows):
        for matrix in matrices:
            yield 1 / (2**rows * len(matrices)), torch.tensor(signs, dtype=torch.float64).unsqueeze(1) * matrix


def subsets_of_columns(matrix, rank):
    rows = matrix.shape[0]
    for columns in combinations(range(matrix.shape[1]), rank):
        yield matrix[:, list(columns)] * math.sqrt(rows / rank)


def dct(n):
    entries = [[math.cos(math.pi * (i + 0.5) * c / n) for c in range(n)] for i in range(n)]
    matrix = torch.tensor(entries, dtype=torch.float64)
    return matrix / matrix.norm(dim=0)


def dft(n):
    """Real orthonormal DFT: the constant, cosines and sines, and for an even n the alternating column."""
    columns = [[1.0] * n]
    for f in range(1, (n + 1) // 2):
        columns.append([math.cos(2 * math.pi * i * f / n) for i in range(n)])
        columns.append([math.sin(2 * math.pi * i * f / n) for i in range(n)])
    if n % 2 == 0:
        columns.append([(-1.0) ** i for i in range(n)])
    matrix = torch.tensor(columns, dtype=torch.float64).t()
    return matrix / matrix.norm(dim=0)


@pytest.mark.parametrize("name", ["dct", "dft"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7])
def test_trigonometric_sketches(name, rows):
    """Odd and even row counts; every rank."""
    x, g = pair(rows)
    matrix = {"dct": dct, "dft": dft}[name](rows)
    for rank in range(1, rows + 1):
        assert SKETCHES[name](ratio=rank / rows).rank(rows) == rank
        check(name, rank / rows, x, g, signed(subsets_of_columns(matrix, rank), rows))


def hadamard(order):
    """Sylvester's matrix: the variance is the same for every Hadamard matrix of an order."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def hadamard_matrices(rows, blocks, kept):
    """Row i is row i // blocks of block i % blocks; all blocks share the columns."""
    block_rows = -(-rows // blocks)
    order = 1 << (block_rows - 1).bit_length()
    matrix = hadamard(order)
    for columns in combinations(range(order), kept):
        s = torch.zeros(rows, blocks, kept, dtype=torch.float64)
        for row in range(rows):
            s[row, row % blocks] = matrix[list(columns), row // blocks] / kept**0.5
        yield s.flatten(1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (7, 8))])
def test_hadamard_in_one_block(rows):
    """Orders 1, 2, 4 and 8; blocks that fill their matrix, and blocks that do not."""
    x, g = pair(rows)
    for rank in range(1, rows + 1):
        sketch = SKETCHES["hadamard"](ratio=rank / rows)
        assert sketch.geometry(rows) == (1, rank)
        check("hadamard", rank / rows, x, g, signed(hadamard_matrices(rows, 1, rank), rows))


@pytest.mark.parametrize(("rows", "ratio"), [(5, 0.7), (7, 0.5), (8, 0.75), (8, 1.0), (10, 0.5), (11, 0.6)])
def test_hadamard_in_several_blocks(rows, ratio, monkeypatch):
    """Blocks of at most 4 rows, ragged ones included."""
    monkeypatch.setattr("rmm_linear.sketches.hadamard._BLOCK", 4)
    x, g = pair(rows)
    blocks, kept = SKETCHES["hadamard"](ratio=ratio).geometry(rows)
    assert blocks == -(-rows // 4)
    check("hadamard", ratio, x, g, signed(hadamard_matrices(rows, blocks, kept), rows))


def test_rows_without_replacement():
    for rows in (1, 2, 3, 6):
        x, g = pair(rows)
        identity = torch.eye(rows, dtype=torch.float64)
        for rank in range(1, rows + 1):
            subsets = list(subsets_of_columns(identity, rank))
            outcomes = ((1 / len(subsets), s) for s in subsets)
            check("rows_without_replacement", rank / rows, x, g, outcomes)


def drawn_rows(p, rank, kept=()):
    """`kept` rows as they are, and the other `rank - len(kept)` drawn with replacement, row i with probability p_i."""
    drawn = rank - len(kept)
    for index in product(range(len(p)), repeat=drawn):
        probability = math.prod(p[i] for i in index)
        if probability == 0:
            continue
        s = torch.zeros(len(p), rank, dtype=torch.float64)
        for column, row in enumerate(kept):
            s[row, column] = 1
        for column, row in enumerate(index, start=len(kept)):
            s[row, column] = (drawn * p[row]) ** -0.5
        yield probability, s


def test_crs():
    """To 1e-9: the library's probabilities are multiples of about 2**-40."""
    for rows in (1, 2, 3, 5):
        x, g = pair(rows)
        norms = x.norm(dim=1).tolist()
        p = [norm / sum(norms) for norm in norms]
        for rank in range(1, min(rows, 4) + 1):
            check("crs", rank / rows, x, g, drawn_rows(p, rank), tolerance=1e-9)


def kept_set(norms, rank):
    """The heaviest rows, as many as minimise (1 - sum of their p) / (rank - k)."""
    order = sorted(range(len(norms)), key=lambda i: -norms[i])
    if len(norms) <= rank:
        return order
    best = min(range(rank), key=lambda k: sum(norms[i] for i in order[k:]) / (rank - k))
    return order[:best]


def test_wta_crs():
    """To 1e-9, see above. Weights that fall fast, so that the kept set is sometimes empty and sometimes not."""
    sizes = set()
    for rows in (1, 2, 4, 6):
        for decay in (1.0, 0.5, 0.2):
            x, g = pair(rows)
            x = x * decay ** torch.arange(rows).unsqueeze(1)
            norms = x.norm(dim=1).tolist()
            for rank in range(1, min(rows, 4) + 1):
                kept = kept_set(norms, rank)
                sizes.add(len(kept))
                rest = sum(norm for i, norm in enumerate(norms) if i not in kept)
                q = [0.0 if i in kept else norm / rest for i, norm in enumerate(norms)]
                check("wta_crs", rank / rows, x, g, drawn_rows(q, rank, kept), tolerance=1e-9)
    assert {0, 1, 2, 3} <= sizes


# the value of an entry -> its probability
ENTRIES = {
    "rademacher": ({1.0: 1 / 2, -1.0: 1 / 2}, ((1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (3, 3))),
    # a three-point Gauss-Hermite rule, exact for the fourth powers that a variance is made of
    "gaussian": ({-(3**0.5): 1 / 6, 0.0: 2 / 3, 3**0.5: 1 / 6}, ((1, 1), (2, 1), (2, 2), (3, 2))),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_independent_entries(name):
    values, shapes = ENTRIES[name]
    for rows, rank in shapes:
        outcomes = (
            (
                math.prod(values[value] for value in entries),
                torch.tensor(entries, dtype=torch.float64).view(rows, rank) / rank**0.5,
            )
            for entries in product(values, repeat=rows * rank)
        )
        check(name, rank / rows, *pair(rows), outcomes)


@pytest.mark.parametrize("name", sorted(SKETCHES))
def test_centred_form_is_the_inner_one_of_the_centred_pair(name):
    x, g = pair(9)
    sketch = SKETCHES[name](ratio=0.5)
    expected = sketch.variance(x - x.mean(0), g - g.mean(0))
    torch.testing.assert_close(Centered(sketch).variance(x, g), expected, rtol=1e-12, atol=0)
    # columns that are means alone leave nothing to sketch
    constant = torch.ones_like(x) * x[:1]
    assert Centered(sketch).variance(constant, g) <= 1e-25


@pytest.mark.parametrize("name", sorted(SKETCHES))
@pytest.mark.parametrize("center", [False, True])
def test_form_is_quadratic_in_each_argument_and_accepts_any_dtype_and_no_rows(name, center):
    x, g = pair(9)
    sketch = SKETCHES[name](ratio=0.5)
    sketch = Centered(sketch) if center else sketch
    variance = sketch.variance(x, g)
    for of_x, of_g in ((2, 3), (0, 1), (1, 0)):
        expected = (of_x * of_g) ** 2 * variance
        torch.testing.assert_close(sketch.variance(of_x * x, of_g * g), expected, rtol=1e-11, atol=0)
    assert sketch.variance(x[:0], g[:0]) == 0
    low = sketch.variance(x.float(), g.float())
    assert low.dtype == torch.float64
    torch.testing.assert_close(low, variance, rtol=1e-5, atol=0)
