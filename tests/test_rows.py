"""Rows kept beside a sketch: which they are, what they cost, and that the gradient stays unbiased."""

import gc
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from sketch_contract import assert_unbiased
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from rmm_linear import RMMConfig, RMMLinear, convert_linears, valid_rows
from rmm_linear.functional import linear
from rmm_linear.memory import MeasuredSaving, SavedTensors, measure_kept_bytes
from rmm_linear.padding import ValidRows
from rmm_linear.rows import Layout, layout_of, sequences_of, split
from rmm_linear.variance import gradient_noise, measure_sketch_variance
from rmm_linear.variance.profile import layer_options

SEQUENCES, LENGTH, FEATURES, OUTPUTS = 6, 40, 24, 20
STORAGES = (None, "int8", "int4", "int2")
GRID = pytest.mark.grid


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SEQUENCES, LENGTH, FEATURES, generator=generator) + 1


@pytest.fixture
def weight():
    return torch.randn(OUTPUTS, FEATURES, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def g():
    return torch.randn(SEQUENCES, LENGTH, OUTPUTS, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def mask():
    """Right padding, left padding, padding at both ends, none, and a sequence of a single token."""
    position = torch.arange(LENGTH)
    return torch.stack([
        position < 10, position >= 30, (position > 4) & (position < 20), position >= 0, position < 25, position == 7
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("length", "tokens", "places"),
    [
        (5, (0,), (0,)),
        (5, (-1, 0), (0, -1)),
        (5, (3, 1), (1, 3)),
        (5, (-1, -2), (-2, -1)),
        (5, (1, -2), (1, -2)),
        (6, (0, 2, -3, -1), (0, 2, -3, -1)),
        (5, (4, -1), (0, 4)),
        (2, (0, -1), (0, -1)),
        (3, (0, 7), (0, 1)),
        (2, (0, 1, -1), (0, 1)),
        (1, (-1,), (-1,)),
    ],
)
def test_places_in_sequences_of_one_length(length, tokens, places):
    y = torch.arange(3 * length, dtype=torch.float32).unsqueeze(1)
    layout = layout_of((3, length, 1), tokens)
    assert layout == Layout(3 * len(places), 3, length, places)
    kept, rest = split(y, layout, None)
    assert kept.flatten().tolist() == [length * sequence + place % length for sequence in range(3) for place in places]
    others = [place for place in range(length) if place not in {place % length for place in places}]
    assert rest.flatten().tolist() == [length * sequence + place for sequence in range(3) for place in others]
    assert kept.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()


def test_places_among_the_tokens_that_are_valid(mask):
    rows = ValidRows(mask)
    for tokens, first, last in (((0,), True, False), ((-1,), False, True), ((0, -1), True, True)):
        index = rows.index_on(mask.device, tokens)
        expected = set()
        for sequence, valid in enumerate(mask):
            numbers = (valid.nonzero().flatten() + sequence * LENGTH).tolist()
            expected |= ({numbers[0]} if first else set()) | ({numbers[-1]} if last else set())
        layout = layout_of((SEQUENCES, LENGTH, 1), tokens, index)
        assert layout.kept == SEQUENCES * len(tokens)
        kept, rest = index[: layout.kept].tolist(), index[layout.kept :].tolist()
        # the sequence of one token has no two: another row is kept in its stead
        assert expected <= set(kept)
        assert len(set(kept) - expected) == layout.kept - len(expected) <= 1
        assert sorted(kept + rest) == rows.index_on(mask.device).tolist()
        assert rest == sorted(rest)
        assert index.dtype == torch.int32
    # one tensor for all layers
    assert rows.index_on(mask.device, (0,)) is rows.index_on(mask.device, (0,))


def test_matrices_have_no_sequences():
    assert sequences_of((64, 8)) == sequences_of((8,)) == 0
    assert sequences_of((4, 16, 8)) == 4
    assert sequences_of((2, 3, 16, 8)) == 6
    assert layout_of((64, 8), (0,)) == Layout()
    assert layout_of((0, 16, 8), (0,)).kept == 0


@pytest.mark.parametrize("storage", [None, "int4"])
@pytest.mark.parametrize("skip", [False, True])
def test_output_and_the_other_gradients_are_those_of_nn_linear(x, weight, g, mask, storage, skip):
    bias = torch.randn(OUTPUTS, requires_grad=True)
    config = RMMConfig(ratio=0.25, storage=storage, min_rows=1, keep_tokens=(0, -1))
    g = g * mask.unsqueeze(-1) if skip else g
    inputs = x.clone().requires_grad_()
    rows = ValidRows(mask, check=True) if skip else None
    output = linear(inputs, weight, bias, config=config, valid_rows=rows)
    exact = F.linear(inputs, weight, bias)
    found, expected = ((each, *torch.autograd.grad(each, (inputs, bias), g)) for each in (output, exact))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_a_gradient_on_the_kept_rows_alone_is_exact(x, weight, g, mask, center, skip):
    config = RMMConfig(ratio=0.1, center=center, min_rows=1, keep_tokens=(0,))
    is_read = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
    first = mask.to(torch.uint8).argmax(1) if skip else torch.zeros(SEQUENCES, dtype=torch.long)
    is_read[torch.arange(SEQUENCES), first] = True
    g = g * is_read.unsqueeze(-1)
    exact = g.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    rows = ValidRows(mask) if skip else None
    found = torch.autograd.grad(linear(x, weight, config=config, valid_rows=rows), weight, g)[0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    without = config.replace(keep_tokens=())
    noisy = torch.autograd.grad(linear(x, weight, config=without, valid_rows=rows), weight, g)[0]
    assert (noisy.double() - exact).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("storage", STORAGES)
def test_it_is_the_sketch_of_the_rest_and_the_kept_rows(x, weight, g, storage):
    """Against an estimate put together by hand of the same seed."""
    config = RMMConfig(ratio=0.5, storage=storage, min_rows=1, keep_tokens=(0,))
    found = torch.autograd.grad(linear(x, weight, config=config, seed=5), weight, g)[0]
    plain = config.replace(keep_tokens=())
    rest = torch.autograd.grad(
        linear(x[:, 1:].flatten(0, 1), weight, config=plain, seed=5), weight, g[:, 1:].flatten(0, 1)
    )[0]
    kept = g[:, 0].double().t() @ x[:, 0].double()
    assert (found.double() - rest.double() - kept).norm() <= 1e-6 * kept.norm()


@pytest.mark.parametrize(
    ("storage", "ratio", "skip"),
    [
        (None, 0.5, True),
        pytest.param("int4", 0.5, False, marks=pytest.mark.slow),
        pytest.param("int2", 1.0, True, marks=pytest.mark.slow),
    ],
)
def test_the_weight_gradient_is_unbiased(x, weight, g, mask, storage, ratio, skip):
    config = RMMConfig(ratio=ratio, storage=storage, min_rows=1, keep_tokens=(0, -1))
    g = g * mask.unsqueeze(-1) if skip else g
    g = g + 0.3 * x[..., :OUTPUTS] * (mask.unsqueeze(-1) if skip else 1)
    rows = ValidRows(mask) if skip else None
    torch.manual_seed(0)

    def draw():
        return torch.autograd.grad(linear(x, weight, config=config, valid_rows=rows), weight, g)[0]

    assert_unbiased(draw, g.flatten(0, 1).double().t() @ x.flatten(0, 1).double(), draws=2500)


@pytest.mark.parametrize(
    ("storage", "skip", "draws"),
    [
        (None, False, 1000),
        ("int4", True, 700),
        *(pytest.param(kind, skip, 3000, marks=pytest.mark.slow) for kind in STORAGES for skip in (False, True)),
    ],
)
def test_the_closed_form_is_the_variance_of_the_draws(x, g, mask, storage, skip, draws):
    config = RMMConfig(ratio=0.4, storage=storage, min_rows=1, keep_tokens=(0,), skip_padding=skip)
    g = g * mask.unsqueeze(-1) if skip else g
    g[:, 0] *= 5
    index = ValidRows(mask).index_on(mask.device) if skip else None
    known = gradient_noise(x, g, config, index=index, draws=64).sketch_variance
    measured = measure_sketch_variance(x, g, config, index=index, draws=draws)
    assert abs(measured.value - known) <= 5 * measured.standard_error + 0.01 * known
    assert measured.standard_error < 0.02 * known
    # and a layer draws as the function that is measured
    weight = torch.zeros(OUTPUTS, FEATURES, requires_grad=True)
    rows = ValidRows(mask) if skip else None
    exact = g.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    torch.manual_seed(1)
    errors = torch.empty(draws // 2)
    for draw in range(len(errors)):
        found = torch.autograd.grad(linear(x, weight, config=config, valid_rows=rows), weight, g)[0]
        errors[draw] = (found - exact).square().sum()
    assert abs(float(errors.mean()) - known) <= 5 * float(errors.std()) / math.sqrt(len(errors)) + 0.01 * known


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("tokens", [(), (0, -1)])
def test_kept_bytes_are_those_that_the_configuration_says(x, weight, mask, storage, skip, tokens):
    config = RMMConfig(ratio=0.25, storage=storage, min_rows=1, keep_tokens=tokens, skip_padding=skip)
    rows = ValidRows(mask) if skip else None
    kept = measure_kept_bytes(lambda: linear(x, weight, config=config, valid_rows=rows), exclude=[weight])
    valid = int(mask.sum()) if skip else None
    said = config.saved_bytes(SEQUENCES * LENGTH, FEATURES, x.dtype, valid, SEQUENCES)
    # the valid rows' numbers, and how many the others are
    assert kept == said + (4 * valid + 4 if valid else 0)
    without = config.replace(keep_tokens=()).saved_bytes(SEQUENCES * LENGTH, FEATURES, x.dtype, valid, SEQUENCES)
    assert (said > without) == bool(tokens)


def test_the_input_is_not_kept(weight):
    """Not even where its first rows could be viewed."""
    x = torch.randn(1, 300, FEATURES)
    for tokens in ((0,), (-1,), (0, 1)):
        config = RMMConfig(ratio=0.1, keep_tokens=tokens)
        with SavedTensors(weight) as kept:
            linear(x, weight, config=config)
        assert not kept.holds(x)


def test_an_input_without_rows_to_sketch_is_kept_as_it_is(weight):
    x = torch.randn(200, 1, FEATURES)
    config = RMMConfig(ratio=0.1, keep_tokens=(0,))
    with SavedTensors(weight) as kept:
        y = linear(x, weight, config=config)
    assert kept.holds(x)
    g = torch.randn_like(y)
    exact = torch.autograd.grad(F.linear(x, weight), weight, g)[0]
    assert torch.equal(torch.autograd.grad(y, weight, g)[0], exact)
    assert config.saved_bytes(200, FEATURES, x.dtype, sequences=200) == x.numel() * 4
    assert gradient_noise(x, g, config).sketch_variance == 0


def test_a_models_saving_is_measured_to_the_byte():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, OUTPUTS))
    config = RMMConfig(ratio=0.5, min_rows=1, keep_tokens=(0,), storage="int4")
    convert_linears(model, config=config)
    x = torch.randn(SEQUENCES, LENGTH, FEATURES)
    with MeasuredSaving(model) as saving:
        model(x).square().sum().backward()
    assert saving.saving_bytes == saving.promised_bytes > 0


def test_profiled_options_are_those_of_gradient_noise(x, g, mask):
    index, g = ValidRows(mask).index_on(mask.device), g * mask.unsqueeze(-1)
    configs = [
        RMMConfig(ratio=ratio, storage=storage, min_rows=1, keep_tokens=tokens, skip_padding=skip)
        for ratio, storage, tokens, skip in itertools.product(
            (0.25, 0.5), (None, "int4"), ((), (0,), (0, -1)), (False, True)
        )
    ]
    for option in layer_options(x, g, configs, index=index):
        config = option.config
        known = gradient_noise(x, g, config, index=index if config.skip_padding else None, draws=8).sketch_variance
        assert option.variance == pytest.approx(known, rel=0.05)
        valid = index.numel()
        assert option.saved_bytes == config.saved_bytes(SEQUENCES * LENGTH, FEATURES, g.dtype, valid, SEQUENCES)


def test_min_rows_counts_the_kept_rows_as_well(x, weight):
    config = RMMConfig(ratio=0.5, min_rows=SEQUENCES * LENGTH, keep_tokens=(0,))
    assert config.sketches(SEQUENCES * LENGTH, SEQUENCES)
    kept = measure_kept_bytes(lambda: linear(x, weight, config=config), exclude=[weight])
    assert kept == config.saved_bytes(SEQUENCES * LENGTH, FEATURES, x.dtype, sequences=SEQUENCES) < x.numel() * 4
    more = config.replace(min_rows=SEQUENCES * LENGTH + 1)
    assert measure_kept_bytes(lambda: linear(x, weight, config=more), exclude=[weight]) == x.numel() * 4


@pytest.mark.parametrize(
    ("storage", "tokens"),
    [(None, (0, -1)), ("int4", (0,)), *(pytest.param(None, t, marks=GRID) for t in ((0,), (-1,)))],
)
def test_compiled_layers_keep_their_rows_and_lengths_are_not_compiled_one_by_one(storage, tokens):
    torch.compiler.reset()
    config = RMMConfig(ratio=0.5, storage=storage, skip_padding=True, min_rows=1, keep_tokens=tokens)
    layer = RMMLinear(FEATURES, OUTPUTS, config=config)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in range(40, 52, 1 if storage is None else 4):
        x = torch.randn(SEQUENCES, length, FEATURES)
        g = torch.zeros(SEQUENCES, length, OUTPUTS)
        g[:, list(tokens)] = 1
        exact, found = g.flatten(0, 1).t() @ x.flatten(0, 1), []
        for run in (compiled, layer):
            torch.manual_seed(3)
            found += torch.autograd.grad(run(x), layer.weight, g)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        assert (found[0] - exact).norm() <= (1e-5 if storage is None else 0.02) * exact.norm()
    assert counter.frame_count <= 2
    with valid_rows(torch.ones(SEQUENCES, length)):
        (gradient,) = torch.autograd.grad(compiled(x), layer.weight, g)
    assert (gradient - exact).norm() <= (1e-5 if storage is None else 0.02) * exact.norm()


def test_no_copy_of_the_rows_outlives_their_use(x, weight):
    """A copy of x while the output is made, or of g while grad_input is, would be the peak of a training step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    live = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                matrices = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dim() >= 2]
                rows = {
                    each.untyped_storage().data_ptr() for each in matrices if each.shape[0] == SEQUENCES * (LENGTH - 1)
                }
                live.append(len(rows))
            return function(*args, **(kwargs or {}))

    x = x.requires_grad_()
    bias = torch.randn(OUTPUTS, requires_grad=True)
    with Watch():
        y = linear(
            x, weight, bias, config=RMMConfig(ratio=0.25, sketch="wta_crs", center=False, min_rows=1, keep_tokens=(0,))
        )
        forward = live[-1]
        y.sum().backward()
    assert forward == 0
    assert live[-1] == 0


def test_configurations_from_before_the_field_are_read():
    old = RMMConfig(ratio=0.25, storage="int4")
    state = {name: value for name, value in vars(old).items() if name != "keep_tokens"}
    new = RMMConfig.__new__(RMMConfig)
    new.__setstate__(state)
    assert new == old
    assert new.saved_bytes(300, 8, torch.float32, sequences=3) == old.saved_bytes(300, 8, torch.float32)


def test_models_that_hold_the_length_first_are_named():
    model = nn.TransformerEncoderLayer(16, 2, 32)
    config = RMMConfig(ratio=0.5, keep_tokens=(0,))
    with pytest.warns(UserWarning, match=r"holds \(length, batch, features\)"):
        convert_linears(model, config=config)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="keep_tokens")
        convert_linears(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), config=config)
