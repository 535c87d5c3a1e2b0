"""Schedules that page: simulated, run op by op to files, and refused where they can't run."""

import errno
import os
import signal
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from measured_peak import MeasuredPeak
from planned_models import assert_equal, assert_same_step, gradients, mean_square, planned_and_plain
from torch import nn

from experiments.checkpointing.generators import chain, with_backward
from rmm_linear.checkpointing import Schedule, Step, apply_schedule, capture, checkpoint_model, simulate, validate
from rmm_linear.errors import PagingError, ScheduleError
from rmm_linear.planning.simulate import bytes_of_order, peak_and_cost
from rmm_linear.planning.timeline import bytes_by_kind

_CHAIN = replace(with_backward(chain([4, 2, 7, 1])), page_cost=0.5)
_OPS = len(_CHAIN.ops)
# the second op's storage goes after the forward pass, and comes back for its reader
_LOADED = (*range(6), _OPS + 1, *range(6, _OPS))


def test_what_paging_takes():
    schedule = Schedule.from_order(_CHAIN, _LOADED)
    taken, plain = simulate(_CHAIN, schedule), simulate(_CHAIN, Schedule.plain(_CHAIN))
    assert schedule.loads(_CHAIN) == [1]
    # out and back
    assert taken.extra_cost == pytest.approx(2 * 0.5 * 2)
    assert taken.cost == pytest.approx(plain.cost + taken.extra_cost)
    assert taken.forward_bytes == plain.forward_bytes - 2
    assert peak_and_cost(_CHAIN, _LOADED) == (taken.peak_bytes, pytest.approx(taken.cost))
    # twice back, once out
    again = (*range(5), _OPS + 1, 5, _OPS + 1, *range(6, _OPS))
    assert peak_and_cost(_CHAIN, again)[1] == pytest.approx(plain.cost + 3 * 0.5 * 2)
    assert simulate(_CHAIN, Schedule.from_order(_CHAIN, again)).extra_cost == pytest.approx(3 * 0.5 * 2)
    kinds = bytes_by_kind(_CHAIN, schedule)
    assert [sum(column) for column in zip(*kinds.values(), strict=True)] == bytes_of_order(_CHAIN, _LOADED)
    assert max(kinds["computed or loaded again"]) == 2


def test_schedules_that_page_survive_json_and_graphs_keep_their_fingerprint():
    assert _CHAIN.fingerprint == replace(_CHAIN, page_cost=None).fingerprint
    schedule = Schedule.from_order(_CHAIN, _LOADED)
    assert Schedule.from_json(schedule.to_json()) == schedule
    for wrong in (0.0, -1.0, float("inf"), "fast"):
        with pytest.raises(ValueError, match="page_cost"):
            replace(_CHAIN, page_cost=wrong)


@pytest.mark.parametrize(
    ("graph", "steps", "message"),
    [
        (replace(_CHAIN, page_cost=None), [Step("compute", _OPS)], "page_to names no place"),
        (_CHAIN, [Step("compute", _OPS)], "has not been computed, and has no page"),
        (_CHAIN, [Step("compute", 0), Step("compute", _OPS)], "is in memory"),
        (_CHAIN, [Step("compute", 1000)], "loads after them"),
    ],
    ids=["no cost", "no page", "there already", "no such load"],
)
def test_loads_that_cannot_run_are_refused(graph, steps, message):
    with pytest.raises(ScheduleError, match=message):
        validate(graph, Schedule(tuple(steps), graph.fingerprint))


def _schedule_that_loads(graph, is_loaded_for):
    """Load each storage for which `is_loaded_for(index, op)` holds just before the op that reads the storage."""
    order = []
    for op in range(len(graph.ops)):
        loaded = (index for index in dict.fromkeys(graph.ops[op].reads) if is_loaded_for(index, op))
        order += [*(len(graph.ops) + index for index in loaded), op]
    return Schedule.from_order(graph, order)


def _run(step, model, x):
    model.zero_grad()
    torch.manual_seed(1)
    loss = step(x)
    loss.backward()
    return [loss.detach(), *gradients(model)]


@pytest.fixture(scope="module")
def paged(tmp_path_factory):
    torch.manual_seed(0)
    # dropout, views, attention, and ops with several results
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    x, folder = torch.randn(4, 24, 16), tmp_path_factory.mktemp("pages")
    expected = _run(lambda x: mean_square(model, x), model, x)
    graph = replace(capture(model, (x,), step=mean_square).graph, page_cost=1.0)
    ends = {*graph.results, *graph.outputs}

    def is_first_of_backward_pass(index, op):
        is_forward = graph.writer[index] < graph.forward_count <= op
        return is_forward and index not in ends and not any(graph.forward_count <= r < op for r in graph.readers[index])

    schedule = _schedule_that_loads(graph, is_first_of_backward_pass)
    step = apply_schedule(model, mean_square, x, schedule, page_to=folder)
    return SimpleNamespace(
        model=model, x=x, expected=expected, graph=graph, schedule=schedule, step=step, folder=folder
    )


def test_a_step_whose_activations_are_all_paged_has_the_bits_of_eager_mode_and_the_simulated_peak(paged):
    graph, schedule = paged.graph, paged.schedule
    taken = simulate(graph, schedule)
    assert taken.forward_bytes <= 64
    assert taken.forward_bytes < simulate(graph, Schedule.plain(graph)).forward_bytes / 100
    runs = paged.step.planned_runs
    assert_equal(_run(paged.step, paged.model, paged.x), paged.expected)
    assert paged.step.planned_runs == runs + 1
    paged.model.zero_grad()
    with MeasuredPeak() as measured:
        paged.step(paged.x).backward()
    # what kernels hold for themselves is no storage
    without = replace(graph, ops=tuple(replace(op, temporary_bytes=0) for op in graph.ops))
    assert simulate(without, schedule).peak_bytes <= measured.peak <= taken.peak_bytes
    assert not list(paged.folder.iterdir())


def test_a_full_disk_is_told_and_the_next_step_runs(paged, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = [parameter.clone() for parameter in paged.model.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", refused)
        with pytest.raises(PagingError, match=f"page_to: {paged.folder} takes no file: .*No space left"):
            paged.step(paged.x)
    resource = pytest.importorskip("resource")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # the first tensors are small, and a buffer would hold them
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(PagingError, match=f"page_to: {paged.folder} takes no [0-9]+ bytes more"):
            paged.step(paged.x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert_equal(before, paged.model.parameters())
    assert_equal(_run(paged.step, paged.model, paged.x), paged.expected)


def test_a_page_that_was_lost_is_told(paged, monkeypatch):
    files, made = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: files.append(made(**options)) or files[-1])
    loss = paged.step(paged.x)
    files[-1].truncate(16)
    with pytest.raises(PagingError, match="has lost its contents"):
        loss.backward()


def test_a_step_whose_backward_pass_alone_pages_has_the_bits_of_eager_mode(paged):
    graph = paged.graph
    stays = {*graph.outputs, *graph.gradients}

    def is_last_of_several(index, op):
        is_of_backward_pass = graph.writer[index] >= graph.forward_count and index not in stays
        return is_of_backward_pass and len(graph.readers[index]) > 1 and graph.readers[index][-1] == op

    schedule = _schedule_that_loads(graph, is_last_of_several)
    assert schedule.loads(graph)
    step = apply_schedule(paged.model, mean_square, paged.x, schedule, page_to=paged.folder)
    assert_equal(_run(step, paged.model, paged.x), paged.expected)


def test_a_schedule_that_pages_needs_a_place(paged):
    with pytest.raises(ScheduleError, match="page_to names no place"):
        apply_schedule(paged.model, mean_square, paged.x, paged.schedule)


def test_poet_pages_a_model_within_a_budget(tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr("rmm_linear.compiler.backend.page_cost", lambda *_: 0.1)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, x = nn.Sequential(*layers, nn.Linear(32, 1)), torch.randn(256, 32)
    model, plain = planned_and_plain(model, x, "65%", strategy="patil2022_poet", page_to=tmp_path)
    (plan,) = model._compiled_call_impl.plans
    assert plan.graph.page_cost == 0.1
    assert plan.peak_bytes <= 0.65 * plan.plain.peak_bytes
    assert plan.schedule.loads(plan.graph)
    assert "paged out and back" in str(plan)
    assert "no bound of other plans is known: the linear program knows no paging" in str(plan)
    assert_same_step(model, plain, x, loss=lambda y: y.square().mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_to": "nowhere"}, 'neither "host" nor a folder'),
        ({"page_to": ""}, "page_to='' is neither"),
        ({"page_to": 5}, "page_to=5 is neither"),
        ({"page_to": "host"}, 'page_to="host": the tensors are in the host'),
        ({"page_to": ".", "costs": "flops"}, "costs='flops' are no times"),
        ({"page_to": ".", "strategy": "auto"}, "strategy='auto' pages nothing"),
    ],
    ids=["no folder", "empty", "a number", "host", "no times", "a strategy that pages nothing"],
)
def test_places_and_costs_that_page_nothing_are_refused(options, message):
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        checkpoint_model(model, torch.randn(2, 4), budget="100%", **({"strategy": "patil2022_poet"} | options))
    assert model._compiled_call_impl is None
