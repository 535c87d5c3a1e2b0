"""Modules run without a trace: their buffers, also of numbers that equal nothing."""

import torch
from torch import nn

from rmm_linear.memory.unchanged import buffers_of, changed_buffers, unchanged


class _Counting(nn.Module):
    def __init__(self, content):
        super().__init__()
        self.register_buffer("content", content)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x


def test_a_buffer_that_nothing_writes_keeps_its_version():
    module = _Counting(torch.tensor([0.0, float("nan")]))
    with unchanged(module):
        module(torch.ones(1))
    assert module.count == 0
    assert module.content._version == 0


def test_conjugate_and_negative_views_are_compared():
    for view in (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j, 2j]).conj().imag):
        module = _Counting(view)
        before = buffers_of(module)
        assert changed_buffers(module, before) == []
        module(torch.ones(1))
        assert changed_buffers(module, before) == ["count"]
