"""The functional layer: exact where it promises to be, estimated where it says so, and clear about bad input."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear import RMMConfig
from rmm_linear.functional import linear
from rmm_linear.memory import SavedTensors
from rmm_linear.padding import ValidRows

CONFIG = RMMConfig(ratio=0.3, min_rows=1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


LAYOUTS = {
    "1d": ((40,), lambda base: base),
    "2d": ((23, 40), lambda base: base),
    "3d": ((6, 23, 40), lambda base: base),
    "4d": ((2, 3, 23, 40), lambda base: base),
    "one row": ((1, 40), lambda base: base),
    "sliced features": ((6, 23, 80), lambda base: base[..., ::2]),
    "sliced rows": ((6, 23, 40), lambda base: base[:, ::3]),
    "transposed batch": ((6, 23, 40), lambda base: base.transpose(0, 1)),
    "column-major": ((40, 138), lambda base: base.t()),
    "3d column-major": ((40, 6, 23), lambda base: base.permute(1, 2, 0)),
    "expanded": ((6, 1, 40), lambda base: base.expand(6, 23, 40)),
}


def _run(base, layout, weight, bias, g, *, sketched):
    """Output, grad_input and grad_bias."""
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in (base, weight, bias)]
    x = LAYOUTS[layout][1](leaves[0])
    output = linear(x, *leaves[1:], config=CONFIG, seed=11) if sketched else F.linear(x, *leaves[1:])
    output.backward(g)
    return [output.detach(), leaves[0].grad, *([] if bias is None else [leaves[2].grad])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_grad_input_and_grad_bias_are_bit_equal_to_nn_linear(dtype, layout):
    shape, view = LAYOUTS[layout]
    base, weight = torch.randn(shape).to(dtype), torch.randn(24, 40).to(dtype)
    wide = torch.randn(*view(base).shape[:-1], 48).to(dtype)
    for bias in (torch.randn(24).to(dtype), None):
        # the last one as of a sum
        for g in (wide[..., :24].contiguous(), wide[..., ::2], wide.new_ones(()).expand(wide[..., :24].shape)):
            expected = _run(base, layout, weight, bias, g, sketched=False)
            result = _run(base, layout, weight, bias, g, sketched=True)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


class _Products(TorchDispatchMode):
    """The matrix products that are formed: shapes and strides of their operands."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.found.append(tuple((operand.shape, operand.stride()) for operand in args))
        return function(*args, **(kwargs or {}))


SINGLES = {
    "(1, 1)": lambda: torch.randn(1, 1),
    "(1, 64) column-major": lambda: torch.randn(64, 1).t(),
    "(1, 64)": lambda: torch.randn(1, 64),
    "(1, 64) far apart": lambda: torch.randn(64, 3)[:, :1].t(),
    "(1,)": lambda: torch.randn(1),
    "(64,)": lambda: torch.randn(64),
    "(1,) of many": lambda: torch.randn(1, 5)[:, 0],
    "(1, 1, 1)": lambda: torch.randn(1, 1, 1),
    "(1, 1, 64) column-major": lambda: torch.randn(64, 1, 1).permute(1, 2, 0),
    "(5, 1)": lambda: torch.randn(5, 1),
    "(5, 1) column-major": lambda: torch.randn(1, 5).t(),
    "(3, 5, 1) column-major": lambda: torch.randn(1, 3, 5).permute(1, 2, 0),
}


def _grad_input_and_its_product(run, x, weight, bias, g):
    leaf = x.detach().requires_grad_()
    output = run(leaf, weight, bias)
    with _Products() as mode:
        (grad_input,) = torch.autograd.grad(output, leaf, g)
    return grad_input, mode.found


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("layout", SINGLES)
def test_grad_input_is_the_product_that_nn_linear_forms(layout, has_bias):
    """The same operands in the same order: whether the transposed product rounds otherwise depends on the machine."""
    x = SINGLES[layout]()
    weight = torch.randn(48, x.shape[-1], requires_grad=True)
    bias, g = torch.randn(48) if has_bias else None, torch.randn(*x.shape[:-1], 48)
    got = _grad_input_and_its_product(partial(linear, config=CONFIG), x, weight, bias, g)
    expected = _grad_input_and_its_product(F.linear, x, weight, bias, g)
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1]


@pytest.mark.parametrize(
    ("ratio", "min_rows", "rows"), [(1.0, 1, 70), (0.5, 71, 70), (0.5, 0, 0), (0.5, 1, 0)], ids=str
)
def test_weight_gradient_is_bit_equal_where_nothing_is_sketched(ratio, min_rows, rows):
    config = RMMConfig(ratio=ratio, min_rows=min_rows)
    x, weight = torch.randn(rows, 8), torch.randn(5, 8, requires_grad=True)
    outputs = linear(x, weight, config=config), F.linear(x, weight)
    assert torch.equal(*(torch.autograd.grad(output.square().sum(), weight)[0] for output in outputs))


def test_a_frozen_weight_keeps_nothing_and_draws_nothing():
    x, weight = torch.randn(200, 8, requires_grad=True), torch.randn(5, 8)
    state = torch.get_rng_state()
    with SavedTensors() as kept:
        output = linear(x, weight, config=CONFIG)
    assert kept.holds(weight)
    assert kept.bytes == weight.nbytes
    assert torch.equal(torch.get_rng_state(), state)
    output.sum().backward()
    assert torch.equal(x.grad, F.linear(x.detach(), weight).new_ones(200, 5) @ weight)


def test_only_what_needs_a_gradient_gets_one():
    x, bias = torch.randn(200, 8), torch.randn(5)
    for needs in [(0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 1)]:
        tensors = (x, torch.randn(5, 8), bias)
        leaves = [each.clone().requires_grad_(bool(need)) for each, need in zip(tensors, needs, strict=True)]
        linear(*leaves, config=CONFIG).sum().backward()
        assert tuple(leaf.grad is not None for leaf in leaves) == needs


def test_same_seed_is_bitwise_equal_and_the_default_generator_governs():
    x, weight = torch.randn(300, 8), torch.randn(5, 8, requires_grad=True)

    def gradient(seed=None):
        return torch.autograd.grad(linear(x, weight, config=CONFIG, seed=seed).square().sum(), weight)[0]

    assert torch.equal(gradient(5), gradient(torch.tensor(5)))
    assert not torch.equal(gradient(5), gradient(6))
    torch.manual_seed(0)
    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(gradient(), first)


def test_create_graph_and_torch_func_give_the_same_gradients():
    x, weight = torch.randn(200, 8), torch.randn(5, 8, requires_grad=True)

    def loss(weight):
        return linear(x, weight, config=CONFIG, seed=1).square().sum()

    (plain,) = torch.autograd.grad(loss(weight), weight)
    assert torch.equal(torch.autograd.grad(loss(weight), weight, create_graph=True)[0], plain)
    assert torch.equal(torch.func.grad(loss)(weight), plain)
    got = torch.func.grad(lambda x: linear(x, weight, config=CONFIG).square().sum())(x)
    torch.testing.assert_close(got, torch.func.grad(lambda x: F.linear(x, weight).square().sum())(x))


def test_an_input_without_gradient_does_not_keep_the_weight():
    # Neither does nn.Linear: the weight may be changed in place, and a computed one is not kept.
    x, weight = torch.randn(200, 8), torch.randn(5, 8, requires_grad=True)
    output = linear(x, weight, config=CONFIG)
    with torch.no_grad():
        weight.mul_(0.9)
    output.sum().backward()
    assert weight.grad is not None
    computed = weight * 2
    with SavedTensors() as kept:
        linear(x, computed, config=CONFIG)
    assert not kept.holds(computed)


def test_no_grad_and_inference_mode_give_a_plain_output_and_only_no_grad_draws_a_seed():
    x, weight = torch.randn(200, 8), torch.randn(5, 8, requires_grad=True)
    for mode in (torch.inference_mode, torch.no_grad):
        state = torch.get_rng_state()
        with mode():
            output = linear(x, weight, config=CONFIG)
            assert torch.equal(output, F.linear(x, weight))
        assert not output.requires_grad
        assert torch.equal(torch.get_rng_state(), state) == (mode is torch.inference_mode)


def test_nested_inputs_train_exactly_and_meta_ones_have_a_shape():
    weight = torch.randn(5, 8, requires_grad=True)
    parts = [torch.randn(70, 8), torch.randn(90, 8)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    linear(nested, weight, config=CONFIG).values().sum().backward()
    torch.testing.assert_close(weight.grad, torch.cat(parts).sum(0).expand(5, 8))
    meta = torch.randn(200, 8, device="meta")
    assert linear(meta, torch.empty(5, 8, device="meta", requires_grad=True), config=CONFIG).shape == (200, 5)


def test_transients_stay_small_at_a_tiny_ratio():
    # A Hadamard matrix of 2 / ratio squared would take gigabytes.
    x, weight = torch.randn(20000, 2), torch.randn(3, 2, requires_grad=True)
    linear(x, weight, config=CONFIG.replace(ratio=1e-4)).sum().backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 8, dtype=torch.int64)}, "int64"),
        ({"x": torch.zeros(4, 8, dtype=torch.complex64)}, "complex64"),
        ({"x": torch.zeros(4, 9)}, r"\(4, 9\)"),
        ({"x": torch.zeros(())}, r"\(\)"),
        ({"x": torch.zeros(4, 8, dtype=torch.float64)}, "float64"),
        ({"weight": torch.zeros(8, requires_grad=True)}, r"\(out, in\)"),
        ({"bias": torch.zeros(6)}, r"\(6,\)"),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, "bias torch.float64"),
        ({"config": 0.5}, "RMMConfig"),
        ({"seed": 1 << 63}, "64-bit"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, "0-d int64"),
        ({"seed": 0.5}, "64-bit"),
        ({"valid_rows": torch.ones(4)}, r"valid_rows is a Tensor; pass rmm_linear\.padding\.ValidRows\(mask\)"),
        ({"valid_rows": ValidRows(torch.ones(3))}, "must have x's shape without the last dimension"),
    ],
)
def test_bad_input_is_named_with_its_remedy(change, message):
    arguments = {"x": torch.zeros(4, 8), "weight": torch.zeros(5, 8, requires_grad=True), "bias": None}
    with pytest.raises(ValueError, match=message):
        linear(**{**arguments, "config": CONFIG, **change})


def test_no_output_features_behave_as_in_nn_linear():
    x, weight = torch.randn(200, 8, requires_grad=True), torch.empty(0, 8, requires_grad=True)
    linear(x, weight, config=CONFIG).sum().backward()
    assert weight.grad.shape == (0, 8)
    assert torch.equal(x.grad, torch.zeros(200, 8))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 8), (4, 16, 8), (2, 2, 16, 8)])
def test_the_output_may_be_changed_in_place(shape, bias):
    layer = torch.nn.Linear(8, 6, bias=bias)
    found = []
    for config in (RMMConfig(ratio=0.5, min_rows=1), RMMConfig(ratio=1.0)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        output = linear(x, layer.weight, layer.bias, config=config)
        torch.relu_(output)
        output.square().sum().backward()
        found.append((output, x.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["crs", "wta_crs", "rows_without_replacement"])
def test_gradients_whose_sum_overflows_are_finite(name):
    weight = torch.zeros(4, 4, requires_grad=True)
    config = RMMConfig(sketch=name, ratio=0.5, center=False, min_rows=1)
    linear(torch.full((4, 4), 1e-3), weight, config=config).backward(torch.full((4, 4), 1e38))
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 4e35))
