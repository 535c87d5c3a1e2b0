"""What a capture follows, what it leaves as it was, and what it says about what it cannot follow."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import Schedule, apply_schedule, capture, checkpoint_model, checkpoint_step
from rmm_linear.errors import CaptureError
from rmm_linear.planning.strategies.segments import order_of_segments


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
    with pytest.raises(CaptureError, match=r"sets `Collects.seen.all` to a tensor"):
        capture(model, (torch.randn(4, 8),))
    assert model.seen == {"all": []}


class CumulativeNorm(nn.Module):
    """Batch norms that average over all batches: each step looks at another number."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = (nn.BatchNorm1d(8, momentum=None) for _ in range(2))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.norm(self.layer(x)))
        return self.norm(self.norm2(x) + x).square().mean()


def test_batch_norms_that_average_over_all_batches_are_captured_once():
    model = CumulativeNorm()
    reference = copy.deepcopy(model)
    x = torch.randn(16, 8)
    graph = capture(model, (x,)).graph
    ops = range(graph.forward_count)
    twice = order_of_segments(graph, [list(ops[first : first + 5]) for first in ops[::5]])
    again = [graph.ops[op].kind for op, times in Counter(twice).items() if times > 1]
    assert "cumulative_batch_norm" in again
    step = apply_schedule(model, None, x, Schedule.from_order(graph, twice))
    for number in range(12):
        losses = [each(x + number) for each in (step, reference)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert len(step.plans) == 1
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class Renormed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 8, **options), nn.Linear(8, 8)

    def forward(self, ids):
        return self.layer(self.embed(ids)).square().mean()


def test_a_trained_weight_that_the_step_writes_into_is_refused_with_the_way_around():
    model, ids = Renormed(max_norm=1.0), torch.randint(0, 20, (16,))
    with pytest.raises(CaptureError, match=r"writes into parameter 'embed.weight'.*embedding_renorm_"):
        checkpoint_model(model, ids, budget="100%", strategy="chen2016_sqrt")
    # the way around is the same step
    reference = copy.deepcopy(model)
    model.embed.max_norm = None
    checkpoint_model(model, ids, budget="100%", strategy="chen2016_sqrt")
    with torch.no_grad():
        torch.embedding_renorm_(model.embed.weight, ids, 1.0, 2.0)
    loss, expected = model(ids), reference(ids)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(model.embed.weight.grad, reference.embed.weight.grad)
    # one that is not trained is a buffer by another name
    model = Renormed(max_norm=1.0)
    model.embed.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    checkpoint_model(model, ids, budget="100%", strategy="chen2016_sqrt")
    assert torch.equal(model(ids), reference(ids))
    assert torch.equal(model.embed.weight, reference.embed.weight)


def test_an_argument_that_is_differentiated_and_written_into_is_refused():
    class Scales(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                x.mul_(0.5)
            return super().forward(x).sum()

    with pytest.raises(CaptureError, match="writes into an argument that is differentiated"):
        capture(Scales(8, 8), (torch.randn(4, 8, requires_grad=True),))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_is_refused_with_the_way_around(kind):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.ModuleDict({"embed": kind(20, 8, sparse=True)})
            self.layer = nn.Linear(8, 8)

        def forward(self, ids):
            return self.layer(self.words["embed"](ids)).square().mean()

    model = Sparse()
    with pytest.raises(CaptureError, match=r"'words.embed' has a sparse gradient.*sparse = False"):
        capture(model, (torch.randint(0, 20, (4, 4)),))
    model.words["embed"].sparse = False
    capture(model, (torch.randint(0, 20, (4, 4)),))


class ChoosesLabelled(nn.Module):
    """The loss of the labelled rows, as DeBERTa's classifiers take it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        rows = (labels >= 0).nonzero()
        if not rows.size(0):
            return logits.sum() * 0
        chosen = torch.gather(logits, 0, rows.expand(-1, 3))
        return nn.functional.cross_entropy(chosen, torch.gather(labels, 0, rows.view(-1)))


def test_how_many_rows_are_labelled_is_checked_as_other_numbers_are():
    model, x = ChoosesLabelled(), torch.randn(4, 8)
    reference = copy.deepcopy(model)
    batches = [
        torch.tensor(labels) for labels in ([0, 1, 2, 0], [2, 2, 1, 1], [0, -1, 2, -1], [-1] * 4, [1, 1, -1, -1])
    ]
    step = checkpoint_step(model, None, (x, batches[0]), budget="100%", strategy="chen2016_sqrt")
    for labels in (*batches, *batches):
        losses = step(x, labels), reference(x, labels)
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert len(step.plans) == 3
    assert torch.equal(model.layer.weight.grad, reference.layer.weight.grad)


class DrawsMask(nn.Module):
    """Masks features at random places, which numpy draws, as SpecAugment does."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = self.layer(x)
        x[torch.as_tensor(np.random.rand(4) < 2)] = self.mask  # noqa: NPY002
        return x.sum()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x):
        return nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([2, 4], dtype=torch.int32)).sum()


class ChoosesRows(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x[x[:, 0] > 0].sum()


def test_errors_name_the_way_around():
    x, state = torch.randn(4, 8), np.random.get_state()  # noqa: NPY002
    with pytest.raises(CaptureError, match=r"from `numpy.random`.*SpecAugment.*mask_time_prob = 0"):
        capture(DrawsMask(), (x,))
    assert np.random.get_state()[2] == state[2]  # noqa: NPY002
    with pytest.raises(CaptureError, match=r"train in bfloat16.*set_experts_implementation\(\"batched_mm\"\)"):
        capture(Experts(), (x,))
    with pytest.raises(CaptureError, match="call the model without labels, and compute the loss after it"):
        capture(ChoosesRows(8, 8), (x,))
