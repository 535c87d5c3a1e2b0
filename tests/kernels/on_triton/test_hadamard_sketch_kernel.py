"""The Hadamard sketch's kernel against its plain-torch twin."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from rmm_linear.sketches import Hadamard
from rmm_linear_kernels.hadamard_sketch import entries as made
from rmm_linear_kernels.hadamard_sketch import kernel, reference

# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
# every construction of the matrix, blocks of unequal length, one row, and blocks of more than 64 rows
GEOMETRIES = [
    *((rows, 0.9) for rows in (1, 2, 3, 5, 12, 17, 20, 27, 36, 40, 44, 48, 56, 60, 64)),
    *((rows, 0.3) for rows in (65, 97, 113, 128, 130, 517)),
    *((rows, 0.02) for rows in (70, 128)),
    grid(300, 0.02),
    grid(1100, 0.004),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# rows, ratio and dtype of what comes with a sketch: programs of several tiles in one dtype
WITH_MORE = [
    *((rows, ratio, dtype) for rows, ratio in ((1, 0.9), (45, 0.5)) for dtype in DTYPES),
    (300, 0.3, torch.float32),
    *(grid(300, 0.3, dtype) for dtype in DTYPES[1:]),
    *(grid(300, 0.02, dtype) for dtype in DTYPES),
]


def operands(rows, features, dtype, device, spread=1.0):
    """An input inside a frame of NaN, so that reading beyond its edge shows, and a mean."""
    frame = torch.full((rows + 2, features + 3), torch.nan, dtype=dtype, device=device)
    x = frame[1:-1, 2:-1]
    x.copy_(torch.randn(rows, features) * spread)
    return x, torch.randn(features, device=device) * spread


def assert_as_good_as_the_twin(found, twin, truth):
    """Error against float64 at most twice the twin's, next to the size of the result."""
    error = (found.double() - truth).abs().max()
    # Triton's interpreter cuts bfloat16 off instead of rounding it, which by itself is twice the error
    factor = 3 if found.dtype == torch.bfloat16 and found.device.type == "cpu" else 2
    allowed = factor * (twin.double() - truth).abs().max() + 1e-5 * max(1.0, float(truth.abs().max()))
    assert error <= allowed, (error, allowed)


@pytest.mark.parametrize(("rows", "ratio"), GEOMETRIES)
def test_sketch_is_the_twin_s(rows, ratio, device, nan_poison):
    blocks, kept = Hadamard(ratio).geometry(rows)
    x, mean = operands(rows, 37, torch.float32, device)
    seed = torch.tensor(11, device=device)
    for centre in (None, mean):
        found = kernel.hadamard_sketch(x, seed, centre, blocks=blocks, kept=kept, scale=0.3, dtype=torch.float32)
        twin, truth = (
            reference.hadamard_sketch(y, seed, centre, blocks=blocks, kept=kept, scale=0.3, dtype=y.dtype)
            for y in (x, x.double())
        )
        assert_as_good_as_the_twin(found, twin, truth)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(dtype, out) if torch.float32 in (dtype, out) else grid(dtype, out) for dtype in DTYPES for out in DTYPES],
    ids=str,
)
def test_dtypes(dtype, out, device, nan_poison):
    blocks, kept = Hadamard(0.3).geometry(131)
    x, mean = operands(131, 130, dtype, device)
    seed = torch.tensor(-5, device=device)
    found = kernel.hadamard_sketch(x, seed, mean, blocks=blocks, kept=kept, scale=0.25, dtype=out)
    twin = reference.hadamard_sketch(x, seed, mean, blocks=blocks, kept=kept, scale=0.25, dtype=out)
    truth = reference.hadamard_sketch(
        x.double(), seed, mean.double(), blocks=blocks, kept=kept, scale=0.25, dtype=torch.float64
    )
    assert found.dtype == out
    assert_as_good_as_the_twin(found, twin, truth)


@pytest.mark.parametrize(("rows", "ratio", "dtype"), WITH_MORE, ids=str)
def test_sums_come_with_the_sketch(rows, ratio, dtype, device, nan_poison):
    blocks, kept = Hadamard(ratio).geometry(rows)
    x, mean = operands(rows, 65, dtype, device)
    seed = torch.tensor(3, device=device)
    arguments = {"blocks": blocks, "kept": kept, "scale": 0.25}
    for centre in (None, mean) if dtype == torch.float32 else (None,):
        sketch, sums = kernel.hadamard_sketch_and_sums(x, seed, centre, **arguments, dtype=dtype)
        truth = reference.hadamard_sketch_and_sums(x.double(), seed, centre, **arguments, dtype=torch.float64)
        twin = reference.hadamard_sketch_and_sums(x, seed, centre, **arguments, dtype=dtype)
        assert torch.equal(sketch, kernel.hadamard_sketch(x, seed, centre, **arguments, dtype=dtype))
        assert_as_good_as_the_twin(sketch, twin[0], truth[0])
        # of x itself, whatever is taken off for the sketch
        assert sums.shape == (blocks, 65)
        assert_as_good_as_the_twin(sums, twin[1], truth[1])
        torch.testing.assert_close(truth[1].sum(0), x.double().sum(0))


@pytest.mark.parametrize(
    ("rows", "ratio", "dtype"), [*WITH_MORE, *(grid(1100, 0.004, dtype) for dtype in DTYPES)], ids=str
)
def test_the_rest_of_the_mean_comes_with_the_sketch(rows, ratio, dtype, device, nan_poison):
    """By its definition, of S itself, and of the sketch as it is stored."""
    blocks, kept = Hadamard(ratio).geometry(rows)
    x, mean = operands(rows, 129, dtype, device)
    seed = torch.tensor(3, device=device)
    arguments = {"blocks": blocks, "kept": kept, "scale": 0.25}
    sketch, rest = kernel.hadamard_sketch_and_mean(x, seed, mean, **arguments, dtype=dtype)
    assert torch.equal(sketch, kernel.hadamard_sketch(x, seed, mean, **arguments, dtype=dtype))
    dense = reference.hadamard_dense(seed.cpu()[None], rows=rows, blocks=blocks, kept=kept, dtype=torch.float64)[0]
    # S^T is 1 / sqrt(kept) of the combinations that the scale is a factor of
    ones = dense.sum(0).to(device) / (kept**0.5 * 0.25)
    expected = x.double().mean(0) - sketch.double().t() @ ones / rows
    torch.testing.assert_close(rest.double(), expected, rtol=1e-5, atol=1e-5)
    assert rest.dtype == torch.float32
    for y in (x, x.double()):
        twin_sketch, twin = reference.hadamard_sketch_and_mean(y, seed, mean, **arguments, dtype=y.dtype)
        expected = y.double().mean(0) - twin_sketch.double().t() @ ones / rows
        torch.testing.assert_close(twin.double(), expected, rtol=1e-5, atol=1e-5)


def test_combinations_that_are_not_kept_may_overflow(device):
    """float16 at the end of its range, one combination kept: the others are in the registers as well."""
    arguments = {"blocks": 1, "kept": 1, "scale": 0.125, "dtype": torch.float16}
    finite = 0
    for seed in range(4):
        x = (60000 * (2 * torch.rand(64, 8) - 1)).to(device, torch.float16)
        mean, key = torch.zeros(8, device=device), torch.tensor(seed, device=device)
        sketch, rest = kernel.hadamard_sketch_and_mean(x, key, mean, **arguments)
        assert torch.equal(rest.isfinite(), sketch[0].isfinite())
        finite += int(sketch.isfinite().sum())
    assert finite >= 16


@pytest.mark.parametrize("layout", ["transposed", "every other column", "expanded rows", "expanded columns"])
def test_any_strides(layout, device, nan_poison):
    x = {
        "transposed": torch.randn(41, 131, device=device).t(),
        "every other column": torch.randn(131, 82, device=device)[:, ::2],
        "expanded rows": torch.randn(1, 41, device=device).expand(131, 41),
        "expanded columns": torch.randn(131, 1, device=device).expand(131, 41),
    }[layout]
    blocks, kept = Hadamard(0.3).geometry(131)
    seed = torch.tensor(3, device=device)
    arguments = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    found = kernel.hadamard_sketch(x, seed, None, **arguments)
    assert torch.equal(found, kernel.hadamard_sketch(x.contiguous(), seed, None, **arguments))
    torch.testing.assert_close(found, reference.hadamard_sketch(x, seed, None, **arguments), rtol=1e-5, atol=1e-4)


@pytest.fixture
def many_tiles(monkeypatch):
    """Programs of several tiles where there would be too few of them."""
    monkeypatch.setattr(kernel, "_PROGRAMS", 4)
    kernel._prepared_launch.cache_clear()
    yield
    kernel._prepared_launch.cache_clear()


@pytest.mark.parametrize("features", [64 * 3 + 5, grid(64 * 4), grid(64 * 7 + 5)])
def test_programs_of_several_tiles(features, device, nan_poison, many_tiles):
    blocks, kept = Hadamard(0.5).geometry(130)
    x, mean = operands(130, features, torch.float32, device)
    seed = torch.tensor(3, device=device)
    arguments = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    found = kernel.hadamard_sketch(x, seed, mean, **arguments)
    torch.testing.assert_close(found, reference.hadamard_sketch(x, seed, mean, **arguments), rtol=1e-5, atol=1e-4)
    sketch, rest = kernel.hadamard_sketch_and_mean(x, seed, mean, **arguments)
    assert torch.equal(sketch, found)
    expected = reference.hadamard_sketch_and_mean(x, seed, mean, **arguments)[1]
    torch.testing.assert_close(rest, expected, rtol=1e-5, atol=1e-4)
    sketch, sums = kernel.hadamard_sketch_and_sums(x, seed, None, **arguments)
    assert torch.equal(sketch, kernel.hadamard_sketch(x, seed, None, **arguments))
    torch.testing.assert_close(sums.sum(0), x.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", [-1, grid(0), grid(1 << 40), grid(-(1 << 63))])
@pytest.mark.parametrize(("rows", "ratio"), [(64, 0.5), (150, 0.2), (40, 0.5), grid(300, 0.02)])
def test_signs_and_columns_are_the_twin_s_bit_for_bit(seed, rows, ratio, device):
    """A sketch of the identity is S itself."""
    blocks, kept = Hadamard(ratio).geometry(rows)
    arguments = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    identity, key = torch.eye(rows, device=device), torch.tensor(seed, device=device)
    found = kernel.hadamard_sketch(identity, key, None, **arguments)
    assert torch.equal(found, reference.hadamard_sketch(identity, key, None, **arguments))


@triton.jit
def _entries_kernel(
    SEED, OUT, DEGREE: tl.constexpr, POLYNOMIAL: tl.constexpr, KEPT_2: tl.constexpr, CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    seed = tl.load(SEED)
    row, low, high = made.mixing_rows(seed, DEGREE, POLYNOMIAL, KEPT_2)
    first, second = made.entries_of(*made.block_words(seed, row, low, high, 0, 0, 64, DEGREE), CHUNK, DTYPE)
    to = OUT + tl.arange(0, KEPT_2)[:, None] * CHUNK + made.half_places(CHUNK)[None, :]
    tl.store(to, first.to(tl.float32))
    tl.store(to + 16, second.to(tl.float32))


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float32], ids=str)
def test_entries_made_of_bits_are_the_twin_s(dtype, device):
    """In the dtypes that a GPU multiplies in: the sketches above are multiplied in float32 by the interpreter."""
    seed = torch.tensor(11, device=device)
    for degree in (2, 4, 5, 6):
        order = 1 << degree
        kept, chunk = max(16, order // 2), max(32, order)
        out = torch.empty(kept, chunk, device=device)
        _entries_kernel[(1,)](seed, out, degree, reference.POLYNOMIALS[degree], kept, chunk, dtype)
        expected = reference._mixing(seed, order, 1, order // 2, torch.float32)[0]
        assert torch.equal(out[: order // 2, :order], expected)


def test_a_mean_of_any_strides(device):
    blocks, kept = Hadamard(0.5).geometry(64)
    arguments = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    x, mean = torch.randn(64, 20, device=device), torch.randn(40, device=device)[::2]
    seed = torch.tensor(3, device=device)
    expected = kernel.hadamard_sketch(x, seed, mean.clone(), **arguments)
    assert torch.equal(kernel.hadamard_sketch(x, seed, mean, **arguments), expected)


def test_values_of_every_size(device):
    """On a GPU float32 is cut into three parts: none of its bits is lost, for small and for large values."""
    blocks, kept = Hadamard(0.5).geometry(64)
    seed = torch.tensor(3, device=device)
    arguments = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    for spread in (1e-30, 1.0, 1e30):
        x, _ = operands(64, 16, torch.float32, device, spread)
        found = kernel.hadamard_sketch(x, seed, None, **arguments)
        twin = reference.hadamard_sketch(x, seed, None, **arguments)
        torch.testing.assert_close(found / spread, twin / spread, rtol=1e-5, atol=1e-5)


def test_nothing_comes_of_nothing(device):
    seed = torch.tensor(3, device=device)
    for rows, features in ((0, 5), (70, 0)):
        blocks, kept = Hadamard(0.5).geometry(rows)
        arguments = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
        x = torch.empty(rows, features, device=device)
        assert kernel.hadamard_sketch(x, seed, None, **arguments).shape == (blocks * kept, features)
        sketch, sums = kernel.hadamard_sketch_and_sums(x, seed, None, **arguments)
        assert (sketch.shape, sums.shape) == ((blocks * kept, features), (blocks, features))
        sketch, rest = kernel.hadamard_sketch_and_mean(x, seed, torch.ones(features, device=device), **arguments)
        assert (sketch.shape, rest.tolist()) == ((blocks * kept, features), [0.0] * features)
