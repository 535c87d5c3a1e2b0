"""Llama, RoBERTa, GPT-2, T5 and ViT: bit-equal outputs, exact gradients, predicted bytes, and a step that learns."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import CONFIG, assert_estimates, batch_of, gpt2, llama, modernbert, roberta, t5, train_step, vit

from rmm_linear import convert_linears
from rmm_linear.compiler import plans
from rmm_linear.memory import measure_kept_bytes, profile

# linear layers of the two blocks (T5: of both stacks); GPT-2's are transformers' Conv1D
SKETCHED = {llama: 14, roberta: 12, gpt2: 8, t5: 32, vit: 12}


def sketches(module):
    return hasattr(module, "rmm_config")


def converted(kind):
    return convert_linears(kind(), config=CONFIG)


def estimated(model):
    return {f"{name}.weight" for name, module in model.named_modules() if sketches(module)}


@pytest.mark.parametrize("kind", SKETCHED)
def test_a_step_is_exact_but_for_the_sketched_weights_and_keeps_the_bytes_predicted(kind):
    model, batch = converted(kind), batch_of(kind)
    names = estimated(model)
    assert len(names) == SKETCHED[kind]
    exact, layers = kind(), [name.removesuffix(".weight") for name in names]
    report = profile(exact, **batch)
    assert measure_kept_bytes(model, **batch) == report.predict(CONFIG, layers=layers) < report.total_bytes
    # tied embeddings have one name, and one gradient that is an estimate
    tied = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    # what attention keeps anyway is kept as it is
    free = {f"{call.layer}.weight" for call in report.linears if call.is_free}
    estimates = {tied[id(parameter)] for name, parameter in every if name in names - free}
    want, got = (train_step(each, [batch]) for each in (exact, model))
    assert torch.equal(got.logits[0], want.logits[0])
    assert torch.equal(got.losses[0], want.losses[0])
    assert_estimates(got.gradients, want.gradients, estimates, least=0.02)


@pytest.mark.parametrize(
    "kind",
    [kind if kind is roberta else pytest.param(kind, marks=pytest.mark.grid) for kind in (*SKETCHED, modernbert)],
)
def test_no_op_behind_a_code_is_taken_for_one_that_is_not_linear_in_gradients(kind):
    # a block has all the ops that a model has
    model = kind(layers=1) if kind in (roberta, llama) else kind()
    torch._dynamo.reset()
    torch.compile(model, backend="rmm_linear", options={"bits": 8, "executor": "exact"})(**batch_of(kind))
    (plan,) = plans(model)
    assert plan.coding.coded
    assert not plan.coding.bending
