"""What is written in place between the forward and the backward pass is noticed; arguments that share memory."""

import pytest
import torch
import torch.nn.functional as F
from model_of import ModelOf, linears
from planned_models import assert_equal, assert_same_gradients, planned_and_plain

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


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "result of another op"])
def test_an_argument_that_no_op_of_the_backward_pass_reads_may_be_written_in_place(is_leaf):
    # the product keeps a copy of its argument, whose gradient comes in another layout
    transposed = ModelOf(lambda it, x: it.layer(x.t().contiguous()), **linears("layer", 64))
    model, reference = planned_and_plain(transposed, X[:64, :48])
    found = []
    for each in (model, reference):
        leaf = X[:64, :48].clone().requires_grad_()
        x = leaf if is_leaf else leaf * 2
        output = each(x)
        with torch.no_grad():
            x.mul_(0)
        output.square().sum().backward()
        found.append(leaf.grad)
    assert_equal(*zip(found, strict=True))
    assert_same_gradients(model, reference)
    ops = {op.kind for op in model._compiled_call_impl.plans[-1].graph.ops}
    # autograd copies gradients of leaves alone
    assert ("dense_copy" in ops) is is_leaf
