"""Centering with about the mean in place of it, and x read once."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear import RMMConfig
from rmm_linear.functional import linear
from rmm_linear.ops import dispatch
from rmm_linear.sketches import SKETCHES, Centered, Hadamard, LowBit, Sketch
from rmm_linear.sketches.contract import SketchContract
from rmm_linear_kernels.hadamard_at_once import reference as at_once
from rmm_linear_kernels.hadamard_sketch import reference as hadamard
from rmm_linear_kernels.hadamard_sketch_quantized import reference as quantized
from rmm_linear_kernels.low_bit import reference as low_bit
from rmm_linear_kernels.sampled_mean import reference
from rmm_linear_kernels.sketched_grad_weight import reference as grad_weight

ROWS = 389


class FewRows(SketchContract):
    """The contract, with about the mean out of 16 rows, which is not the mean of any of its inputs."""

    seed = 3
    inner = Hadamard

    def make(self, ratio):
        return Centered(self.inner(ratio=ratio))


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(reference, "SAMPLE", 16)
    x, _ = FewRows()._pair(67)
    assert (reference.sampled_mean(x) - x.mean(0)).norm() > 0.1 * x.std()


@pytest.mark.parametrize("name", sorted(SKETCHES))
def test_the_gradient_is_that_of_dense(name, few_rows):
    checks = type("Checks", (FewRows,), {"inner": SKETCHES[name]})()
    checks.test_gradient_is_the_product_with_dense()
    checks.test_backward_gives_what_is_asked_for()
    checks.test_saved_bytes_is_what_is_kept()


@pytest.mark.montecarlo
@pytest.mark.parametrize("name", ["hadamard", "crs", "rows_without_replacement"])
def test_unbiased_and_of_the_promised_variance(name, few_rows):
    """Three rates of 1e-6 a case, see the contract."""
    checks = type("Checks", (FewRows,), {"inner": SKETCHES[name], "gradient_draws": 18_000})()
    checks.test_gradient_is_unbiased()
    checks.test_variance_equals_the_closed_form()
    checks.test_layer_gradient_is_unbiased()


def pair(rows=ROWS, dtype=torch.float64):
    return (torch.randn(rows, 12) + 5).to(dtype), (torch.randn(rows, 10) - 2).to(dtype)


@pytest.mark.usefixtures("draws_of_a_gpu")
@pytest.mark.parametrize("inner", [Hadamard(ratio=0.3), LowBit(Hadamard(ratio=0.3), "int8")], ids=str)
def test_both_ways_are_the_identity_in_float64(inner, monkeypatch):
    """One reading and two, of x and of g: known part + (S^T g')^T (S^T x'), with about the mean of 256 of 389 rows."""
    x, g = pair()
    sketch, seed = Centered(inner), torch.tensor(5)
    about = reference.sampled_mean(x)
    assert (about - x.mean(0)).norm() > 1e-3
    saved = sketch.compress(x, seed)
    torch.testing.assert_close(saved.tensors[-1], x.mean(0))
    kept = sketch.stored_input(saved).double()
    if isinstance(inner, Hadamard):
        dense = sketch.dense(x, seed.unsqueeze(0))[0]
        expected = (dense.t() @ (g - g.mean(0))).t() @ (dense.t() @ (x - about)) + torch.outer(g.sum(0), x.mean(0))
        torch.testing.assert_close(sketch.backward(g, saved)[0], expected, rtol=1e-10, atol=1e-10)
    plain = sketch.backward(g, saved)
    monkeypatch.setattr("rmm_linear.ops.is_for_kernels", lambda x: True)
    once = sketch.compress(x, seed)
    torch.testing.assert_close(sketch.stored_input(once).double(), kept)
    torch.testing.assert_close(sketch.backward(g, once), plain, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("draws_of_a_gpu")
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [(None, torch.bfloat16), (None, torch.float16), ("int4", torch.float32), ("int2", torch.float32)],
)
def test_what_rounding_leaves_is_multiplied_by_the_centred_gradient(storage, dtype, monkeypatch):
    """In one reading of a g that is nearly its mean: by g itself, it would be as large as the sketch's own noise."""
    monkeypatch.setattr("rmm_linear.ops.is_for_kernels", lambda x: True)
    x, g, seed = 100 * torch.randn(ROWS, 12).to(dtype), 3 + 0.01 * torch.randn(ROWS, 10), torch.tensor(5)
    sketch = RMMConfig(ratio=0.4, storage=storage).sketch_object
    saved = sketch.compress(x, seed)
    inner = Hadamard(ratio=0.4)
    stored = sketch.stored_input(saved, dtype=torch.float32).double()
    centred = inner.project((g - g.mean(0)).double(), seed, None, gradient=True)
    expected = centred.t() @ stored + torch.outer(g.double().sum(0), x.double().mean(0))
    found, _ = sketch.backward(g, saved)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3 * float(expected.std()))
    rounding = stored - inner.project(x.double(), seed, reference.sampled_mean(x).double(), gradient=False)
    ones = inner.project(torch.ones(ROWS, 1, dtype=torch.float64), seed, None, gradient=True)
    by_g_itself = torch.outer(g.double().sum(0), (rounding.t() @ ones).squeeze(1) / ROWS)
    assert by_g_itself.norm() > 10 * (found.double() - expected).norm()


def product_as_on_a_gpu(sketched_g, codes, steps, offsets, seed, *sums_and_mean, kind, group, **how):
    """What is decoded is rounded to the dtype of the product there, by the kernel as by its twin."""
    stored = {"kind": kind, "group": group, "features": steps.shape[1], "dtype": sketched_g.dtype}
    values = low_bit.dequantize(codes, steps, offsets, seed, **stored)
    return grad_weight.sketched_grad_weight(sketched_g, values, *sums_and_mean, **how)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("ratio", [0.4, 0.004, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [None, "int8", "int4", "fp8"])
def test_a_gradient_of_equal_rows_has_no_noise(storage, dtype, ratio, is_read, monkeypatch):
    """Nothing is left of it once it is centred; in blocks of 64 rows and of 550, and of x itself.

    But of what half precision rounds off the sketch's integer codes: a noise, which falls with the root of the rank.
    """
    monkeypatch.setattr("rmm_linear.ops.is_for_kernels", lambda x: True)
    monkeypatch.setattr("rmm_linear.ops.dispatch.is_for_kernels", lambda x: True)
    monkeypatch.setattr("rmm_linear.ops.grad_weight.is_for_kernels", lambda x: True)
    monkeypatch.setattr("rmm_linear.ops.grad_weight.reads_codes", lambda *sizes: is_read)
    monkeypatch.setattr("rmm_linear.ops.grad_weight._grad_weight.sketched_grad_weight_low_bit", product_as_on_a_gpu)
    x, g = (torch.randn(1100, 12) + 2).to(dtype), torch.ones(1100, 10, dtype=dtype)
    if ratio == 1:
        # rows that are alike are rounded alike
        x[:] = x[torch.arange(1100) // 69] + (0.01 * torch.randn(1100, 12)).to(dtype)
    sketch = RMMConfig(ratio=ratio, storage=storage).sketch_object
    found, bias = sketch.backward(g, sketch.compress(x, torch.tensor(5)), dtype=torch.float32)
    expected = x.double().sum(0).expand(10, 12)
    is_rounded_apart = storage in ("int8", "int4") and ratio < 1
    allowed = 3 * torch.finfo(dtype).eps / 2 / sketch.rank(1100) ** 0.5 if is_rounded_apart else 2e-6
    torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed * float(expected.abs().max()))
    assert bias.tolist() == torch.full((10,), 1100.0).to(dtype).tolist()


def test_a_sketch_that_reads_once_says_what_it_leaves_of_the_mean():
    class Half(Hadamard):
        name = "half"
        compress_with_mean = Sketch.compress_with_mean

    class Whole(Hadamard):
        name = "whole"
        one_pass = Sketch.one_pass

    for sketch, message in (
        (Half, "Half has a one_pass and no compress_with_mean of its own"),
        (Whole, "Whole has a one_pass_backward and no one_pass of its own"),
    ):
        for inner in (sketch(ratio=0.5), LowBit(sketch(ratio=0.5), "int8")):
            with pytest.raises(ValueError, match=message):
                Centered(inner)


@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_subclass_is_asked_for_what_it_has_made_its_own(storage, monkeypatch):
    asked = []

    class Other(Hadamard):
        name = "other"

        def one_pass(self, g, saved, *, need_sum=True):
            asked.append("one_pass")
            return super().one_pass(g, saved, need_sum=need_sum)

    for place in ("rmm_linear.ops.is_for_kernels", "rmm_linear.ops.dispatch.is_for_kernels"):
        monkeypatch.setattr(place, lambda x: True)
    x, g = pair(200, torch.float32)
    estimates = []
    for of in (Hadamard, Other):
        inner = of(ratio=0.5)
        sketch = Centered(inner if storage is None else LowBit(inner, storage))
        estimates.append(sketch.backward(g, sketch.compress(x, torch.tensor(5)))[0])
    assert asked == ["one_pass"]
    torch.testing.assert_close(*estimates)


SKETCH_OF_G, AT_ONCE = "hadamard_sketch_and_sums", "grad_weight_at_once"


class Readers(TorchDispatchMode):
    """Operators that are given all rows of x."""

    def __init__(self, x):
        super().__init__()
        self.x, self.names = x, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        storage = self.x.untyped_storage().data_ptr()
        for argument in args:
            if isinstance(argument, torch.Tensor) and argument.untyped_storage().data_ptr() == storage:
                self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("storage", "ratio", "rows", "op", "of_x", "of_g"),
    [
        (None, 0.3, 600, "hadamard_sketch_and_mean", ["hadamard_sketch_and_mean"], SKETCH_OF_G),
        (None, 0.3, ROWS, "hadamard_sketch_and_mean", ["hadamard_sketch_and_mean"], AT_ONCE),
        (None, 0.3, 256, "hadamard_sketch_and_mean", ["sketch_and_mean_at_once"], AT_ONCE),
        ("int4", 0.3, ROWS, "hadamard_sketch_quantized", ["hadamard_sketch_and_sums"], SKETCH_OF_G),
        ("int8", 0.5, 384, "hadamard_sketch_quantized", ["hadamard_sketch_quantized"], SKETCH_OF_G),
        ("int4", 0.25, 384, "hadamard_sketch_quantized", ["hadamard_sketch_quantized"], SKETCH_OF_G),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x_is_read_once(storage, ratio, rows, op, of_x, of_g, dtype, monkeypatch):
    """With the twins in the kernels' place: 256 rows for m, one pass for sketch and sum; and so is g."""
    launched = []
    twins = {
        "hadamard_sketch_and_mean": hadamard.hadamard_sketch_and_mean,
        "hadamard_sketch_and_sums": hadamard.hadamard_sketch_and_sums,
        "hadamard_sketch_quantized": quantized.hadamard_sketch_quantized,
        "sketch_and_mean_at_once": at_once.sketch_and_mean_at_once,
        "grad_weight_at_once": at_once.grad_weight_at_once,
    }

    def loaded(name):
        def launch(x, *args, **kwargs):
            launched.append((name, x.data_ptr()))
            return twins[name](x, *args, **kwargs)

        if name in twins:
            return launch
        return dispatch.importlib.import_module(f"rmm_linear_kernels.{dispatch.KERNELS[name]}.reference").__dict__[name]

    monkeypatch.setattr(dispatch, "_reason_against", lambda name, x: None)
    monkeypatch.setattr(dispatch, "_loaded", loaded)
    for place in ("rmm_linear.ops.is_for_kernels", "rmm_linear.ops.dispatch.is_for_kernels"):
        monkeypatch.setattr(place, lambda x: True)
    x, g = pair(rows, dtype)
    sketch = RMMConfig(ratio=ratio, storage=storage).sketch_object
    with Readers(x) as readers:
        saved = sketch.compress(x, torch.tensor(5))
    assert [name for name, where in launched if where == x.data_ptr()] == of_x
    assert readers.names == [f"rmm_linear.{name}.default" for name in (["sampled_mean"] if storage else []) + [op]]
    launched.clear()
    with Readers(g) as readers:
        sketch.backward(g, saved)
    assert [name for name, where in launched if where == g.data_ptr()] == [of_g]
    op_of_g = "hadamard_grad_weight" if storage is None else "hadamard_sketch_and_sums"
    assert readers.names == [f"rmm_linear.{op_of_g}.default"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_bytes_kept_are_those_of_the_mean_and_the_sketch(dtype):
    x, _ = pair(dtype=dtype)
    sketch = Centered(Hadamard(ratio=0.3))
    saved = sketch.compress(x, torch.tensor(5))
    kept = sum(tensor.untyped_storage().nbytes() for tensor in (saved.seed, *saved.tensors))
    mean_bytes = x.shape[1] * max(4, dtype.itemsize)
    assert kept == sketch.saved_bytes(ROWS, x.shape[1], dtype)
    assert kept == sketch.rank(ROWS) * x.shape[1] * dtype.itemsize + mean_bytes + 8


def test_at_most_two_graphs_serve_rows_of_any_number(monkeypatch):
    """Few rows and many, for which about the mean is found otherwise."""
    monkeypatch.setattr("rmm_linear.ops.is_for_kernels", lambda x: True)
    torch._dynamo.reset()
    weight = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    config = RMMConfig(ratio=0.3, min_rows=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear, backend=counter, fullgraph=True, dynamic=True)
    for rows in (200, 300, 389, 1000, 130):
        x, _ = pair(rows)
        g = torch.randn(rows, 4, dtype=torch.float64)
        found = torch.autograd.grad(compiled(x, weight, config=config, seed=7), weight, g)
        torch.testing.assert_close(
            found, torch.autograd.grad(linear(x, weight, config=config, seed=7), weight, g), rtol=1e-9, atol=1e-9
        )
    assert counter.frame_count <= 2
