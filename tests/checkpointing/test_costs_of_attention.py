"""Attention costs its matrix products, also where torch has no formula for its kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmm_linear.checkpointing import capture


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query * self.scale, key, key).sum()


def test_fused_attention_of_a_cpu_costs_its_matrix_products() -> None:
    query, key = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8)
    graph = capture(Attention(), (query, key), costs="flops").graph
    product = 2.0 * 2 * 4 * 16 * 24 * 8
    costs = {op.kind: op.cost for op in graph.ops if "attention" in op.kind}
    assert list(costs.values()) == [2 * product, 5 * product], costs
    assert all("flash_attention_for_cpu" in kind for kind in costs)
