"""The operators: what torch expects of one, under every kind of call."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear import RMMConfig, RMMLinear, available_sketches, ops
from rmm_linear.sketches import STORAGES

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = {"draw_seed", "unbind_copy", "compress", "grad_weight", "sketched_linear"}
# every sketch, centred or not, and every storage
CONFIGS = [
    *(
        RMMConfig(ratio=0.3, sketch=sketch, center=center)
        for sketch in available_sketches()
        for center in (False, True)
    ),
    *(RMMConfig(ratio=ratio, storage=storage) for storage in STORAGES for ratio in (0.3, 1.0)),
    RMMConfig(ratio=0.3, storage="int8", sketch="crs", center=False),
]


def calls(rows, dtype, device="cpu", configs=CONFIGS):
    """Every op of a layer but draw_seed, with each of its flags: (name, arguments)."""
    x, g = torch.randn(rows, 6).to(device, dtype), torch.randn(rows, 5).to(device, dtype)
    seed = torch.tensor(3, device=device)
    for config in configs:
        yield "compress", (x, seed, config.graph_key)
        kept = ops.compress(x, seed, config.graph_key)
        for need_bias, result in ((False, None), (True, None), (True, dtype)):
            yield "grad_weight", (g, seed, kept, config.graph_key, False, 6, need_bias, result)
    # rows beside a sketch are kept by no operator
    yield "grad_weight", (g, seed, [x], configs[0].graph_key, True, 6, False, None)


def run(name, arguments):
    return getattr(torch.ops.rmm_linear, name).default(*arguments)


def test_these_are_all_ops():
    schemas = torch._C._jit_get_all_schemas()
    found = {schema.name.partition("::")[2] for schema in schemas if schema.name.startswith("rmm_linear::")}
    # sketched_linear is a layer in a compiled graph, made of the others: tests/test_compile.py
    assert found == NAMES


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (67, torch.bfloat16),
        pytest.param(0, torch.float64, marks=pytest.mark.slow),
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(256, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_opcheck(rows, dtype, device):
    """Schema, shapes and dtypes of the fake kernels, and AOT dispatch with fixed and with dynamic sizes."""
    configs = CONFIGS if rows != 67 else CONFIGS[::5]
    for name, arguments in calls(rows, dtype, device, configs):
        outcome = torch.library.opcheck(getattr(torch.ops.rmm_linear, name).default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}, (name, arguments, outcome)


def test_opcheck_of_draw_seed(device):
    # its results differ from call to call, which the comparison of eager and traced runs cannot allow for
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(3, 4, device=device)
    outcome = torch.library.opcheck(torch.ops.rmm_linear.draw_seed.default, (x, None), test_utils=checks)
    assert set(outcome.values()) == {"SUCCESS"}
    assert torch.Tag.nondeterministic_seeded in torch.ops.rmm_linear.draw_seed.default.tags


def test_rows_are_copied_into_memory_of_their_own(device):
    x = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    outcome = torch.library.opcheck(torch.ops.rmm_linear.unbind_copy.default, (x,))
    assert set(outcome.values()) == {"SUCCESS"}
    rows = ops.unbind_copy(x)
    assert torch.equal(torch.stack(rows), x)
    assert len({row.untyped_storage().data_ptr() for row in (*rows, x)}) == 4
    # a GPU's kernels may assume it
    assert all(row.data_ptr() % 16 == 0 for row in rows)


@pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ambient_autocast_changes_nothing(dtype, lowered):
    """A backward pass that runs within an autocast region must not have its float32 sums lowered."""
    for name, arguments in calls(67, dtype):
        outside = run(name, arguments)
        with torch.autocast("cpu", lowered):
            inside = run(name, arguments)
        torch.testing.assert_close(inside, outside, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("rows", [0, 1, 67, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_written_whole_and_share_no_memory(rows, dtype, nan_poison):
    """Into memory that holds NaN where nothing was written; contiguous, and no views of anything larger."""
    assert torch.empty(3, dtype=dtype).isnan().all()
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    for name, arguments in calls(rows, dtype):
        results = run(name, arguments)
        if name == "grad_weight":
            *_, need_bias, result = arguments
            assert results[0].dtype == (result or accumulate)
            assert results[1].shape == ((5,) if need_bias else (0,))
            assert results[1].dtype == dtype
        storages = {tensor.untyped_storage().data_ptr() for tensor in arguments if isinstance(tensor, torch.Tensor)}
        for result in results:
            assert result.float().isfinite().all(), (name, arguments)
            assert result.is_contiguous(), name
            assert result.untyped_storage().data_ptr() not in storages - {0}, name
            assert result.untyped_storage().nbytes() == result.numel() * result.itemsize, name


def test_arguments_are_left_alone():
    for name, arguments in calls(67, torch.float32):
        before = [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments[:2]]
        run(name, arguments)
        assert all(map(torch.equal, arguments[:2], before)), name


def test_flops_are_counted():
    rows, features, outputs, ratio = 256, 32, 48, 0.25
    x = torch.randn(rows, features, requires_grad=True)
    kept = int(ratio * rows)
    for sketch, of_a_column in (("hadamard", rows * 16), ("gaussian", rows * kept), ("crs", 0)):
        layer = RMMLinear(features, outputs, config=RMMConfig(ratio=ratio, sketch=sketch))
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        assert counts["rmm_linear.compress"] == 2 * of_a_column * features
        assert counts["rmm_linear.grad_weight"] == 2 * outputs * (of_a_column + kept * features)
        with FlopCounterMode(display=False) as exact:
            nn.Linear(features, outputs)(x).sum().backward()
        # output and grad_input
        assert counts["aten.addmm"] + counts["aten.mm"] == 2 / 3 * exact.get_total_flops()


def test_draw_seed_follows_the_default_generator(device):
    x = torch.randn(3, device=device)
    torch.manual_seed(5)
    first = [ops.draw_seed(x) for _ in range(4)]
    torch.manual_seed(5)
    assert all(map(torch.equal, [ops.draw_seed(x) for _ in range(4)], first))
    assert len({int(seed) for seed in first}) == 4
    assert all((seed.dim(), seed.dtype, seed.device) == (0, torch.int64, x.device) for seed in first)


@pytest.mark.montecarlo
def test_draw_seed_covers_all_64_bits():
    """Each bit is fair over 20,000 draws: one z-score a bit, false-alarm rate 64 * 5.7e-7 = 4e-5, fixed seed."""
    x = torch.randn(3)
    drawn = torch.stack([ops.draw_seed(x) for _ in range(20_000)])
    for bit in range(64):
        ones = int(((drawn >> bit) & 1).sum())
        assert abs(ones - 10_000) <= 5 * 20_000**0.5 / 2, bit
    assert drawn.unique().numel() == 20_000


def test_ranks_seeded_alike_draw_different_seeds_a_stride_apart(monkeypatch):
    """Rank 0 adds nothing: a launch less on a GPU."""
    x, stride, ranks, drawn = torch.randn(3), 0x9E3779B97F4A7C15, (0, 1, 2, 63, 1023, 2**20), []
    for rank in ranks:
        monkeypatch.setattr("rmm_linear.ops.data_parallel_rank", lambda rank=rank: rank)
        torch.manual_seed(5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            drawn.append([int(ops.draw_seed(x)) for _ in range(3)])
        assert ("aten::add" in [event.name for event in profile.events()]) == (rank > 0)
    assert len({seed for seeds in drawn for seed in seeds}) == 3 * len(ranks)
    torch.manual_seed(5)
    own = int(torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64))
    assert [(seeds[0] - own) % (1 << 64) for seeds in drawn] == [rank * stride % (1 << 64) for rank in ranks]
