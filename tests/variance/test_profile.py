"""profile_noise: its numbers are the closed forms, and training does not notice."""

import copy

import pytest
import torch
from assert_unchanged import assert_unchanged
from captured import captured
from model_of import ModelOf
from sketch_contract import structured_pair
from torch import nn

from rmm_linear import RMMConfig, available_sketches, convert_linears
from rmm_linear.padding import valid_rows
from rmm_linear.sketches import STORAGES
from rmm_linear.variance import gradient_noise
from rmm_linear.variance.profile import layer_options, profile_noise

RATIOS = (0.05, 0.1, 0.3, 0.5, 0.77, 1.0)


@pytest.fixture
def pair():
    return structured_pair(331, 24, 20, seed=3)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("name", available_sketches())
def test_options_are_the_closed_forms(name, center, pair):
    x, g = (y.float() for y in pair)
    configs = [RMMConfig(ratio=ratio, sketch=name, center=center, min_rows=1) for ratio in (*RATIOS, 0.02)]
    for config, option in zip(configs, layer_options(x, g, configs), strict=True):
        assert option.config == config
        assert option.saved_bytes == config.saved_bytes(331, 24, torch.float32)
        expected = gradient_noise(x, g, config).sketch_variance
        assert option.variance == pytest.approx(expected, rel=1e-5, abs=1e-6 * float((x.norm() * g.norm()).square()))


@pytest.mark.parametrize("storage", STORAGES)
def test_options_with_a_storage_are_close_to_the_closed_forms(storage, pair):
    x, g = (y.float() for y in pair)
    configs = [RMMConfig(ratio=ratio, storage=storage, min_rows=1) for ratio in RATIOS]
    for config, option in zip(configs, layer_options(x, g, configs), strict=True):
        assert option.saved_bytes == config.saved_bytes(331, 24, torch.float32)
        expected = gradient_noise(x, g, config).sketch_variance
        # Of what the storage adds: groups of different lengths; two draws, each off by 0.7 over the root of the rank.
        own = expected - gradient_noise(x, g, config.replace(storage=None)).sketch_variance
        noise = 4 * 0.5 / config.sketch_object.rank(331) ** 0.5 if config.ratio < 1 else 0.0
        assert abs(option.variance - expected) < (0.1 + noise) * own


@pytest.mark.parametrize(
    ("scale", "sketch", "storage"),
    [
        *((scale, "hadamard", "int4") for scale in (1.0, 1e-9, 1e-25, 1e18)),
        *((1e-25, sketch, None) for sketch in available_sketches()),
    ],
)
def test_float32_products_are_good_to_five_digits(scale, sketch, storage):
    """Also where float32 squares would vanish or overflow."""
    x, g = (y.float().unflatten(0, (3, 510)) for y in structured_pair(1530, 48, 40, seed=5))
    g = g * scale
    config = RMMConfig(ratio=0.3, sketch=sketch, storage=storage, min_rows=1)
    found = gradient_noise(x, g, config, draws=2)
    expected = gradient_noise(x.double(), g.double(), config, draws=2)
    for name in ("gradient_squared", "row_variance", "sequence_variance", "alpha"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5)
    # one code more or less changes what a storage adds
    assert found.sketch_variance == pytest.approx(expected.sketch_variance, rel=1e-2 if storage else 1e-5)


def test_autocast_does_not_lower_the_products():
    x, g = (y.float().unflatten(0, (4, 50)) for y in structured_pair(200, 24, 20, seed=5))
    config = RMMConfig(ratio=0.3, min_rows=1)
    expected = gradient_noise(x, g, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gradient_noise(x, g, config) == expected


CONFIGS = [RMMConfig(ratio=ratio, min_rows=1) for ratio in (0.1, 0.5, 0.8, 1.0)]


@pytest.fixture
def network():
    """Layers of two shapes, dropout, and a buffer that each forward pass changes."""

    def run(it, x):
        hidden = it.norm(it.first(x).transpose(1, 2)).transpose(1, 2)
        return it.last(x + it.dropout(it.second(nn.functional.gelu(hidden))))

    torch.manual_seed(0)
    layers = {"first": (12, 16), "second": (16, 12), "last": (12, 3), "unused": (3, 3)}
    parts = {name: nn.Linear(*sizes) for name, sizes in layers.items()}
    model = ModelOf(run, **parts, norm=nn.BatchNorm1d(16), dropout=nn.Dropout(0.2))
    return convert_linears(model, config=RMMConfig(ratio=0.5, min_rows=1))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, length, 12, generator=generator) for length in (40, 61)]


def runs_of(network):
    return [lambda x=x: network(x).square().mean().backward() for x in batches()]


def test_a_profile_is_the_mean_over_the_batches(network):
    profile = profile_noise(network, runs_of(network), CONFIGS, layers_at_once=1)
    assert [layer.name for layer in profile.layers] == ["first", "second", "last"]
    state, pairs = torch.get_rng_state(), []
    for x in batches():
        torch.set_rng_state(state)
        pairs.append(captured(copy.deepcopy(network), lambda net, x=x: net(x).square().mean().backward()))
    for layer in profile.layers:
        for option, config in zip(layer.options, CONFIGS, strict=True):
            assert option.config == config
            seen = [pair[layer.name] for pair in pairs]
            noise = [gradient_noise(x, g, config) for x, g in seen]
            # atol: at ratio 1 nothing is sketched
            assert option.variance == pytest.approx(sum(each.sketch_variance for each in noise) / 2, rel=1e-4)
            width = network.get_submodule(layer.name).in_features
            kept = [config.saved_bytes(5 * length, width, torch.float32) for length in (40, 61)]
            assert option.saved_bytes == pytest.approx(sum(kept) / 2, abs=0.5)
        assert layer.gradient_squared == pytest.approx(sum(each.gradient_squared for each in noise) / 2, rel=1e-4)
        assert layer.minibatch_variance == pytest.approx(sum(each.sequence_variance for each in noise) / 2, rel=1e-4)


def test_training_goes_on_as_if_nothing_had_been_done(network):
    # in the middle of an accumulation
    runs_of(network)[0]()

    def fails():
        runs_of(network)[0]()
        raise RuntimeError("no")

    with assert_unchanged(network):
        profile_noise(network, runs_of(network), CONFIGS)
        with pytest.raises(RuntimeError, match="no"):
            profile_noise(network, [fails], CONFIGS)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_no_more_layers_are_watched_than_asked_for(network, at_once):
    watched = []

    def run():
        watched.append(sum(len(module._forward_hooks) for module in network.modules()))
        runs_of(network)[0]()

    profile = profile_noise(network, [run, run], CONFIGS, layers_at_once=at_once)
    assert watched == [at_once] * (2 * 4 // at_once)
    # the fourth is not used
    assert len(profile.layers) == 3


def profiled_layer(*batches, configs=CONFIGS):
    """Profile one layer that gets each batch's x and g."""
    layer = convert_linears(nn.Sequential(nn.Linear(24, 20)), config=CONFIGS[1].replace(share_sketch=False))
    profile = profile_noise(layer, [lambda x=x, g=g: layer(x).backward(g) for x, g in batches], configs)
    return profile.layers[0]


def test_one_sequence_has_no_spread_but_that_of_its_rows(pair):
    x, g = (each.float() for each in pair)
    one = profiled_layer((x.view(1, 331, 24), g.view(1, 331, 20)))
    assert one.minibatch_variance == pytest.approx(gradient_noise(x, g, CONFIGS[0]).row_variance)


def test_candidates_without_padding_use_the_models_mask(network):
    x = batches()[0]
    mask = torch.arange(40) < torch.tensor([[40], [3], [20], [33], [9]])
    config = RMMConfig(ratio=0.5, min_rows=1, skip_padding=True)
    # the others are read across the mask
    network.last.rmm_config = config

    def run():
        with valid_rows(mask):
            loss = network(x)[mask].square().mean()
        loss.backward()

    profile = profile_noise(network, [run], [config, config.replace(skip_padding=False)])
    skips, keeps = next(layer for layer in profile.layers if layer.name == "last").options
    assert skips.saved_bytes == config.saved_bytes(200, 12, torch.float32, 105)
    assert skips.saved_bytes < keeps.saved_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": []}, "0 runs and 4 configurations; pass at least one of each"),
        ({"configs": []}, "1 runs and 0 configurations"),
        ({"configs": CONFIGS[:1] * 2}, "2 configurations, and some are equal; pass each once"),
        ({"layers_at_once": 0}, "layers_at_once=0 is not a positive int"),
        ({"layers_at_once": True}, "layers_at_once=True is not a positive int"),
        ({"runs": [lambda: None]}, "no layer got a finite gradient; run a forward and a backward pass"),
    ],
    ids=["no runs", "no configurations", "one configuration twice", "zero layers", "a bool of layers", "no layer runs"],
)
def test_bad_arguments_are_named(network, change, message):
    arguments = {"runs": runs_of(network)[:1], "configs": CONFIGS, **change}
    with pytest.raises(ValueError, match=message):
        profile_noise(network, arguments.pop("runs"), arguments.pop("configs"), **arguments)
    with pytest.raises(ValueError, match="the model is in eval mode.*call model.train"):
        profile_noise(network.eval(), runs_of(network), CONFIGS)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_batch_that_is_not_finite_where_the_gradient_is_zero_is_left_out(pair, value):
    x, g = (each.float() for each in pair)
    g[300:] = 0.0
    wrong = x.clone()
    wrong[300:] = value
    assert profiled_layer((wrong, g), (x, g)) == profiled_layer((x, g))
    with pytest.raises(ValueError, match="no layer got a finite gradient"):
        profiled_layer((wrong, g))
