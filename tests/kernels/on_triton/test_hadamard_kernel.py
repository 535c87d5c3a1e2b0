"""The Hadamard sketch's kernel against its reference."""

import pytest
import torch
from operands import DTYPES, LAYOUTS, assert_as_good, grid, operands

from rmm_linear.sketches import Hadamard
from rmm_linear_kernels.hadamard import kernel, reference

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
PAIRS = [(dtype, out) if torch.float32 in (dtype, out) else grid(dtype, out) for dtype in DTYPES for out in DTYPES]


def check(x, seed, mean, ratio, *, scale=0.3, dtype=torch.float32):
    blocks, kept = Hadamard(ratio).geometry(x.shape[0])
    how = {"blocks": blocks, "kept": kept, "scale": scale, "dtype": dtype}
    assert_as_good(kernel.hadamard_sketch, reference.hadamard_sketch, x, seed, mean, **how)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, device, nan_poison):
    x = LAYOUTS[layout](131, 41, device=device)
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
    x, _ = operands(64, 16, torch.float32, device, size)
    check(x, torch.tensor(3, device=device), None, 0.5, scale=1.0)


@pytest.mark.parametrize(("rows", "features"), [(0, 5), (70, 0)])
def test_nothing_comes_of_nothing(rows, features, device):
    blocks, kept = Hadamard(0.5).geometry(rows)
    how = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": torch.float32}
    x, seed = torch.empty(rows, features, device=device), torch.tensor(3, device=device)
    assert kernel.hadamard_sketch(x, seed, None, **how).shape == (blocks * kept, features)
