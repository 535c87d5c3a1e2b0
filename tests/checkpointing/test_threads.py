"""Planned models in several threads."""

import copy
import threading

import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model

X = torch.randn(6, 8)


def test_threads_train_planned_copies_at_once():
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    models, failures, start = [copy.deepcopy(plain) for _ in range(2)], [], threading.Barrier(2)
    plain(X).sum().backward()

    def train(model):
        try:
            start.wait(20)
            checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
            for _ in range(3):
                model.zero_grad()
                model(X).sum().backward()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for model in models:
        assert model._compiled_call_impl.planned_runs == 3
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_trace_in_another_thread_is_waited_for(monkeypatch):
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    # torch keeps one flag for the traces of all threads
    if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        pytest.skip("torch 2.15 has no flag that all threads share")
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    model(X).sum().backward()
    plain(X).sum().backward()
    assert model._compiled_call_impl.planned_runs == 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_compiler_around_the_model_finds_it_as_it_was_written():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    reference = copy.deepcopy(model)
    checkpoint_model(model, X, budget="100%", strategy="chen2016_sqrt")
    around = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(around(X), reference(X) * 2)
    assert model._compiled_call_impl.planned_runs == 0
