"""The Hadamard sketch in low bits against its plain-torch twin: the same bits, but for values on an edge."""

from functools import partial

import pytest
import torch
from torch import Tensor

from rmm_linear_kernels.hadamard_sketch.kernel import hadamard_sketch
from rmm_linear_kernels.hadamard_sketch_quantized import kernel, reference
from rmm_linear_kernels.hadamard_sketch_quantized.shapes import holds
from rmm_linear_kernels.low_bit.kernel import quantize
from rmm_linear_kernels.low_bit.reference import BITS, FP8, dequantize
from rmm_linear_kernels.quantize_and_mean.kernel import quantize_and_mean
from rmm_linear_kernels.quantize_and_mean.reference import mean_less_codes, rounded_dtype

pytestmark = pytest.mark.usefixtures("nan_poison")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# kind, kept, rows of a group, rows of x: one group and a part of one; blocks of 63 and 64 rows; the library's groups
# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
CASES = [
    ("int8", 32, 64, 187),
    grid("int8", 16, 32, 187),
    (FP8, 16, 32, 191),
    grid(FP8, 32, 64, 192),
    ("int4", 32, 64, 187),
    ("int2", 16, 64, 366),
    grid("int8", 32, 128, 380),
    grid("int4", 32, 256, 573),
    grid("int4", 16, 256, 1085),
]


def framed(x: Tensor) -> Tensor:
    """The same values in the middle of NaN: what is read from beside them shows."""
    larger = torch.full((x.shape[0] + 2, x.shape[1] + 2), torch.nan, dtype=x.dtype, device=x.device)
    larger[1:-1, 1:-1] = x
    return larger[1:-1, 1:-1]


def uneven(rows: int, features: int, device: torch.device, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Columns of different sizes and means, one of them constant, and the means."""
    x = torch.randn(rows, features) * torch.logspace(-2, 1, features) + 3 * torch.randn(features)
    x[:, -1] = 0
    x = x.to(device, dtype)
    return framed(x), x.float().mean(0)


def options(kind: str, kept: int, group: int, rows: int) -> dict:
    blocks = -(-rows // 64)
    return {"blocks": blocks, "kept": kept, "scale": 0.125, "kind": kind, "group": group}


def unpacked(codes: Tensor, features: int, kind: str) -> Tensor:
    shifts = torch.arange(0, 8, BITS[kind], device=codes.device, dtype=torch.uint8)
    return ((codes.unsqueeze(-1) >> shifts) & (2 ** BITS[kind] - 1)).flatten(1)[:, :features]


def assert_the_twin_s(found, expected, *, kind: str, group: int, share: float = 1e-3) -> None:
    """Steps and offsets to rounding; codes equal, where these are, but for a share of them that is on an edge."""
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    codes, steps, offsets, _ = found
    torch.testing.assert_close(steps, expected[1], rtol=2**-7, atol=1e-30)
    torch.testing.assert_close(offsets, expected[2], rtol=2**-7, atol=1e-6)
    same = steps == expected[1]
    if kind != FP8:
        same &= offsets == expected[2]
    assert same.float().mean() > 0.98
    rows = torch.arange(codes.shape[0], device=codes.device) // group
    features = steps.shape[1]
    differ = (unpacked(codes, features, kind) != unpacked(expected[0], features, kind)) & same[rows]
    assert int(differ.sum()) <= share * differ.numel(), int(differ.sum())


def assert_left_of_the_mean(found, x: Tensor, seed: Tensor, how: dict) -> None:
    """What these very codes stand for is taken off the mean of all rows."""
    *codes, rest = found
    decoded = rounded_dtype(x.dtype, how["kind"], how["blocks"])
    sums, options = x.double().sum(0, keepdim=True), how | {"scale": 1 / (how["kept"] * how["scale"])}
    expected = mean_less_codes(sums, *codes, seed, rows=x.shape[0], **options, decoded=decoded)
    largest = float(x.double().abs().nan_to_num(0, 0).max())
    torch.testing.assert_close(rest.double(), expected, rtol=1e-5, atol=1e-6 * largest, equal_nan=True)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("kind", "kept", "group", "rows"), CASES)
def test_codes_steps_and_offsets_are_the_twin_s(kind, kept, group, rows, centred, device):
    x, mean = uneven(rows, 69, device)
    seed = torch.tensor(11, device=device)
    how = options(kind, kept, group, rows)
    assert holds(x, blocks=how["blocks"], kept=kept, kind=kind, group=group)
    mean = mean if centred else None
    found = kernel.hadamard_sketch_quantized(x, seed, mean, **how)
    assert_the_twin_s(found, reference.hadamard_sketch_quantized(x, seed, mean, **how), kind=kind, group=group)
    if centred:
        assert_left_of_the_mean(found, x, seed, how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "kept", "group"), [("int8", 32, 64), grid(FP8, 16, 128), grid("int4", 16, 64)])
def test_dtypes(kind, kept, group, dtype, device, monkeypatch):
    """In one kernel each: nothing goes by way of the memory."""
    for step in (quantize, quantize_and_mean):
        monkeypatch.setattr(kernel, step.__name__, None)
    x, mean = uneven(187, 101, device, dtype)
    seed = torch.tensor(-5, device=device)
    how = options(kind, kept, group, 187)
    found = kernel.hadamard_sketch_quantized(x, seed, mean, **how)
    assert_the_twin_s(found, reference.hadamard_sketch_quantized(x, seed, mean, **how), kind=kind, group=group)
    assert_left_of_the_mean(found, x, seed, how)


@pytest.mark.parametrize("layout", ["transposed", "every other column", "expanded rows"])
def test_any_strides(layout, device):
    x = {
        "transposed": torch.randn(11, 128, device=device).half().t(),
        "every other column": torch.randn(128, 22, device=device).half()[:, ::2],
        "expanded rows": torch.randn(1, 11, device=device).half().expand(128, 11),
    }[layout]
    mean, seed = torch.randn(22, device=device)[::2], torch.tensor(3, device=device)
    how = options("int4", 16, 32, 128)
    found = kernel.hadamard_sketch_quantized(x, seed, mean, **how)
    for one, other in zip(
        found, kernel.hadamard_sketch_quantized(x.contiguous(), seed, mean.clone(), **how), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "centred"), [(187, False), grid(573, True)])
def test_by_way_of_the_memory_are_the_same_bits(rows, centred, device, monkeypatch):
    """What the launcher does for shapes that no program holds: nothing tells it from the one kernel."""
    x = torch.randint(-64, 64, (rows, 69), device=device).half() / 8
    mean, seed = x[3].float() / 4 if centred else None, torch.tensor(7, device=device)
    how = options("int4", 32, 256, rows)
    found = kernel.hadamard_sketch_quantized(framed(x), seed, mean, **how)
    rounded = []

    def second_step(step):
        def run(sketch, *args, **how):
            rounded.append((step, sketch.dtype))
            return step(sketch, *args, **how)

        return run

    monkeypatch.setattr(torch.version, "hip", "7.0")
    for step in (quantize, quantize_and_mean):
        monkeypatch.setattr(kernel, step.__name__, second_step(step))
    in_two = kernel.hadamard_sketch_quantized(framed(x), seed, mean, **how)
    for one, other in zip(found[:3], in_two[:3], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[3], in_two[3], rtol=1e-5, atol=1e-5)
    assert rounded == [(quantize_and_mean if centred else quantize, torch.float32)]


@pytest.mark.parametrize("kind", ["int8", FP8])
def test_what_is_not_finite_stays_in_its_column_and_group(kind, device):
    x, _ = uneven(192, 9, device)
    x[0, 2], x[0, 3], x[1, 5] = torch.nan, torch.inf, torch.nan
    how = options(kind, 32, 64, 192)
    seed = torch.tensor(3, device=device)
    found = kernel.hadamard_sketch_quantized(x, seed, None, **how)
    # rows 0 and 1 belong to blocks 0 and 1, and these to group 0
    columns = [2, 3, 5]
    broken = torch.zeros(2, 9, dtype=torch.bool, device=device)
    broken[0, columns] = True
    assert torch.equal(~found[1].isfinite(), broken)
    values = dequantize(*found[:3], seed, kind=kind, group=64, features=9)
    assert not values[:64, columns].isfinite().any()
    assert values[64:].isfinite().all()


def test_values_are_within_half_a_step_of_the_sketch(device):
    """The codes are those of this very sketch and this very dither."""
    x, mean = uneven(187, 37, device)
    seed = torch.tensor(7, device=device)
    how = options("int8", 16, 32, 187)
    found = kernel.hadamard_sketch_quantized(x, seed, mean, **how)
    sketch = hadamard_sketch(x, seed, mean, blocks=3, kept=16, scale=0.125, dtype=torch.float32)
    values = dequantize(*found[:3], seed, kind="int8", group=32, features=37)
    step = found[1].float()[torch.arange(48, device=device) // 32]
    assert ((values - sketch).abs() <= 0.5001 * step + 1e-5).all()


@pytest.mark.parametrize("rows", [192, 380])
def test_the_mean_is_that_of_all_rows_and_no_other(rows, device):
    """A group and half of one: what stands in for the other half is not counted again, infinite or not."""
    x = torch.arange(rows, device=device)[:, None] + torch.arange(0, 70, 10, device=device)
    x = framed(x.half())
    x[-1, 2], x[0, 3] = torch.nan, torch.inf
    how = options("int8", 32, 64, rows)
    seed = torch.tensor(3, device=device)
    found = kernel.hadamard_sketch_quantized(x, seed, x[5].float(), **how)
    assert found[3].isfinite().nonzero().flatten().tolist() == [0, 1, 4, 5, 6]
    assert_left_of_the_mean(found, x, seed, how)


@pytest.mark.parametrize(
    ("rows", "features", "kept", "kind"),
    [(130, 5, 17, "int8"), (192, 5, 21, "int3"), (20, 5, 16, "int8"), (0, 5, 1, "int8"), (128, 0, 32, "int4")],
)
def test_what_no_program_holds_is_sketched_first(rows, features, kept, kind, device):
    x, seed = torch.randn(rows, features, device=device), torch.tensor(3, device=device)
    mean = torch.randn(features, device=device) if rows != 130 else None
    how = options(kind, kept, 63 if kind == "int3" else 64, rows)
    found = kernel.hadamard_sketch_quantized(x, seed, mean, **how)
    expected = reference.hadamard_sketch_quantized(x, seed, mean, **how)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    if rows * features:
        torch.testing.assert_close(found[1], expected[1], rtol=2**-7, atol=0)
        if mean is not None:
            assert_left_of_the_mean(found, x, seed, how)


@pytest.mark.parametrize("scale", [1.2451361, grid(0.3)])
def test_a_scale_that_is_no_power_of_2_rounds_no_code_around(scale, device):
    """Products and extremes would be rounded in different ways: the lowest code could become the highest."""
    x = torch.zeros(192, 8, device=device).half()
    x[:, :] = 1.00390625 * torch.arange(1, 9, device=device)
    x[::3] *= -1
    how = options("int8", 32, 64, 192) | {"scale": scale}
    seed = torch.tensor(3, device=device)
    found = kernel.hadamard_sketch_quantized(x, seed, None, **how)
    sketch = hadamard_sketch(x, seed, None, blocks=3, kept=32, scale=scale, dtype=torch.float32)
    values = dequantize(*found[:3], seed, kind="int8", group=64, features=8)
    step = found[1].float()[torch.arange(96, device=device) // 64]
    assert ((values - sketch).abs() <= 0.5001 * step + 1e-5).all()


@pytest.mark.parametrize(("features", "steps"), [(64, 0), grid(65, 1)])
def test_float32_rows_that_begin_anywhere_go_by_way_of_the_memory(features, steps, device, monkeypatch):
    """Where 256 rows share a step, and 32 of a block are kept: to the same bits."""
    x, seed = torch.randn(573, features, device=device), torch.tensor(7, device=device)
    how = options("int4", 32, 256, 573)
    calls = []
    monkeypatch.setattr(kernel, "quantize", lambda *args, **how: calls.append(1) or quantize(*args, **how))
    found = kernel.hadamard_sketch_quantized(x, seed, None, **how)
    assert len(calls) == steps
    assert_the_twin_s(found, reference.hadamard_sketch_quantized(x, seed, None, **how), kind="int4", group=256)


def is_held(rows: int = 8192, dtype: torch.dtype = torch.bfloat16, columns: slice = slice(None), **change) -> bool:
    """Of 128 blocks."""
    x = torch.empty(1, 144, dtype=dtype)[:, columns].expand(rows, -1)
    return holds(x, **{"blocks": 128, "kept": 32, "kind": "int8", "group": 128} | change)


def test_what_a_program_holds():
    odd = slice(1, 129)
    for change, expected in (
        ({}, True),
        ({"kept": 16}, True),
        ({"kept": 31}, False),
        ({"kept": 8}, False),
        ({"kept": 64}, False),
        ({"kind": FP8}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float64}, False),
        ({"kind": "int4", "group": 256}, True),
        ({"kind": "int4", "group": 256, "kept": 16}, True),
        ({"kind": "int4", "group": 256, "columns": odd}, True),
        ({"kind": "int4", "group": 256, "dtype": torch.float32}, True),
        ({"kind": "int4", "group": 256, "dtype": torch.float32, "columns": odd}, False),
        ({"kind": "int4", "group": 256, "dtype": torch.float32, "columns": odd, "kept": 16}, True),
        ({"dtype": torch.float32, "columns": odd}, True),
        ({"kind": "int2", "group": 512}, False),
        ({"kind": "int3", "group": 341}, False),
        ({"group": 16}, False),
        # one block a group
        ({"group": 32}, False),
        ({"columns": slice(0)}, False),
        ({"rows": 0}, False),
        # blocks of 61 rows have the same matrix as those of 64, blocks of 60 another one
        ({"rows": 61 * 128}, True),
        ({"rows": 60 * 128}, False),
        ({"rows": 65 * 128}, False),
    ):
        assert is_held(**change) == expected, change


def test_amd_s_gpus_take_two_steps_for_int4_half_of_the_rows_and_float32(monkeypatch):
    half, wide = torch.bfloat16, torch.float32
    cases = [("int8", 16, half), ("int8", 32, half), ("fp8", 16, half), ("int4", 16, half), ("int8", 16, wide)]
    for version, held in ((None, cases), ("7.0", [("int8", 16, half), ("fp8", 16, half)])):
        monkeypatch.setattr(torch.version, "hip", version)
        for case in cases:
            kind, kept, dtype = case
            found = is_held(kept=kept, kind=kind, group=1024 // BITS[kind], dtype=dtype)
            assert found == (case in held), case
