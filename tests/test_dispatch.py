"""Which implementation an op runs, and what happens where a kernel cannot."""

import importlib
import itertools
import math
import subprocess
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rmm_linear
from rmm_linear import RMMConfig, RMMLinear, available_sketches, ops, use_kernels
from rmm_linear.ops import dispatch
from rmm_linear_kernels.hadamard_sketch import reference

pytestmark = pytest.mark.usefixtures("draws_of_a_gpu")


@pytest.fixture(autouse=True)
def unspoilt(monkeypatch):
    """A state of its own for each test, whatever the environment asks for."""
    monkeypatch.setattr(dispatch, "_state", dispatch._State("auto"))
    dispatch.unusable.cache_clear()
    yield
    dispatch.unusable.cache_clear()


def sketch(x):
    return ops.hadamard_sketch(x, torch.tensor(3), None, blocks=2, kept=10, gradient=False)


X = torch.randn(100, 8)


def test_plain_torch_runs_on_a_cpu_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice in ("auto", "torch"):
            with use_kernels(choice):
                assert torch.equal(sketch(X), reference.hadamard_sketch(
                    X, torch.tensor(3), None, blocks=2, kept=10, scale=1 / 8, dtype=torch.float32
                ))  # fmt: skip


def test_choices_nest_and_end():
    assert ops.chosen() == "auto"
    with use_kernels("torch"):
        assert ops.chosen() == "torch"
        with use_kernels("triton"):
            assert ops.chosen() == "triton"
        assert ops.chosen() == "torch"
    assert ops.chosen() == "auto"
    use_kernels("torch")
    assert ops.chosen() == "torch"


def test_a_wrong_choice_is_named():
    with pytest.raises(ValueError, match="choice='cuda' is none of auto, triton, torch"):
        use_kernels("cuda")
    code = "import rmm_linear"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), dispatch.ENVIRONMENT: "on"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RMM_LINEAR_KERNELS='on' is none of auto, triton, torch" in done.stderr


def test_triton_by_force_says_why_it_cannot():
    layer = RMMLinear(8, 4, config=RMMConfig(min_rows=1))
    with (
        use_kernels("triton"),
        pytest.raises(ValueError, match=r"cpu, and the kernels are for GPUs; use_kernels\('auto"),
    ):
        layer(X)


def pretend_to_have_a_gpu(monkeypatch, kernel):
    """CPU tensors pass for those of a GPU, and `kernel` for the module of the Hadamard kernels."""
    monkeypatch.setattr(
        dispatch, "_reason_against", lambda name, x: dispatch._state.broken.get((name, x.dtype, x.device))
    )
    monkeypatch.setattr(dispatch, "_loaded", lambda name: kernel)


def test_a_kernel_that_fails_is_replaced_with_one_warning(monkeypatch):
    calls = []

    def kernel(*args, **kwargs):
        calls.append(1)
        raise RuntimeError("Failed to find C compiler")

    expected = sketch(X)
    pretend_to_have_a_gpu(monkeypatch, kernel)
    message = r"hadamard_sketch failed for torch.float32 \(RuntimeError: Failed to find C compiler\).*doctor"
    with pytest.warns(RuntimeWarning, match=message):
        assert torch.equal(sketch(X), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sketch(X), expected)
    assert len(calls) == 1
    # another kernel is tried all the same, and says nothing of its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.hadamard_sketch_and_sums(X, torch.tensor(3), blocks=2, kept=10)
        ops.hadamard_sketch_and_sums(X.bfloat16(), torch.tensor(3), blocks=2, kept=10)
    assert len(calls) == 3
    assert len(dispatch._state.broken) == 3


def test_a_broken_triton_on_a_gpu_is_one_warning_for_all_kernels_and_steps(monkeypatch):
    def kernel(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    pretend_to_have_a_gpu(monkeypatch, kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for dtype, name in itertools.product((torch.float32, torch.bfloat16), ("hadamard_sketch", "quantize")):
                x = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"), dtype=dtype)
                assert dispatch.run(name, lambda x: "of the twin", x) == "of the twin"
    assert len(said) == 1
    assert "hadamard_sketch failed for torch.float32" in str(said[0].message)
    assert len(dispatch._state.broken) == 4


def test_a_kernel_that_is_asked_for_and_fails_raises(monkeypatch):
    def kernel(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    pretend_to_have_a_gpu(monkeypatch, kernel)
    with use_kernels("triton"), pytest.raises(RuntimeError, match="C compiler"):
        sketch(X)


def test_running_out_of_memory_is_no_fault_of_the_kernel(monkeypatch):
    def kernel(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    pretend_to_have_a_gpu(monkeypatch, kernel)
    with pytest.raises(torch.OutOfMemoryError):
        sketch(X)
    assert dispatch._state.broken == {}


def test_a_kernel_is_taken_where_it_can_run(monkeypatch):
    pretend_to_have_a_gpu(monkeypatch, lambda *args, **kwargs: torch.full((20, 8), 5.0))
    assert torch.equal(sketch(X), torch.full((20, 8), 5.0))
    with use_kernels("torch"):
        monkeypatch.undo()
        assert not torch.equal(sketch(X), torch.full((20, 8), 5.0))


def test_old_gpus_and_missing_triton_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    assert dispatch.unusable(0) == "Tesla T4 has compute capability 7.5, and the kernels need 8.0"
    dispatch.unusable.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert dispatch.unusable(0) is None
    dispatch.unusable.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton cannot be imported" in dispatch.unusable(0)
    assert "pip install 'rmm-linear[kernels]'" in dispatch.unusable(0)


def test_every_dtype_without_a_kernel_has_its_twin():
    for dtype in (torch.float64, torch.float8_e4m3fn):
        assert "there is no kernel" in dispatch._reason_against("hadamard_sketch", torch.empty(0, dtype=dtype))
    with use_kernels("triton"):
        assert sketch(X.double()).dtype == torch.float64


def test_flops_are_counted():
    rows, features, outputs, ratio = 256, 32, 48, 0.25
    layer = RMMLinear(features, outputs, config=RMMConfig(ratio=ratio))
    x = torch.randn(rows, features, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    kept = 16
    assert counts["rmm_linear.hadamard_sketch"] == 2 * rows * kept * (features + outputs)
    assert counts["rmm_linear.sketched_grad_weight"] == 2 * int(ratio * rows) * features * outputs
    with FlopCounterMode(display=False) as exact:
        nn.Linear(features, outputs)(x).sum().backward()
    # output and grad_input
    assert counts["aten.addmm"] + counts["aten.mm"] == 2 / 3 * exact.get_total_flops()


def test_flops_of_rows_in_runs_are_those_of_a_matrix():
    x, seed = torch.randn(4, 40, 6), torch.tensor(3)
    sizes, counts = {"blocks": 3, "kept": 20}, []
    for y in (x, x.flatten(0, 1)):
        with FlopCounterMode(display=False) as counter:
            ops.hadamard_sketch(y, seed, None, **sizes, gradient=False)
            ops.hadamard_sketch_and_mean(y, seed, **sizes)
            ops.hadamard_sketch_quantized(y, seed, None, **sizes, kind="int8", group=32)
        counts.append({str(name): count for name, count in counter.get_flop_counts()["Global"].items()})
    assert counts[0] == counts[1]
    assert set(counts[0].values()) == {2 * 160 * 20 * 6}


def test_the_ways_of_a_gpu_give_the_same_gradient(monkeypatch):
    """One reading of g as it is: the twin of it, in float64, is the same to rounding."""
    torch.manual_seed(0)
    x, g = torch.randn(150, 8).double() + 3, torch.randn(150, 5).double() - 2
    for center, (storage, ratio) in itertools.product((False, True), ((None, 0.4), ("int4", 0.4), ("int4", 1.0))):
        sketched = RMMConfig(ratio=ratio, center=center, storage=storage).sketch_object
        expected = sketched.backward(g, sketched.compress(x, torch.tensor(5)))
        with monkeypatch.context() as patch:
            patch.setattr(ops, "is_for_kernels", lambda g: True)
            found = sketched.backward(g, sketched.compress(x, torch.tensor(5)))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sketch", ["hadamard", "gaussian"])
def test_float16_keeps_both_ends_of_its_range(sketch, ratio, monkeypatch):
    """Sketches of large gradients do not overflow, and those of small ones are not flushed to zero."""
    for place in ("rmm_linear.ops.is_for_kernels", "rmm_linear.ops.dispatch.is_for_kernels"):
        monkeypatch.setattr(place, lambda g: True)
    torch.manual_seed(0)
    sketched = RMMConfig(ratio=ratio, sketch=sketch).sketch_object
    x = torch.randn(1024, 16).to(torch.float16)
    plain = x.float() @ torch.randn(16, 8) / 4 + torch.randn(1024, 8)
    # the smallest is 5 times the smallest number of float16
    for size in (3e-7, 1e-6, 1e-3, 1e4):
        g = (plain / plain.std() * size).clamp(-6e4, 6e4).to(torch.float16)
        for seed in range(5):
            saved = sketched.compress(x, torch.tensor(seed))
            found, _ = sketched.backward(g, saved, dtype=torch.float32)
            assert found.isfinite().all()
            with monkeypatch.context() as patch:
                patch.setattr("rmm_linear.ops.is_for_kernels", lambda g: False)
                patch.setattr("rmm_linear.ops.dispatch.is_for_kernels", lambda g: False)
                wide, _ = sketched.backward(g, saved)
            slope = (found.double() * wide.double()).sum() / wide.double().square().sum()
            assert abs(slope - 1) < 0.02, (size, slope)


def test_each_float16_scale_is_a_power_of_two_around_the_sketchs_size():
    for ratio in (1.0, 0.9, 0.5, 0.3, 0.1, 0.01):
        scale = ops.product_scale(torch.float16, ratio)
        assert 1 / ratio <= scale <= 2 / ratio
        assert math.frexp(scale)[0] == 0.5
        assert ops.product_scale(torch.bfloat16, ratio) == 1


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "ratio"), [(128, 0.1), (128, 0.3), (128, 0.9), (110, 0.4), (100, 0.02)])
def test_a_lonely_row_of_a_block_is_rounded_by_no_factor(rows, ratio, dtype, center, monkeypatch):
    """One row of x and of g other than zero a block: its part is its own product times p / p, in every draw.

    All combinations of such a row are the row itself, but for their sign: what a factor that is no power of 2 rounds
    off one of them, it rounds off all of them.
    """
    for place in ("rmm_linear.ops.is_for_kernels", "rmm_linear.ops.dispatch.is_for_kernels"):
        monkeypatch.setattr(place, lambda g: True)
    torch.manual_seed(0)
    sketched = RMMConfig(ratio=ratio, center=False).sketch_object
    blocks, kept = sketched.geometry(rows)
    x, g = torch.zeros(rows, 6), torch.zeros(rows, 5)
    # the first row of each block
    x[:blocks], g[:blocks] = torch.randn(blocks, 6), torch.randn(blocks, 5)
    x, g = x.to(dtype), g.to(dtype)
    exact = g.double().t() @ x.double()
    for seed in range(3):
        saved = sketched.compress(x, torch.tensor(seed))
        read = sketched.one_pass(g, saved)
        assert read.sketched.dtype == dtype
        assert read.divisor == kept
        assert 2**-0.5 <= ops.odd_factor(kept) <= 2**0.5
        if center:
            # the product takes the factor beside a mean as well
            sums, mean = torch.randn(3, 5), torch.randn(6)
            found, _ = ops.sketched_grad_weight(
                read.sketched, saved.tensors[0], sums, mean, scale=read.scale, dtype=torch.float32, divisor=kept
            )
            found = found.double() - torch.outer(sums.sum(0), mean).double()
        else:
            found, _ = sketched.backward(g, saved, dtype=torch.float32)
        # float32 sums of 57 equal terms, and a rounding of 2**-9 would be 2e-3
        assert (found.double() - exact).abs().max() < 5e-6 * exact.abs().max()


def test_a_callers_mistake_is_no_fault_of_the_kernel(monkeypatch):
    def kernel(x, seed, mean, **options):
        raise ValueError("too large")

    def twin(x, seed, mean, **options):
        raise ValueError("too large")

    pretend_to_have_a_gpu(monkeypatch, kernel)
    with pytest.raises(ValueError, match="too large"):
        dispatch.run("random_projection", twin, X, torch.tensor(3), None)
    assert dispatch._state.broken == {}


def test_a_failure_in_a_capture_says_what_to_do(monkeypatch):
    def kernel(x):
        raise RuntimeError("operation not permitted when stream is capturing")

    pretend_to_have_a_gpu(monkeypatch, kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    x = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="run a step before the capture"):
        dispatch.run("hadamard_sketch", None, x)
    assert dispatch._state.broken == {}


def test_an_empty_variable_is_none():
    code = "import rmm_linear; print(rmm_linear.ops.chosen())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), dispatch.ENVIRONMENT: ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["auto"], done.stderr


class NoWaiting(TorchDispatchMode):
    """Refuses what a GPU would have to be waited for: a number read by the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        assert function.overloadpacket not in (torch.ops.aten.nonzero, torch.ops.aten.masked_select), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("sketch", available_sketches())
def test_no_number_is_read_by_the_host(sketch, center):
    config = RMMConfig(ratio=0.3, sketch=sketch, center=center)
    for storage, keep_tokens in ((None, ()), ("int4", (0,))):
        changed = config.replace(storage=storage, keep_tokens=keep_tokens, min_rows=1)
        x, weight = torch.randn(3, 50, 8), torch.randn(4, 8, requires_grad=True)
        with NoWaiting():
            rmm_linear.functional.linear(x, weight, config=changed, seed=5).sum().backward()
    with pytest.raises(AssertionError), NoWaiting():
        torch.ones(()).item()


def test_public_name():
    assert rmm_linear.use_kernels is dispatch.use_kernels


def twins_for_kernels(monkeypatch):
    """The twins run where the kernels would, on CPU tensors that pass for those of a GPU; (name, shapes) of each."""
    calls = []

    def loaded(name):
        module = importlib.import_module(f"rmm_linear_kernels.{dispatch.KERNELS[name]}.reference")

        def kernel(*args, **kwargs):
            calls.append((name, [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]))
            return getattr(module, name)(*args, **kwargs)

        return kernel

    monkeypatch.setattr(
        dispatch, "_reason_against", lambda name, x: "asked for" if dispatch.chosen() == "torch" else None
    )
    monkeypatch.setattr(dispatch, "_loaded", loaded)
    for place in ("ops", "ops.dispatch", "ops.grad_weight"):
        monkeypatch.setattr(f"rmm_linear.{place}.is_for_kernels", lambda g: True)
    return calls


@pytest.mark.parametrize("is_amd", [False, True])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("storage", ["int8", "int4", "int3"])
def test_a_sketch_is_rounded_in_its_own_pass_where_a_program_holds_its_groups(storage, center, is_amd, monkeypatch):
    seed = torch.tensor(5)
    monkeypatch.setattr(torch.version, "hip", "7.0" if is_amd else None)
    # Blocks of 63 rows: the factor of what is stored is a power of 2 there as well. 320 rows: about the mean is out of
    # 256 of them.
    for ratio, rows, is_held in ((0.5, 128, True), (0.5, 130, False), (0.51, 126, True), (0.5, 320, True)):
        is_held &= storage in ("int8", "int4") and not is_amd
        sketched = RMMConfig(ratio=ratio, storage=storage, center=center).sketch_object
        x = torch.randn(rows, 16) + 1
        expected = sketched.compress(x, seed)
        with monkeypatch.context() as patch:
            calls = twins_for_kernels(patch)
            found = sketched.compress(x, seed)
        # in float32, nothing is rounded in between
        for one, other in zip(found.tensors[:3], expected.tensors[:3], strict=True):
            assert torch.equal(one, other)
        if center:
            # the mean, less what the decoded sketch's own mean makes of it
            blocks, kept = sketched.inner.inner.geometry(rows)
            how = {"blocks": blocks, "kept": kept, "gradient": True}
            ones = ops.hadamard_sketch(torch.ones(rows, 1), seed, None, **how)
            taken_off = sketched.stored_input(expected).t() @ ones.squeeze(1) / rows
            torch.testing.assert_close(found.tensors[-1], expected.tensors[-1] - taken_off, rtol=1e-5, atol=1e-6)
        names = [name for name, _ in calls]
        sketch_kernel = "hadamard_sketch_and_sums" if center else "hadamard_sketch"
        # what the codes stand for is taken off the mean on the way to them
        in_two = [sketch_kernel, "quantize_and_mean" if center else "quantize"]
        to_codes = ["hadamard_sketch_quantized"] if is_held else in_two
        assert names == to_codes
        # on a CPU there is one way
        assert sketched.compress(x, seed).tensors[0].equal(expected.tensors[0])


def test_a_sketch_in_half_precision_is_rounded_once_in_one_pass(monkeypatch):
    x, seed = torch.randn(256, 8).bfloat16(), torch.tensor(5)
    sketched = RMMConfig(ratio=0.5, storage="int8", center=False).sketch_object
    twins_for_kernels(monkeypatch)
    codes, steps, _ = sketched.compress(x, seed).tensors
    wide = ops.hadamard_sketch(x.float(), seed, None, blocks=4, kept=32, gradient=False)
    assert torch.equal(codes, ops.quantize(wide, seed, None, kind="int8", group=128)[0])
    narrow = ops.hadamard_sketch(x, seed, None, blocks=4, kept=32, gradient=False)
    assert not torch.equal(codes, ops.quantize(narrow, seed, None, kind="int8", group=128)[0])


def test_codes_are_read_for_small_products_that_fill_a_gpu_or_are_short():
    for rank, out, features, kind, expected in (
        (4096, 256, 4096, "int8", True),
        (4096, 256, 2048, "int4", True),
        (4096, 256, 1024, "int8", False),
        (4096, 257, 8192, "int8", False),
        (4096, 64, 8192, "fp8", True),
        (4096, 64, 4096, "int8", False),
        (512, 64, 768, "int2", True),
        (513, 64, 768, "int2", False),
        (512, 3072, 768, "int8", False),
        (512, 64, 768, "int3", False),
        (0, 1, 1, "int8", True),
    ):
        assert ops.reads_codes(rank, out, features, kind) == expected, (rank, out, features, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("storage", ["int8", "int3", "fp8"])
def test_the_product_reads_codes_where_it_should(storage, center, dtype, monkeypatch):
    """Whichever way: what is decoded is the same."""
    sketched = RMMConfig(ratio=0.5, storage=storage, center=center).sketch_object
    x, g = (torch.randn(256, 24) + 2).to(dtype), (torch.randn(256, 20) - 1).to(dtype)
    calls = twins_for_kernels(monkeypatch)
    saved = sketched.compress(x, torch.tensor(5))
    found = {}
    for choice, rule in (("torch", True), ("auto", True), ("auto", False), ("triton", False)):
        monkeypatch.setattr("rmm_linear.ops.grad_weight.reads_codes", lambda *sizes, rule=rule: rule)
        calls.clear()
        with use_kernels(choice):
            found[choice, rule], _ = sketched.backward(g, saved)
        products = [shapes[0] for name, shapes in calls if name == "sketched_grad_weight_low_bit"]
        is_read = dtype != torch.float32 and storage != "int3" and (choice == "triton" or (choice == "auto" and rule))
        assert products == ([(128, 20)] if is_read else [])
        assert ("dequantize" in [name for name, _ in calls]) == (not is_read and choice != "torch")
    expected = found.pop(("torch", True))
    assert torch.equal(found["auto", False], expected)
    for estimate in found.values():
        # the twin decodes to float32 on a CPU, the way by memory to the gradient's half precision
        tolerance = {torch.float32: 0, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        assert (estimate - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("ratio", "rows", "kept"), [(0.5, 320, 32), (0.25, 320, 16), (0.51, 315, 32), (0.3, 320, 19)])
@pytest.mark.parametrize("storage", ["int8", "fp8", "int4"])
def test_a_centred_layer_in_low_bits_has_the_gradients_of_plain_torch(storage, ratio, rows, kept, dtype, monkeypatch):
    """End to end, whichever way the product goes, and whether or not the rows kept of a block are a power of 2."""
    config = RMMConfig(ratio=ratio, storage=storage, min_rows=1)
    assert config.center
    assert config.sketch_object.inner.inner.geometry(rows) == (5, kept)
    x, g = (torch.randn(rows, 24) + torch.randn(24)).to(dtype), (torch.randn(rows, 20) + 0.3).to(dtype)
    weight, bias = torch.randn(20, 24).to(dtype).requires_grad_(), torch.randn(20).to(dtype).requires_grad_()

    def gradients(seed):
        output = rmm_linear.functional.linear(x, weight, bias, config=config, seed=seed)
        return [gradient.double() for gradient in torch.autograd.grad(output, (weight, bias), g)]

    expected = [gradients(seed) for seed in range(3)]
    # a factor on the sketched part would show: it is no small one
    exact = g.double().t() @ x.double()
    assert all((weights - exact).norm() > 0.2 * exact.norm() for weights, _ in expected)
    calls = twins_for_kernels(monkeypatch)
    is_held = kept != 19
    in_two = ["hadamard_sketch_and_sums", "quantize_and_mean"]
    of_x = ["hadamard_sketch_quantized"] if is_held else in_two
    for choice, rule in (("auto", True), ("auto", False), ("triton", False)):
        monkeypatch.setattr("rmm_linear.ops.grad_weight.reads_codes", lambda *sizes, rule=rule: rule)
        calls.clear()
        with use_kernels(choice):
            found = [gradients(seed) for seed in range(3)]
        product = "sketched_grad_weight_low_bit" if rule or choice == "triton" else "dequantize"
        expected_calls = [*of_x, "hadamard_sketch_and_sums", product]
        assert [name for name, _ in calls] == expected_calls * 3
        for (weights, biases), (expected_weights, expected_biases) in zip(found, expected, strict=True):
            # Sketches that were rounded to half precision, or were not, have another code next to an edge.
            tolerance = {"int8": 0.01, "fp8": 0.05, "int4": 0.05}[storage]
            assert (weights - expected_weights).norm() < tolerance * expected_weights.norm()
            assert (biases - expected_biases).norm() < 0.005 * expected_biases.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config",
    [
        RMMConfig(ratio=0.4),
        RMMConfig(ratio=0.5, storage="int8"),
        RMMConfig(ratio=0.4, center=False, sketch="crs"),
        RMMConfig(ratio=0.4, storage="int4", keep_tokens=(0,)),
        RMMConfig(ratio=1.0, storage="int8"),
    ],
    ids=str,
)
def test_the_ways_of_a_gpu_compile_to_one_graph(config, dtype, monkeypatch):
    """Traced on a CPU, with the twins in the place of the kernels: the same gradients, in half precision as well."""
    for place in ("rmm_linear.ops.is_for_kernels", "rmm_linear.ops.dispatch.is_for_kernels"):
        monkeypatch.setattr(place, lambda g: True)
    torch.manual_seed(0)
    x, g = torch.randn(2, 70, 16).to(dtype), torch.randn(2, 70, 8).to(dtype)
    weight = torch.randn(8, 16).to(dtype).requires_grad_()
    bias = torch.randn(8).to(dtype).requires_grad_()

    def gradients(function):
        output = function(x, weight, bias, config=config.replace(min_rows=1), seed=5)
        return torch.autograd.grad(output, (weight, bias), g)

    eager = gradients(rmm_linear.functional.linear)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(rmm_linear.functional.linear, backend="aot_eager", fullgraph=True))
    assert [gradient.dtype for gradient in eager] == [dtype, dtype]
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)
    # the product of two rounded sketches is that of plain torch, up to their rounding
    monkeypatch.undo()
    wide = gradients(rmm_linear.functional.linear)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01 if dtype == torch.bfloat16 else 0.002
    for one, other in zip(eager, wide, strict=True):
        assert (one.double() - other.double()).norm() < tolerance * other.double().norm()
