"""Modules run without a trace: their buffers, also of numbers that equal nothing."""

import torch
from model_of import ModelOf

from rmm_linear.memory.unchanged import buffers_of, changed_buffers, unchanged


def counting(content):
    def run(it, x):
        it.count += 1
        return x

    return ModelOf(run, content=content, count=torch.zeros(()))


def test_a_buffer_that_nothing_writes_keeps_its_version():
    module = counting(torch.tensor([0.0, float("nan")]))
    with unchanged(module):
        module(torch.ones(1))
    assert module.count == 0
    assert module.content._version == 0


def test_conjugate_and_negative_views_are_compared():
    for view in (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j, 2j]).conj().imag):
        module = counting(view)
        before = buffers_of(module)
        assert changed_buffers(module, before) == []
        module(torch.ones(1))
        assert changed_buffers(module, before) == ["count"]
