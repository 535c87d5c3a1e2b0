"""The operators of the seam: what torch expects of one, under every kind of call."""

import pytest
import torch

from rmm_linear import ops
from rmm_linear.sketches import Hadamard

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = (
    "dequantize",
    "draw_seed",
    "gather_rows",
    "hadamard_grad_weight",
    "hadamard_sketch",
    "hadamard_sketch_and_mean",
    "hadamard_sketch_and_sums",
    "hadamard_sketch_quantized",
    "importance_rows",
    "projected_grad_weight",
    "quantize",
    "quantize_and_mean",
    "random_projection",
    "sampled_mean",
    "sketched_grad_weight",
    "sketched_grad_weight_low_bit",
    "trigonometric_sketch",
    "uniform_row_sketch",
)
ROWS = (0, 1, 67, 128)


def calls_on(device, rows, dtype):
    """`calls`, with tensors on a device."""
    for name, arguments in calls(rows, dtype):
        yield name, tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in arguments)


def calls(rows, dtype):
    """Every op but draw_seed, with each of its flags, and with and without its optional tensors: (name, arguments)."""
    x = torch.randn(rows, 6).to(dtype)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    mean, seed = torch.randn(6).to(accumulate), torch.tensor(3)
    rank = max(1, rows // 3) if rows else 0
    blocks, kept = Hadamard(ratio=0.3).geometry(rows)
    for gradient in (False, True):
        for centre in (None, mean):
            yield "hadamard_sketch", (x, seed, centre, blocks, kept, gradient)
            for flag in (False, True):
                yield "random_projection", (x, seed, centre, rank, flag, gradient)
                yield "uniform_row_sketch", (x, seed, centre, rank, flag, gradient)
            if gradient:
                # either order of the products is the cheaper one
                for out, few in ((1, rank), (40, 2 * rank)):
                    stored, g = torch.randn(few, 6).to(dtype), torch.randn(rows, out).to(dtype)
                    of_g = None if centre is None else torch.randn(out).to(accumulate)
                    yield "projected_grad_weight", (g, seed, stored, of_g, True)
            for kind in ("dct", "dft"):
                yield "trigonometric_sketch", (x, seed, centre, rank, kind, gradient)
    for half in (False, True):
        yield "hadamard_sketch_and_sums", (x, seed, blocks, kept, half, 4.0 if half else 1.0)
    yield "hadamard_sketch_and_mean", (x, seed, blocks, kept)
    if rows > 1:
        # rows in runs
        runs = torch.randn(rows, 3, 6)[:, 1:].to(dtype)
        sizes = Hadamard(ratio=0.3).geometry(2 * rows)
        yield "sampled_mean", (runs,)
        yield "hadamard_sketch", (runs, seed, None, *sizes, False)
        yield "hadamard_sketch_and_mean", (runs, seed, *sizes)
        yield "hadamard_sketch_quantized", (runs, seed, mean, *sizes, "int8", 32)
    # more than is done at once
    yield "hadamard_sketch_and_mean", (torch.randn(300, 6).to(dtype), seed, 5, 3)
    g = torch.randn(rows, 5).to(dtype)
    for stored in (torch.randn(blocks * kept, 6).to(dtype), torch.randn(blocks * kept, 6).to(accumulate)):
        yield "hadamard_grad_weight", (g, seed, stored, None, blocks, kept, 0.3, None, False)
        yield "hadamard_grad_weight", (g, seed, stored, mean, blocks, kept, 0.3, torch.float32, True)
    many, its = torch.randn(600, 5).to(dtype), torch.randn(30, 6).to(dtype)
    yield "hadamard_grad_weight", (many, seed, its, mean, 10, 3, 0.05, dtype, False)
    yield "sampled_mean", (x,)
    index = torch.arange(rank, dtype=torch.int32)
    scales = torch.rand(rank).to(accumulate)
    for centre in (None, mean):
        yield "gather_rows", (x, index, centre, None)
        yield "gather_rows", (x, index, centre, scales)
        if rows:
            for winner_take_all in (False, True):
                yield "importance_rows", (x, seed, centre, None, rank, winner_take_all)
                yield "importance_rows", (x, seed, centre, torch.rand(rows).to(accumulate), rank, winner_take_all)
    for kind in ("int8", "int4", "int3", "int2", "fp8"):
        for centre in (None, mean):
            yield "quantize", (x, seed, centre, kind, 32)
            yield "hadamard_sketch_quantized", (x, seed, centre, blocks, kept, kind, 32)
            if rows == 128:
                # in one pass
                yield "hadamard_sketch_quantized", (x, seed, centre, 2, 16, kind, 32)
        yield "quantize_and_mean", (x, seed, mean, kind, 32)
        codes = torch.ops.rmm_linear.quantize.default(x, seed, None, kind, 32)
        for result in (None, torch.bfloat16):
            yield "dequantize", (*codes, seed, kind, 32, result)
    sketched_g = torch.randn(rank, 5).to(accumulate)
    # of as many parts as a product adds up by itself, and of more
    few, many = torch.randn(3, 5).to(accumulate), torch.randn(40, 5).to(accumulate)
    for factor, result in ((sketched_g, None), (sketched_g.to(dtype), torch.float32)):
        yield "sketched_grad_weight", (factor, x[:rank], None, None, 1.0, result, None)
        yield "sketched_grad_weight", (factor, x[:rank], few, mean, 64.0, result, dtype)
        yield "sketched_grad_weight", (factor, x[:rank], many, mean, 1.0, result, None)
        yield "sketched_grad_weight", (factor, x[:rank], many, None, 2.0, result, dtype, 6)
        stored = *torch.ops.rmm_linear.quantize.default(x[:rank], seed, None, "int4", 32), seed
        yield "sketched_grad_weight_low_bit", (factor, *stored, None, None, "int4", 32, 1.0, result, None)
        yield "sketched_grad_weight_low_bit", (factor, *stored, few, mean, "int4", 32, 64.0, result, dtype)
        yield "sketched_grad_weight_low_bit", (factor, *stored, many, None, "int4", 32, 2.0, result, dtype, 6)


def run(name, arguments):
    result = getattr(torch.ops.rmm_linear, name).default(*arguments)
    return result if isinstance(result, tuple) else (result,)


def test_these_are_all_ops():
    """Every op of the library is called below."""
    schemas = torch._C._jit_get_all_schemas()
    found = {schema.name.partition("::")[2] for schema in schemas if schema.name.startswith("rmm_linear::")}
    # a layer in a compiled graph, which is made of the others: tests/test_compile.py
    assert found - {"sketched_linear"} == set(NAMES)
    assert {name for name, _ in calls(67, torch.float32)} | {"draw_seed"} == set(NAMES)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (67, torch.bfloat16),
        pytest.param(0, torch.float64, marks=pytest.mark.slow),
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(128, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_opcheck(rows, dtype, device):
    """Schema, shapes and dtypes of the fake kernels, and AOT dispatch with fixed and with dynamic sizes."""
    checked = set()
    for name, arguments in calls_on(device, rows, dtype):
        outcome = torch.library.opcheck(getattr(torch.ops.rmm_linear, name).default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}, (name, outcome)
        checked.add(name)
    assert len(checked) >= 6


def test_opcheck_of_draw_seed(device):
    # its results differ from call to call, which the comparison of eager and traced runs cannot allow for
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(3, 4, device=device)
    outcome = torch.library.opcheck(torch.ops.rmm_linear.draw_seed.default, (x, None), test_utils=checks)
    assert set(outcome.values()) == {"SUCCESS"}
    assert torch.Tag.nondeterministic_seeded in torch.ops.rmm_linear.draw_seed.default.tags


@pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ambient_autocast_changes_nothing(dtype, lowered):
    """A backward pass that runs within an autocast region must not have its float32 sums lowered."""
    for name, arguments in calls(67, dtype):
        outside = run(name, arguments)
        with torch.autocast("cpu", lowered):
            inside = run(name, arguments)
        for first, second in zip(outside, inside, strict=True):
            assert first.dtype == second.dtype, name
            assert torch.equal(first, second), name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_written(rows, dtype, nan_poison):
    """Into memory that holds NaN where nothing was written."""
    assert torch.empty(3, dtype=dtype).isnan().all()
    for name, arguments in calls(rows, dtype):
        for result in run(name, arguments):
            assert result.isfinite().all(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_promised_dtype_and_layout(dtype):
    """Stored sketches in x's dtype, those of the gradient in float32 or float64; all contiguous and unaliased."""
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    for name, arguments in calls(67, dtype):
        results = run(name, arguments)
        if name == "importance_rows":
            assert [result.dtype for result in results] == [torch.int32, accumulate]
        elif name == "gather_rows":
            assert results[0].dtype == (dtype if arguments[3] is None else accumulate)
        elif name in ("sketched_grad_weight", "sketched_grad_weight_low_bit"):
            # a divisor may follow
            dtype_of_result, bias_dtype = arguments[5:7] if name == "sketched_grad_weight" else arguments[10:12]
            assert results[0].dtype == (dtype_of_result or accumulate)
            assert results[1].shape == ((0,) if bias_dtype is None else (5,))
            assert bias_dtype is None or results[1].dtype == bias_dtype
        elif name == "hadamard_grad_weight":
            *_, dtype_of_result, need_bias = arguments
            assert results[0].dtype == (dtype_of_result or dtype)
            assert results[1].shape == ((5,) if need_bias else (0,))
            assert not need_bias or results[1].dtype == dtype
        elif name == "sampled_mean":
            assert results[0].dtype == accumulate
        elif name == "hadamard_sketch_and_sums":
            is_half = arguments[4] and dtype in (torch.bfloat16, torch.float16)
            assert [result.dtype for result in results] == [dtype if is_half else accumulate, accumulate]
        elif name == "hadamard_sketch_and_mean":
            assert [result.dtype for result in results] == [dtype, accumulate]
        elif name in ("quantize", "quantize_and_mean", "hadamard_sketch_quantized"):
            assert [result.dtype for result in results[:3]] == [torch.uint8, torch.bfloat16, torch.bfloat16]
            assert [result.dtype for result in results[3:]] == [accumulate] * (name != "quantize")
        elif name == "dequantize":
            assert results[0].dtype == (arguments[-1] or torch.float32)
        else:
            assert results[0].dtype == (accumulate if arguments[-1] else dtype), name
        storages = {tensor.untyped_storage().data_ptr() for tensor in arguments if isinstance(tensor, torch.Tensor)}
        for result in results:
            assert result.is_contiguous(), name
            assert result.untyped_storage().data_ptr() not in storages, name
            # a sketch that views something larger would keep all of it
            assert result.untyped_storage().nbytes() == result.numel() * result.itemsize, name


def test_arguments_are_left_alone():
    for name, arguments in calls(67, torch.float32):
        before = [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        run(name, arguments)
        for argument, copy in zip(arguments, before, strict=True):
            assert torch.equal(argument, copy) if isinstance(argument, torch.Tensor) else argument == copy, name


def test_draw_seed_follows_the_default_generator():
    x = torch.randn(3)
    torch.manual_seed(5)
    first = [int(ops.draw_seed(x)) for _ in range(4)]
    torch.manual_seed(5)
    assert [int(ops.draw_seed(x)) for _ in range(4)] == first
    assert len(set(first)) == 4
    seed = ops.draw_seed(x)
    assert seed.dim() == 0
    assert seed.dtype == torch.int64


@pytest.mark.montecarlo
def test_draw_seed_covers_all_64_bits():
    """Each bit is fair over 20,000 draws: one z-score a bit, false-alarm rate 64 * 5.7e-7 = 4e-5, fixed seed."""
    x = torch.randn(3)
    drawn = torch.stack([ops.draw_seed(x) for _ in range(20_000)])
    for bit in range(64):
        ones = int(((drawn >> bit) & 1).sum())
        assert abs(ones - 10_000) <= 5 * 20_000**0.5 / 2, bit
    assert drawn.unique().numel() == 20_000


def test_ranks_seeded_alike_draw_different_seeds(monkeypatch):
    x = torch.randn(3)
    drawn = []
    for rank in (0, 1, 2, 63):
        monkeypatch.setattr("rmm_linear.ops.seeds.data_parallel_rank", lambda rank=rank: rank)
        torch.manual_seed(5)
        drawn.append(tuple(int(ops.draw_seed(x)) for _ in range(3)))
    assert len({seed for seeds in drawn for seed in seeds}) == 12
