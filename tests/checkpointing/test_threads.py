"""Planned models in several threads."""

import copy
import threading

import pytest
import torch
from planned_models import assert_same_gradients, planned, planned_and_plain, planned_runs
from torch import nn

X = torch.randn(6, 8)


def test_threads_train_planned_copies_at_once():
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    models, failures, start = [copy.deepcopy(plain) for _ in range(2)], [], threading.Barrier(2)
    plain(X).sum().backward()

    def train(model):
        try:
            start.wait(20)
            planned(model, X)
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
        assert planned_runs(model) == 3
        assert_same_gradients(model, plain)


def test_a_trace_in_another_thread_is_waited_for(monkeypatch):
    # torch keeps one flag for the traces of all threads
    if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        pytest.skip("torch 2.15 has no flag that all threads share")
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    model, plain = planned_and_plain(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), X)
    model(X).sum().backward()
    plain(X).sum().backward()
    assert planned_runs(model) == 1
    assert_same_gradients(model, plain)
