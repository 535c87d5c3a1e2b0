"""Launches by the short way against Triton's own choice, on the GPU that is none of `pretended_gpu.py`."""

import itertools
import os
import random
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'rmm-linear[kernels]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from pretended_gpu import pretended_gpu
from triton import knobs
from triton.runtime.jit import JITFunction

from rmm_linear_kernels import launching
from rmm_linear_kernels.hadamard_at_once import kernel as at_once
from rmm_linear_kernels.hadamard_sketch import kernel as hadamard_sketch
from rmm_linear_kernels.hadamard_sketch_quantized import kernel as quantized
from rmm_linear_kernels.launching import Constants, Prepared, ceil_div, launch
from rmm_linear_kernels.low_bit import kernel as low_bit
from rmm_linear_kernels.quantize_and_mean import kernel as quantize_and_mean
from rmm_linear_kernels.random_projection import kernel as random_projection
from rmm_linear_kernels.sketched_grad_weight import kernel as grad_weight
from rmm_linear_kernels.strides import are_rows_aligned


@triton.jit(do_not_specialize=["rows", "rank", "scale"])
def _sums_kernel(
    X, MEAN, OUT, rows, rank, features, row_stride, factor, scale, BLOCK: tl.constexpr, TYPE: tl.constexpr
):
    feature = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(X + (rows - rank) * row_stride + feature, mask=feature < features, other=0).to(tl.float32)
    if MEAN is not None:
        total -= tl.load(MEAN + feature, mask=feature < features, other=0)
    tl.store(OUT + feature, (total * factor * scale).to(TYPE), mask=feature < features)


@triton.jit
def _mixed_kernel(X, BLOCK: tl.constexpr, rows):
    tl.store(X + tl.arange(0, BLOCK), rows)


SMALL = Constants({"TYPE": tl.float32, "BLOCK": 16}, num_warps=1)
CONSTANTS = [
    SMALL,
    Constants({"BLOCK": 32, "TYPE": tl.float32}, num_warps=1),
    Constants({"BLOCK": 16, "TYPE": tl.float32}, num_warps=2),
    Constants({"BLOCK": 16, "TYPE": tl.float32}, num_warps=1, num_stages=2),
]


@pytest.fixture
def gpu(tmp_path_factory):
    with knobs.cache.scope(), pretended_gpu() as gpu:
        knobs.cache.dir = str(tmp_path_factory.getbasetemp() / "compiled")
        yield gpu


@pytest.fixture
def runs(monkeypatch):
    """Names of the kernels that Triton was asked to launch."""
    names, run = [], JITFunction.run

    def noting_run(self, *args, **kwargs):
        names.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", noting_run)
    return names


def by_triton(kernel, grid, arguments, constants):
    options = {} if constants.num_stages is None else {"num_stages": constants.num_stages}
    kernel[grid](*arguments, **constants.values, num_warps=constants.num_warps, **options)


def noted(gpu, launcher, case):
    gpu.launches.clear()
    launcher(*case)
    (launched,) = gpu.launches
    return launched


def are_equal(one, other):
    def is_same(left, right):
        return left is right or (type(left) is type(right) and not torch.is_tensor(left) and left == right)

    return (
        (one.kernel, one.handle, one.grid, one.device) == (other.kernel, other.handle, other.grid, other.device)
        and len(one.arguments) == len(other.arguments)
        and all(is_same(*pair) for pair in zip(one.arguments, other.arguments, strict=True))
    )


def check(gpu, runs, cases):
    """Each launch is Triton's, the first as well as those after all others, which Triton is not asked for."""
    first = [noted(gpu, launch, case) for case in cases]
    runs.clear()
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    again = {place: noted(gpu, launch, cases[place]) for place in order}
    assert runs == []
    expected = [noted(gpu, by_triton, case) for case in cases]
    for place, wanted in enumerate(expected):
        assert are_equal(first[place], wanted), cases[place]
        assert are_equal(again[place], wanted), cases[place]
    return {launched.handle for launched in expected}


def sums(x, mean=None, rows=3, rank=2, features=5, row_stride=7, factor=2.0, scale=0.5, constants=SMALL, out=None):
    out = torch.empty(16) if out is None else out
    return _sums_kernel, (2, 1, 3), (x, mean, out, rows, rank, features, row_stride, factor, scale), constants


def test_what_arguments_are_like_decides_the_compiled_kernel(gpu, runs):
    half, wide = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
    kinds = [half, half[1:], half[8:], wide, wide[1:], wide[2:], wide[4:], half.bfloat16(), torch.nn.Parameter(wide)]
    means = [None, wide, wide[1:], half]
    outs = [wide, wide[1:]]
    cases = [sums(x, mean, out=out) for x, mean, out in itertools.product(kinds, means, outs)]
    assert len(check(gpu, runs, cases)) == 5 * 4 * 2


def test_integers_decide_by_their_value_and_those_of_any_rows_by_their_width(gpu, runs):
    x = torch.zeros(64)
    wide = [1, 15, 16, 17, 0, -16, 2**31 - 1, 2**31, 2**31 + 5, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 16]
    cases = [sums(x, row_stride=stride) for stride in wide]
    cases += [sums(x, features=features, row_stride=stride) for features in (1, 16, 3) for stride in (1, 16, 3)]
    cases += [sums(x, rows=rows) for rows in wide]
    cases += [sums(x, rows=rows, row_stride=2**31 + 5) for rows in (1, 2**31 + 5)]
    cases += [sums(x, rows=rows, rank=rank) for rows in (16, 2**31 + 5, 2**63) for rank in (1, 2**31 + 5, 2**63)]
    check(gpu, runs, cases)
    runs.clear()
    for rows in range(1, 100):
        launch(*sums(x, rows=rows))
        launch(*sums(x, rows=rows + 2**31))
    assert runs == []


def test_the_python_type_of_a_number_decides(gpu, runs):
    # 1, 1.0 and True are equal, and so are their hashes
    numbers = [1, 1.0, True, 0, 0.0, False, 2, 2.0, 16, 16.0]
    x = torch.zeros(64)
    check(gpu, runs, [sums(x, factor=number) for number in numbers] + [sums(x, scale=number) for number in numbers])


def test_floats_are_no_reason_to_ask_triton(gpu, runs):
    x = torch.zeros(64)
    launch(*sums(x))
    runs.clear()
    for number in range(100):
        launch(*sums(x, factor=number / 7, scale=1 / (1 + number)))
    assert runs == []


def test_constants_and_options_decide(gpu, runs):
    x = torch.zeros(64)
    assert len(check(gpu, runs, [sums(x, constants=constants) for constants in CONSTANTS])) == len(CONSTANTS)


def test_each_device_has_its_own_compiled_kernel(gpu, runs):
    x, one = torch.zeros(64), gpu.device
    case = sums(x)
    first = noted(gpu, launch, case)
    two = gpu.switch_device()
    second = noted(gpu, launch, case)
    runs.clear()
    again = {}
    for device in (one, two):
        gpu.device = device
        again[device] = noted(gpu, launch, case)
    assert runs == []
    assert are_equal(again[one], first)
    assert are_equal(again[two], second)
    assert first.handle != second.handle


def test_debugging_switched_on_later_is_respected(gpu, runs):
    case = sums(torch.zeros(64))
    plain = noted(gpu, launch, case)
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        check(gpu, runs, [case])
        assert noted(gpu, launch, case).handle != plain.handle
    assert noted(gpu, launch, case).handle == plain.handle


def test_a_hook_of_the_kernel_sees_every_launch(gpu, monkeypatch):
    case, seen = sums(torch.zeros(64)), []
    launch(*case)
    monkeypatch.setattr(_sums_kernel, "pre_run_hooks", [lambda *args, **kwargs: seen.append(args)])
    for _ in range(3):
        launch(*case)
    assert len(seen) == 3


@pytest.mark.parametrize("is_known", [False, True])
def test_both_ways_to_call_a_compiled_kernel_are_triton_s(gpu, runs, is_known, monkeypatch):
    monkeypatch.setattr(launching, "_IS_CALL_KNOWN", is_known)
    x = torch.zeros(64)
    check(gpu, runs, [sums(x, features=features) for features in (3, 16)] + [sums(x, x[16:])])


def test_hooks_around_launches_are_handed_on_and_told_the_kernel(gpu, runs):
    """As a profiler sets them: in a chain, or in its place; the launcher, which is none here, would call them."""
    case, seen = sums(torch.zeros(64)), []
    launch(*case)
    launch(*case)
    assert (gpu.hooks, gpu.told) == ((None, None), None)
    runs.clear()
    for chained in (True, False):
        with knobs.runtime.scope():
            if chained:
                knobs.runtime.launch_enter_hook.add(seen.append)
            else:
                knobs.runtime.launch_enter_hook = seen.append
            try:
                launch(*case)
                enter, _ = gpu.hooks
                enter(gpu.told)
            finally:
                if chained:
                    knobs.runtime.launch_enter_hook.remove(seen.append)
        launch(*case)
        assert (gpu.hooks, gpu.told) == ((None, None), None)
    assert [told.get()["name"] for told in seen] == ["_sums_kernel"] * 2
    assert runs == []


def prepared(case):
    """A case whose launch is prepared, as (function of the tensors, tensors)."""
    kernel, grid, arguments, constants = case
    return Prepared(kernel, grid, arguments[3:], constants).launch, arguments[:3]


@pytest.fixture
def general(monkeypatch):
    """Launches that are asked of the function `launch`."""
    seen = []

    def noting_launch(*case):
        seen.append(case)
        return launch(*case)

    monkeypatch.setattr(launching, "launch", noting_launch)
    return seen


def test_a_prepared_launch_is_triton_s_and_soon_asks_nothing(gpu, runs, general):
    x, out = torch.zeros(64), torch.zeros(64)
    cases = [sums(x, mean, out=out, features=size) for mean in (None, x) for size in (1, 3, 16, 2**31 + 5)]
    cases += [sums(x, rows=rows, factor=factor) for rows in (1, 2**31 + 5) for factor in (1, 1.0)]
    for case in cases:
        call, tensors = prepared(case)
        expected = noted(gpu, by_triton, case)
        for _ in range(4):
            assert are_equal(noted(gpu, call, tensors), expected)
    assert len(general) == 2 * len(cases)
    general.clear()
    call, tensors = prepared(cases[0])
    noted(gpu, call, tensors)
    # other tensors, other memory
    moved = x.clone(), None, out.clone()
    call(*moved)
    again = noted(gpu, call, moved)
    assert are_equal(again, noted(gpu, by_triton, (cases[0][0], cases[0][1], (*moved, *cases[0][2][3:]), cases[0][3])))
    assert len(general) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_prepared_launch_looks_where_the_tensors_lie(gpu, place):
    whole = torch.zeros(64)
    call, aligned = prepared(sums(whole, whole, out=whole))
    shifted = tuple(whole[1:] if index == place else whole for index in range(3))
    expected = {
        tensors: noted(gpu, by_triton, sums(tensors[0], tensors[1], out=tensors[2])) for tensors in (aligned, shifted)
    }
    assert expected[aligned].handle != expected[shifted].handle
    for tensors in (shifted, aligned, shifted, aligned, aligned, shifted, aligned, shifted):
        assert are_equal(noted(gpu, call, tensors), expected[tensors])


def test_a_prepared_launch_respects_devices_settings_and_hooks(gpu, general, monkeypatch):
    case, seen = sums(torch.zeros(64)), []
    call, tensors = prepared(case)

    def check_now():
        for _ in range(3):
            assert are_equal(noted(gpu, call, tensors), noted(gpu, by_triton, case))
        return gpu.launches[0].handle

    handles = {check_now()}
    gpu.switch_device()
    handles.add(check_now())
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        handles.add(check_now())
    assert len(handles) == 3
    general.clear()
    check_now()
    assert general == []
    with knobs.runtime.scope():
        knobs.runtime.launch_enter_hook.add(seen.append)
        try:
            call(*tensors)
            enter, _ = gpu.hooks
            enter(gpu.told)
        finally:
            knobs.runtime.launch_enter_hook.remove(seen.append)
    assert [told.get()["name"] for told in seen] == ["_sums_kernel"]
    with monkeypatch.context() as patch:
        patch.setattr(_sums_kernel, "pre_run_hooks", [lambda *args, **kwargs: seen.append(args)])
        call(*tensors)
    assert len(seen) == 2
    launching.forget()
    general.clear()
    check_now()
    assert len(general) == 2


def test_a_prepared_launch_keeps_its_compiled_kernel(gpu):
    """Triton unloads it (3.8 on) once nobody has it, and its handle is then that of nothing."""
    call, tensors = prepared(sums(torch.zeros(64)))
    call(*tensors)
    call(*tensors)
    (compiled,) = _sums_kernel.device_caches[gpu.device][0].values()
    (found,) = launching._prepared.values()
    assert any(part is compiled for part in found)


def test_what_is_remembered_of_prepared_launches_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_REMEMBERED", 2)
    calls = [prepared(sums(torch.zeros(64), features=features)) for features in (3, 16, 1, 5)]
    for call, tensors in [*calls, *calls, *calls]:
        call(*tensors)
        call(*tensors)
    assert 0 < len(launching._prepared) <= 2


def test_what_is_remembered_is_bounded(gpu, runs, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_REMEMBERED", 2)
    cases = [sums(torch.zeros(64), features=features) for features in (3, 16, 1, 5)]
    for case in [*cases, *cases[::-1]]:
        assert are_equal(noted(gpu, launch, case), noted(gpu, by_triton, case))
    (plan,) = launching._plans.values()
    assert len(plan.remembered) <= 2


def test_an_argument_of_another_kind_is_left_to_triton(gpu, runs):
    class Row(int):
        pass

    case = sums(torch.zeros(64), rows=Row(3))
    for _ in range(2):
        assert are_equal(noted(gpu, launch, case), noted(gpu, by_triton, case))
    assert len(runs) == 4


def test_wrong_arguments_are_named(gpu):
    kernel, grid, arguments, constants = sums(torch.zeros(64))
    with pytest.raises(ValueError, match="was given 8 arguments; it has 9: X, MEAN, OUT, rows"):
        launch(kernel, grid, arguments[:-1], constants)
    with pytest.raises(ValueError, match=r"has the constants \['BLOCK', 'TYPE'\] and was given \['BLOCK'\]"):
        launch(kernel, grid, arguments, Constants({"BLOCK": 16}, num_warps=1))
    with pytest.raises(ValueError, match="_mixed_kernel: put its constants .* after all other"):
        launch(_mixed_kernel, grid, (arguments[0], 3), constants)


def test_the_pretended_gpu_leaves_nothing_behind(tmp_path):
    before = triton.runtime.driver._active
    case = sums(torch.zeros(64))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        for target in ("sm_90", "gfx942"):
            with pretended_gpu(target) as gpu:
                launch(*case)
                launch(*case)
                assert [launched.kernel for launched in gpu.launches] == ["_sums_kernel"] * 2
    assert triton.runtime.driver._active is before
    assert not _sums_kernel.device_caches
    assert not launching._plans
    assert not launching._prepared


def test_on_amd_the_size_of_the_storage_decides(runs, tmp_path):
    # not touched, and so not paid for
    large = torch.empty(2**31, dtype=torch.uint8).view(torch.float32)[:64]
    with knobs.cache.scope(), pretended_gpu("gfx942") as gpu:
        knobs.cache.dir = str(tmp_path)
        assert len(check(gpu, runs, [sums(large), sums(torch.zeros(64))])) == 2
        call, (x, *others) = prepared(sums(large))
        small = x.clone()
        for tensors in ((x, *others), (small, *others)) * 3:
            expected = noted(gpu, by_triton, sums(tensors[0], out=others[1]))
            assert are_equal(noted(gpu, call, tensors), expected)


def calls_of_the_launchers():
    """Launchers with what they are called with, as (module, function of no arguments)."""
    half, wide = torch.zeros(40, 33, dtype=torch.bfloat16), torch.zeros(300, 48)
    seed = torch.zeros((), dtype=torch.int64)
    for x, kind in ((half, "int8"), (wide[:64], "fp8")):
        yield low_bit, partial(low_bit.quantize, x, seed, None, kind=kind, group=64)
    codes = torch.zeros(40, 16, dtype=torch.uint8)
    for kind, features in (("int8", 16), ("int4", 32)):
        steps = torch.zeros(1, features, dtype=torch.bfloat16)
        storage = {"kind": kind, "group": 64, "features": features}
        yield low_bit, partial(low_bit.dequantize, codes, steps, steps, seed, **storage)
    for rows, rank in ((40, 5), (33, 1)):
        options = {"rank": rank, "gaussian": False, "scale": 0.5, "dtype": half.dtype}
        yield random_projection, partial(random_projection.random_projection, half[:rows], seed, None, **options)
    sketching = {"scale": 0.5, "dtype": half.dtype}
    for x, blocks, kept in ((half, 1, 16), (wide.bfloat16(), 5, 16), (wide.bfloat16()[1:], 5, 6)):
        mean = torch.zeros(x.shape[1])
        options = {"blocks": blocks, "kept": kept, **sketching}
        yield hadamard_sketch, partial(hadamard_sketch.hadamard_sketch, x, seed, None, **options)
        yield hadamard_sketch, partial(hadamard_sketch.hadamard_sketch_and_mean, x, seed, mean, **options)
        yield hadamard_sketch, partial(hadamard_sketch.hadamard_sketch_and_sums, x, seed, None, **options)
        if blocks * 64 <= 256:
            yield at_once, partial(at_once.sketch_and_mean_at_once, x, seed, **options)
        stored, geometry = torch.zeros(blocks * kept, 33, dtype=x.dtype), {"blocks": blocks, "kept": kept, "scale": 0.5}
        for centre, bias_dtype in ((None, None), (torch.zeros(33), x.dtype)):
            how = {**geometry, "bias_dtype": bias_dtype}
            yield at_once, partial(at_once.grad_weight_at_once, x, seed, stored, centre, **how)
    # full blocks of 64 rows
    full = torch.zeros(320, 48, dtype=torch.bfloat16)
    options = {"blocks": 5, "kept": 16, "scale": 0.5, "kind": "int8", "group": 32}
    for centre in (None, torch.zeros(48)):
        coded = partial(quantized.hadamard_sketch_quantized, full, seed, centre, **options)
        yield quantized, coded
    sums, mean = torch.zeros(3, 48), torch.zeros(33)
    left, right = wide.bfloat16()[:40], half
    for rest in ((None, None), (sums, None), (sums, mean), (sums[:1], mean[1:].repeat(2)[:33])):
        for bias_dtype in (None, half.dtype):
            yield grad_weight, partial(grad_weight.sketched_grad_weight, left, right, *rest, bias_dtype=bias_dtype)
    for centre in (None, mean):
        outer = partial(grad_weight.outer_product_of_sums, sums, centre, dtype=half.dtype, bias_dtype=half.dtype)
        yield grad_weight, outer
    steps = torch.zeros(1, 16, dtype=torch.bfloat16)
    stored = (codes, steps, steps, seed)
    for rows, blocks, kept, parts in ((128, 2, 20, torch.zeros(2, 16)), (40, 0, 1, None)):
        options = {"rows": rows, "blocks": blocks, "kept": kept, "scale": 0.5, "kind": "int8", "group": 64}
        centre = torch.zeros(16) if parts is None else None
        both = partial(quantize_and_mean.quantize_and_mean, right[:40, :16], seed, centre, parts, decoded=half.dtype)
        yield quantize_and_mean, partial(both, **options)
    yield (
        grad_weight,
        partial(grad_weight.sketched_grad_weight_low_bit, left, *stored, sums, None, kind="int8", group=64),
    )


# all take a minute to compile
some_or_all = pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])


@some_or_all
def test_the_launchers_launches_are_those_of_triton(gpu, runs, monkeypatch, step):
    cases = []
    for module, call in calls_of_the_launchers():
        for place in (module, launching):
            monkeypatch.setattr(place, "launch", lambda *case: cases.append(case), raising=False)
        call()
    assert {case[0].__name__ for case in cases} == {
        "_quantize_kernel",
        "_dequantize_kernel",
        "_random_projection_kernel",
        "_hadamard_sketch_kernel",
        "_sketch_and_mean_at_once_kernel",
        "_grad_weight_at_once_kernel",
        "_hadamard_sketch_quantized_kernel",
        "_grad_weight_kernel",
        "_low_bit_grad_weight_kernel",
        "_quantize_and_mean_kernel",
        "_outer_product_of_sums_kernel",
    }
    check(gpu, runs, cases[::step])


@some_or_all
def test_a_launcher_that_is_called_again_does_not_ask_triton(gpu, runs, step):
    calls = [call for _, call in calls_of_the_launchers()][::step]
    # fresh tensors may lie elsewhere: torch's are aligned alike
    for _ in range(2):
        runs.clear()
        for call in calls:
            call()
    assert runs == []


@pytest.mark.parametrize(
    ("width", "columns", "is_aligned"),
    [
        (96, slice(None), True),
        (96, slice(16, 80), True),
        (96, slice(0, 72), False),
        # rows begin at multiples of 16 bytes, which is not known
        (88, slice(0, 80), False),
        (96, slice(1, 81), False),
        (96, slice(None, None, 2), False),
    ],
)
def test_rows_are_aligned_where_triton_knows_it(width, columns, is_aligned):
    x = torch.empty(4, width, dtype=torch.bfloat16)[:, columns]
    assert are_rows_aligned(x) == is_aligned
    assert not are_rows_aligned(x.t())


@pytest.mark.parametrize(("columns", "tiles"), [(slice(0, 3072), 4), (slice(0, 3001), 2), (slice(1, 3073), 2)])
def test_fewer_tiles_where_each_number_has_an_address_of_its_own(gpu, columns, tiles):
    x = torch.empty(8192, 3088, dtype=torch.bfloat16)[:, columns]
    options = {"blocks": 128, "kept": 32, "scale": 1.0, "dtype": torch.bfloat16}
    hadamard_sketch.hadamard_sketch(x, torch.tensor(1), None, **options)
    assert gpu.launches[-1].grid == (128, -(-x.shape[1] // (64 * tiles)), 1)


@pytest.mark.parametrize(
    ("size", "block", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (2**40, 3, 366503875926)]
)
def test_blocks_cover_all(size, block, blocks):
    assert ceil_div(size, block) == blocks
