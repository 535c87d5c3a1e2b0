"""Low bits and what they take off the mean, by the kernel against its plain-torch twin."""

from functools import partial

import pytest
import torch
from torch import Tensor

from rmm_linear_kernels.low_bit.reference import BITS, FP8, dequantize, quantize
from rmm_linear_kernels.quantize_and_mean import kernel, reference

pytestmark = pytest.mark.usefixtures("nan_poison")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# rows, blocks, kept: full blocks; blocks of 62 and 63 rows; 31 and 32; orders with a factor of Paley's, of either kind,
# and Sylvester's below 64; larger blocks; one row; x itself
# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
GEOMETRIES = [
    (128, 2, 32),
    grid(187, 3, 19),
    (63, 2, 16),
    grid(236, 4, 30),
    (83, 3, 9),
    grid(40, 2, 12),
    (13, 1, 7),
    grid(10, 4, 1),
    grid(200, 2, 2),
    grid(700, 2, 3),
    (1, 1, 1),
    grid(150, 0, 1),
]


def framed(y: Tensor) -> Tensor:
    """The same values in the middle of NaN: what is read from beside them shows."""
    larger = torch.full((y.shape[0] + 2, y.shape[1] + 2), torch.nan, dtype=y.dtype, device=y.device)
    larger[1:-1, 1:-1] = y
    return larger[1:-1, 1:-1]


def case(rows, blocks, kept, kind, group, device, *, features=37, parts=None, size=0.05, dtype=torch.float32):
    """Arguments of both, without the dtype of the codes' values; what they take off is as large as the mean."""
    seed = torch.tensor(rows - 50, device=device)
    y = framed((torch.randn(blocks * kept or rows, features) + 0.3).to(device, dtype))
    if blocks:
        sums = size * rows**0.5 * torch.randn(blocks if parts is None else parts, features).to(device)
        arguments = (y, seed, None, sums)
    else:
        # about a mean that is not quite that of x
        arguments = (y, seed, y[::3].float().mean(0) + 0.01, None)
    options = {"rows": rows, "blocks": blocks, "kept": kept, "scale": 0.37 if blocks else 1.0}
    return arguments, options | {"kind": kind, "group": group}


def check(arguments, options, *, decoded_as=DTYPES):
    """The twin's codes to the bit; what is left of the mean as near to float64 as the twin's, and finite."""
    y, seed, _, sums = arguments
    given = y.double().sum(0, keepdim=True) if sums is None else sums.double()
    for decoded in decoded_as:
        *codes, found = kernel.quantize_and_mean(*arguments, **options, decoded=decoded)
        *expected, twin = reference.quantize_and_mean(*arguments, **options, decoded=decoded)
        for one, other in zip(codes, expected, strict=True):
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            assert torch.equal(one, other)
        truth = reference.mean_less_codes(given, *codes, seed, **options, decoded=decoded)
        assert (found.shape, found.dtype, found.device) == (twin.shape, torch.float32, twin.device)
        # what is rounded off is taken away as a part of a step
        size = max(truth.abs().max(), y.double().abs().max(), codes[1].double().max())
        allowed = 2 * (twin - truth).abs().max() + 2e-6 * size
        assert (found - truth).abs().max() <= allowed, decoded
        # all of it counts
        without = given.sum(0) / options["rows"]
        assert (truth - without).abs().max() > 1e-3 * truth.abs().max()


@pytest.mark.parametrize(("rows", "blocks", "kept"), GEOMETRIES)
def test_every_geometry(rows, blocks, kept, device):
    """Groups of 48 rows: blocks begin in the middle of them, and a program's rows are not filled."""
    check(*case(rows, blocks, kept, "int8", 48, device), decoded_as=(torch.float32, torch.bfloat16))


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("blocks", [6, grid(0)])
def test_every_kind(kind, blocks, device):
    """In the library's groups, the last one ragged."""
    group = 1024 // BITS[kind]
    arguments = case(383, blocks, 32 if blocks else 1, kind, group, device, features=69 if blocks else 64)
    check(*arguments, decoded_as=(torch.float32 if blocks else torch.bfloat16,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [3, grid(0)])
def test_dtypes(dtype, blocks, device):
    for kind in ("int8", "int4", FP8):
        check(*case(187, blocks, 19 if blocks else 1, kind, 64, device, dtype=dtype), decoded_as=(dtype,))


@pytest.mark.grid
def test_groups_of_more_rows_than_a_program_holds(device):
    """512 are held: the rows are read twice."""
    for blocks, kept in ((20, 30), (0, 1)):
        check(*case(1200, blocks, kept, "int8", 700, device, features=9), decoded_as=(torch.float32, torch.bfloat16))


@pytest.mark.parametrize("parts", [1, 7, *map(grid, (3, 48, 97, 384, 385))])
def test_sums_of_any_number_of_parts(parts, device):
    """Of 3 groups, 128 sums each: more are added up first."""
    check(*case(130, 3, 42, "int8", 48, device, parts=parts, size=1.0), decoded_as=(torch.float32,))


def test_x_is_rounded_as_it_is_decoded(device):
    arguments, options = case(128, 2, 32, "int8", 128, device)
    found = [kernel.quantize_and_mean(*arguments, **options, decoded=decoded)[3] for decoded in DTYPES]
    assert all((found[i] - found[j]).abs().max() > 1e-5 for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("blocks", [3, grid(0)])
def test_any_strides(blocks, device):
    (y, seed, mean, sums), options = case(187, blocks, 19 if blocks else 1, "int4", 32, device)
    run = partial(kernel.quantize_and_mean, **options, decoded=torch.float16)
    expected = run(y, seed, mean, sums)
    if blocks:
        sums = sums.t().contiguous().t()
    else:
        mean = torch.stack((mean, mean), 1)[:, 1]
    for one, other in zip(run(y.t().contiguous().t(), seed, mean, sums), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["int8", FP8])
@pytest.mark.parametrize("decoded", [torch.float32, grid(torch.bfloat16)])
def test_what_is_not_finite_stays_in_its_column(kind, decoded, device):
    (y, seed, mean, sums), options = case(128, 2, 32, kind, 48, device, features=70)
    y[50, 3], y[1, 66], sums[0, 5] = torch.nan, torch.inf, torch.inf
    found = kernel.quantize_and_mean(y, seed, mean, sums, **options, decoded=decoded)[3]
    expected = torch.ones(70, dtype=torch.bool, device=device)
    expected[[3, 5, 66]] = False
    assert torch.equal(found.isfinite(), expected)


@pytest.mark.parametrize(("kind", "group", "size"), [grid("int2", 512, 50000), ("int4", 48, 63500)])
def test_codes_at_the_end_of_float16_are_finite(kind, group, size, device):
    """What they stand for may be beyond it by a step."""
    seed, features = torch.tensor(5, device=device), 160
    x = (size * (2 * torch.rand(70, features) - 1)).to(device)
    stored = quantize(x, seed, None, kind=kind, group=group)
    values = dequantize(*stored, seed, kind=kind, group=group, features=features)
    assert values.abs().max() > 65504
    options = {"rows": 70, "blocks": 0, "kept": 1, "scale": 1.0, "kind": kind, "group": group}
    found = kernel.quantize_and_mean(x, seed, None, None, **options, decoded=torch.float16)[3]
    expected = x.double().mean(0) - values.double().mean(0)
    # rounded to eleven bits each
    assert (found - expected).abs().max() < 2**-11 * size / 2


@pytest.mark.parametrize(("rows", "features"), [(0, 3), (5, 0)])
def test_empty_inputs(rows, features, device):
    y, options = torch.zeros(rows, features, device=device), {"rows": rows, "blocks": 0, "kept": 1, "scale": 1.0}
    *_, found = kernel.quantize_and_mean(
        y, torch.tensor(5, device=device), None, None, **options, kind="int8", group=48, decoded=torch.float32
    )
    assert (found.shape, found.dtype) == ((features,), torch.float32)
    assert found.eq(0).all()


@pytest.mark.grid
def test_the_same_in_every_run(device):
    arguments, options = case(500, 8, 31, "int8", 128, device)
    found = [kernel.quantize_and_mean(*arguments, **options, decoded=torch.bfloat16)[3] for _ in range(2)]
    assert torch.equal(*found)
