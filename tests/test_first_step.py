"""Sketches that free nothing are told after the first training step; everything else trains without a word."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert_linears, revert_linears, summary
from rmm_linear.memory import measure_kept_bytes
from rmm_linear.variance import VarianceMonitor

CONFIG = RMMConfig(ratio=0.25, min_rows=1)


class Gated(nn.Module):
    """Of four layers one reads what a product keeps, and one what an exact layer keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.exact, self.beside = (nn.Linear(16, 16) for _ in range(4))
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        x = F.gelu(self.first(x))
        x = x * self.gate(x)
        y = F.layer_norm(x, (16,))
        return self.last(F.silu(self.exact(y) + self.beside(y)))


def train(model, steps=2, **checkpointing):
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(128, 16, requires_grad=True) * 1
        y = checkpoint(model, x, **checkpointing) if checkpointing else model(x)
        del x
        y.square().sum().backward()


def converted(**options):
    return convert_linears(Gated(), config=CONFIG, exclude_modules=["exact"], **options)


def test_layers_whose_inputs_something_else_keeps_are_named_with_the_way_out():
    model = converted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, steps=1)
    size = 2 * CONFIG.saved_bytes(128, 16, torch.float32) / 2**20
    with pytest.warns(UserWarning, match="2 of the 4 layers") as caught:
        train(model)
    (message,) = [str(warning.message) for warning in caught]
    assert f"their sketches take {size:.2f} MiB on top: gate; beside. Leave them exact" in message
    x = torch.randn(128, 16)
    with_them = measure_kept_bytes(model, x)
    model = convert_linears(Gated(), config=CONFIG, exclude_modules=["exact", "gate", "beside"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, steps=3)
    # what the warning says is what it costs
    assert with_them - measure_kept_bytes(model, x) == 2 * CONFIG.saved_bytes(128, 16, torch.float32)


def test_nothing_is_told_twice_or_once_a_sample_has_told():
    model = converted()
    with pytest.warns(UserWarning, match="free nothing") as caught:
        train(model, steps=4)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(converted(sample=torch.randn(128, 16)))
        train(revert_linears(converted()))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
def test_models_that_save_train_without_a_word(activation):
    model = nn.Sequential(nn.Linear(16, 64), activation(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    convert_linears(model, config=CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(torch.randn(128, 16)).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_keeps_its_input_and_no_sketch(use_reentrant):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    convert_linears(model, config=CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, use_reentrant=use_reentrant)


def test_a_layer_that_frees_something_in_one_of_its_calls_is_not_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = F.gelu(self.first(x))
            return self.shared(F.gelu(y * self.shared(y)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(convert_linears(Twice(), config=CONFIG), steps=3)


def test_copies_look_for_themselves_and_can_be_saved():
    model = converted()
    train(model, steps=1)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, other):
        with pytest.warns(UserWarning, match="2 of the 4 layers"):
            train(each)
    assert "_input_watch" not in vars(revert_linears(other).gate)


def test_captured_and_transformed_steps_are_not_looked_at():
    from rmm_linear.checkpointing import checkpoint_model

    model, x = converted(), torch.randn(128, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*free nothing")
        parameters = dict(model.named_parameters())
        for _ in range(2):
            torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
        checkpoint_model(model, (x,), budget="100%")
        for _ in range(2):
            model(x).sum().backward()


def test_inputs_that_a_monitor_holds_are_not_looked_at():
    layers = [module for _ in range(4) for module in (nn.Linear(16, 16), nn.GELU())]
    model = convert_linears(nn.Sequential(*layers), config=CONFIG)
    with warnings.catch_warnings(), VarianceMonitor(model, every=2) as monitor:
        warnings.simplefilter("error")
        for _ in range(3):
            train(model, steps=1)
            monitor.step()
    assert monitor.noise() is not None


def test_a_batch_that_the_loop_holds_is_told_and_one_that_it_drops_is_freed():
    x = torch.randn(128, 16)
    held, dropped = (convert_linears(nn.Linear(16, 4), config=CONFIG) for _ in range(2))
    held(x).sum().backward()
    with pytest.warns(UserWarning, match=r"a batch by the training loop.* MiB on top: \(the model\)\. Leave"):
        held(x)
    (row,) = summary(held).rows
    assert row.note == "something else keeps its input as well: the sketch comes on top"
    assert "at most" not in str(summary(held))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            # as a frozen trunk's features, which nobody holds
            dropped(x * 1).sum().backward()
    assert (summary(dropped).rows[0].note, summary(dropped).sketched) == ("", 1)


@pytest.mark.parametrize("lowered", [True, False])
def test_a_batch_that_the_layer_copies_is_not_told(lowered):
    model = convert_linears(nn.Linear(16, 4), config=CONFIG)
    # autocast's copy, and the one that rows without a single stride take, are what an exact layer keeps
    x = torch.randn(4, 64, 16) if lowered else torch.randn(4, 80, 16)[:, :64]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                y = model(x)
            y.float().sum().backward()
    assert summary(model).rows[0].note == ""


class _TwiceOfItsOwn(nn.Module):
    """Calls one layer with what ReLU keeps, and with what nobody keeps, in either order."""

    def __init__(self, order):
        super().__init__()
        self.first, self.shared, self.order = nn.Linear(16, 16), nn.Linear(16, 16), order

    def forward(self, x):
        x = F.layer_norm(self.first(x), (16,))
        return sum(self.shared(activation(x)) for activation in (F.relu, F.gelu)[:: self.order])


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_layer_frees_in_one_of_its_calls_counts_in_any_order(order):
    model = convert_linears(_TwiceOfItsOwn(order), config=CONFIG)
    train(model, steps=2)
    row = summary(model).rows[1]
    assert (row.is_sketched, row.note) == (True, "")
