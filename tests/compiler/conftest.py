"""No test finds compiled graphs of another one, and some run Inductor's graphs op by op."""

import pytest
import torch

from rmm_linear.compiler import inductor_program


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    # a limit on recompilations counts for all models of one class
    torch._dynamo.reset()


@pytest.fixture
def uncompiled_graphs(monkeypatch):
    """Inductor compiles nothing. Graphs that it was asked for, and whether they are of a backward pass."""
    found = []

    def compile_nothing(module, *_, is_backward, **__):
        found.append((module.graph, is_backward))
        return lambda arguments: module(*arguments)

    monkeypatch.setattr(inductor_program, "compile_by_inductor", compile_nothing)
    return found
