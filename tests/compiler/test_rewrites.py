"""Backward passes that read codes: outputs keep their bits, and each parameter's gradient is unbiased.

The draws are compared with the exact gradient in two ways. Their slope on it is 1 in the mean. And |sum of n errors|^2
over the sum of |error|^2 is 1 in the mean if errors are unbiased, and n beta^2 more if the bias is beta times as large.
"""

import copy
import itertools
import math
import warnings
from functools import partial

import draws as draws_of_gradients
import pytest
import torch
from draws import Of, Weighted, gradients, keys_of_one, squared_errors
from model_of import ModelOf, linears
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rmm_linear.compiler import plans, rewrites
from rmm_linear.compiler.rewrites import activations, attention, choice, code_step, norms
from rmm_linear.compiler.rewrites.coded import Shape
from rmm_linear.compiler.rewrites.codes import draw_keys
from rmm_linear.compiler.rewrites.step import Step
from rmm_linear.planning.coding import KINDS, Bits
from tests.checkpointing.measured_peak import MeasuredPeak

ROWS, WIDTH = 256, 16


class Net(nn.Module):
    """A linear layer on each side of what is tested, so that gradients pass through it."""

    def __init__(self, body, scale=1.0, outer=WIDTH, inner=WIDTH):
        super().__init__()
        self.before, self.body, self.after = nn.Linear(WIDTH, inner), body, nn.Linear(outer, 3)
        self.before.weight.data *= scale

    def forward(self, x):
        return (self.after(self.body(self.before(x))) ** 2).sum()


def rms():
    def run(it, x):
        wide = x.to(torch.float32)
        return it.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return ModelOf(run, weight=nn.Parameter(torch.rand(WIDTH) + 0.5))


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def silu_of_exp(x):
    return x / (1 + torch.exp(-x))


def gated():
    parts = {"gate": nn.Linear(WIDTH, 24), "up": nn.Linear(WIDTH, 24)}
    return Net(ModelOf(lambda it, x: functional.silu(it.gate(x)) * it.up(x), **parts), outer=24)


def heads_of(*tensors):
    return (each.view(4, -1, 2, 8).transpose(1, 2) for each in tensors)


def by_hand(q, k, v):
    return (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v


def attention_of(attend=functional.scaled_dot_product_attention, **options):
    def run(it, x):
        return attend(*heads_of(*it.qkv(x).split(WIDTH, -1)), **options).transpose(1, 2).reshape(-1, WIDTH)

    return ModelOf(run, qkv=nn.Linear(WIDTH, 3 * WIDTH))


def block():
    """Functions whose gradients arrive from what other codes have replaced."""

    def run(it, x):
        y = x + it.linear(functional.gelu(it.norm(x)))
        return y * torch.sigmoid(y) + x

    return ModelOf(run, norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH))


def compiled(model, executor="exact", **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="rmm_linear", options={"executor": executor, **options})


def plan_of(model, x, **options):
    compiled(model, **options)(x).backward()
    return plans(model)[-1]


def judge(model, x, draws, **options):
    return draws_of_gradients.judge(model, compiled(model, **options), x, draws), plans(model)[-1]


def is_unbiased(result, bias=0.0):
    """Slopes within 4.5 standard errors (once in 10,000 runs for 20 parameters), and means no further than chance."""
    return all(
        abs(slope - 1) <= 4.5 * error + bias and ratio <= 6 + bias * 1e9 for slope, error, ratio, _ in result.values()
    )


def named_bias(plan):
    """The bias of functions is bounded; the bias of scores is none that is seen."""
    return max(each.bias or 0.0 for each in plan.coding.coded)


CASES = {
    "layer norm": (lambda: Net(nn.LayerNorm(WIDTH)), {"norm"}),
    "layer norm without weight": (lambda: Net(nn.LayerNorm(WIDTH, elementwise_affine=False)), {"norm"}),
    "layer norm without bias": (lambda: Net(nn.LayerNorm(WIDTH, bias=False)), {"norm"}),
    "RMS norm of single ops": (lambda: Net(rms()), {"norm"}),
    "GELU": (lambda: Net(nn.GELU()), {"activation"}),
    "GELU by tanh": (lambda: Net(nn.GELU(approximate="tanh")), {"activation"}),
    "GELU of single ops": (lambda: Net(Of(new_gelu)), {"activation"}),
    "SiLU": (lambda: Net(nn.SiLU()), {"activation"}),
    "Mish": (lambda: Net(nn.Mish()), {"activation"}),
    "softplus": (lambda: Net(nn.Softplus()), {"activation"}),
    "ReLU": (lambda: Net(nn.ReLU()), {"activation", "linear"}),
    "gated": (gated, {"activation", "linear"}),
    "attention": (lambda: Net(attention_of()), {"attention"}),
    "attention with scores of deviation 6": (lambda: Net(attention_of(scale=6.0)), {"attention"}),
    "causal attention": (lambda: Net(attention_of(is_causal=True)), {"attention"}),
    "attention by hand": (lambda: Net(attention_of(by_hand)), {"attention"}),
    "block": (lambda: Net(block()), {"norm", "activation", "linear"}),
    "linear": (lambda: Net(nn.Identity()), {"linear"}),
}


# A case of each kind with the larger steps, and one with 8 bits.
QUICK = {("layer norm", 4), ("GELU", 4), ("attention with scores of deviation 6", 4), ("block", 4), ("GELU", 8)}


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, bits, marks=() if (name, bits) in QUICK else pytest.mark.slow)
        for name in CASES
        for bits in (8, 4)
    ],
)
def test_outputs_keep_their_bits_and_gradients_are_unbiased_for_each_parameter(name, bits):
    make, kinds = CASES[name]
    model, x = make(), torch.randn(ROWS, WIDTH)
    run = compiled(model, bits=bits)
    assert run(x).equal(model(x))
    result, plan = draws_of_gradients.judge(model, run, x, 100), plans(model)[-1]
    assert kinds <= {tensor.kind for tensor in plan.coding.coded}
    # queries and keys always have 8
    assert {tensor.bits for tensor in plan.coding.coded if tensor.bias is not None} - {1} == {bits}
    assert result
    assert is_unbiased(result, named_bias(plan)), result


def fake_quantised(x):
    """A cast to integers, whose gradient is that of the identity."""
    y = functional.silu(x)
    return y + ((2 * y).to(torch.int32).to(torch.float32) / 2 - y).detach()


def constant_times_function():
    """Two gradients along one path, each times a function of the same tensor."""
    weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
    return ModelOf(lambda it, x: functional.gelu(x).detach() * (it.weight * torch.tanh(x)), weight=weight)


def one_for_both():
    """Queries and keys are views of one tensor."""

    def run(it, x):
        y = it.both(x)
        attended = functional.scaled_dot_product_attention(*heads_of(2 * y, y, it.value(x)))
        return attended.transpose(1, 2).reshape(-1, WIDTH)

    return ModelOf(run, **linears("both value", WIDTH))


def rms_of_rms(x):
    """The output of the first norm is the input of the second one."""
    for epsilon in (0.01, 1.0):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return x


def scaled_rms(x):
    """The norm's scale has a gradient through the negative input."""
    x = x.unflatten(1, (8, 2))
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0)
    return (2 * (x * scale.detach()) + (-x) * scale).flatten(1)


def sigmoid_gate():
    """The gradient that arrives at the function is largest where the function is smallest."""
    model = ModelOf(lambda it, x: x * torch.sigmoid(it.gate(x)), **linears("gate", WIDTH))
    model.gate.weight.data = 2 * torch.eye(WIDTH)
    return model


def cut_silu():
    """A function that bends far away from zero."""
    linear = nn.Linear(WIDTH, WIDTH)
    linear.weight.data *= 40
    return nn.Sequential(linear, Of(lambda x: functional.silu(x).clamp(max=41)))


def with_outliers(body):
    x = torch.randn(ROWS, WIDTH)
    x[::50] *= 30
    return Net(body, 2.0), x


def small_beside_outliers():
    """A GELU of small inputs, and of an outlier in each group of rows, which sets the steps and has no gradient."""
    x, weight = 0.3 * torch.randn(ROWS, WIDTH), torch.rand(ROWS, 3)
    x[::128], weight[::128] = 60 * torch.randn(2, WIDTH), 0

    class Masked(Net):
        def forward(self, x):
            return (weight * self.after(self.body(self.before(x)))).sum()

    model = Masked(nn.GELU())
    nn.init.zeros_(model.before.bias)
    return model, x


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("body", "bits", "draws"),
    [
        (lambda: Of(fake_quantised), 8, 150),
        slow(constant_times_function, 4, 150),
        slow(one_for_both, 4, 150),
        (lambda: Of(rms_of_rms), 4, 150),
        slow(lambda: Of(scaled_rms), 4, 150),
        slow(sigmoid_gate, 4, 150),
        (cut_silu, 8, 150),
        slow(lambda: Of(silu_of_exp), 8, 150),
        (small_beside_outliers, 4, 400),
        slow(small_beside_outliers, 8, 400),
        slow(lambda: with_outliers(nn.LayerNorm(WIDTH)), 4, 200),
        slow(lambda: with_outliers(nn.GELU()), 4, 200),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_gradients_stay_unbiased_where_a_code_would_not_do(body, bits, draws):
    made = body()
    model, x = made if isinstance(made, tuple) else (Net(made, 5.0), torch.randn(ROWS, WIDTH))
    result, plan = judge(model, x, draws, bits=bits)
    assert plan.coding.coded
    assert is_unbiased(result, named_bias(plan)), result


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "function",
    [
        *(functional.gelu, functional.mish, functional.sigmoid, functional.silu, functional.softplus, functional.tanh),
        pytest.param(partial(functional.gelu, approximate="tanh"), id="tanh_gelu"),
        *(new_gelu, silu_of_exp),
    ],
)
def test_gradients_are_near_the_exact_gradients_far_from_zero(function, bits):
    model, x = Net(Of(function)), torch.linspace(-40, 40, ROWS * WIDTH).view(ROWS, WIDTH)
    nn.init.eye_(model.before.weight)
    exact = gradients(model, model, x)
    # also where autograd would look for NaN in the traced ops of a reading
    with torch.autograd.set_detect_anomaly(True):
        coded = gradients(model, compiled(model, bits=bits), x)
    assert [tensor.kind for tensor in plans(model)[0].coding.coded] == ["activation"]
    for name, gradient in coded.items():
        assert (gradient - exact[name]).norm() < {8: 0.05, 4: 0.2}[bits] * exact[name].norm()


def test_scores_of_attention_are_said_to_be_biased():
    for bits in (4, 8):
        plan = plan_of(Net(attention_of()), torch.randn(ROWS, WIDTH), bits={"attention": bits})
        assert [tensor.kind for tensor in plan.coding.coded] == ["attention"] * 4
        assert sum(tensor.bias is None for tensor in plan.coding.coded) == 2
        assert plan.coding.freed_bytes == 4 * 4 * ROWS * WIDTH
        assert sorted(tensor.bits for tensor in plan.coding.coded) == [bits, bits, 8, 8]
        assert "gradients of attention are biased by half the variance of its scores' errors; no bound" in str(plan)


def test_a_gradient_beside_the_loss_is_refused_where_plans_for_it_draw_other_numbers():
    weight, scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(()))

    def step(x):
        # coded in plans for all gradients alone: their seed is drawn before the random numbers
        z = functional.gelu(x @ weight)
        y = x * scale * torch.rand_like(x)
        return scale + weight.sum(), y, z

    coded = torch.compile(step, backend="rmm_linear", options={"bits": 8, "executor": "exact"})
    x = torch.randn(ROWS, WIDTH)
    _, y, z = coded(x)
    with (
        pytest.warns(UserWarning, match="arrived at a result beside the loss"),
        pytest.raises(RuntimeError, match="draw other random numbers; .* run this step again"),
    ):
        (y.sum() + z.sum()).backward()
    scale.grad = None
    _, y, z = coded(x)
    (y.sum() + z.sum()).backward()
    # with the noise of 8 bits
    assert (scale.grad - y.sum()).abs() < 0.02 * y.abs().sum()


def test_rounding_to_float8_is_part_of_the_function_and_no_alias():
    rounded = Of(lambda x: functional.gelu(x).to(torch.float8_e4m3fn).to(x.dtype))
    model, x = Net(rounded), 0.003 * torch.randn(ROWS, WIDTH)
    nn.init.constant_(model.before.bias, 0.003)
    result, _ = judge(model, x, 100, bits=8)
    assert is_unbiased(result), result


def test_a_weight_gradient_has_the_variance_of_the_closed_form():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)), torch.randn(ROWS, WIDTH)
    weights = torch.randn(ROWS, 3)
    hidden = model[0](x).detach().view(2, 128, WIDTH)
    steps = hidden.abs().amax(1, keepdim=True) / 7.5
    variance = (steps**2 / 12).expand(2, 128, WIDTH).reshape(ROWS, WIDTH)
    expected = float((weights.square().sum(1, keepdim=True) * variance).sum())

    whole = Weighted(model, weights)
    squares = squared_errors(whole, compiled(whole, bits=4), x, 500, "model.1.weight")
    # 48 numbers, whose squares' mean deviates by sqrt(2 / 48 / 500) = 0.9 %
    assert float(squares.mean()) == pytest.approx(expected, rel=0.03)


def same():
    """A product of two tensors that are equal, each with a code of its own."""
    first = nn.Linear(WIDTH, WIDTH)
    return ModelOf(lambda it, x: it.first(x) * it.second(x), first=first, second=copy.deepcopy(first))


def twice(x):
    """The gradient of the second factor reads x, and goes on to a product with x."""
    pairs = x.unflatten(1, (8, 2))
    return (pairs * pairs.pow(2).mean(-1, keepdim=True)).flatten(1)


def _keys_of_one_seed(x, *, count):
    return tuple(each.clone() for each in draw_keys(torch.full((), 7, dtype=torch.int64), count))


@pytest.mark.parametrize(
    "mutant",
    [
        *("variance", "one key", "one seed"),
        *(pytest.param(mutant, marks=pytest.mark.slow) for mutant in ("smoothing", "read twice")),
    ],
)
def test_the_checks_see_a_mutant(monkeypatch, mutant):
    model, x, draws = Net(nn.LayerNorm(WIDTH)), torch.randn(ROWS, WIDTH), 300
    if mutant == "variance":
        original = norms.codes.error_variance
        monkeypatch.setattr(norms.codes, "error_variance", lambda *args: 0 * original(*args))
    elif mutant == "smoothing":
        monkeypatch.setattr(activations, "_compared", activations._compared.__wrapped__)
        monkeypatch.setattr(activations, "_BEND", 0.0)
        monkeypatch.setattr(activations, "_MOST_BIASED", 1.0)
        model, x = small_beside_outliers()
    elif mutant == "one key":
        model = Net(same())
        monkeypatch.setattr(rewrites, "_keys", keys_of_one)
    elif mutant == "one seed":
        draws = 100
        monkeypatch.setattr(rewrites, "_keys", _keys_of_one_seed)
    else:
        model, draws = Net(Of(twice)), 1500
        assert is_unbiased(judge(model, x, 300, bits=4)[0])
        monkeypatch.setattr(choice.Choice, "_dependent_reads", lambda self: ())
    result, plan = judge(model, x, draws, bits=4)
    assert plan.coding.coded
    assert not is_unbiased(result, 2.5e-3 if mutant == "smoothing" else 0.0), result


@pytest.mark.parametrize(
    "body",
    [
        nn.Sequential(nn.Unflatten(1, (4, 4)), nn.LayerNorm((4, 4)), nn.Flatten()),
        Of(lambda x: x.cumprod(1)),
        nn.Sequential(nn.Unflatten(0, (4, 64)), nn.Unflatten(2, (1, 16)), nn.Conv2d(64, 64, 1), nn.Flatten(0, 2)),
    ],
    ids=["norm over two dimensions", "unknown op", "convolution"],
)
def test_what_is_not_recognised_stays_exact_and_is_named(body):
    model, x = Net(body), torch.randn(ROWS, WIDTH)
    exact, run = gradients(model, model, x), compiled(model, bits=8)
    found = gradients(model, run, x)
    # the first layer's input is the batch's: its gradient is exact
    torch.testing.assert_close(found["before.weight"], exact["before.weight"])
    (plan,) = plans(model)
    assert any(tensor.tensor_bytes >= 4 * ROWS * WIDTH for tensor in plan.coding.exact)


def test_the_softmax_of_an_attention_is_coded_and_that_of_a_loss_stays_exact():
    diagonal = torch.eye(ROWS, dtype=torch.bool)

    def attend(x):
        return ((x @ x.mT).softmax(-1).masked_fill(diagonal, 0.0) @ x).square().sum()

    # the gradient of log p is 1 / p, which would multiply the error of a small p
    for function, coded in ((attend, ["_softmax"]), (lambda x: -(x.softmax(-1) + 1e-8).log().sum(), [])):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Of(function))
        plan = plan_of(model, torch.randn(ROWS, WIDTH), bits={"attention": 8})
        assert [each.name for each in plan.coding.coded if "softmax" in each.name] == coded


@pytest.mark.parametrize(
    ("dtype", "executor"), [(torch.float32, "exact"), (torch.float32, "inductor"), (torch.bfloat16, "exact")]
)
def test_relu_keeps_a_bit_an_element_and_its_gradient_is_exact(dtype, executor):
    # no other op of the backward pass reads the result of ReLU
    before, rows = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype), 2 * ROWS - 3
    model = ModelOf(lambda it, x, weights: (functional.relu(it.before(x)) * weights).sum(), before=before)
    x, weights = torch.randn(2, rows, WIDTH, dtype=dtype)
    x[0], x[1, 0], weights[2, 0] = 0, math.nan, math.nan
    for size in (rows, rows - 1) if executor == "exact" else (rows,):
        found = []
        for run in (model, compiled(model, executor, bits=8)):
            model.zero_grad()
            run(x[:size], weights[:size]).backward()
            found.append(model.before.weight.grad)
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
        (mask,) = plans(model)[-1].coding.coded
        assert (mask.bits, mask.bias) == (1, 0)
        assert mask.code_bytes == -(-size // 8) * WIDTH
        assert [freed.size_bytes for freed in plans(model)[-1].coding.freed] == [size * WIDTH * dtype.itemsize]
        assert "gradients: exact" in plans(model)[-1].card()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_the_result_of_relu_is_freed_by_its_mask_and_the_code_of_a_linear_layers_input(p):
    model, x = Net(nn.Sequential(nn.ReLU(), *([nn.Dropout(p)] if p else []))), torch.randn(ROWS, WIDTH)
    freed = {memory.name: memory.codes for memory in plan_of(model, x, bits=8).coding.freed}
    assert freed["relu"] == (("mask of relu",) if p else ("mask of relu", "relu"))
    for alone in ("activation", "linear"):
        freed = {memory.name for memory in plan_of(model, x, bits={alone: 8}).coding.freed}
        assert ("relu" in freed) == (p > 0 and alone == "activation")


def test_few_rows_and_float64_stay_exact_with_a_warning():
    for model, x in (
        *((Net(nn.LayerNorm(WIDTH)), torch.randn(rows, WIDTH)) for rows in (1, 100)),
        (Net(nn.GELU()).double(), torch.randn(ROWS, WIDTH).double()),
    ):
        exact, run = gradients(model, model, x), compiled(model, bits=4)
        gradients(model, run, x)
        with pytest.warns(UserWarning, match="no tensor of the step is coded: codes are for tensors of the given"):
            found = gradients(model, run, x)
        for name in found:
            torch.testing.assert_close(found[name], exact[name])
        assert not plans(model)[-1].coding.coded


def test_one_graph_of_a_step_without_codes_is_no_reason_for_a_warning():
    class Scaled(Net):
        def forward(self, x):
            x = x * self.before.bias
            torch._dynamo.graph_break()
            return super().forward(x)

    bits = dict.fromkeys(KINDS, 8)
    for _ in range(2):
        model = Scaled(nn.GELU())
        run = compiled(model, bits=bits)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* coded")
            # a step that warms up may be small
            for rows in (100, ROWS, ROWS):
                run(torch.randn(rows, WIDTH)).backward()
        coded = [[tensor.name for tensor in plan.coding.coded] for plan in plans(model)]
        assert [] in coded
        assert any(coded)
        bits = bits | {"only": [name for names in coded for name in names]}


@pytest.mark.parametrize(
    ("dtype", "is_autocast"),
    [
        *((torch.bfloat16, True), (torch.float16, False)),
        *(pytest.param(*each, marks=pytest.mark.grid) for each in ((torch.bfloat16, False), (torch.float16, True))),
    ],
)
def test_low_precision_has_gradients_of_the_right_dtype_that_are_close(dtype, is_autocast):
    model, x = nn.Sequential(nn.LayerNorm(WIDTH), gated()), torch.randn(ROWS, WIDTH) / 4
    if not is_autocast:
        model, x = model.to(dtype), x.to(dtype)
    losses, found = [], []
    for run in (model, compiled(model, bits=8)):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=is_autocast):
            losses.append(run(x))
        losses[-1].backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*losses)
    assert plans(model)[-1].coding.coded
    for (name, parameter), exact, coded in zip(model.named_parameters(), *found, strict=True):
        assert coded.dtype == parameter.dtype
        assert (coded.float() - exact.float()).norm() < 0.05 * exact.float().norm(), name


def test_casts_of_weights_are_made_again_in_place_of_coded():
    model, x = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh()), torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(model, bits=8)(x).square().sum()
    loss.backward()
    (plan,) = plans(model)
    # the cast of x and the input of the first tanh; the other one's result is kept by the caller
    assert sorted(tensor.tensor_bytes for tensor in plan.coding.coded) == [2 * ROWS * WIDTH, 2 * ROWS * 40]
    assert all(tensor.tensor_bytes not in (2 * 40 * WIDTH, 2 * 40 * 24) for tensor in plan.coding.exact)


@pytest.mark.parametrize("executor", ["exact", slow("inductor")])
def test_casts_of_what_is_no_parameter_are_not_made_again(executor):
    def reads_a_buffer_and_writes_into_it(it, x):
        y = it.linear(x) @ it.mixing
        it.mixing.mul_(0.9)
        return y.square().sum()

    parts = {"mixing": torch.randn(WIDTH, WIDTH), **linears("linear", WIDTH)}
    model, x = ModelOf(reads_a_buffer_and_writes_into_it, **parts), torch.randn(ROWS, WIDTH)
    run = compiled(model, executor, bits=8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(model)(x)
        loss = run(x)
    # the caller reuses its batch's memory
    x.zero_()
    loss.backward()
    assert torch.allclose(loss, expected)
    (plan,) = plans(model)
    assert plan.coding.coded


def test_results_that_are_equal_casts_are_tensors_of_their_own():
    doubled = Of(lambda y: (y.to(torch.bfloat16), y.to(torch.bfloat16), y.square().sum()))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), doubled)
    first, second, _ = compiled(model, "inductor", bits=8)(torch.randn(ROWS, WIDTH))
    before = second.clone()
    with torch.no_grad():
        first.mul_(2)
    assert torch.equal(second, before)


def joint_graph_of(model, x, **options):
    captured = []

    def capture(step, *args):
        coding = code_step(step, *args)
        captured.append(step.joint)
        return coding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rmm_linear.compiler.joint_graph.code_step", capture)
        compiled(model, **options)(x).backward()
    (joint,) = captured
    return joint


@pytest.mark.parametrize("body", [attention_of, slow(block), nn.ReLU])
def test_inserted_ops_have_the_fake_values_that_they_return(body):
    def described(value, sources):
        parts = value if isinstance(value, (tuple, list)) else [value]
        return [
            (
                *(part.shape, part.stride(), part.storage_offset(), part.dtype, part.device),
                part.untyped_storage().nbytes(),
                [part.untyped_storage()._cdata == source.untyped_storage()._cdata for source in sources],
            )
            for part in parts
        ]

    joint = joint_graph_of(Net(body()), torch.randn(ROWS, WIDTH), bits=4)
    mode, checked = next(iter(joint.graph.nodes)).meta["val"].fake_mode, 0
    for node in joint.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            sources = [source.meta["val"] for source in node.all_input_nodes]
            with mode:
                again = node.target(*args, **kwargs)
            assert described(node.meta["val"], sources) == described(again, sources), node
            checked += 1
    assert checked > 100


def test_what_attention_reads_lies_as_its_forward_op_wrote_it():
    """A GPU's kernel takes the strides of the output for granted: a reading is a view of rows as they lie in memory."""
    joint = joint_graph_of(Net(attention_of()), torch.randn(ROWS, WIDTH), bits=8)
    (reader,) = (node for node in joint.graph.nodes if node.target in attention.FUSED)
    for place in attention.FUSED[reader.target]:
        read = reader.args[place]
        assert read.meta["val"].stride() == (ROWS // 4 * WIDTH, 8, WIDTH, 1)
        assert read.target.is_view, read.target


def test_a_mask_of_dropout_that_lies_transposed_is_coded():
    """Op by op, as in eager mode, a mask lies as the tensor that it drops from."""
    torch.manual_seed(0)
    transposed = Of(lambda x: functional.dropout(x.transpose(0, 1), 0.1))
    layers = nn.Linear(64, 64), nn.LayerNorm(64), transposed, nn.Linear(64, 64), Of(lambda x: x.square().mean())
    model, x = nn.Sequential(*layers), torch.randn(64, 32, 64)

    def step(kind):
        # each of them draws one seed: the masks are the same
        torch.manual_seed(1)
        loss = compiled(model, bits={kind: 8})(x)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    loss, expected = step("norm")
    coded_loss, found = step("linear")
    assert coded_loss == loss
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient - other).norm() < 0.02 * other.norm()
    run, start = compiled(model, bits={"linear": 8}), torch.ones(())
    run(x).backward(start)
    model.zero_grad()
    with MeasuredPeak() as measured:
        run(x).backward(start)
    assert measured.peak == plans(model)[-1].peak_bytes


@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.grid)])
def test_what_is_not_finite_is_not_finite_in_the_gradients(bad):
    for body in (nn.LayerNorm(WIDTH), nn.GELU(), nn.Identity()):
        model, x = Net(body), torch.randn(ROWS, WIDTH)
        x[3, 5] = bad
        found = gradients(model, compiled(model, bits=8), x)
        assert not found["after.weight"].isfinite().all()


def test_a_block_in_a_checkpoint_has_codes():
    # nothing is known of the functions yet
    activations._compared.cache_clear()
    model, x = Net(nn.GELU()), torch.randn(ROWS, WIDTH)
    run = compiled(model, bits={"activation": 8})
    exact = gradients(model, model, x)
    found = gradients(model, partial(checkpoint, run, use_reentrant=False), x)
    assert plans(model)[0].coding.coded
    error = (found["before.weight"] - exact["before.weight"]).norm() / exact["before.weight"].norm()
    assert 0 < error < 0.05


def test_bits_that_are_none_are_refused():
    parts = {"norm": 5}, {"norm": 8.0}, {"norms": 8}, {"only": "mul"}, {"only": [1]}, {"only": ["mul"]}
    for given in (3, 16, True, "8", 8.0, *parts):
        with pytest.raises(ValueError, match="bits"):
            Bits.of(given)
    assert Bits.of({"norm": 8}) == Bits(norm=8)
    assert Bits.of(4) == Bits(**dict.fromkeys(KINDS, 4))
    some = Bits.of({"norm": 8, "only": ["mul"]})
    assert some.only == {"mul"}
    assert Bits.of(some.as_given()) == some
    for given in (None, {}, {"norm": None}):
        with pytest.raises(ValueError, match="budget"):
            compiled(nn.Linear(2, 2), bits=given)(torch.randn(2, 2))


def test_a_plan_tells_the_bytes_of_its_codes():
    model, x = Net(nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU())), torch.randn(200, WIDTH)
    plan = plan_of(model, x, bits={"norm": 8, "activation": 4})
    kept = plan.planned.forward_bytes
    # the norm's statistic of 200 rows, the keys of two codes, the loss, what is squared, and what GELU returns
    assert kept == plan.coding.code_bytes + 200 * 4 + 2 * 8 + 4 + 200 * 3 * 4
    assert "codes of 2 tensors" in str(plan)
    assert "1 norm in 8 bits, 1 activation in 4 bits" in str(plan)
    assert "no budget" in str(plan)
    assert "sketches" not in str(plan)


def test_a_statistic_whose_exact_value_is_kept_has_no_code():
    plan = plan_of(Net(Of(rms_of_rms)), torch.randn(ROWS, WIDTH), bits=8)
    # the first norm's; the second norm's output is read from it, and from its own scale
    assert [tensor.kind for tensor in plan.coding.coded] == ["norm"]


def of_gradient(function):
    """The identity, whose gradient a function changes."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return function(gradient)

    return ModelOf(lambda it, x: Changed.apply(x))


@torch.library.custom_op("rmm_linear_tests::gather", mutates_args=())
def in_quarters(x: torch.Tensor) -> torch.Tensor:
    return (4 * x).round() / 4


in_quarters.register_fake(torch.empty_like)
eye = partial(torch.eye, WIDTH)
BENDING = {
    "bessel": torch.special.bessel_j0,
    **{
        op.__name__: op for op in (torch.ceil, torch.floor, torch.frac, torch.round, torch.sgn, torch.sign, torch.trunc)
    },
    "cholesky": lambda g: torch.cholesky_solve(eye(), g[:WIDTH]),
    "clamp": lambda g: g.clamp(-1, 1),
    "comparison": lambda g: torch.where(g > 0, g, 0.5 * g),
    "complex_step": lambda g: g.to(torch.cfloat).sgn(),
    "convolution": lambda g: functional.conv1d(g[None], g[:, None, :3], groups=ROWS),
    "copy_of_whole_numbers": lambda g: g.new_zeros(g.shape, dtype=torch.int64).copy_(g) * g.new_ones(()),
    "custom": in_quarters,
    "floor_divide": lambda g: g.floor_divide(0.3),
    "fmod": lambda g: g.fmod(0.3),
    "heaviside": lambda g: g.heaviside(torch.ones(())),
    "logarithm": lambda g: torch.xlogy(torch.ones_like(g), g),
    "largest": lambda g: torch.ops._c10d_functional.all_reduce(g, "max", "0"),
    "matrix_product": lambda g: g @ (g.T @ torch.ones_like(g)),
    "norm": lambda g: g / g.norm(),
    "product": lambda g: g * g.flip(0),
    "quotient": lambda g: torch.div(8 * g, 1.0, rounding_mode="floor") / 8,
    "remainder": lambda g: g.remainder(0.3),
    "softmax": lambda g: g * g.detach().softmax(-1),
    "solution": lambda g: torch.linalg.solve_triangular(g[:WIDTH] + eye(), eye(), upper=True),
    "solution_of_lu": lambda g: torch.linalg.lu_solve(g[:WIDTH], torch.arange(1, WIDTH + 1).int(), eye()),
    "sort": lambda g: g.sort(0).values,
}
LINEAR = {
    "cast": lambda g: g.to(torch.bfloat16).to(g.dtype),
    "cholesky": lambda g: torch.cholesky_solve(g.T, eye()),
    "constant": lambda g: g * (torch.ones_like(g) + g.new_ones(WIDTH) + g.clone().fill_(2.0) + g.bernoulli(0.5)),
    "convolution": lambda g: functional.conv1d(g[None], torch.ones(ROWS, 1, 3), groups=ROWS),
    "copy": lambda g: torch.ops.aten.copy.default(g.new_zeros(ROWS, WIDTH), g[:, :1]),
    "complex": lambda g: torch.fft.ifft(torch.fft.fft(g).slice_scatter(g[:3].to(torch.cfloat), end=3)).real,
    "complex_row": lambda g: torch.fft.fft(g).select_scatter(g[0].to(torch.cfloat), 0, 3),
    "fourier": lambda g: torch.fft.irfft(torch.fft.rfft(g)),
    "index": lambda g: g[torch.arange(ROWS - 1, -1, -1)],
    "logarithm": lambda g: torch.xlogy(g, torch.ones_like(g)),
    "masked": lambda g: g.masked_fill(torch.ones(WIDTH) > 0, 0.0).tril(),
    "mean": lambda g: g - g.mean(0, keepdim=True) + g.cumsum(1) / 3,
    "detached": lambda g: 2 * g.detach() * (1 + g.clone().zero_()),
    "gather": lambda g: g.gather(0, torch.arange(ROWS - 1, -1, -1)[:, None].expand_as(g)),
    "pieces": lambda g: torch.cat([g[:, 3:], -g[:, :3]], 1).roll(1, 0),
    "solved": lambda g: torch.linalg.solve_triangular(torch.eye(ROWS), g, upper=True),
    "solved_by_lu": lambda g: torch.linalg.solve(torch.eye(ROWS), g),
    "solved_from_lu": lambda g: torch.linalg.lu_solve(eye(), torch.arange(1, WIDTH + 1).int(), g[:WIDTH]),
    "split": lambda g: torch.stack(torch.ops.rmm_linear.unbind_copy.default(g)),
    "put": lambda g: torch.zeros_like(g).put(torch.arange(g.numel()), g),
    "index_add": lambda g: torch.zeros_like(g).index_add(0, torch.arange(ROWS), g),
    "total": lambda g: torch.ops._c10d_functional.all_reduce(g, "sum", "0"),
    "taken": lambda g: g.take(torch.arange(g.numel()).view_as(g)),
    "weight": lambda g: functional.pad(g @ torch.ones(WIDTH, 3), (0, WIDTH - 3)),
}


@pytest.mark.parametrize(
    ("function", "is_linear"),
    [pytest.param(function, False, id=f"bending-{name}") for name, function in BENDING.items()]
    + [pytest.param(function, True, id=f"linear-{name}") for name, function in LINEAR.items()],
)
def test_ops_that_are_not_linear_in_a_noisy_gradient_are_found(function, is_linear):
    traced = make_fx(torch.func.functionalize(lambda g: function(2 * g)), tracing_mode="fake")
    joint = traced(torch.randn(ROWS, WIDTH))
    gradient, reader = itertools.islice(joint.graph.nodes, 2)
    assert (not list(Step(joint, [gradient], {}).bent([reader]))) == is_linear


@pytest.mark.slow
def test_a_plan_names_ops_that_bend_noisy_gradients():
    def of_noisy_gradients(it, x):
        return functional.gelu(it.linear(sum(each(x) for each in it.gradients.values())))

    x = torch.randn(ROWS, WIDTH)
    functions = {name: BENDING[name] for name in ("custom", "norm", "sort")}
    linear = ("cast", "fourier", "mean", "weight")
    gradients = {name: of_gradient(function) for name, function in functions.items()}
    gradients |= {name: of_gradient(LINEAR[name]) for name in linear}
    body = ModelOf(of_noisy_gradients, gradients=nn.ModuleDict(gradients), **linears("linear", WIDTH))
    plan = plan_of(Net(body), x, bits=8)
    assert sorted({op.rpartition(".")[2] for op in plan.coding.bending}) == list(functions)
    told = "gradients behind ops that are not linear in them are biased"
    assert f"{told}: aten.sort.default of body.gradients.sort; " in str(plan)
    # where no noise arrives
    bending = [of_gradient(function) for function in functions.values()]
    for body, bits in ((nn.Sequential(nn.GELU(), *bending), {8}), (nn.Sequential(*bending, nn.ReLU()), {1, 8})):
        plan = plan_of(Net(body), x, bits=8)
        assert {tensor.bits for tensor in plan.coding.coded} == bits
        assert told not in str(plan)


def test_columns_of_channels_last_images_are_channels_and_those_of_heads_all_heads():
    shape = Shape.of(torch.empty(2, 16, 8, 16).to(memory_format=torch.channels_last))
    assert (shape.layout.rows, shape.layout.columns) == (256, 16)
    shape = Shape.of(torch.empty(4, 64, 2, 8).transpose(1, 2))
    assert (shape.layout.rows, shape.layout.columns) == (256, 16)

    def gelu_of_channels_last_image(it, x):
        image = x.view(2, 8, -1, WIDTH).permute(0, 3, 1, 2)
        return functional.gelu(it.conv(image)).permute(0, 2, 3, 1).reshape(-1, WIDTH)

    conv = nn.Conv2d(WIDTH, WIDTH, 1).to(memory_format=torch.channels_last)
    model = Net(ModelOf(gelu_of_channels_last_image, conv=conv))
    result, plan = judge(model, torch.randn(ROWS, WIDTH), 100, bits={"activation": 8})
    assert [tensor.kind for tensor in plan.coding.coded] == ["activation"]
    assert is_unbiased(result, named_bias(plan)), result


def test_memory_that_two_codes_serve_is_freed_once():
    # the sum takes 2 bytes an element, a code 1.03: the sum has a code, not the norms
    parts = {"first": nn.LayerNorm(128), "second": nn.LayerNorm(128), "linear": nn.Linear(128, 3)}
    model = ModelOf(lambda it, x: it.linear(it.first(x) + it.second(x)).sum(), **parts).to(torch.bfloat16)
    plan = plan_of(model, torch.randn(ROWS, 128, dtype=torch.bfloat16), bits={"norm": 8, "linear": 8})
    assert [tensor.kind for tensor in plan.coding.coded] == ["linear"]
    # a code frees both factors and the product, for gate, up and the linear layer behind them
    model, x = gated(), torch.randn(ROWS, WIDTH)
    exact, coded = plan_of(model, x, budget="100%"), plan_of(model, x, bits=8)
    coding = coded.coding
    freed = coding.freed_bytes - coding.code_bytes
    # the keys are kept beside the codes
    assert exact.plain.forward_bytes - coded.plain.forward_bytes == freed - 8 * len(coding.coded)


def test_shapes_may_change_and_a_budget_comes_on_top():
    model = Net(nn.LayerNorm(WIDTH))
    run = compiled(model, bits=8, budget="100%")
    # the last batch of an epoch may be small, and is no reason for a warning
    for rows in (256, 300, 100, 256):
        x = torch.randn(rows, WIDTH)
        exact, found = gradients(model, model, x), gradients(model, run, x)
        for name in exact:
            assert (found[name] - exact[name]).norm() < 0.05 * exact[name].norm()
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans(model))


# test_codes.py compiles the codes alone
@pytest.mark.slow
def test_inductor_reads_the_same_codes():
    model, x = Net(nn.Sequential(nn.LayerNorm(WIDTH), gated().body), outer=24), torch.randn(ROWS, WIDTH)
    found = []
    for executor in ("exact", "inductor"):
        torch.manual_seed(1)
        found.append(gradients(model, compiled(model, executor, bits=4), x))
    kinds = {(tensor.kind, tensor.bits) for tensor in plans(model)[-1].coding.coded}
    assert kinds == {("norm", 4), ("activation", 4), ("linear", 4)}
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-3, atol=1e-4 * float(each.abs().max()))
