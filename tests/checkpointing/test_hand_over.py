"""Each gradient is handed over when it is ready: hooks, sums and optimizers in the backward pass work as in eager."""

import copy

import pytest
import torch
from measured_peak import MeasuredPeak
from model_of import ModelOf
from planned_models import Ops, assert_equal, assert_same_gradients, assert_same_step, gradients
from planned_models import planned as planned_for
from torch import nn

from rmm_linear.checkpointing import Schedule, apply_schedule, capture, checkpoint_step, simulate
from rmm_linear.errors import ScheduleError
from rmm_linear.planning.schedule import Step

X, TANGENT = torch.randn(32, 64), torch.ones(32, 64)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))


def planned(model, budget="100%", **options):
    return planned_for(model, X, budget, **options)


def plan_of(model):
    return model._compiled_call_impl.plans[-1]


def arrivals(model):
    """For each parameter, in the order of arrival, its name and the part of the backward pass that was over."""
    found = []
    out, ops = model(X), Ops()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append((name, ops.count)))
    with ops:
        out.backward(TANGENT)
    return [(name, count / ops.count) for name, count in found]


def test_gradients_arrive_while_the_backward_pass_runs():
    eager, ours = arrivals(layers()), arrivals(planned(layers()))
    assert eager[0][1] < 0.2
    assert ours[0][1] < 0.2
    layer = [name.partition(".")[0] for name, _ in ours]
    assert layer == [name.partition(".")[0] for name, _ in eager] == sorted(layer, key=int, reverse=True)


def stepping(model):
    """An optimizer in the backward pass: it takes each gradient as soon as it is there."""

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return model


def peak_of(model):
    with MeasuredPeak() as measured:
        out = model(X)
        out.backward(TANGENT)
    return measured.peak


def test_an_optimizer_in_the_backward_pass_frees_gradients():
    eager, ours, less = stepping(layers()), stepping(planned(layers(), gradients="freed")), stepping(layers())
    planned(less, "80%", gradients="freed")
    for _ in range(2):
        peak = peak_of(eager)
        assert peak >= peak_of(ours) == plan_of(ours).peak_bytes
        assert 0.8 * peak >= peak_of(less) == plan_of(less).peak_bytes
    assert_equal(ours.parameters(), eager.parameters())
    assert_equal(less.parameters(), eager.parameters())


def test_a_second_micro_batch_takes_what_it_takes_in_eager():
    eager, ours = layers(), planned(layers())
    (first, *later), (first_of_eager, *later_of_eager) = ([peak_of(model) for _ in range(3)] for model in (ours, eager))
    assert first == first_of_eager == plan_of(ours).peak_bytes
    assert later == [plan_of(ours).with_gradients_freed().peak_bytes] * 2
    assert max(later) <= min(later_of_eager) < first
    assert_same_gradients(ours, eager)


def parameters(names, *shape):
    return {name: nn.Parameter(torch.randn(shape)) for name in names}


def shares():
    """Two pairs of parameters with one gradient each, and two whose gradients are parts of one."""

    def run(it, x):
        h = torch.tanh(x + it.a + it.b)
        h = torch.cat([it.c, it.d]) * torch.cat([h, h.cos()])
        return h[:32] * h[32:].sin() + it.e + it.f

    return ModelOf(run, **parameters("abcdef", 32, 64))


def joined():
    """Two parameters whose gradients are columns of one, and one whose gradient is expanded: autograd copies them."""

    def run(it, x):
        return nn.functional.linear(x, torch.cat([it.a, it.b], 1)).square().mean() + it.c.sum()

    return ModelOf(run, **parameters("ab", 64, 32), **parameters("c", 500, 4))


@pytest.mark.parametrize("kind", [shares, joined])
@pytest.mark.parametrize("freed", [False, True])
def test_gradients_that_share_memory_or_are_copied_are_counted(freed, kind):
    model = kind()
    eager = copy.deepcopy(model)
    for each in (model, eager):
        each(X).sum().backward()
        if not freed:
            each.zero_grad()
    step = checkpoint_step(
        model,
        lambda m, x: m(x).square().sum(),
        X,
        budget="100%",
        strategy="chen2016_sqrt",
        gradients="freed" if freed else "kept",
    )
    one = torch.ones(())
    with MeasuredPeak() as measured:
        loss = step(X)
        loss.backward(one)
    eager(X).square().sum().backward()
    assert_same_gradients(model, eager)
    assert measured.peak == step.plans[0].peak_bytes


class Calls:
    def __init__(self, model):
        self.calls = {name: [] for name, _ in model.named_parameters()}
        self.nodes = []
        for name, parameter in model.named_parameters():
            note = self.calls[name].append
            parameter.register_hook(lambda g, note=note: note(("tensor", g.clone())) or g * 2)
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_prehook(lambda gs, note=note: note(("before", gs[0].clone())))
            node.register_hook(lambda *_, note=note, p=parameter: note(("after", p.grad.clone())))
            parameter.register_post_accumulate_grad_hook(lambda p, note=note: note(("post", p.grad.clone())))
            self.nodes.append(node)


def test_hooks_of_all_kinds_are_called_as_in_eager():
    eager, ours = layers(), planned(layers())
    calls = [Calls(eager), Calls(ours)]
    for model in (eager, ours):
        for _ in range(2):
            model(X).backward(TANGENT)
    for name, theirs in calls[0].calls.items():
        mine = calls[1].calls[name]
        assert [kind for kind, _ in mine] == [kind for kind, _ in theirs]
        assert len(mine) == 8
        assert_equal([value for _, value in mine], [value for _, value in theirs])
    assert_same_gradients(ours, eager)


def test_what_is_asked_for_alone_is_computed_and_nothing_accumulates():
    eager, ours = layers(), planned(layers())
    out, again = ours(X), ours(X)
    with Ops() as part:
        found = torch.autograd.grad(out, [ours[8].weight, ours[10].bias], TANGENT)
    with Ops() as whole:
        again.backward(TANGENT)
    # two layers of six
    assert part.count < 0.5 * whole.count
    assert_equal(found, torch.autograd.grad(eager(X), [eager[8].weight, eager[10].bias], TANGENT))
    ours.zero_grad()
    assert gradients(ours) == [None] * 12
    ours(X).backward(TANGENT, inputs=[ours[4].weight])
    eager(X).backward(TANGENT, inputs=[eager[4].weight])
    assert_same_gradients(ours, eager)
    assert sum(gradient is not None for gradient in gradients(ours)) == 1


def test_memory_goes_with_a_pass_that_ended_early():
    model = planned(layers())
    model(X)
    for keeps in (True, False):
        with MeasuredPeak() as measured:
            out = model(X)
            torch.autograd.grad(out, model[10].bias, TANGENT)
            if not keeps:
                del out
        assert measured.held > 2 * TANGENT.nbytes if keeps else measured.held == 0
        out = None


def test_what_is_used_elsewhere_as_well_gets_the_sum():
    def around(it, x):
        shared = it.inner[4].weight
        return (it.inner((it.first(x) @ shared).tanh()) @ shared).square().mean()

    # the weight of a layer of the planned part is used before the part and after it
    model = ModelOf(around, first=nn.Linear(64, 64), inner=layers())
    eager = copy.deepcopy(model)
    planned(model.inner)
    assert_same_step(model, eager, X)


def scaled():
    """The gradient of each scale is there before the op runs that reads it: the second factor's is computed first."""

    def run(it, x):
        for scale in it.scales:
            x = x.tanh() * scale
        return x

    return ModelOf(run, scales=nn.ParameterList(torch.rand(32, 64) + 0.5 for _ in range(4)))


@pytest.mark.parametrize("budget", ["100%", "90%"])
def test_an_optimizer_waits_for_the_ops_that_read_its_parameter(budget):
    model = scaled()
    eager = stepping(copy.deepcopy(model))
    plan = plan_of(planned(model, budget, gradients="freed"))
    writer = plan.graph.writer
    assert any(writer[index] < place for place, op in enumerate(plan.graph.ops) for index in op.holds_back)
    stepping(model)
    for _ in range(2):
        peak_of(eager)
        assert peak_of(model) == plan.peak_bytes
    assert_equal(model.parameters(), eager.parameters())


def test_a_parameter_that_changes_before_it_was_read_is_noticed():
    for model in (layers(), planned(layers())):

        def change_another(parameter, model=model):
            with torch.no_grad():
                model[4].weight.mul_(2)

        model[10].weight.register_post_accumulate_grad_hook(change_another)
        out = model(X)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(TANGENT)


def test_a_schedule_that_reads_a_parameter_too_late_is_refused():
    model = scaled()
    graph = capture(model, (X,), gradients="freed").graph
    assert graph == capture(model, (X,)).graph.with_gradients_freed()
    schedule = Schedule.plain(graph)
    gradient = next(
        gradient
        for position, op in enumerate(graph.ops)
        for gradient in op.holds_back
        if graph.writer[gradient] < position
    )
    steps = [step for step in schedule.steps if step != Step("free", gradient)]
    written = steps.index(Step("compute", graph.writer[gradient]))
    steps.insert(written + 1, Step("free", gradient))
    early = Schedule(tuple(steps), schedule.graph)
    with pytest.raises(ScheduleError, match="reads a parameter whose gradient .* has gone"):
        simulate(graph, early)
    # one that leaves it there for longer runs
    late = Schedule((*(step for step in schedule.steps if step != Step("free", gradient)),), schedule.graph)
    simulate(graph, late)
    out = apply_schedule(model, None, X, late, gradients="freed")(X)
    out.backward(TANGENT)
    ours = gradients(model)
    model.zero_grad()
    model(X).backward(TANGENT)
    assert_equal(ours, gradients(model))
    without = [step for step in schedule.steps if step.target != graph.writer[gradient] or step.kind == "free"]
    with pytest.raises(ScheduleError, match="is not in memory|never computed"):
        simulate(graph, Schedule(tuple(without), schedule.graph))
