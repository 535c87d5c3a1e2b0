"""Steps that draw from a generator of the user's own."""

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model
from rmm_linear.errors import CaptureError

X = torch.randn(4, 8)


class Draws(nn.Module):
    """Drops by numbers of its own generator."""

    def __init__(self):
        super().__init__()
        self.layer, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(0)

    def forward(self, x):
        x = self.layer(x)
        return x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


def test_a_generator_of_the_users_own_is_refused_and_left_as_it_is():
    # the graph would hold a copy of it, which seeding it anew does not reach, and which no recomputation rewinds
    model = Draws()
    before = model.generator.get_state()
    with pytest.raises(CaptureError, match=r"generator of its own.*torch\.manual_seed"):
        checkpoint_model(model, X, budget="100%")
    assert torch.equal(model.generator.get_state(), before)
    model(X).sum().backward()
