"""What a capture follows, what it leaves as it was, and what it says about what it cannot follow."""

import copy

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import capture, checkpoint_model
from rmm_linear.errors import CaptureError


class Repeated(nn.Module):
    """One module under two names, with a buffer, and a weight under a second name."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))] * 3)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.layers[0][0].weight
        self.fails = False

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.fails:
                raise ArithmeticError("in the middle of the step")
        return self.tied(x).square().mean()


def tensors_by_owner(model):
    return [
        (module, kind, name, tensor)
        for module in model.modules()
        for kind in ("_parameters", "_buffers")
        for name, tensor in vars(module)[kind].items()
    ]


def assert_holds(model, before):
    after = tensors_by_owner(model)
    assert len(after) == len(before)
    for mine, theirs in zip(after, before, strict=True):
        assert mine[:3] == theirs[:3]
        assert mine[3] is theirs[3]


def test_a_module_under_several_names_keeps_its_weights_and_is_planned():
    model, x = Repeated(), torch.randn(4, 8)
    reference, before = copy.deepcopy(model), tensors_by_owner(model)
    checkpoint_model(model, x, budget="100%", strategy="chen2016_sqrt")
    assert_holds(model, before)
    for _ in range(2):
        loss, expected = model(x), reference(x)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
    for mine, theirs in zip([*model.parameters()], [*reference.parameters()], strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_weights_stay_where_a_capture_fails_midway():
    model, x = Repeated(), torch.randn(4, 8)
    before, contents = tensors_by_owner(model), copy.deepcopy(model.state_dict())
    model.fails = True
    with pytest.raises(CaptureError, match="ArithmeticError: in the middle of the step"):
        capture(model, (x,))
    assert_holds(model, before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, contents[name])
    model.fails = False
    model(x).backward()


def test_weights_stay_where_a_capture_is_interrupted():
    class Interrupted(Repeated):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    model, x = Interrupted(), torch.randn(4, 8)
    before = tensors_by_owner(model)
    with pytest.raises(KeyboardInterrupt):
        capture(model, (x,))
    assert_holds(model, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_a_step_registers_is_refused_and_taken_away():
    class Grows(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(8))
                self.inner = nn.Linear(8, 8)
                self.register_buffer("seen", x.detach().mean())
            return self.inner(super().forward(x) * self.scale).sum()

    model = Grows(8, 8)
    with pytest.raises(CaptureError, match="registers parameter 'scale'.*buffer 'seen'.*module 'inner'"):
        capture(model, (torch.randn(4, 8),))
    assert {name for name, _ in model.named_parameters()} == {"weight", "bias"}
    assert not model._modules
    assert not model._buffers


def test_a_step_that_exchanges_a_weight_or_fills_a_list_is_refused():
    class Exchanges(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(self.weight.detach() * 2)
            return super().forward(x).sum()

    class Collects(nn.Linear):
        def forward(self, x):
            self.seen["all"].append(x * 2)
            return super().forward(x).sum()

    model = Exchanges(8, 8)
    weight = model.weight
    with pytest.raises(CaptureError, match="in the place of parameter 'weight'"):
        capture(model, (torch.randn(4, 8),))
    assert model.weight is weight
    model = Collects(8, 8)
    model.seen = {"all": []}
    with pytest.raises(CaptureError, match=r"sets `Collects.seen` to a tensor"):
        capture(model, (torch.randn(4, 8),))
    assert model.seen == {"all": []}
