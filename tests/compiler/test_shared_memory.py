"""Arguments and results of planned graphs that share memory, and graphs that only a model with breaks has."""

import pytest
import torch
from assert_unchanged import assert_unchanged
from model_of import ModelOf, linears
from torch import nn

from rmm_linear.checkpointing import checkpoint_model
from rmm_linear.compiler import plans, rmm_linear
from rmm_linear.errors import NothingToTrainError

break_graph = torch._dynamo.graph_break


def planned(function, budget="100%"):
    return torch.compile(function, backend=rmm_linear, options={"budget": budget, "executor": "exact"})


def both(function, *calls, budget="100%"):
    """Results and the gradient of w, of eager mode and by plan, for each call."""
    found = []
    for run in (function, planned(function, budget)):
        torch.manual_seed(0)
        w = torch.randn(4, 4, requires_grad=True)
        for make in calls:
            values = run(w, *make())
            loss = values[0] if isinstance(values, tuple) else values
            loss.backward()
            found.append([loss.detach(), *(values[1:] if isinstance(values, tuple) else ()), w.grad.clone()])
    half = len(found) // 2
    return zip(found[:half], found[half:], strict=True)


DATA = torch.arange(64.0).reshape(16, 4)
SLICES = (lambda: (DATA[0:4],)), (lambda: (DATA[4:8],))


def writes_into_the_first(w, a, b):
    a.add_(1)
    return (b @ w).sum()


def writes_into_a_result_after_a_break(w, x):
    h = x @ w
    v = h[:, :2]
    break_graph()
    h.mul_(2)
    return (v * w[0, 0]).sum()


def reads_a_detached_result(w, x):
    h = x @ w
    return (h * 2).sum(), h.detach(), h


def writes_a_differentiated_value_into_a_buffer(w, x):
    buffer = torch.zeros(4, 4)
    break_graph()
    buffer[:, :2] = (x @ w)[:, :2]
    break_graph()
    return (buffer * w[0, 0]).sum()


def measures_accuracy_after_the_loss(w, x):
    logits = x @ w
    loss = logits.square().mean()
    break_graph()
    return loss, (logits.argmax(-1) == 1).float().mean()


def apart():
    return torch.ones(4, 4), torch.ones(4, 4)


def together():
    a, _ = apart()
    return a, a.view(4, 4)


CASES = {
    "views of slices": (lambda w, x: ((x @ w).sum(), x[:, :2]), *SLICES),
    "slices by strides": (lambda w, x: (torch.as_strided(x, (2, 4), (4, 1), 20) @ w).sum(), *SLICES),
    "arguments that share memory later": (writes_into_the_first, apart, together),
    "arguments that shared memory before": (writes_into_the_first, together, apart),
    "a part of a result": (writes_into_a_result_after_a_break, lambda: (torch.ones(4, 4),)),
    "a detached result": (reads_a_detached_result, lambda: (torch.ones(4, 4),)),
    "a buffer": (writes_a_differentiated_value_into_a_buffer, lambda: (torch.ones(4, 4),)),
    "a graph without gradients": (measures_accuracy_after_the_loss, lambda: (torch.ones(4, 4),)),
}


@pytest.mark.filterwarnings("ignore:.*runs as written")
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_eager_mode(case):
    for eager, by_plan in both(*CASES[case]):
        assert len(eager) == len(by_plan)
        for mine, theirs in zip(by_plan, eager, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    # a write of a differentiated value into an argument is refused, and that graph runs as written
    assert plans(CASES[case][0]) or case == "a buffer"


def test_a_dict_of_options_that_changed_is_read_anew():
    options = {"budget": "100%", "executor": "exact"}
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())]
    models = [nn.Sequential(*layers), nn.Sequential(*layers[:12])]
    for model, budget in zip(models, ("100%", "80%"), strict=True):
        options["budget"] = budget
        torch.compile(model, backend=rmm_linear, options=options)(torch.randn(64, 16)).sum().backward()
    peaks = [plan.peak_bytes / plan.plain.peak_bytes for model in models for plan in plans(model)]
    assert peaks[0] == 1
    assert min(peaks) <= 0.8


def test_a_graph_that_runs_several_times_in_a_step_is_told():
    blocks = [ModelOf(lambda it, x: torch.tanh(it.linear(x)), **linears("linear", 16)) for _ in range(3)]
    options = {"budget": "1MiB", "executor": "exact"}
    for block in blocks:
        block.compile(backend="rmm_linear", options=options)
    x = blocks[0](torch.randn(8, 16))
    with pytest.warns(UserWarning, match="a budget in bytes is for each of its runs"):
        x = blocks[1](x)
    blocks[2](x).sum().backward()


def test_a_model_without_anything_to_train_stays_as_it_is():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False)
    x = torch.randn(8, 4)
    with assert_unchanged(model), pytest.raises(NothingToTrainError, match="nothing that the step returns"):
        checkpoint_model(model, x, budget="90%")


def test_a_capture_leaves_a_profile_that_warms_up_as_it_is():
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    checkpoint = planned(model)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, schedule=schedule)
    # at its end torch forgets the number of steps, also of the profile that is to come
    with torch.profiler.profile(activities=activities):
        pass
    with profile:
        for _ in range(3):
            checkpoint(torch.randn(3, 7)).sum().backward()
            profile.step()
    assert len(plans(model)) == 1
