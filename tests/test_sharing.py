"""Layers that are called with one tensor keep one sketch of it: who shares, who does not, and what stays as it was."""

import copy
import gc
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from sketch_contract import assert_unbiased
from tiny_transformers import tiny
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear, convert_linears, revert_linears, valid_rows
from rmm_linear.adapters import watch_adapted_layers
from rmm_linear.memory import SavedTensors, measure_kept_bytes, profile
from rmm_linear.sharing import current_groups
from rmm_linear.variance import allocate_ratios, profile_noise

ROWS, WIDTH = 256, 32
CONFIG = RMMConfig(ratio=0.25)


class Three(nn.Module):
    def __init__(self, *configs):
        super().__init__()
        torch.manual_seed(0)
        configs = configs or (CONFIG,)
        self.layers = nn.ModuleList(
            RMMLinear(WIDTH, WIDTH, config=configs[number % len(configs)]) for number in range(3)
        )

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def one(config=CONFIG, dtype=torch.float32):
    return config.saved_bytes(ROWS, WIDTH, dtype)


@pytest.mark.parametrize("storage", [None, "int4"])
@pytest.mark.parametrize("sketch", ["hadamard", "gaussian", "wta_crs"])
def test_three_layers_keep_one_sketch(sketch, storage):
    config = RMMConfig(ratio=0.25, sketch=sketch, storage=storage)
    x = torch.randn(ROWS, WIDTH)
    assert measure_kept_bytes(Three(config), x) == one(config)
    assert measure_kept_bytes(Three(config.replace(share_sketch=False)), x) == 3 * one(config)


def test_they_have_one_s_and_their_gradients_are_those_of_that_s():
    model, x = Three(), torch.randn(ROWS, WIDTH)
    g = torch.randn(ROWS, WIDTH)
    torch.manual_seed(3)
    model(x).backward(g)
    first, second, third = (layer.weight.grad for layer in model.layers)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    # and they are the first layer's own
    alone = copy.deepcopy(model.layers[0])
    alone.zero_grad()
    torch.manual_seed(3)
    alone(x).backward(g)
    assert torch.equal(alone.weight.grad, first)


def test_the_random_state_does_not_tell_who_shares():
    x, states = torch.randn(ROWS, WIDTH), []
    for share in (True, False):
        model = Three(CONFIG.replace(share_sketch=share))
        torch.manual_seed(1)
        model(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def seeds_of(*runs):
    """The seeds that layers' graphs hold, numbered in the order in which they come."""
    numbers = {}
    found = []

    def pack(tensor):
        if tensor.dtype == torch.int64 and tensor.dim() == 0:
            found.append(numbers.setdefault(int(tensor), len(numbers)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # graphs live on until all have run
        alive = [run() for run in runs]
    del alive
    return found


def step(function, *args, retain=False):
    """A forward and a backward pass, whose graph lives on if it is retained."""

    def run():
        y = function(*args)
        y.sum().backward(retain_graph=retain)
        return y

    return run


def changed_between(model, x):
    return model.layers[0](x) + model.layers[1](x.mul_(2))


def some_of(model, x, members):
    return lambda: sum(model.layers[member](x) for member in members).sum().backward()


def without_a_gradient(model, place):
    model.layers[place].weight.requires_grad_(False)
    return model


def with_one_weight(model):
    model.layers[1].weight = model.layers[0].weight
    return model


# name -> functions that run, and numbers of their layers' seeds
SEEDS = {
    "one forward pass": (lambda m, x: [lambda: m(x)], [0, 0, 0]),
    "a frozen member": (lambda m, x: [lambda: without_a_gradient(m, 0)(x)], [0, 0]),
    "layers with one weight": (lambda m, x: [lambda: with_one_weight(m)(x)], [0, 1, 1]),
    "two configurations": (lambda m, x: [lambda: Three(CONFIG, RMMConfig(ratio=0.5))(x)], [0, 1, 0]),
    "share_sketch=False": (lambda m, x: [lambda: Three(CONFIG.replace(share_sketch=False))(x)], [0, 1, 2]),
    "a tensor changed in between": (lambda m, x: [lambda: changed_between(m, x)], [0, 1]),
    "equal tensors": (lambda m, x: [lambda: sum(layer(x.clone()) for layer in m.layers)], [0, 1, 2]),
    "views": (lambda m, x: [lambda: sum(layer(x.view(x.shape)) for layer in m.layers)], [0, 1, 2]),
    "a layer that comes back": (lambda m, x: [lambda: m.layers[0](x)] * 3, [0, 1, 2]),
    "forwards before a backward": (lambda m, x: [lambda: m(x)] * 2, [0, 0, 0, 1, 1, 1]),
    "steps": (lambda m, x: [step(m, x)] * 2, [0, 0, 0, 1, 1, 1]),
    **{
        # the second layer takes a new S, since the first has been trained with the old one
        f"a step on one layer and then on another, retained: {retain}": (
            lambda m, x, retain=retain: [step(m.layers[n], x, retain=retain) for n in (0, 1, 0)],
            [0, 1, 2],
        )
        for retain in (False, True)
    },
    "layers skipped in some steps": (
        lambda m, x: [some_of(m, x, members) for members in ([0, 1], [0, 2], [1, 2], [2], [1], [0])],
        [0, 0, 1, 1, 2, 2, 3, 4, 5],
    ),
    "copies of the model": (lambda m, x: [step(copy.deepcopy(m), x) for _ in range(2)], [0, 0, 0, 1, 1, 1]),
}


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_the_mean_gradient_of_each_member_is_exact(autocast):
    model, x = Three(RMMConfig(ratio=0.5, min_rows=1)), torch.randn(100, WIDTH) + 1
    g = torch.randn(100, WIDTH) + 0.3 * x
    lowered = x.bfloat16() if autocast else x
    torch.manual_seed(5)

    def draw():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        return torch.autograd.grad(y, model.layers[2].weight, g.to(y.dtype))[0]

    exact = (g.bfloat16() if autocast else g).double().t() @ lowered.double()
    assert_unbiased(draw, exact, draws=1500, bias=0.02, rounding=1e-3 if autocast else 1e-6)


def test_autocast_shares_the_uncast_tensor():
    model, x = Three(), torch.randn(ROWS, WIDTH, requires_grad=True)
    config = CONFIG
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_kept_bytes(model, x) == one(config, torch.bfloat16)

    def mixed():
        y = model.layers[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            return y, model.layers[1](x)

    assert measure_kept_bytes(mixed, exclude=[model]) == one() + one(config, torch.bfloat16)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_checkpointed_blocks_replay_their_random_numbers(reentrant, outside):
    """Dropout after the layers, and a layer outside that has sketched the same tensor already."""
    before, three, found = RMMLinear(WIDTH, WIDTH, config=CONFIG), Three(), []

    def block(x):
        return F.dropout(three(x), 0.5)

    for wrapped in (False, True):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        three.zero_grad()
        torch.manual_seed(9)
        y = before(x) if outside else x
        y = y + (checkpoint(block, x, use_reentrant=reentrant) if wrapped else block(x))
        y.square().sum().backward()
        # grad_input and grad_bias are exact, and tell whether dropout dropped the same elements twice
        found.append((x.grad, [layer.bias.grad.clone() for layer in three.layers]))
    # a reentrant checkpoint adds the gradients of x up in another order
    torch.testing.assert_close(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_padding_is_part_of_what_is_shared():
    config = RMMConfig(ratio=0.25, min_rows=1, skip_padding=True)
    model, x = Three(config), torch.randn(4, 64, WIDTH)
    masks = [torch.arange(64) < torch.tensor([[64], [length], [50], [7]]) for length in (40, 30)]

    def forward():
        with valid_rows(masks[0]):
            y = model.layers[0](x) + model.layers[1](x)
        with valid_rows(masks[1]):
            return y + model.layers[2](x)

    sizes = [config.saved_bytes(256, WIDTH, x.dtype, int(mask.sum())) + 4 * int(mask.sum()) + 4 for mask in masks]
    assert measure_kept_bytes(forward) == sum(sizes)


def test_nothing_grows_over_many_steps():
    model = Three(RMMConfig(ratio=0.25, min_rows=1))
    static = torch.randn(8, WIDTH)
    gc.collect()
    before = len(current_groups._inputs)
    for step in range(200):
        model(static if step % 2 else torch.randn(8, WIDTH)).sum().backward()
    assert len(current_groups._inputs) <= before + 1
    del static
    assert len(current_groups._inputs) == before


def test_a_sketch_is_freed_with_its_graph():
    model, x = Three(), torch.randn(ROWS, WIDTH)
    references = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: references.append(StorageWeakRef(tensor.untyped_storage())) or tensor, lambda tensor: tensor
    ):
        y = model(x)
    y.sum().backward()
    del y
    # x is alive, and nothing with it
    assert len(references) >= 2
    assert all(reference.expired() for reference in references)
    ((group, _),) = current_groups._inputs[x].groups.values()
    assert group() is None


def test_threads_do_not_share():
    model, x, kept = Three(), torch.randn(ROWS, WIDTH), []
    with SavedTensors(model) as saved:
        outputs = [model.layers[0](x)]
        thread = threading.Thread(target=lambda: kept.append(measure_kept_bytes(model.layers[1], x)))
        thread.start()
        thread.join()
    assert saved.bytes == one()
    assert kept == [one()]
    assert len(outputs) == 1


def test_a_roberta_layer_keeps_what_the_design_says():
    """In hidden sizes a token: 16 exact, 10 + 6 ratio, 10 + 8 ratio unshared; attention keeps its own output anyway."""
    width, rows = 64, 8 * 64

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "max_position_embeddings": 80}

    def a_layer(config, exclude=None):
        found = []
        for blocks in (1, 2):
            model = tiny("RobertaModel", num_hidden_layers=blocks, attn_implementation="sdpa", **sizes)
            if config is not None:
                convert_linears(model, config=config, exclude_modules=exclude)
            found.append(measure_kept_bytes(model, input_ids=torch.randint(5, 50, (8, 64))))
        return (found[1] - found[0]) / (rows * width * 4)

    slack = 1.02
    assert a_layer(None) == pytest.approx(16.0, rel=0.02)
    for ratio in (0.5, 0.1):
        config = RMMConfig(ratio=ratio, center=False)
        assert a_layer(config) == a_layer(config, ["attention.output.dense"]) <= (10 + 6 * ratio) * slack
        alone = a_layer(config.replace(share_sketch=False))
        assert alone == pytest.approx(10 + 8 * ratio, rel=0.02)


def test_a_checkpoint_beside_another_reader_of_the_same_tensor_never_meets_an_old_seed():
    first, second = (RMMLinear(WIDTH, WIDTH, config=CONFIG) for _ in range(2))
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    found = seeds_of(*[step(lambda: first(x) + checkpoint(second, x, use_reentrant=False))] * 3)
    a_step = len(found) // 3
    used = [set(found[place : place + a_step]) for place in range(0, len(found), a_step)]
    assert sum(map(len, used)) == len(set.union(*used))


def test_groups_of_masks_that_are_gone_are_dropped():
    layers = [RMMLinear(WIDTH, WIDTH, config=RMMConfig(min_rows=1, skip_padding=True)) for _ in range(2)]
    x = torch.randn(4, 64, WIDTH)
    for length in range(1, 40):
        mask = torch.arange(64).expand(4, 64) < length
        with valid_rows(mask):
            sum(layer(x) for layer in layers)[mask].sum().backward()
    assert len(current_groups._inputs[x].groups) <= 2


@pytest.mark.parametrize("share", [True, False])
def test_allocated_ratios_keep_a_group_together(share):
    """And the bytes that they say are those that the model keeps."""

    three = Three(CONFIG.replace(share_sketch=share))
    model = nn.Sequential(three, nn.GELU(), RMMLinear(WIDTH, 8, config=CONFIG))
    # gradients of very different sizes: alone, each would have a ratio of its own
    for size, layer in zip((1.0, 5.0, 0.1), three.layers, strict=True):
        layer.weight.data *= size
    batches = [torch.randn(4, 64, WIDTH) * torch.linspace(0.1, 3, WIDTH) for _ in range(2)]
    configs = [CONFIG.replace(ratio=ratio, share_sketch=share) for ratio in (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)]
    known = profile_noise(model, [lambda x=x: model(x).square().sum().backward() for x in batches], configs)
    members = {layer.name: layer.group for layer in known.layers}
    names = [f"0.layers.{number}" for number in range(3)]
    assert [members[name] for name in names] == ([names[0]] * 3 if share else [None] * 3)
    # a group of its own, or none
    assert members["2"] in ("2", None)
    for budget in (0.1, 0.3):
        allocation = allocate_ratios(known, budget * known.most_bytes)
        for name, config in allocation.configs.items():
            model.get_submodule(name).rmm_config = config
        if share:
            assert len({allocation.configs[name] for name in names}) == 1
        exact = 4 * 64 * WIDTH * 4
        kept = measure_kept_bytes(model, batches[0]) - exact
        # GELU's input comes on top, and at ratio 1 nothing but the input is kept
        assert kept == allocation.saved_bytes or any(c.is_exact for c in allocation.configs.values())


class Adapted(nn.Module):
    """As in PEFT: an adapter in float32 on a layer in bfloat16, which casts the input for itself."""

    def __init__(self, config, dtype):
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": RMMLinear(WIDTH, WIDTH, config=config, dtype=dtype)})

    def cast(self, x):
        return x.to(self.lora_A["default"].weight.dtype)

    def forward(self, x):
        return self.lora_A["default"](self.cast(x)).double()


class Adapters(nn.Module):
    kind = Adapted

    def __init__(self, config=CONFIG, dtypes=(torch.float32,) * 3):
        super().__init__()
        torch.manual_seed(0)
        self.adapted = nn.ModuleList(self.kind(config, dtype) for dtype in dtypes)
        watch_adapted_layers(self)

    def between(self, x):
        return x

    def forward(self, x):
        x = torch.sin(x)
        outputs = []
        for adapted in self.adapted:
            outputs.append(adapted(x))
            x = self.between(x)
        return sum(outputs)


def lowered():
    return torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def sketches(model, x):
    """Bytes of sketches: without the sine's input, which is x."""
    return measure_kept_bytes(model, x) - x.nbytes


def test_copies_of_one_tensor_share_a_sketch_and_a_ratio():
    x = lowered()
    assert sketches(Adapters(), x) == one()
    assert sketches(Adapters(CONFIG.replace(share_sketch=False)), x) == 3 * one()
    report = profile(Adapters(RMMConfig(ratio=1.0)), x)
    assert len({call.storage for call in report.linears}) == 3
    assert report.predict(CONFIG) == measure_kept_bytes(Adapters(), x)
    model = Adapters()
    known = profile_noise(model, [lambda: model(x).square().sum().backward()], [CONFIG, CONFIG.replace(ratio=0.5)])
    assert len({layer.group for layer in known.layers}) == 1


def no_grad_mul(x, factor):
    with torch.no_grad():
        return x.mul_(factor)


class OfLeaf(Adapters):
    def forward(self, x):
        return sum(adapted(x) for adapted in self.adapted)


def between(change):
    """The tensor changes between the adapters."""
    return type("Changing", (Adapters,), {"between": lambda self, x: change(x)})()


def cast_and(change):
    """Each adapter changes its copy of the tensor."""
    kind = type("Cast", (Adapted,), {"cast": lambda self, x: change(Adapted.cast(self, x))})
    return type("Changed", (Adapters,), {"kind": kind})()


def run_on(x, *models):
    return [lambda model=model: model(x) for model in models]


def of_a_leaf_that_an_optimizer_changes(x):
    model = OfLeaf()
    return [lambda: model(x), lambda: model(no_grad_mul(x, 0.5))]


COPIES = {
    "copies": (lambda x: run_on(x, Adapters()), [0, 0, 0]),
    "two forwards": (lambda x: run_on(x, *[Adapters()] * 2), [0, 0, 0, 1, 1, 1]),
    "in two dtypes": (lambda x: run_on(x, Adapters(dtypes=(torch.float32, torch.float64, torch.float32))), [0, 1, 0]),
    "of a leaf that an optimizer changes": (of_a_leaf_that_an_optimizer_changes, [0, 0, 0, 1, 1, 1]),
    "changed in place": (lambda x: run_on(x, between(lambda x: x.mul_(-1.0))), [0, 1, 2]),
    "changed without a gradient": (lambda x: run_on(x, between(lambda x: no_grad_mul(x, -1.0))), [0, 1, 2]),
    "changed through an alias": (lambda x: run_on(x, between(lambda x: x.detach().mul_(-1.0) is None or x)), [0, 1, 2]),
    "changed in part": (lambda x: run_on(x, between(lambda x: no_grad_mul(x[:7], 0.0) is None or x)), [0, 1, 2]),
    "a copy that is shifted": (lambda x: run_on(x, cast_and(lambda x: x.add_(1))), [0, 1, 2]),
    "a copy that is masked": (lambda x: run_on(x, cast_and(lambda x: x.detach()[3:].zero_() is None or x)), [0, 1, 2]),
}


@pytest.mark.parametrize(("runs", "expected"), [*SEEDS.values(), *COPIES.values()], ids=[*SEEDS, *COPIES])
def test_these_layers_have_one_seed(runs, expected):
    arguments = (lowered(),) if (runs, expected) in COPIES.values() else (Three(), torch.randn(ROWS, WIDTH))
    assert seeds_of(*runs(*arguments)) == expected


def test_hooks_on_adapted_layers_come_and_go():
    model = Adapters()
    copies = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert sketches(copies, lowered()) == one()
    with pytest.raises(ValueError, match="input features"):
        model(torch.randn(3, 5))
    assert not current_groups._given
    convert_linears(model, ratio=0.5)
    assert [len(each._forward_pre_hooks) for each in model.adapted] == [1, 1, 1]
    revert_linears(model)
    assert [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.adapted] == [0, 0, 0]


def test_groups_of_copies_keep_no_graph_alive():
    model, x = Adapters(), lowered()
    gc.collect()
    gc.disable()
    try:
        before = len(current_groups._inputs)
        for ends in (lambda y: y.sum().backward(), lambda y: None):
            references = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, seen=references: seen.append(StorageWeakRef(tensor.untyped_storage())) or tensor.clone(),
                lambda tensor: tensor,
            ):
                y = model(torch.exp(x))
            ends(y)
            del y
            assert len(current_groups._inputs) == before
            own = {x.untyped_storage()._cdata} | {weight.untyped_storage()._cdata for weight in model.parameters()}
            assert all(reference.expired() for reference in references if reference.cdata not in own)
    finally:
        gc.enable()
