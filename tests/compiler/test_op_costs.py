"""Prices of ops."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear.compiler.costs import cost_of


def _loop(length: int, device: str) -> list[fx.Node]:
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(1000, 1000, device=device)
        node = graph.placeholder("x")
        node.meta["val"] = value
        nodes = []
        for _ in range(length):
            node = graph.call_function(torch.ops.aten.mul.Scalar, (node, 2.0))
            value = value * 2.0
            node.meta["val"] = value
            nodes.append(node)
    return nodes


@pytest.mark.parametrize(("device", "grows"), [("cpu", False), ("cuda", True)])
def test_a_gpu_takes_longer_for_a_loop_that_computes_more_numbers_than_it_moves(device: str, grows: bool) -> None:
    short, long = (cost_of(_loop(length, device), "roofline") for length in (2, 60))

    # a million numbers in, a million out; 6 are computed in the time of a byte
    assert long - short == (10e6 - 8e6 if grows else 0)
    assert cost_of(_loop(60, device), "bytes") == 8e6
