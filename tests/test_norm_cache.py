"""Rows drawn by the norms of earlier gradients: unbiased whatever was remembered, and by the right norms."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from rmm_linear import NormCache, RMMConfig, RMMLinear, valid_rows
from rmm_linear.ops import draw_seed
from rmm_linear.sketches.row_sampling import CRS, WTACRS, integer_weights, sampling_norms

ROWS, FEATURES = 40, 12
CONFIG = RMMConfig(ratio=0.2, sketch="wta_crs", center=False, min_rows=1)
DRAWS = 40_000
# |z| of 2 sketches x 7 caches x 40 rows exceeds it once in 80,000 runs
BOUND = 5.6


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    heavy = torch.rand(ROWS, 1, generator=generator, dtype=torch.float64) ** 6
    return x, torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64) * heavy


def caches():
    _, g = inputs()
    norms = g.norm(dim=1)
    mixed = norms.clone()
    mixed[::3] = -1
    mixed[1::3] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(5)[: mixed[1::3].numel()].double()
    one = norms.clone()
    one[5] = -norms.max()
    return {
        "true": norms,
        "one unknown": one,
        "partly unknown": mixed,
        "zero": torch.zeros(ROWS),
        "zero where the gradient is large": torch.where(norms > norms.median(), 0.0, 1.0),
        "one row alone": torch.eye(ROWS)[3],
        "huge and tiny": torch.logspace(-30, 30, ROWS, dtype=torch.float64),
    }


@pytest.mark.parametrize("sketch", [CRS, WTACRS])
@pytest.mark.parametrize("held", caches())
def test_the_estimate_is_unbiased_whatever_the_cache_holds(sketch, held):
    """E[S S^T] = I on the diagonal, row by row; off it, S S^T of sampled rows is 0 in every draw."""
    x, g = inputs()
    known = caches()[held]
    sampled = sketch(ratio=0.2)
    norms = sampling_norms(x, None, known)
    index, squared = sampled.sample(norms, torch.arange(DRAWS) * 7919 + 5, rank=sampled.rank(ROWS))
    diagonal = torch.zeros(DRAWS, ROWS, dtype=torch.float64).scatter_add_(1, index, squared)
    error = diagonal.mean(0) - 1
    deviation = diagonal.std(0) / DRAWS**0.5
    # rows that are kept in each draw have no deviation
    assert (error.abs() <= BOUND * deviation + 1e-12).all()
    # every row with a norm has at least a tenth of the probability that it has without a cache
    weights, plain = (integer_weights(each).double() for each in (norms, sampling_norms(x, None, None)))
    assert (weights / weights.sum() >= 0.0999 * plain / plain.sum()).all()
    if sketch is CRS:
        # of independent draws that is a bound: ten times the variance, and nine times the square over their number
        bound = 10 * sampled.variance(x, g) + 9 * (g.T @ x).square().sum() / sampled.rank(ROWS)
        assert sampled.variance(x, g, gradient_norms=known) <= 1.001 * bound


@pytest.mark.parametrize("sketch", [CRS, WTACRS])
@pytest.mark.parametrize("held", ["true", "partly unknown"])
def test_the_variance_is_that_of_the_draws(sketch, held):
    x, g = inputs()
    known, sampled = caches()[held], sketch(ratio=0.2)
    index, squared = sampled.sample(sampling_norms(x, None, known), torch.arange(DRAWS) * 104729 + 3, rank=8)
    estimates = torch.einsum("dro,dri->doi", g[index] * squared.unsqueeze(2), x[index])
    errors = (estimates - g.T @ x).square().sum((1, 2))
    expected = sampled.variance(x, g, gradient_norms=known)
    assert abs(errors.mean() - expected) < 5 * errors.std() / DRAWS**0.5
    assert errors.std() / DRAWS**0.5 < 0.02 * expected


def test_true_norms_take_off_most_of_the_variance_where_gradients_are_uneven():
    x, g = inputs()
    norms = g.norm(dim=1).bfloat16()
    for sketch in (CRS(ratio=0.2), WTACRS(ratio=0.2)):
        assert sketch.variance(x, g, gradient_norms=norms) < 0.4 * sketch.variance(x, g)
    # where nothing is known, rows are drawn as without a cache, bit for bit
    seed = torch.tensor(9)
    nothing = WTACRS(ratio=0.2).compress(x, seed, gradient_norms=torch.full((ROWS,), -1.0))
    assert all(map(torch.equal, nothing.tensors, WTACRS(ratio=0.2).compress(x, seed).tensors))


def make_layer(config=CONFIG):
    torch.manual_seed(0)
    return RMMLinear(FEATURES, 5, config=config)


def backward(model, x, g):
    model.zero_grad()
    (model(x) * g).sum().backward()
    return model.weight.grad.clone()


def test_the_cache_holds_the_norms_of_each_sample_and_position():
    layer = make_layer()
    cache = NormCache(layer, 6)
    gradients = {}
    # batches of several lengths, as collators pad them
    for number, (samples, length) in enumerate([([4, 1], 9), ([0, 5], 30), ([1, 3], 20)]):
        generator = torch.Generator().manual_seed(number)
        x, g = (torch.randn(2, length, width, generator=generator) for width in (FEATURES, 5))
        with cache.samples(torch.tensor(samples)):
            y = layer(x)
        # behind the announcement
        y.backward(g)
        gradients |= dict(zip(samples, g, strict=True))
    table = cache.state_dict()["tables"][""]
    assert table.shape == (6, 30)
    expected = torch.full((6, 30), -1.0)
    for sample, g in gradients.items():
        expected[sample, : len(g)] = g.norm(dim=1)
    torch.testing.assert_close(table.float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("tokens", [(), (0, -1)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_rows_are_drawn_by_the_norms_of_their_samples(tokens, is_padded):
    """Also where rows are left out as padding, or kept beside the sketch."""
    layer = make_layer(CONFIG.replace(keep_tokens=tokens, skip_padding=is_padded))
    cache = NormCache(layer, 8)
    torch.manual_seed(1)
    x, g = torch.randn(3, 16, FEATURES), torch.randn(3, 16, 5) * torch.rand(3, 16, 1) ** 8
    mask = torch.ones(3, 16, dtype=torch.bool)
    if is_padded:
        mask[1, 10:] = mask[2, 5:] = False
        g = torch.where(mask.unsqueeze(-1), g, 0)

    def step(samples):
        torch.manual_seed(5)
        with valid_rows(mask), cache.samples(samples):
            return backward(layer, x, g)

    step([6, 0, 2])
    found = step([6, 0, 2])
    # by hand: the rows between the kept ones, sampled with the seed that the layer has drawn
    norms = g.norm(dim=2).bfloat16()
    torch.manual_seed(5)
    seed = draw_seed(x)
    kept, rest = torch.zeros_like(mask), mask.clone()
    for sample, length in enumerate(mask.sum(1).tolist()):
        for token in tokens:
            kept[sample, token % length] = True
    rest &= ~kept
    sketch = CONFIG.sketch_object
    saved = sketch.compress(x[rest], seed, gradient_norms=norms[rest])
    expected, _ = sketch.backward(g[rest], saved)
    torch.testing.assert_close(found, expected + g[kept].T @ x[kept], rtol=1e-5, atol=1e-6)
    # other samples are other rows
    assert not torch.equal(step([1, 3, 5]), found)


def test_a_state_is_loaded_and_the_run_goes_on_as_before():
    x, g = (each.float().view(2, 20, -1) for each in inputs())
    g = g[..., :5]
    layers = [make_layer(), make_layer()]
    caches = [NormCache(layer, 2) for layer in layers]
    with caches[0].samples([0, 1]):
        backward(layers[0], x, g)
    caches[1].load_state_dict(caches[0].state_dict())
    gradients = []
    for layer, cache in zip(layers, caches, strict=True):
        torch.manual_seed(3)
        with cache.samples([1, 0]):
            gradients.append(backward(layer, x, g))
    assert torch.equal(*gradients)
    # the same draw without a cache takes other rows
    torch.manual_seed(3)
    assert not torch.equal(gradients[0], backward(layers[0], x, g))


def test_layers_that_share_a_sketch_draw_by_all_of_their_gradients():
    model = nn.ModuleList([make_layer(), make_layer(), make_layer()])
    cache = NormCache(model, 2)
    x = inputs()[0].float().view(2, 20, -1)
    gradients = [torch.randn(2, 20, 5) for _ in model]

    def step():
        with cache.samples([0, 1]):
            outputs = [layer(x) for layer in model]
        torch.autograd.backward(outputs, gradients)

    step()
    tables = cache.state_dict()["tables"]
    expected = torch.stack(gradients).square().sum((0, 3)).sqrt()
    torch.testing.assert_close(tables["0"].float(), expected, rtol=2**-8, atol=0)
    assert tables.keys() == {"0"}
    # a second backward pass of a graph adds nothing
    step()
    assert torch.equal(cache.state_dict()["tables"]["0"], tables["0"])


def _keeps_products(context, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("contexts", [noop_context_fn, partial(create_selective_checkpoint_contexts, _keeps_products)])
def test_checkpointed_layers_draw_by_the_input_alone(contexts):
    inner, outer = make_layer(), RMMLinear(5, 4, config=CONFIG)
    cache = NormCache(nn.ModuleList([inner, outer]), 2)
    x, g = (each.float().view(2, 20, -1) for each in inputs())
    x.requires_grad_()
    for is_within in (False, True, False):
        with cache.samples([0, 1]):
            y = outer(checkpoint(inner, x, use_reentrant=False, context_fn=contexts))
            if is_within:
                y.backward(g[..., :4])
        if not is_within:
            y.backward(g[..., :4])
    assert cache.state_dict()["tables"].keys() == {"1"}
    torch.testing.assert_close(x.grad, 3 * g[..., :4] @ outer.weight @ inner.weight)
    with pytest.raises(ValueError, match="checkpointed blocks"), cache.samples([0, 1]):
        checkpoint(inner, x, use_reentrant=False)


def test_a_step_that_overflows_is_not_remembered():
    layer = make_layer()
    cache = NormCache(layer, 2)
    x, g = (each.float().view(2, 20, -1) for each in inputs())
    g = g[..., :5].clone()
    expected = g.norm(dim=2)
    for factor in (1, torch.inf):
        g[0, 7] *= factor
        with cache.samples([0, 1]):
            y = layer(x)
        y.backward(g)
    torch.testing.assert_close(cache.state_dict()["tables"][""].float(), expected, rtol=2**-8, atol=0)


def test_two_models_have_a_cache_each():
    models = [make_layer(), make_layer()]
    caches = [NormCache(model, 2) for model in models]
    x, g = (each.float().view(2, 20, -1) for each in inputs())
    with caches[0].samples([0, 1]), caches[1].samples([1, 0]):
        # of one tensor they would keep one sketch
        outputs = [model(x.clone()) for model in models]
    torch.autograd.backward(outputs, [g[..., :5]] * 2)
    first, second = (cache.state_dict()["tables"][""] for cache in caches)
    assert torch.equal(first, second.flip(0))


def test_layers_of_other_inputs_and_eval_mode_are_left_alone():
    model = nn.Sequential(make_layer(), nn.Flatten(0, 1), RMMLinear(5, 3, config=CONFIG))
    cache = NormCache(model, 4)
    with cache.samples([2, 3]):
        y = model(torch.randn(2, 40, FEATURES))
    y.sum().backward()
    # the last layer's rows are not in samples
    assert cache.state_dict()["tables"].keys() == {"0"}
    model.eval()
    with cache.samples([2, 3]):
        model(torch.randn(2, 40, FEATURES))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([0, 9], "from 0 to 9, and the cache is made for 4"),
        ([-1, 0], "from -1 to 0"),
        ([0.0, 1.0], "dtype torch.float32; pass the numbers"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ([True, False], "torch.bool"),
        ([], "pass the numbers"),
        ([0, 1, 2], "no layer has drawn rows by the norms of these 3 samples"),
    ],
)
def test_wrong_samples_are_refused(samples, message):
    layer = make_layer()
    with pytest.raises(ValueError, match=message), NormCache(layer, 4).samples(samples):
        layer(torch.randn(2, 40, FEATURES))


def test_a_compiled_model_is_refused():
    layer = make_layer()
    compiled = torch.compile(layer, backend="eager")
    with pytest.raises(ValueError, match=r"run by torch\.compile or by a plan"):  # noqa: SIM117
        with NormCache(layer, 4).samples([0, 1]):
            compiled(torch.randn(2, 40, FEATURES))


def test_models_and_states_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="samples=0 is not a positive int"):
        NormCache(make_layer(), 0)
    for model in (nn.Linear(4, 4), make_layer(CONFIG.replace(center=True)), make_layer(CONFIG.replace(storage="int8"))):
        with pytest.raises(ValueError, match="no layer of the model draws rows by their norms"):
            NormCache(model, 4)
    with pytest.raises(ValueError, match=r"40 rows have gradient norms of shape \(3,\); pass one norm a row"):
        WTACRS(ratio=0.2).compress(inputs()[0], torch.tensor(1), gradient_norms=torch.ones(3))
    state = {"samples": 4, "tables": {"other": torch.zeros(4, 1)}}
    with pytest.raises(ValueError, match="no layer here is called other"):
        NormCache(make_layer(), 4).load_state_dict(state)
    with pytest.raises(ValueError, match="is of 4 samples and this cache of 5"):
        NormCache(make_layer(), 5).load_state_dict(state | {"tables": {}})
    with pytest.raises(ValueError, match="is of 3, 4 samples|is of 4, 3 samples"):
        NormCache(make_layer(), 4).load_state_dict({"samples": 4, "tables": {"": torch.zeros(3, 1)}})
