"""RMMConv1D: GPT-2's linear layers, whose weight is held as (in, out), are sketched as nn.Linear's are."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from model_of import ModelOf
from tiny_transformers import tiny
from torch import nn

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D

from rmm_linear import RMMConfig, convert_linears, revert_linears, summary
from rmm_linear.layer import RMMConv1D, SketchedLayer
from rmm_linear.memory import MeasuredSaving, SavedTensors, profile
from rmm_linear.variance.probe import LayerProbe

CONFIG = RMMConfig(ratio=0.3, min_rows=1)
LAYOUTS = {
    "2d": ((46, 40), lambda base: base),
    "3d": ((6, 23, 40), lambda base: base),
    "1d": ((40,), lambda base: base),
    "sliced features": ((6, 23, 80), lambda base: base[..., ::2]),
    "half of the features": ((6, 23, 80), lambda base: base.chunk(2, -1)[1]),
    "column-major": ((40, 138), lambda base: base.t()),
    "column-major and tall": ((32, 1024), lambda base: base.t()[:, :]),
}


def pair(config=CONFIG, dtype=torch.float32, width=40):
    exact = Conv1D(24, width).to(dtype)
    nn.init.normal_(exact.bias)
    return exact, convert_linears(copy.deepcopy(exact), config=config)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in LAYOUTS),
        *(("3d", dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_output_grad_input_and_grad_bias_are_bit_equal(layout, dtype):
    shape, view = LAYOUTS[layout]
    base = torch.randn(shape).to(dtype)
    width = view(base).shape[-1]
    g = torch.randn(*view(base).shape[:-1], 24).to(dtype)
    results = []
    for layer in pair(dtype=dtype, width=width):
        leaf = base.clone().requires_grad_()
        output = layer(view(leaf))
        output.backward(g)
        results.append((output.detach(), leaf.grad, layer.bias.grad, layer.weight.grad))
    for exact, sketched in zip(*(result[:3] for result in results), strict=True):
        assert torch.equal(exact, sketched)
    assert results[1][3].shape == (width, 24)
    # a single row is kept as it is
    assert torch.equal(results[0][3], results[1][3]) == (layout == "1d")


def test_an_input_that_is_no_view_of_rows_is_taken():
    exact, sketched = pair()
    x = torch.randn(23, 6, 40).transpose(0, 1)
    assert torch.equal(sketched(x), exact(x.contiguous()))


def test_siblings_share_whatever_the_strides():
    model = ModelOf(lambda it, x: it.one(x) + it.two(x), one=Conv1D(24, 40), two=Conv1D(24, 40))
    wide = torch.randn(6, 23, 80)
    for x in (wide[..., :40], wide[..., ::2], torch.randn(40, 138).t()):
        report = profile(model, x)
        convert_linears(model, config=CONFIG)
        with SavedTensors(model) as kept:
            model(x)
        assert kept.bytes == report.predict(CONFIG) == CONFIG.saved_bytes(138, 40, torch.float32)
        revert_linears(model)


def test_the_whole_model_keeps_what_was_predicted_under_autocast():
    model, ids = tiny("GPT2LMHeadModel", dropout=0.1), torch.randint(0, 50, (8, 32))
    inputs = {"input_ids": ids, "labels": ids}
    config = RMMConfig(ratio=0.25, min_rows=1)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs)

    with torch.autocast("cpu", torch.bfloat16):
        report = profile(model, **inputs)
    names = {call.layer for call in report.linears}
    assert {"transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"} < names
    with SavedTensors(model) as exact:
        run()
    convert_linears(model, config=config, target_modules=".*")
    with MeasuredSaving(model) as saving:
        run()
    assert exact.bytes == report.total_bytes == saving.exact_bytes
    assert saving.kept_bytes == report.predict(config, layers=names) < 0.9 * exact.bytes


def test_it_is_saved_copied_and_reverted():
    exact, sketched = pair()
    assert list(exact.state_dict()) == list(sketched.state_dict())
    assert isinstance(sketched, Conv1D)
    assert isinstance(sketched, SketchedLayer)
    assert repr(sketched).startswith("RMMConv1D(nf=24, nx=40, ratio=0.3, sketch='hadamard'")
    for copied in (copy.deepcopy(sketched), pickle.loads(pickle.dumps(sketched))):
        assert type(copied) is RMMConv1D
        assert copied.rmm_config == CONFIG
    (row,) = summary(sketched).rows
    assert (row.in_features, row.out_features) == (40, 24)
    assert row.kept_bytes_per_row < row.exact_bytes_per_row == 40 * 4
    assert type(revert_linears(sketched)) is Conv1D
    assert vars(sketched).keys() == vars(exact).keys()


@pytest.mark.slow
def test_a_pickle_is_read_by_a_process_that_has_not_met_transformers(tmp_path):
    path = tmp_path / "layer.pt"
    torch.save(pair()[1], path)
    code = (
        "import sys, torch, rmm_linear\n"
        "assert 'transformers' not in sys.modules\n"
        f"layer = torch.load({str(path)!r}, weights_only=False)\n"
        "layer(torch.randn(4, 64, 40)).sum().backward()\n"
        "print(type(layer).__name__, tuple(layer.weight.grad.shape))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == "RMMConv1D (40, 24)", done.stderr


def test_a_probe_sees_input_and_gradient():
    sketched = pair()[1]
    seen = []
    probe = LayerProbe(sketched, lambda name, layer, x, g, index: seen.append((name, x.shape, g.shape)))
    probe.watch([""])
    sketched(x=torch.randn(6, 23, 40)).sum().backward()
    assert seen == [("", (6, 23, 40), (6, 23, 24))]


def test_it_compiles_whole():
    torch._dynamo.reset()
    sketched = pair()[1]
    compiled = torch.compile(sketched, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 23, 40)
    gradients = []
    for run in (sketched, compiled):
        torch.manual_seed(5)
        gradients += torch.autograd.grad(run(x).square().sum(), sketched.weight)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="config is a float; pass an RMMConfig"):
        RMMConv1D(24, 40, config=0.5)
    with pytest.raises(ValueError, match=r"x's last dimension must be the weight's 40 input features"):
        pair()[1](torch.randn(3, 39))
