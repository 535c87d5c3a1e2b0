"""The kernels of small inputs against their plain-torch twins, and against what they stand for."""

import math
from functools import partial

import pytest
import torch

from rmm_linear.sketches import Hadamard
from rmm_linear_kernels.hadamard_at_once import kernel, reference
from rmm_linear_kernels.hadamard_sketch import kernel as sketches
from rmm_linear_kernels.hadamard_sketch.reference import hadamard_dense
from rmm_linear_kernels.sampled_mean import reference as sampled_mean
from rmm_linear_kernels.sketched_grad_weight import kernel as products

pytestmark = pytest.mark.usefixtures("nan_poison")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
# every construction of the matrix, blocks of unequal length, one row, and as many blocks as there may be
GEOMETRIES = [
    *((rows, 0.9) for rows in (1, 2, 3, 5, 12, 20, 27, 36, 44, 56, 60, 64)),
    *((rows, 0.3) for rows in (65, 97, 113, 128, 130, 256)),
    *((rows, 0.1) for rows in (64, 250)),
]
LARGER = [grid(*geometry, torch.bfloat16) for geometry in ((300, 0.5), (449, 0.1), (512, 0.04))]
FIRST = [(1, 0.9), (12, 0.9), (27, 0.9), (64, 0.9), (65, 0.3), (250, 0.1)]
# all of these in float32, and some in half precision: a GPU takes a second or two to compile each
CASES = [
    *((*geometry, torch.float32) for geometry in GEOMETRIES if geometry in FIRST),
    *(grid(*geometry, torch.float32) for geometry in GEOMETRIES if geometry not in FIRST),
    *((rows, ratio, dtype) for rows, ratio in ((1, 0.9), (60, 0.9), (130, 0.3)) for dtype in DTYPES[1:]),
]
SCALE, FACTOR = 0.25, 0.5


def within_nan(values):
    """The same values in the middle of NaNs: what is read from beside them shows."""
    rows, columns = values.shape
    larger = torch.full((rows + 2, columns + 2), math.nan, dtype=values.dtype, device=values.device)
    larger[1:-1, 1:-1] = values
    return larger[1:-1, 1:-1]


def sizes_of(rows, ratio):
    blocks, kept = Hadamard(ratio).geometry(rows)
    return {"blocks": blocks, "kept": kept, "scale": SCALE}


def mixing(seed, rows, blocks, kept, scale):
    """What either kernel multiplies by: scale sqrt(kept) S, (rows, rank), float64."""
    dense = hadamard_dense(seed.cpu()[None], rows=rows, blocks=blocks, kept=kept, dtype=torch.float64)[0]
    return dense.to(seed.device) * (scale * kept**0.5)


@pytest.mark.parametrize(("rows", "ratio", "dtype"), CASES)
def test_sketch_and_what_is_left_of_the_mean(rows, ratio, dtype, device):
    """By the definitions: S itself, and the sketch as it is stored."""
    sizes = sizes_of(rows, ratio)
    assert reference.holds_input(rows, sizes["blocks"])
    x, seed = within_nan((torch.randn(rows, 37) + 2).to(device, dtype)), torch.tensor(11, device=device)
    found, rest = kernel.sketch_and_mean_at_once(x, seed, **sizes, dtype=dtype)
    twin, twin_rest = reference.sketch_and_mean_at_once(x, seed, **sizes, dtype=dtype)
    assert (found.shape, found.dtype, rest.shape, rest.dtype) == (twin.shape, dtype, (37,), torch.float32)
    mixed_by = mixing(seed, rows, **sizes)
    truth = mixed_by.t() @ (x.double() - x.double().mean(0))
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    # 2e-5: sums of 64 in float32, of which nearly nothing is left
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=2e-5)
    ones = mixed_by.sum(0) / (sizes["kept"] * SCALE**2)
    for stored, left in ((found, rest), (twin, twin_rest)):
        expected = x.double().mean(0) - stored.double().t() @ ones / rows
        torch.testing.assert_close(left.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "ratio", "dtype"), [*CASES, *LARGER])
def test_gradient_and_sum(rows, ratio, dtype, device):
    sizes = sizes_of(rows, ratio)
    assert reference.holds_gradient(rows, sizes["blocks"], 70, 37, dtype)
    g = within_nan((torch.randn(rows, 70) - 1).to(device, dtype))
    seed, mean = torch.tensor(-7, device=device), torch.randn(37, device=device)
    x = within_nan(torch.randn(sizes["blocks"] * sizes["kept"], 37).to(device, dtype))
    sketched = (mixing(seed, rows, **sizes).t() @ g.double()).to(dtype).double()
    variants = [(mean, dtype, torch.float32), (None, None, dtype), (None, torch.float32, None), (mean, None, dtype)]
    for centre, bias_dtype, result in variants[: 4 if rows == 130 else 1]:
        how = {"factor": FACTOR, "dtype": result, "bias_dtype": bias_dtype}
        found, bias = kernel.grad_weight_at_once(g, seed, x, centre, **sizes, **how)
        truth = FACTOR * sketched.t() @ x.double()
        if centre is not None:
            truth += torch.outer(g.double().sum(0), centre.double())
        assert (found.shape, found.dtype) == ((70, 37), result or dtype)
        # what lies between two neighbours of half precision may be rounded to the other one, now and then
        allowed = 2e-3 if dtype == torch.bfloat16 else 2e-4 if dtype == torch.float16 else 2e-6
        assert (found.double() - truth).norm() <= (allowed + torch.finfo(found.dtype).eps) * truth.norm()
        twin, twin_bias = reference.grad_weight_at_once(g, seed, x, centre, **sizes, **how)
        assert (twin.shape, twin.dtype, twin_bias.shape) == (found.shape, found.dtype, bias.shape)
        assert (found.double() - twin.double()).norm() <= (allowed + torch.finfo(found.dtype).eps) * truth.norm()
        if bias_dtype is None:
            assert bias.shape == (0,)
        else:
            assert bias.dtype == bias_dtype
            expected = g.double().sum(0).to(bias_dtype)
            torch.testing.assert_close(bias, expected, rtol=2 * torch.finfo(bias_dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", [DTYPES[0], *map(grid, DTYPES[1:])], ids=str)
def test_both_are_those_of_a_large_input(dtype, device):
    """What several kernels make of the same, one after the other."""
    sizes, seed = sizes_of(200, 0.5), torch.tensor(3, device=device)
    x, g = (torch.randn(200, 130) + 3).to(device, dtype), torch.randn(200, 70).to(device, dtype)
    found, rest = kernel.sketch_and_mean_at_once(x, seed, **sizes, dtype=dtype)
    mean = sampled_mean.sampled_mean(x)
    expected, other = sketches.hadamard_sketch_and_mean(x, seed, mean, **sizes, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rest, other, rtol=tolerance, atol=tolerance)
    got, bias = kernel.grad_weight_at_once(g, seed, found, rest, **sizes, dtype=torch.float32, bias_dtype=dtype)
    sketched, sums = sketches.hadamard_sketch_and_sums(g, seed, None, **sizes, dtype=dtype)
    how = {"dtype": torch.float32, "bias_dtype": dtype}
    expected, other = products.sketched_grad_weight(sketched, found, sums, rest, **how)
    assert (got - expected).norm() <= tolerance * expected.norm()
    torch.testing.assert_close(bias, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["transposed", grid("every other column"), grid("expanded rows")])
def test_any_strides(layout, device):
    def laid_out(rows, columns):
        return {
            "transposed": torch.randn(columns, rows, device=device).t(),
            "every other column": torch.randn(rows, 2 * columns, device=device)[:, ::2],
            "expanded rows": torch.randn(1, columns, device=device).expand(rows, columns),
        }[layout]

    sizes, seed = sizes_of(131, 0.3), torch.tensor(3, device=device)
    x, g, stored = laid_out(131, 41), laid_out(131, 67), laid_out(sizes["blocks"] * sizes["kept"], 41)
    mean = torch.randn(41, 2, device=device)[:, 0]
    found = kernel.sketch_and_mean_at_once(x, seed, **sizes, dtype=torch.float32)
    expected = kernel.sketch_and_mean_at_once(x.contiguous(), seed, **sizes, dtype=torch.float32)
    how = {**sizes, "bias_dtype": torch.float32}
    found += kernel.grad_weight_at_once(g, seed, stored, mean, **how)
    expected += kernel.grad_weight_at_once(g.contiguous(), seed, stored.contiguous(), mean.contiguous(), **how)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_combinations_that_are_not_kept_may_overflow(device):
    """float16 at the end of its range, one combination kept: the others are in the registers as well."""
    sizes = {"blocks": 1, "kept": 1, "scale": 0.125}
    finite = 0
    for seed in range(4):
        x = (60000 * (2 * torch.rand(64, 8) - 1)).to(device, torch.float16)
        key, stored = torch.tensor(seed, device=device), torch.ones(1, 5, device=device).half()
        sketch, rest = kernel.sketch_and_mean_at_once(x, key, **sizes, dtype=torch.float16)
        assert torch.equal(rest.isfinite(), sketch[0].isfinite())
        gradient, _ = kernel.grad_weight_at_once(x, key, stored, None, **sizes, dtype=torch.float32)
        twin, _ = reference.grad_weight_at_once(x, key, stored, None, **sizes, dtype=torch.float32)
        assert torch.equal(gradient.isfinite(), twin.isfinite())
        finite += int(gradient[:, 0].isfinite().sum())
    assert finite >= 16


def test_what_is_not_finite_shows_in_its_column(device):
    sizes, seed = sizes_of(100, 0.5), torch.tensor(3, device=device)
    x, g = torch.randn(100, 40, device=device), torch.randn(100, 70, device=device)
    x[99, 35], g[99, 66] = math.inf, math.nan
    sketch, rest = kernel.sketch_and_mean_at_once(x, seed, **sizes, dtype=torch.float32)
    expected = torch.arange(40, device=device) != 35
    assert torch.equal(rest.isfinite(), expected)
    assert torch.equal(sketch.isfinite().any(0), expected)
    gradient, bias = kernel.grad_weight_at_once(
        g, seed, sketch.nan_to_num(0.0, 0.0, 0.0), None, **sizes, bias_dtype=torch.float32
    )
    expected = torch.arange(70, device=device) != 66
    assert torch.equal(bias.isfinite(), expected)
    assert torch.equal(gradient.isfinite().all(1), expected)


def test_nothing_comes_of_nothing(device):
    seed = torch.tensor(3, device=device)
    for rows, features, out in ((0, 5, 4), (70, 0, 4), (70, 5, 0)):
        sizes = sizes_of(rows, 0.5)
        x, g = torch.zeros(rows, features, device=device), torch.ones(rows, out, device=device)
        sketch, rest = kernel.sketch_and_mean_at_once(x, seed, **sizes, dtype=torch.float32)
        assert (sketch.shape, rest.tolist()) == ((sizes["blocks"] * sizes["kept"], features), [0.0] * features)
        found = kernel.grad_weight_at_once(g, seed, sketch, rest, **sizes, bias_dtype=torch.float32)
        assert [part.tolist() for part in found] == [[[0.0] * features] * out, [float(rows)] * out]
