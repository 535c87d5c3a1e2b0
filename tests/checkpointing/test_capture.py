"""What a capture follows, what it leaves as it was, and what it says about what it cannot follow."""

import copy
import itertools
import random

import pytest
import torch
from assert_unchanged import assert_unchanged
from model_of import ModelOf, linears
from planned_models import assert_same_step, planned, planned_and_plain, planned_runs
from torch import nn

from rmm_linear.checkpointing import capture, checkpoint_model
from rmm_linear.errors import CaptureError


def test_a_module_under_several_names_keeps_its_weights_and_is_planned():
    def repeated(it, x):
        for layer in it.layers:
            x = torch.relu(layer(x))
        return it.tied(x).square().mean()

    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))] * 3)
    model, x = ModelOf(repeated, layers=layers, tied=nn.Linear(8, 8)), torch.randn(4, 8)
    model.tied.weight = layers[0][0].weight
    with assert_unchanged(model):
        model, reference = planned_and_plain(model, x)
    for _ in range(2):
        assert_same_step(model, reference, x)


def of_layer(run):
    return ModelOf(run, **linears("layer", 8))


def exchanges(it, x):
    it.layer.weight = nn.Parameter(it.layer.weight.detach() * 2)
    return it.layer(x).sum()


def registers(it, x):
    it.register_buffer("seen", x.detach().mean())
    it.scale = nn.Parameter(torch.ones(8))
    return (it.layer(x) * it.scale).sum()


def is_interrupted(it, x):
    it.layer.weight.data.mul_(2)
    raise KeyboardInterrupt


def looks_for_labels(it, x):
    """The loss of the labelled rows, if there are any."""
    rows = (x[:, 0] >= 0).nonzero()
    if not rows.size(0):
        return it.layer(x).sum() * 0
    return it.layer(x).sum() / rows.size(0)


def chooses_rows(it, x):
    x = it.layer(x)
    return x[x[:, 0] > 0].sum()


def reads(state, read):
    return lambda it, x: (it.layer(x) * read(state)).sum()


THIS_LINE = r"test_capture\.py:\d+: (reads\(|return)"
REFUSED = {
    exchanges: r"nn.Parameter.*\n  at .*test_capture.py:\d+: it.layer.weight = nn.Parameter",
    registers: r"nn.Parameter.*\n  at .*test_capture.py:\d+: it.scale = nn.Parameter",
    is_interrupted: r"\n  at .*test_capture.py:\d+: raise KeyboardInterrupt",
    looks_for_labels: r"data-dependent.*\n  at .*if not rows.size\(0\):",
    chooses_rows: r"contents of a tensor at .*test_capture.py:\d+: return x\[x\[:, 0\] > 0\].sum\(\)",
    reads(torch.ones(1), lambda state: float(state)): THIS_LINE,
    reads(torch.ones(1), lambda state: 1.0 if state > 0 else 2.0): THIS_LINE,
    reads(itertools.cycle([1.0, 2.0]), lambda state: next(state)): THIS_LINE,
    reads(torch.Generator(), lambda state: torch.randn(8, generator=state)): THIS_LINE,
}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input": torch.ones(4, 8), "idx": torch.arange(4)}, "idx.*Check first that the step runs as written"),
        ({}, "missing.*input.*Check first that the step runs as written"),
        ((torch.ones(4, 7),), "Check first that the step runs as written"),
        ("x", "argument 'input'.*not str.*Check first that the step runs as written"),
    ],
)
def test_a_sample_that_the_model_cannot_take_is_told_as_such(sample, message):
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        checkpoint_model(nn.Linear(8, 8), sample, budget="100%")


def test_a_plan_at_the_prompt_is_a_few_lines():
    plan = checkpoint_model(nn.Linear(8, 8), torch.ones(4, 8), budget="100%")
    assert len(repr(plan)) < 400


@pytest.mark.parametrize("run", REFUSED)
def test_what_is_refused_is_told_with_its_line_and_leaves_the_model_as_it_was(run):
    model, x = of_layer(run), torch.randn(4, 8)
    state = random.getstate()
    with assert_unchanged(model), pytest.raises(CaptureError, match=f"(?s){REFUSED[run]}.*one by one"):
        checkpoint_model(model, x, budget="100%")
    assert model._compiled_call_impl is None
    assert random.getstate() == state


def test_a_list_that_the_step_fills_is_filled_by_steps_alone():
    def collects(it, x):
        it.seen["all"].append(x * 2)
        return it.layer(x).sum()

    model, x = of_layer(collects), torch.randn(4, 8)
    model.seen = {"all": []}
    planned(model, x)
    assert model.seen == {"all": []}
    model(x).backward()
    (seen,) = model.seen["all"]
    assert torch.equal(seen, x * 2)
    assert planned_runs(model) == 1


def of_words(embed):
    return ModelOf(lambda it, ids: it.layer(it.embed(ids)).square().mean(), embed=embed, layer=nn.Linear(8, 8))


def test_a_trained_weight_that_the_step_writes_into_is_refused_with_the_way_around():
    model, ids = of_words(nn.Embedding(20, 8, max_norm=1.0)), torch.randint(0, 20, (16,))
    with pytest.raises(CaptureError, match=r"writes into parameter 'embed.weight'.*embedding_renorm_"):
        planned(model, ids)
    # the way around is the same step
    reference = copy.deepcopy(model)
    model.embed.max_norm = None
    planned(model, ids)
    with torch.no_grad():
        torch.embedding_renorm_(model.embed.weight, ids, 1.0, 2.0)
    assert_same_step(model, reference, ids)
    # one that is not trained is a buffer by another name
    model = of_words(nn.Embedding(20, 8, max_norm=1.0))
    model.embed.weight.requires_grad_(False)
    model, reference = planned_and_plain(model, ids)
    assert torch.equal(model(ids), reference(ids))
    assert torch.equal(model.embed.weight, reference.embed.weight)


def test_an_argument_that_is_differentiated_and_written_into_is_refused():
    def scales(it, x):
        with torch.no_grad():
            x.mul_(0.5)
        return it.layer(x).sum()

    with pytest.raises(CaptureError, match="writes into an argument that is differentiated"):
        capture(of_layer(scales), (torch.randn(4, 8, requires_grad=True),))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_is_refused_with_the_way_around(kind):
    model = of_words(nn.Sequential(kind(20, 8, sparse=True)))
    with pytest.raises(CaptureError, match=r"'embed.0' has a sparse gradient.*sparse = False"):
        capture(model, (torch.randint(0, 20, (4, 4)),))
    model.embed[0].sparse = False
    capture(model, (torch.randint(0, 20, (4, 4)),))


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 computes grouped products in float32")
def test_errors_name_the_way_around():
    def experts(it, x):
        return nn.functional.grouped_mm(x, it.weight, offs=torch.tensor([2, 4], dtype=torch.int32)).sum()

    with pytest.raises(CaptureError, match=r"train in bfloat16.*set_experts_implementation\(\"batched_mm\"\)"):
        capture(ModelOf(experts, weight=nn.Parameter(torch.randn(2, 8, 8))), (torch.randn(4, 8),))
