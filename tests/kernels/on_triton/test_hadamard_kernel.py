"""The Hadamard sketch's kernel against its reference."""

from functools import partial

import pytest
import torch
from operands import operands

from rmm_linear.sketches import Hadamard
from rmm_linear_kernels.hadamard import kernel, reference

# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
# every construction of the matrix, blocks of unequal length, one row, and blocks of more than 64 rows
GEOMETRIES = [
    *((rows, 0.9) for rows in (1, 2, 5, 12, 17, 27, 36, 44, 56, 60, 64)),
    *((rows, 0.3) for rows in (65, 130, 517)),
    (70, 0.02),
    *(grid(rows, 0.9) for rows in (3, 20, 40, 48)),
    *(grid(rows, 0.3) for rows in (97, 113, 128)),
    grid(128, 0.02),
    grid(300, 0.02),
    grid(1100, 0.004),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(dtype, out) if torch.float32 in (dtype, out) else grid(dtype, out) for dtype in DTYPES for out in DTYPES]


def check(x, seed, mean, ratio, *, scale=0.3, dtype=torch.float32):
    """Error against float64 at most twice the reference's, next to the size of the result."""
    blocks, kept = Hadamard(ratio).geometry(x.shape[0])
    how = {"blocks": blocks, "kept": kept, "scale": scale}
    found = kernel.hadamard_sketch(x, seed, mean, **how, dtype=dtype)
    plain = reference.hadamard_sketch(x, seed, mean, **how, dtype=dtype)
    wide_mean = None if mean is None else mean.double()
    truth = reference.hadamard_sketch(x.double(), seed, wide_mean, **how, dtype=torch.float64)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, plain.shape, True)
    allowed = 2 * (plain.double() - truth).abs().max() + 1e-5 * max(1.0, float(truth.abs().max()))
    assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize(("rows", "ratio"), GEOMETRIES)
def test_sketch_is_the_reference_s(rows, ratio, device, nan_poison):
    x, mean = operands(rows, 37, torch.float32, device)
    # a mean is subtracted before the matrix is there
    for centre in (None, mean) if rows in (1, 64, 130, 517) or device.type == "cuda" else (mean,):
        check(x, torch.tensor(11, device=device), centre, ratio)


@pytest.mark.parametrize(("dtype", "out"), PAIRS, ids=str)
def test_dtypes(dtype, out, device, nan_poison):
    x, mean = operands(131, 130, dtype, device)
    check(x, torch.tensor(-5, device=device), mean, 0.3, scale=0.25, dtype=out)


@pytest.mark.parametrize("layout", ["transposed", "every other column", "expanded rows", "expanded columns"])
def test_any_strides(layout, device, nan_poison):
    x = {
        "transposed": torch.randn(41, 131, device=device).t(),
        "every other column": torch.randn(131, 82, device=device)[:, ::2],
        "expanded rows": torch.randn(1, 41, device=device).expand(131, 41),
        "expanded columns": torch.randn(131, 1, device=device).expand(131, 41),
    }[layout]
    for mean in (None, torch.randn(82, device=device)[::2]):
        check(x, torch.tensor(3, device=device), mean, 0.3)


@pytest.mark.parametrize("seed", [-1, grid(0), grid(1 << 40), grid(-(1 << 63))])
@pytest.mark.parametrize(("rows", "ratio"), [(64, 0.5), (150, 0.2), (40, 0.5), grid(300, 0.02)])
def test_signs_and_columns_are_the_reference_s_bit_for_bit(seed, rows, ratio, device):
    """A sketch of the identity is S itself."""
    blocks, kept = Hadamard(ratio).geometry(rows)
    how = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    identity, key = torch.eye(rows, device=device), torch.tensor(seed, device=device)
    found = kernel.hadamard_sketch(identity, key, None, **how)
    assert torch.equal(found, reference.hadamard_sketch(identity, key, None, **how))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_values_of_every_size(size, device):
    """On a GPU float32 is cut into parts: none of its bits is lost, for small and for large values."""
    blocks, kept = Hadamard(0.5).geometry(64)
    how = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    x, seed = torch.randn(64, 16, device=device) * size, torch.tensor(3, device=device)
    found, expected = (of.hadamard_sketch(x, seed, None, **how) / size for of in (kernel, reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "features"), [(0, 5), (70, 0)])
def test_nothing_comes_of_nothing(rows, features, device):
    blocks, kept = Hadamard(0.5).geometry(rows)
    how = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    x, seed = torch.empty(rows, features, device=device), torch.tensor(3, device=device)
    assert kernel.hadamard_sketch(x, seed, None, **how).shape == (blocks * kept, features)
