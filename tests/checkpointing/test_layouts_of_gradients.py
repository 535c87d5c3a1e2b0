"""Gradients that arrive at a planned model's outputs in any layout: the plain model's bits."""

import copy

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model

ROWS, WIDTH = 132, 50
WEIGHTS = torch.randn(WIDTH, ROWS)
X = torch.randn(4, 33, 16)


class Outputs(nn.Module):
    """Returns a tensor and what shares its memory."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.second, self.shared = nn.Linear(16, 32), nn.Linear(32, WIDTH), shared

    def forward(self, x):
        h = self.second(torch.nn.functional.gelu(self.first(x))).flatten(0, 1)
        return (h, h.T) if self.shared else (h,)


LOSSES = {
    "transposed": lambda h, *_: (h.T * WEIGHTS).sum(),
    "expanded": lambda h, *_: h.sum(),
    "every other row": lambda h, *_: (h[::2] * WEIGHTS.T[::2]).sum(),
    "folded": lambda h, *_: (h.view(4, 33, WIDTH).permute(2, 0, 1) * WEIGHTS.view(WIDTH, 4, 33)).sum(),
}
TWO_LOSSES = {
    "both": lambda h, t: h.square().sum() + (t * WEIGHTS).sum(),
    "the transposed one": lambda h, t: (t * WEIGHTS).sum(),
    "both, expanded": lambda h, t: h.sum() + t.mean(),
}


@pytest.mark.parametrize("shared", [False, True], ids=["one output", "two in one memory"])
def test_gradients_of_outputs_are_used_in_the_layout_in_which_they_arrive(shared):
    model = Outputs(shared)
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    for name, loss in (TWO_LOSSES if shared else LOSSES).items():
        found = []
        for each in (model, reference):
            each.zero_grad()
            loss(*each(X)).backward()
            found.append([parameter.grad for parameter in each.parameters()])
        assert all(map(torch.equal, *found)), name


def test_what_reads_memory_as_it_lies_gets_the_layout_that_it_was_captured_with():
    class Strided(nn.Linear):
        def forward(self, x):
            # its gradient is read by strides
            return super().forward(x).as_strided((WIDTH, 4), (1, WIDTH))

    model = Strided(16, WIDTH)
    reference = copy.deepcopy(model)
    x = torch.randn(4, 16)
    checkpoint_model(model, x, budget="100%", strategy="chen2016_sqrt")
    for each in (model, reference):
        (each(x).T * torch.arange(4 * WIDTH).view(4, WIDTH)).sum().backward()
    assert torch.equal(model.weight.grad, reference.weight.grad)
