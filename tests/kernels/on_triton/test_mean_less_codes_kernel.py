"""The kernel of what codes take off the mean against its plain-torch twin."""

from functools import partial

import pytest
import torch

from rmm_linear_kernels.low_bit.reference import BITS, FP8, dequantize, quantize
from rmm_linear_kernels.mean_less_codes import kernel, reference

pytestmark = pytest.mark.usefixtures("nan_poison")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# rows, blocks, kept: full blocks; blocks of 62 and 63 rows; 31 and 32; orders with a factor of Paley's, of either kind,
# and Sylvester's below 64; larger blocks, the last longer than what bfloat16 counts; one row; x itself
GEOMETRIES = [
    (128, 2, 32),
    (187, 3, 19),
    (63, 2, 16),
    (236, 4, 30),
    (83, 3, 9),
    (40, 2, 12),
    (13, 1, 7),
    (10, 4, 1),
    (200, 2, 2),
    (700, 2, 3),
    (1, 1, 1),
    (150, 0, 1),
]


def case(rows, blocks, kept, kind, group, device, *, features=37, parts=None, size=0.05):
    """Arguments of both, without the dtype; what the codes take off is as large as the mean."""
    seed = torch.tensor(rows - 50, device=device)
    rank = blocks * kept or rows
    codes = quantize((torch.randn(rank, features) + 0.3).to(device), seed, None, kind=kind, group=group)
    sums = size * rows**0.5 * torch.randn(max(1, blocks) if parts is None else parts, features).to(device)
    options = {"rows": rows, "blocks": blocks, "kept": kept, "scale": 0.37, "kind": kind, "group": group}
    return (sums, *codes, seed), options


def check(arguments, options):
    """As near to float64 as the twin is, and finite."""
    sums, *rest = arguments
    for decoded in DTYPES:
        found = kernel.mean_less_codes(*arguments, **options, decoded=decoded)
        twin = reference.mean_less_codes(*arguments, **options, decoded=decoded)
        truth = reference.mean_less_codes(sums.double(), *rest, **options, decoded=decoded)
        assert (found.shape, found.dtype, found.device) == (twin.shape, torch.float32, twin.device)
        allowed = 2 * (twin - truth).abs().max() + 1e-6 * truth.abs().max()
        assert (found - truth).abs().max() <= allowed, decoded
        # all of it counts
        without = sums.double().sum(0) / options["rows"]
        assert (truth - without).abs().max() > 1e-3 * truth.abs().max()


@pytest.mark.parametrize(("rows", "blocks", "kept"), GEOMETRIES)
def test_every_geometry(rows, blocks, kept, device):
    """Groups of 48 rows: blocks begin in the middle of them, and a program's rows are not filled."""
    check(*case(rows, blocks, kept, "int8", 48, device))


@pytest.mark.parametrize("kind", BITS)
def test_every_kind(kind, device):
    """In the library's groups, the last one ragged: a program takes a part of each."""
    group = 1024 // BITS[kind]
    for features in (64, 69):
        check(*case(383, 6, 32, kind, group, device, features=features))


@pytest.mark.parametrize("parts", [1, 3, 7, 48, 49, 70])
def test_sums_of_any_number_of_parts(parts, device):
    """Of 3 programs, 16 sums each: more are added up first."""
    check(*case(130, 3, 42, "int8", 48, device, parts=parts, size=1.0))


def test_x_is_rounded_as_it_is_decoded(device):
    arguments, options = case(128, 2, 32, "int8", 128, device)
    found = [kernel.mean_less_codes(*arguments, **options, decoded=decoded) for decoded in DTYPES]
    assert all((found[i] - found[j]).abs().max() > 1e-5 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_any_strides(device):
    (sums, codes, steps, offsets, seed), options = case(187, 3, 19, "int4", 32, device)
    run = partial(kernel.mean_less_codes, **options, decoded=torch.float16)
    other = run(*(part.t().contiguous().t() for part in (sums, codes, steps, offsets)), seed)
    assert torch.equal(other, run(sums, codes, steps, offsets, seed))
    framed = torch.full((codes.shape[0] + 2, codes.shape[1] + 2), 255, dtype=torch.uint8, device=device)
    framed[1:-1, 1:-1] = codes
    assert torch.equal(run(sums, framed[1:-1, 1:-1], steps, offsets, seed), other)


@pytest.mark.parametrize("kind", ["int8", FP8])
def test_what_is_not_finite_stays_in_its_column(kind, device):
    (sums, codes, steps, offsets, seed), options = case(128, 2, 32, kind, 48, device, features=70)
    steps[1, 3], steps[0, 66], sums[0, 5] = torch.nan, torch.inf, torch.inf
    found = kernel.mean_less_codes(sums, codes, steps, offsets, seed, **options, decoded=torch.bfloat16)
    expected = torch.ones(70, dtype=torch.bool, device=device)
    expected[[3, 5, 66]] = False
    assert torch.equal(found.isfinite(), expected)


@pytest.mark.parametrize(("kind", "group", "size"), [("int2", 512, 50000), ("int4", 48, 63500)])
def test_codes_at_the_end_of_float16_are_finite(kind, group, size, device):
    """What they stand for may be beyond it by a step; so may code 0, which is read where the last group has no row."""
    seed, features = torch.tensor(5, device=device), 420
    x = (size * (2 * torch.rand(70, features) - 1)).to(device)
    codes = quantize(x, seed, None, kind=kind, group=group)
    decoded = dequantize(*codes, seed, kind=kind, group=group, features=features)
    assert decoded.abs().max() > 65504
    options = {"rows": 70, "blocks": 0, "kept": 1, "scale": 1.0, "kind": kind, "group": group}
    found = kernel.mean_less_codes(x.sum(0, keepdim=True), *codes, seed, **options, decoded=torch.float16)
    expected = x.double().mean(0) - decoded.double().mean(0)
    # rounded to eleven bits each
    assert (found - expected).abs().max() < 2**-11 * size / 2


@pytest.mark.parametrize(("rows", "features"), [(0, 3), (5, 0)])
def test_empty_inputs(rows, features, device):
    arguments, options = case(rows, 0, 1, "int8", 48, device, features=features)
    found = kernel.mean_less_codes(*arguments, **options, decoded=torch.float32)
    assert (found.shape, found.dtype) == ((features,), torch.float32)
    assert found.eq(0).all()


def test_the_same_in_every_run(device):
    arguments, options = case(500, 8, 31, "int8", 128, device)
    found = [kernel.mean_less_codes(*arguments, **options, decoded=torch.bfloat16) for _ in range(2)]
    assert torch.equal(*found)
