"""Gradients that arrive at a planned model's outputs in any layout: the plain model's bits."""

import pytest
import torch
from model_of import ModelOf
from planned_models import assert_same_step, planned_and_plain, planned_runs
from torch import nn

ROWS, WIDTH = 132, 50
WEIGHTS = torch.randn(WIDTH, ROWS)
X = torch.randn(4, 33, 16)


LOSSES = {
    "transposed": lambda h, *_: (h.T * WEIGHTS).sum(),
    "expanded": lambda h, *_: h.sum(),
    "every other row": lambda h, *_: (h[::2] * WEIGHTS.T[::2]).sum(),
    "folded": lambda h, *_: (h.view(4, 33, WIDTH).permute(2, 0, 1) * WEIGHTS.view(WIDTH, 4, 33)).sum(),
}
LOSSES_OF_SEVERAL = {
    "two": lambda h, t, *_: h.square().sum() + (t * WEIGHTS).sum(),
    "the transposed one": lambda h, t, *_: (t * WEIGHTS).sum(),
    "two, expanded": lambda h, t, *_: h.sum() + t.mean(),
    "all": lambda h, t, column, rest: h.square().sum() + t.mean() + column.sum() + rest.cos().sum(),
}


@pytest.mark.parametrize("shared", [False, True], ids=["one output", "several in one memory"])
def test_gradients_of_outputs_are_used_in_the_layout_in_which_they_arrive(shared):
    def outputs(it, x):
        h = it.layers(x).flatten(0, 1)
        return (h, h.T, h[:, 0], h[:, 1:]) if shared else (h,)

    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WIDTH))
    model, reference = planned_and_plain(ModelOf(outputs, layers=layers), X)
    for loss in (LOSSES_OF_SEVERAL if shared else LOSSES).values():
        assert_same_step(model, reference, X, loss=lambda found, loss=loss: loss(*found))
    assert planned_runs(model) == len(LOSSES)


def test_what_reads_memory_as_it_lies_gets_the_layout_that_it_was_captured_with():
    class Strided(nn.Linear):
        def forward(self, x):
            # its gradient is read by strides
            return super().forward(x).as_strided((WIDTH, 4), (1, WIDTH))

    x = torch.randn(4, 16)
    model, reference = planned_and_plain(Strided(16, WIDTH), x)
    assert_same_step(model, reference, x, loss=lambda y: (y.T * torch.arange(4 * WIDTH).view(4, WIDTH)).sum())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(33), nn.BatchNorm1d(33).eval(), nn.InstanceNorm1d(33)])
def test_a_norm_over_a_batch_lays_its_result_out_as_the_kernel_does(norm):
    def outputs(it, x):
        # a fake norm of a transposed tensor is transposed, a CPU's is not
        h = it.norm(it.layer(x).permute(0, 2, 1).roll(1, 0).transpose(1, 2))
        return h, h.transpose(1, 2), h.transpose(1, 2).reshape(-1, 33)

    model, reference = planned_and_plain(ModelOf(outputs, layer=nn.Linear(16, WIDTH), norm=norm), X)
    for place in range(3):
        torch.manual_seed(0)
        assert torch.equal(model(X)[place], reference(X)[place])
        assert_same_step(model, reference, X, loss=lambda found, place=place: found[place].pow(3).sum())
    assert planned_runs(model) == 6
