"""Converted layers that read one tensor keep one sketch under the backend, as in eager mode."""

import copy
from functools import partial

import pytest
import torch
from draws import gradients, judge
from model_of import ModelOf, linears
from torch import nn
from torch.nn import functional

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.compiler import plans
from rmm_linear.memory import SavedTensors
from tests.checkpointing.planned_models import assert_same_gradients

BATCH, LENGTH, WIDTH = 4, 64, 32
ROWS = BATCH * LENGTH
CONFIG = RMMConfig(ratio=0.25, min_rows=1)


def attention(dropout=0.1, **configs):
    def run(it, x):
        y = it.norm(x)
        # under autocast it computes in float32 within
        y = functional.scaled_dot_product_attention(it.q(y), it.k(y), it.v(y), dropout_p=dropout * it.training)
        return it.out(y).square().mean()

    torch.manual_seed(0)
    model = ModelOf(run, norm=nn.LayerNorm(WIDTH), **linears("q k v out", WIDTH))
    for name in "q", "k", "v", "out":
        convert_linears(model, config=configs.get(name, CONFIG), target_modules=[name])
    return model


def compiled(model, executor, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="rmm_linear", options={"executor": executor, "budget": "100%", **options})


def batch():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


# op by op, Inductor's ops take what they would not if they were fused
@pytest.mark.filterwarnings("ignore:the compiled step takes")
@pytest.mark.usefixtures("uncompiled_graphs")
@pytest.mark.parametrize("is_autocast", [pytest.param(False, marks=pytest.mark.grid), True])
@pytest.mark.parametrize("executor", ["exact", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_sketch_of_one_tensor_is_kept(executor, is_autocast):
    x, kept = batch(), {}
    dtype = torch.bfloat16 if is_autocast else torch.float32
    for shares in (True, False):
        config = CONFIG.replace(share_sketch=shares)
        model = attention(q=config, k=config, v=config)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = compiled(model, executor)(x)
        loss.backward()
        (plan,) = plans(model)
        kept[shares] = plan.plain.forward_bytes
        kinds = [op.kind for op in plan.graph.ops]
        assert kinds.count("rmm_linear.compress") == (2 if shares else 4)
        # in eager mode each layer draws, and so does the same program op by op
        assert kinds.count("rmm_linear.draw_seed") == (2 if shares and executor == "inductor" else 4)
        assert kinds.count("rmm_linear.grad_weight") == 4
    assert kept[False] - kept[True] == 2 * CONFIG.saved_bytes(ROWS, WIDTH, dtype)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"keep_tokens": (0,)}, marks=pytest.mark.grid), {"keep_tokens": (0,), "storage": "int8"}],
    ids=str,
)
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_plan_keeps_what_eager_mode_keeps(is_autocast, options):
    config = CONFIG.replace(ratio=0.5, **options)
    model, x = attention(q=config, k=config, v=config, out=config), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        with SavedTensors(model) as kept:
            loss = model(x)
        compiled(model, "exact")(x)
    # the norm keeps the batch, which is the caller's; the loss is counted with the plan
    assert plans(model)[0].plain.forward_bytes == kept.bytes - x.nbytes + loss.nbytes


def behind_tanh():
    """The second layer reads a tensor that tanh keeps, and has no sketch."""
    torch.manual_seed(0)
    layers = linears("first second third", WIDTH)
    model = ModelOf(lambda it, x: it.third(it.second(it.first(x).tanh())).square().mean(), **layers)
    return convert_linears(model, config=CONFIG)


@pytest.mark.parametrize(
    "make",
    [
        attention,
        partial(attention, k=CONFIG.replace(ratio=0.5)),
        partial(attention, v=CONFIG.replace(share_sketch=False)),
        behind_tanh,
    ],
    ids=["alike", "one of another ratio", "one that shares nothing", "one without a sketch"],
)
def test_layers_draw_and_share_as_in_eager_mode(make):
    model, x = make(), batch()
    reference = copy.deepcopy(model)
    run = compiled(model, "exact")
    for seed in (3, 4):
        for one, call in ((reference, reference), (model, run)):
            one.zero_grad()
            torch.manual_seed(seed)
            call(x).backward()
        assert_same_gradients(model, reference)


@pytest.mark.montecarlo
@pytest.mark.parametrize("executor", ["exact", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_of_a_shared_sketch_are_unbiased_for_each_weight(executor):
    """Slope on the exact gradient, 150 draws: |z| < 4.5 for 4 weights, false alarm 6e-5. Another seed's slope is 0."""
    model, x = attention(dropout=0.0), batch()
    exact = gradients(model.eval(), model, x)
    result = judge(model.train(), compiled(model, executor), x, 150, exact)
    assert len(plans(model)) == 1
    # torch's attention keeps its output, and torch 2.14 tells the layer that reads it, which is exact then
    sketched = {"q.weight", "k.weight", "v.weight", *(["out.weight"] if torch.__version__ < "2.14" else [])}
    assert result.keys() >= sketched, "they are not sketched: the test shows nothing"
    estimates = [each for name, each in result.items() if model.get_parameter(name).dim() == 2]
    assert all(abs(slope - 1) <= 4.5 * error for slope, error, *_ in estimates), result
