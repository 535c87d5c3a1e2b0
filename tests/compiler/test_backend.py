"""The backend of torch.compile by its name: what is planned, what runs as written, and what is refused."""

import copy
import gc
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.utils.checkpoint import checkpoint

from rmm_linear.compiler import backend, plans, rmm_linear, torch_private
from rmm_linear.errors import CaptureError, InfeasibleBudgetError
from tests.checkpointing.measured_peak import MeasuredPeak
from tests.checkpointing.planned_models import assert_same_gradients, assert_same_step, planned_and_plain, planned_runs
from tests.contracts.model_of import ModelOf

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))

    def forward(self, x):
        return x + super().forward(x)


class Net(nn.Module):
    """Blocks, after the first of which torch.compile may have to break the graph; or each under a checkpoint."""

    def __init__(self, *, breaks=False, checkpoints=False):
        super().__init__()
        self.first, *others = (Block() for _ in range(3))
        self.blocks, self.breaks, self.checkpoints = nn.ModuleList(others), breaks, checkpoints

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.square().mean()


def exact(budget="80%", **options):
    return {"budget": budget, "executor": "exact", **options}


def runs(options):
    """Planned forward passes of what was compiled with these options."""
    return backend._groups[id(options)][2].runs


def assert_trains_as(reference, run, model, batches=(X, X, X)):
    for seed, x in enumerate(batches):
        for call, own in ((run, model), (reference, reference)):
            own.zero_grad()
            torch.manual_seed(seed)
            call(x).backward()
        assert_same_gradients(model, reference)


def in_place(model, options):
    model.compile(backend="rmm_linear", options=options)
    return model


WAYS = {
    "name": lambda model, options: torch.compile(model, backend="rmm_linear", options=options),
    "callable": lambda model, options: torch.compile(model, backend=rmm_linear, options=options),
    "in place": in_place,
    "function": lambda model, options: torch.compile(lambda x: model(x), backend="rmm_linear", options=options),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_runs_by_plan_with_the_gradients_of_eager_mode(way):
    model, options = Net(), exact()
    reference, keys = copy.deepcopy(model), model.state_dict().keys()
    run = WAYS[way](model, options)
    assert plans(model) == plans(run) == []
    assert_trains_as(reference, run, model)
    (plan,) = plans(model)
    assert plans(run) == [plan]
    assert plan.peak_bytes <= 0.8 * plan.plain.peak_bytes
    assert runs(options) == 3
    assert model.state_dict().keys() == keys
    assert plans(reference) == []
    # a second model of the class runs by the plan of the first
    other = copy.deepcopy(model)
    assert_trains_as(reference, WAYS[way](other, dict(options)), other)
    assert len(plans(other)) == 1


def test_a_function_lists_its_plans_by_itself():
    weight = torch.randn(16, 16, requires_grad=True)

    def step(x):
        return torch.tanh(x @ weight).sum()

    run = torch.compile(step, backend="rmm_linear", options=exact("100%"))
    run(X).backward()
    (plan,) = plans(step)
    assert plans(run) == [plan]
    assert plans(test_a_function_lists_its_plans_by_itself) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (None, 'the option "budget" is missing'),
        ("60%", "options are '60%'; pass a dict"),
        (exact(speed=1), "option 'speed' is unknown; choose among budget, strategy"),
        (exact("much"), "budget='much' is no budget"),
        (exact(strategy="magic"), "strategy='magic' is unknown; choose one of"),
        ({"bits": 8, "strategy": "magic"}, "strategy='magic' is unknown; choose one of"),
        ({"budget": "60%", "executor": "fast"}, "executor='fast' is unknown; choose one of exact, inductor"),
        (exact(gradients="summed"), "gradients='summed' is neither"),
        (exact(costs="seconds"), "costs='seconds' is unknown; choose one of roofline"),
        ({"budget": "60%", "executor": "inductor", "gradients": "freed"}, 'gradients="freed" needs executor="exact"'),
        ({"budget": "60%", "executor": "inductor", "page_to": "."}, "page_to='.' needs executor=\"exact\""),
    ],
)
def test_a_wrong_option_is_named(options, told):
    model = torch.compile(Net(), backend="rmm_linear", options=options)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        model(X)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("budget", ["90%", 160_000])
@pytest.mark.parametrize("is_cut", [False, True], ids=["at a break", "at a bucket of DDP"])
def test_the_graphs_of_a_model_that_breaks_share_a_budget_in_bytes(budget, is_cut):
    model, options = Net(breaks=not is_cut), exact(budget)
    reference, how = copy.deepcopy(model), {"backend": "rmm_linear", "options": options}
    if is_cut:
        how = {"backend": DDPOptimizer(10_000, partial(rmm_linear, options=options), 10_000).compile_fn}
    assert_trains_as(reference, torch.compile(model, **how), model)
    found = plans(model)
    assert len(found) == 2
    assert runs(options) == 6
    if budget == "90%":
        assert all(plan.budget_bytes == int(0.9 * plan.plain.peak_bytes) for plan in found)
    else:
        first, second = found
        assert 0.99 * budget < first.budget_bytes + second.budget_bytes <= budget
        parts = [plan.budget_bytes / plan.plain.peak_bytes for plan in found]
        assert parts[0] == pytest.approx(parts[1], rel=1e-3)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_small_graph_beside_a_break_is_planned_for_its_least(is_last):
    model = Net(breaks=True)
    if is_last:
        model.first, model.blocks = nn.Sequential(Block(), Block()), nn.ModuleList([nn.Linear(16, 1)])
    else:
        model.first = nn.Linear(16, 16)
    reference, options = copy.deepcopy(model), exact("80%")
    with pytest.warns(UserWarning, match="one of the model's graphs .* planned for the least"):
        assert_trains_as(reference, torch.compile(model, backend="rmm_linear", options=options), model)
    small, rest = reversed(plans(model)) if is_last else plans(model)
    assert 0.8 * small.plain.peak_bytes < small.peak_bytes == small.budget_bytes
    assert rest.peak_bytes <= 0.8 * rest.plain.peak_bytes
    with pytest.raises(InfeasibleBudgetError):
        torch.compile(model, backend="rmm_linear", options=exact(1000))(X)


def test_a_graph_without_a_parameter_has_a_plan_of_the_model_before_it():
    model, other = Net(), Net()

    def step(x, model):
        result = model(x)
        torch._dynamo.graph_break()
        return (result.tanh() * result.exp()).sum()

    run, run_other = (torch.compile(step, backend="rmm_linear", options=exact("100%")) for _ in range(2))
    run(X, model).backward()
    assert len(plans(model)) == 2
    assert plans(other) == []
    run_other(X, other).backward()
    assert len(plans(model)) == len(plans(other)) == 2


def test_a_graph_of_a_model_that_is_deleted_is_no_graph_of_the_next_model():
    def step(x, model):
        return model(x)

    run, model, other = torch.compile(step, backend="rmm_linear", options=exact("100%")), Net(), nn.Linear(16, 1)
    run(X, model).backward()
    kept_graph = next(graph for graph in backend._all_graphs if graph.belongs_to(model))
    run(X, other).sum().backward()
    del model
    gc.collect()
    assert not kept_graph.belongs_to(other)
    assert len(plans(other)) == 1


@pytest.mark.parametrize("options", [{"budget": "100%"}, {"bits": 8}])
def test_equal_results_of_whole_numbers_are_tensors_of_their_own(options):
    def step(self, x, numbers):
        counts = [torch.arange(4, dtype=torch.int32) for _ in range(2)]
        return self.inner(x).sum(), *counts, numbers + 1, numbers + 1

    model, numbers = ModelOf(step, inner=Net()), torch.arange(6, dtype=torch.int32)
    _, first, second, third, fourth = torch.compile(model, backend="rmm_linear", options=options)(X, numbers)
    first.zero_(), third.zero_()
    assert second.equal(torch.arange(4, dtype=torch.int32))
    assert fourth.equal(numbers + 1)


def test_one_graph_has_a_plan_for_each_length():
    model, options = Net(), exact("100%", strategy="chen2016_sqrt")
    batches = [X[:rows].clone() for rows in (64, 48, 40, 48, 64)]
    assert_trains_as(copy.deepcopy(model), torch.compile(model, backend="rmm_linear", options=options), model, batches)
    # of the first length, one that is static and one for changing lengths
    assert len(plans(model)) == 4
    assert len(backend._groups[id(options)][2].graphs) == 2
    assert runs(options) == len(batches)


def test_a_number_that_changes_from_call_to_call_is_warned_of_once():
    layer = nn.Linear(16, 4)
    run = torch.compile(lambda x, t: (layer(x) * t).mean(), backend="rmm_linear", options=exact("100%"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch.compile takes the first value for a constant
        for number in range(2, 9):
            run(X, number).backward()
    with pytest.warns(UserWarning, match="a value that the step reads changes"):
        run(X, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(X, 10)


def test_a_count_of_steps_that_is_traced_anew_each_time_is_warned_of_once():
    class Counting(Net):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x) / self.count

    model, _ = planned_and_plain(Counting(), X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(9):
            model(X).backward()
    told = [str(each.message) for each in caught if "a value that the step reads changes" in str(each.message)]
    assert len(told) == 1
    assert planned_runs(model) == 9


def test_a_float_that_changes_runs_as_written_and_the_way_around_is_named():
    layer = nn.Linear(16, 4)
    run = torch.compile(lambda x, t: (layer(x) * t).mean(), backend="rmm_linear", options=exact("100%"))
    run(X, 0.5)
    with pytest.warns(UserWarning, match=r"a Python float that changes from call to call is such a tensor"):
        run(X, 0.75).backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 0.75 / 4))


def test_identical_blocks_that_are_compiled_one_by_one_share_a_plan():
    model, options = Net(), exact("100%")
    reference = copy.deepcopy(model)
    for block in (model.first, *model.blocks):
        in_place(block, options)
    assert_trains_as(reference, model, model, (X.clone().requires_grad_(),))
    assert len(plans(model)) == 1
    assert runs(options) == 3


@pytest.mark.parametrize("how", ["eval without gradients", "no_grad", "frozen", "torch.func"])
def test_where_there_is_nothing_to_differentiate_or_transforms_are_active_no_plan_is_made(how):
    model, options = Net(), exact()
    run = in_place(model, options)
    torch.manual_seed(0)
    if how == "torch.func":
        torch.func.grad(lambda x: run(x))(X)
    elif how == "frozen":
        assert not run.requires_grad_(False)(X).requires_grad
    else:
        with torch.no_grad():
            assert not run.train(how == "no_grad")(X).requires_grad
    assert plans(model) == []


def test_checkpoints_of_the_model_itself_are_replaced_with_a_warning_and_draw_once():
    model, options = Net(checkpoints=True), exact("60%")
    run = torch.compile(model, backend="rmm_linear", options=options)
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"the plan takes the checkpoints' place, and the step's peak is \d+ bytes"):
        assert_trains_as(reference, run, model)
    (plan,) = plans(model)
    assert plan.peak_bytes <= 0.6 * plan.plain.peak_bytes
    assert runs(options) == 3


def test_a_small_batch_may_take_what_a_larger_one_was_allowed():
    model, options = Net(), exact("60%")
    run = torch.compile(model, backend="rmm_linear", options=options)
    # of one row's peak gradients are more than a share
    assert_trains_as(copy.deepcopy(model), run, model, [X, X[:1]])
    whole, small = plans(model)
    assert 0.6 * small.plain.peak_bytes < small.peak_bytes <= whole.budget_bytes
    assert runs(options) == 2


def test_checkpoints_of_the_model_itself_stay_where_it_is_not_captured(monkeypatch):
    def refuse(*_, **__):
        raise CaptureError("refused")

    monkeypatch.setattr(backend, "read_joint_graph", refuse)
    model = Net(checkpoints=True)
    run, reference = torch.compile(model, backend="rmm_linear", options=exact()), copy.deepcopy(model)
    with pytest.warns(UserWarning, match="runs as written, outside of the budget: refused"):
        assert_trains_as(reference, run, model)
    with MeasuredPeak() as mine:
        loss = run(X)
    with MeasuredPeak() as theirs:
        other = reference(X)
    assert mine.held == theirs.held
    del loss, other


@pytest.mark.parametrize(
    "root",
    [nn.Sequential(Block(), nn.Tanh()), nn.Linear(16, 4), pytest.param(nn.GRU(16, 8), marks=pytest.mark.slow)],
    ids=type,
)
def test_torchs_own_modules_are_planned_as_roots(root):
    root, reference = planned_and_plain(root, X, strategy="auto")
    for seed in range(2):
        loss = (lambda out: out[0].sum()) if isinstance(root, nn.GRU) else torch.sum
        assert_same_step(root, reference, X, loss=loss, seed=seed)
    assert planned_runs(root) == 2


def test_a_step_beyond_the_limit_of_recompilations_runs_as_written_with_one_warning(monkeypatch):
    class Named(Net):
        name = ""

        def forward(self, x):
            return super().forward(x) if self.name else 2 * super().forward(x)

    monkeypatch.setattr(torch_private, "_MOST_RECOMPILATIONS", 2)
    model, reference = planned_and_plain(Named(), X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(9):
            model.name = reference.name = f"{number}"
            assert_trains_as(reference, model, model, (X,))
    told = [str(each.message) for each in caught if "Named" in str(each.message)]
    assert len(told) == 1
    assert "recompile" in told[0]


@pytest.mark.parametrize("executor", ["exact", "inductor"])
def test_the_gradient_of_a_backward_pass_without_ops_arrives(executor):
    weight = nn.Parameter(torch.ones(1))
    options = {"budget": "100%", "executor": executor}
    step = torch.compile(lambda: weight.sum(), backend="rmm_linear", options=options)
    step().backward()
    assert torch.equal(weight.grad, torch.ones(1))
