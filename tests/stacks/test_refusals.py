"""What cannot be sketched raises, or is left exact and named: never a layer that is exact without a word."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.utils import parametrizations

from rmm_linear import RMMConfig, RMMLinear, convert_linears
from rmm_linear.errors import DoubleBackwardError, TracingError, TransformError

CONFIG = RMMConfig(ratio=0.25, min_rows=1)


def network(convert=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return convert_linears(model, config=CONFIG, target_modules=".*") if convert else model


@pytest.fixture
def x():
    return torch.randn(160, 16)


def loss_of(model, x):
    return lambda parameters: functional_call(model, parameters, (x,)).square().sum()


def test_double_backward_raises(x):
    model = network()
    gradients = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
    with pytest.raises(DoubleBackwardError, match="no second derivative.*ratio=1.0 with storage=None"):
        sum(gradient.square().sum() for gradient in gradients).backward()
    parameters = dict(model.named_parameters())
    with pytest.raises(DoubleBackwardError, match="no second derivative"):
        grad(lambda p: sum(g.square().sum() for g in grad(loss_of(model, x))(p).values()))(parameters)


def batched_gradients(model, x):
    output = model(x)
    torch.autograd.grad(output, list(model.parameters()), torch.randn(3, *output.shape), is_grads_batched=True)


MAPPED = {
    **{
        f"vmap, {randomness}": lambda model, x, r=randomness: vmap(model, randomness=r)(x.view(4, 40, 16))
        for randomness in ("error", "same", "different")
    },
    "gradients of each sample": lambda model, x: vmap(
        lambda p, x: grad(loss_of(model, x))(p), in_dims=(None, 0), randomness="different"
    )(dict(model.named_parameters()), x.view(4, 40, 16)),
    "jacrev": lambda model, x: jacrev(lambda p: functional_call(model, p, (x,)).sum(0))(dict(model.named_parameters())),
    "hessian": lambda model, x: hessian(loss_of(model, x))(dict(model.named_parameters())),
    "batched gradients": batched_gradients,
}


@pytest.mark.parametrize("way", MAPPED)
def test_what_maps_over_rows_or_gradients_raises(x, way):
    with pytest.raises(TransformError, match="one sketch stands for all rows"):
        MAPPED[way](network(), x)


def test_forward_mode_raises_for_inputs(x):
    model = network()
    with pytest.raises(TransformError, match="forward-mode"):
        jvp(model, (x,), (x,))
    with dual_level(), pytest.raises(TransformError, match="forward-mode"):
        model(make_dual(x, x))


def test_forward_mode_is_exact_for_parameters(x):
    """There the weights want no gradient by themselves, and the layer is an nn.Linear."""
    found = []
    for convert in (False, True):
        model = network(convert)
        parameters = dict(model.named_parameters())
        found.append(jvp(loss_of(model, x), (parameters,), (parameters,))[1])
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_tracing_in_training_mode_raises_and_in_eval_mode_is_exact(x):
    model = network()
    with pytest.raises(TracingError, match="model.eval()"):
        torch.jit.trace(model, (x,))
    with pytest.raises(TracingError, match="is_leaf_module"):
        torch.fx.symbolic_trace(model)
    # in eval mode as well: it compiles what no mode runs
    with pytest.raises((OSError, torch.jit.frontend.FrontendError)):
        torch.jit.script(model)
    model.eval()
    want = network(convert=False)(x)
    assert torch.equal(torch.jit.trace(model, (x,))(x), want)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), want)


@pytest.mark.parametrize("strict", [False, True])
def test_export_in_training_mode_raises_and_in_eval_mode_is_exact(x, strict):
    model = network()
    with pytest.raises(Exception, match="cannot be exported or traced|Observed exception"):
        torch.export.export(model, (x,), strict=strict)
    exported = torch.export.export(model.eval(), (x,), strict=strict)
    assert not any("rmm_linear" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(x), network(convert=False)(x))


def traced_with_leaves(model):
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, RMMLinear) or super().is_leaf_module(module, name)

    return torch.fx.GraphModule(model, Tracer().trace(model))


def parametrized(model):
    """The weights that are computed get estimates, and hand them on to tensors that they are computed from."""
    for layer in (model[0], model[2]):
        parametrizations.weight_norm(layer)
    return model


def hooked_by_accelerate(model):
    hooks = pytest.importorskip("accelerate").hooks
    for layer in model:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    return model


@pytest.mark.parametrize("change", [traced_with_leaves, parametrized, hooked_by_accelerate])
def test_a_converted_model_that_is_changed_has_estimates_of_its_weights_gradients(x, change):
    model, found = change(network()), []
    for seed in (0, 0, 1):
        model.zero_grad()
        torch.manual_seed(seed)
        model(x).square().sum().backward()
        found.append([weight.grad.clone() for weight in model.parameters() if weight.dim() == 2 and weight.size(1) > 1])
    assert len(found[0]) == 2
    assert all(map(torch.equal, found[0], found[1]))
    assert not any(map(torch.equal, found[0], found[2]))


def test_a_partitioned_weight_is_used_where_it_is_gathered_and_refused_where_it_is_not(x):
    """As DeepSpeed's ZeRO-3 does it: the parameter is empty outside of its layer's forward and backward."""
    reference, model = network(), network(convert=False)
    weight = model[0].weight
    full = weight.detach().clone()

    def gather(*_):
        weight.data = full

    def partition(*_):
        weight.data = torch.empty(0)

    partition()
    model[0].register_forward_pre_hook(gather)
    model[0].register_forward_hook(partition)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_linears(model, config=CONFIG, target_modules=".*")
    x.requires_grad_()
    found = []
    for each in (reference, model):
        x.grad = None
        torch.manual_seed(0)
        output = each(x)
        gather()
        output.square().sum().backward()
        found.append((output.detach(), x.grad.clone(), each[0].weight.grad.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    bare = network()
    bare[0].weight.data = torch.empty(0)
    with pytest.raises(ValueError, match=r"weight has shape \(0,\)"):
        bare(x)


def test_layers_of_opacus_are_left_exact_and_converted_ones_refused_in_it(x):
    opacus = pytest.importorskip("opacus")
    wrapped = opacus.GradSampleModule(network(convert=False))
    with pytest.raises(ValueError, match="Opacus needs a gradient for each sample"):
        convert_linears(wrapped, config=CONFIG, target_modules=".*")
    wrapped(x).sum().backward()
    assert all(parameter.grad_sample.shape[0] == len(x) for parameter in wrapped.parameters())

    wrapped = opacus.GradSampleModule(network())
    with pytest.raises(TransformError, match="per-sample gradients"):
        wrapped(x).sum().backward()
