"""What is written in place between the forward and the backward pass is noticed; arguments that share memory."""

import pytest
import torch
import torch.nn.functional as F
from model_of import ModelOf, linears

from rmm_linear.checkpointing import checkpoint_model

X = torch.randn(256, 64)


def recomputed(it, x):
    """Returns what dropout alone reads, which keeps its mask and no input in eager mode."""
    features = it.first(x)
    return features, it.last(torch.tanh(F.dropout(features, 0.1)))


def kept(it, x):
    """Returns what eager mode keeps as well, in three dimensions: a view of what the op wrote."""
    features = it.first(x.view(4, -1, 64))
    return features, it.last(features)


@pytest.mark.parametrize(("run", "budget"), [(recomputed, "90%"), (kept, "100%")])
def test_a_result_or_a_weight_changed_in_place_before_it_is_read_is_refused(run, budget):
    planned = ModelOf(run, **linears("first last", 64))
    checkpoint_model(planned, X, budget=budget)
    features, output = planned(X)
    with torch.no_grad():
        features.div_(10.0)
    with pytest.raises(RuntimeError, match=r"result 0 of a planned step .* modified in place.*`x = x \* 2`"):
        output.sum().backward()
    features, output = planned(X)
    # the backward part does not read this one
    with torch.no_grad():
        output.div_(10.0)
    (output.sum() + features.sum()).backward()
    assert planned.first.weight.grad is not None
    _, output = planned(X)
    with torch.no_grad():
        planned.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_constant_changed_in_place_before_it_is_read_is_refused():
    mask = torch.ones(64)
    model = ModelOf(lambda it, x: it.layer(x) * mask, **linears("layer", 64))
    checkpoint_model(model, X, budget="100%")
    output = model(X)
    mask.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|modified in place"):
        output.sum().backward()
    model(X).sum().backward()
