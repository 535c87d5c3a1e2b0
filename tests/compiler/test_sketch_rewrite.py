"""Weight gradients from sketches that the compiler writes: all else keeps its bits, and each parameter's is unbiased.

Draws are compared with the exact gradient by their slope on it, which is 1 in the mean, and by |sum of n errors|^2 over
the sum of |error|^2, which is 1 in the mean if errors are unbiased. Variances are compared with the closed form.
"""

import copy
import math

import pytest
import torch
from draws import Of, Weighted, gradients, judge, keys_of_one, squared_errors
from model_of import ModelOf, linears
from torch import nn
from torch.nn import functional

from rmm_linear import convert_linears
from rmm_linear.compiler import plans, rewrites
from rmm_linear.sketches import Hadamard

RATIO, ROWS, WIDTH = 0.375, 320, 96
# 5 and 6 blocks: of 64 rows; of 61 and 62, Hadamard matrices of order 64; of 56 and 55 rows, of order 56
SIZES = [ROWS, 307, 333]


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) / 8)


def conv1d():
    """GPT-2's: the weight is (in, out), and its gradient x^T g."""

    def run(it, x):
        return torch.addmm(it.bias, x.view(-1, WIDTH), it.weight).view(x.shape)

    return ModelOf(run, weight=parameter(WIDTH, WIDTH), bias=nn.Parameter(torch.zeros(WIDTH)))


def queries(norm=None):
    """Three layers that read one tensor."""

    def run(it, x):
        x = it.norm(x)
        return it.q(x) + 2 * it.k(x) + it.v(x).sin()

    return ModelOf(run, norm=norm or nn.LayerNorm(WIDTH), **linears("q k v", WIDTH))


def net(body):
    """Layers of inputs that nothing else needs, and of others: the batch, and what tanh returns."""

    def run(it, x):
        y = it.body(it.first(x).sin())
        return it.last(it.norm(y).tanh()).square().sum()

    last = nn.Linear(WIDTH, WIDTH, bias=False)
    return ModelOf(run, norm=nn.LayerNorm(WIDTH), body=body, last=last, **linears("first", WIDTH))


def weighted(model, rows=ROWS):
    return Weighted(model, torch.randn(rows, WIDTH))


BODIES = {"linear": lambda: nn.Linear(WIDTH, WIDTH), "x^T g": conv1d, "queries": queries}


def compiled(model, executor="exact", sketch=RATIO, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="rmm_linear", options={"executor": executor, "sketch": sketch, **options})


def coding_of(model):
    return plans(model)[-1].coding


def batch(rows=ROWS):
    return torch.randn(rows, WIDTH)


def is_unbiased(result):
    """Slopes within 4.5 standard errors (once in 10,000 runs for 15 parameters), and means no further than chance."""
    return all(abs(slope - 1) <= 4.5 * error and ratio <= 3 for slope, error, ratio, _ in result.values())


# all of net's own layers are like the body "linear"
QUICK = {("x^T g", None), ("queries", 8)}


@pytest.mark.parametrize(
    ("executor", "body", "rows", "bits"),
    [
        pytest.param(*case, bits, marks=() if case[0] == "exact" and (case[1], bits) in QUICK else pytest.mark.slow)
        for case in (*zip(["exact"] * 3, BODIES, SIZES, strict=True), ("inductor", "queries", 333))
        for bits in (None, 8)
    ],
)
def test_gradients_are_unbiased_for_each_parameter(executor, body, rows, bits):
    model = net(BODIES[body]())
    result = judge(model, compiled(model, executor, bits=bits), batch(rows), 250)
    assert set(result) >= {name for name, each in model.named_parameters() if each.dim() == 2}
    assert is_unbiased(result), result
    # a bias of 1 % is four standard errors
    assert max(error for _, error, *_ in result.values()) < 0.0025, result


@pytest.mark.parametrize("body", BODIES)
def test_all_but_weight_gradients_keep_the_bits_of_eager_mode(body):
    model, x = net(BODIES[body]()), batch(333).requires_grad_()
    exact, run = gradients(model, model, x), compiled(model)
    assert run(x).equal(model(x))
    found = gradients(model, run, x)
    weights = {name for name, each in model.named_parameters() if each.dim() == 2}
    assert {name for name in exact if not found[name].equal(exact[name])} == weights


# each kind, and the other pairs on demand
@pytest.mark.parametrize(
    ("rows", "is_kept"),
    [
        pytest.param(rows, is_kept, marks=() if (rows == 307) == is_kept and rows != 333 else pytest.mark.grid)
        for rows in SIZES
        for is_kept in (True, False)
    ],
)
def test_a_weight_gradient_has_the_variance_of_the_closed_form(rows, is_kept):
    layer, x = nn.Linear(WIDTH, WIDTH), batch(rows)
    # sin keeps its input; tanh keeps its result. Both have no mean, which would be most of a gradient's noise
    function = Of(torch.sin) if is_kept else nn.Tanh()
    model = weighted(nn.Sequential(nn.Linear(WIDTH, WIDTH), function, layer), rows)
    expected = float(Hadamard(RATIO).variance(model.model[:2](x).detach(), model.weights))
    squares = squared_errors(model, compiled(model), x, 200, "model.2.weight")
    assert [each.is_kept for each in coding_of(model).sketched] == [is_kept, False]
    assert squares.std() / 200**0.5 < 0.006 * expected
    assert float(squares.mean()) == pytest.approx(expected, rel=0.03)


def branches(is_shared):
    """Layers alike whose inputs are equal: one tensor, or two that are computed alike."""

    def run(it, x):
        y = functional.gelu(it.before(x))
        z = y if is_shared else functional.gelu(it.alike(x))
        return torch.stack([it.first(y), it.second(z)], -1).sum(-1).square().sum()

    parts = linears("before first", WIDTH)
    alike = {} if is_shared else {"alike": copy.deepcopy(parts["before"])}
    return ModelOf(run, second=copy.deepcopy(parts["first"]), **parts, **alike)


def correlation(model, x, draws=60):
    """Correlation of the errors of both layers' weight gradients; 1 / sqrt(draws) is its standard error at the most."""
    exact, run = gradients(model, model, x), compiled(model)
    products, squares = 0.0, 0.0
    for _ in range(draws):
        found = gradients(model, run, x)
        first, second = (found[name] - exact[name] for name in ("first.weight", "second.weight"))
        products += float((first * second).sum())
        squares += float(first.norm() * second.norm())
    return products / squares


def test_layers_of_one_input_share_a_sketch_and_others_do_not(monkeypatch):
    model, x = branches(is_shared=True), batch()
    assert correlation(model, x, 3) == pytest.approx(1, abs=1e-6)
    assert sorted(each.layers for each in coding_of(model).sketched) == [1, 2]
    model = branches(is_shared=False)
    # once in 10,000 runs, if errors of a draw were all in one direction
    assert abs(correlation(model, x)) < 4 / 60**0.5
    assert sorted(each.layers for each in coding_of(model).sketched) == [1, 1, 2]
    monkeypatch.setattr(rewrites, "_keys", keys_of_one)
    assert correlation(model, x, 3) > 0.99


@pytest.mark.parametrize("executor", ["exact", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_draw_in_the_forward_pass_governs_all_sketches_and_codes(executor):
    model, x = net(queries()), batch()
    run = compiled(model, executor, bits=8)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([gradients(model, run, x)["body.q.weight"] for _ in range(2)])
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])
    assert not found[0][0].equal(found[0][1])
    assert not found[0][0].equal(found[2][0])
    (draw,) = (op for op in plans(model)[-1].graph.ops if op.is_random)
    assert "draw_seed" in draw.kind
    assert not draw.is_backward
    assert not draw.is_recomputable


def test_kept_inputs_shrink_by_the_ratio():
    model, x = nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]), batch()
    model = weighted(nn.Sequential(*model, nn.Linear(WIDTH, WIDTH)))
    kept = {}
    for ratio in (RATIO, 0.25):
        compiled(model, sketch=ratio)(x).backward()
        (plan,) = plans(model)[-1:]
        assert sorted((each.layers, each.is_kept) for each in plan.coding.sketched) == [(1, False)] + [(1, True)] * 3
        sizes = {(each.tensor_bytes, each.sketch_bytes) for each in plan.coding.sketched}
        assert sizes == {(4 * ROWS * WIDTH, 4 * ratio * ROWS * WIDTH)}
        kept[ratio] = plan.planned.forward_bytes
    compiled(model, sketch=None, budget="100%")(x)
    # the seeds of four sketches, which are kept in the place of three inputs
    plain = plans(model)[-1].plain.forward_bytes
    assert plain - kept[RATIO] == 3 * 4 * ROWS * WIDTH * (1 - RATIO) - 4 * 8
    assert plain - kept[0.25] == 3 * 4 * ROWS * WIDTH * 0.75 - 4 * 8
    told = "from sketches of 0.25 of the rows: 3 kept, 360.00 -> 90.00 KiB; 1 made in the backward pass"
    assert f"weight gradients of 4 linear layers {told}" in str(plan)


def test_bytes_of_codes_are_kept_and_sketches_are_made_of_what_is_read():
    model, x = net(queries()), batch()
    kept = []
    for sketch in (None, RATIO):
        compiled(model, sketch=sketch, bits=8)(x).backward()
        kept.append(plans(model)[-1].planned.forward_bytes)
    assert kept[1] - kept[0] == 8 * len(coding_of(model).sketched)
    assert [(each.layers, each.is_kept) for each in coding_of(model).sketched] == [(1, False), (3, False), (1, False)]


OTHERS = {
    "a weight that is computed of its parameter": lambda: ModelOf(
        lambda it, x: functional.linear(x, it.weight / it.weight.norm()), weight=parameter(WIDTH, WIDTH)
    ),
    "products of two tensors of the forward pass": lambda: ModelOf(
        lambda it, x: ((x * it.weight) @ x.t() / WIDTH).softmax(-1) @ x, weight=nn.Parameter(torch.ones(WIDTH))
    ),
    "an input that is a parameter": lambda: ModelOf(
        lambda it, x: functional.linear(it.queries, it.weight)[:, :WIDTH] * x,
        **{name: parameter(ROWS, WIDTH) for name in ("queries", "weight")},
    ),
    "less arithmetic than a sketch": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ZeroPad1d((0, WIDTH - 8))),
}


@pytest.mark.parametrize(
    ("body", "is_autocast"), [*((body, False) for body in OTHERS), ("an input that is a parameter", True)]
)
def test_other_products_stay_exact(body, is_autocast):
    body = OTHERS[body]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        assert_stays_exact(weighted(body()), batch().requires_grad_())


def assert_stays_exact(model, x):
    exact, run = gradients(model, model, x), compiled(model)
    found = gradients(model, run, x)
    assert not coding_of(model).sketched
    assert all(found[name].equal(exact[name]) for name in exact)


def test_few_rows_and_float64_stay_exact():
    assert_stays_exact(net(queries()), batch(255))
    assert_stays_exact(net(queries()).double(), batch().double())


def test_a_weight_that_is_used_twice_has_the_sum_of_two_estimates():
    layer = nn.Linear(WIDTH, WIDTH)
    model = weighted(nn.Sequential(layer, nn.GELU(), layer))
    result = judge(model, compiled(model), batch(), 150)
    assert [each.layers for each in coding_of(model).sketched] == [1, 1]
    assert is_unbiased(result), result


@pytest.mark.parametrize(
    ("dtype", "is_autocast"),
    [
        (torch.bfloat16, True),
        *(
            pytest.param(*each, marks=pytest.mark.grid)
            for each in ((torch.bfloat16, False), (torch.float16, False), (torch.float16, True))
        ),
    ],
)
def test_low_precision_has_sketches_and_gradients_of_the_right_dtype(dtype, is_autocast):
    model, x = net(queries()), batch(ROWS) / 4
    if not is_autocast:
        model, x = model.to(dtype), x.to(dtype)
    totals = {}
    run = compiled(model)
    for step in (model, *[run] * 100):
        with torch.autocast("cpu", dtype, enabled=is_autocast):
            loss = step(x)
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == parameter.dtype
            totals[name] = totals.get(name, 0.0) + parameter.grad.double() * (-100 if step is model else 1)
    exact = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    assert [each.layers for each in coding_of(model).sketched] == [1, 3, 1]
    assert all(each.sketch_bytes == 2 * RATIO * ROWS * WIDTH for each in coding_of(model).sketched)
    for name, total in totals.items():
        assert total.norm() / 100 < 0.15 * exact[name].norm(), name


def test_casts_of_one_tensor_have_one_sketch():
    scale = ModelOf(lambda it, x: x * it.weight, weight=nn.Parameter(torch.ones(WIDTH)))
    model = weighted(queries(scale))
    with torch.autocast("cpu", torch.bfloat16):
        gradients(model, compiled(model), batch())
    (sketch,) = coding_of(model).sketched
    assert (sketch.layers, sketch.is_kept) == (3, True)


def test_a_budget_comes_on_top():
    model, x = net(queries()), batch()
    result = judge(model, compiled(model, budget="90%"), x, 100)
    assert is_unbiased(result), result
    (plan,) = plans(model)[-1:]
    assert plan.peak_bytes <= plan.budget_bytes
    assert len(plan.coding.sketched) == 3
    assert "converted" not in plan.card()


def test_converted_layers_keep_their_own_sketches():
    model, x = net(queries()), batch()
    convert_linears(model, ratio=0.5)
    compiled(model)(x).backward()
    plan = plans(model)[-1]
    # tanh keeps the last one's input: it was left exact
    assert [(each.layers, each.is_kept) for each in plan.coding.sketched] == [(1, False)]
    assert [op.kind for op in plan.graph.ops].count("rmm_linear.grad_weight") == 5
    assert "sketches at the end of the forward pass" in str(plan)
    assert "weight gradients of converted linear layers" in plan.card()


@pytest.mark.parametrize("options", [{"sketch": RATIO}, {"bits": 8}])
def test_masks_of_dropout_stay_where_a_gradient_arrives_beside_the_loss(options):
    model, x = net(queries()), batch()
    # two of the seeds that it draws are not used
    convert_linears(model.body, ratio=0.5)

    def features(x):
        return model.body(model.first(x).sin())

    def step(x):
        y = functional.dropout(features(x), 0.5)
        return y.square().mean(), y

    run = torch.compile(step, backend="rmm_linear", options={**options, "executor": "exact"})
    loss, y = run(x)
    with pytest.warns(UserWarning, match="arrived at a result beside the loss"):
        (loss + y.sum()).backward()
    gradient, mask = model.body.q.bias.grad.clone(), 2.0 * (y != 0)
    model.zero_grad()
    z = features(x) * mask
    (z.square().mean() + z.sum()).backward()
    exact = model.body.q.bias.grad
    # codes have the noise of 8 bits: other masks take it away by more than its norm
    assert (gradient - exact).norm() < (0.05 if "bits" in options else 1e-5) * exact.norm()


@pytest.mark.parametrize("bad", [0, 1, 0.0, 1.0, 1.5, -0.5, "x", True, math.nan])
def test_ratios_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match=r"sketch=.* is not in \(0, 1\)"):
        compiled(nn.Linear(2, 2), sketch=bad)(torch.randn(2, 2))
