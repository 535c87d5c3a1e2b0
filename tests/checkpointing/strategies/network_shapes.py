"""Graphs shaped like networks: residual chains, dense blocks that copy what they concatenate, Transformers."""

import torch
from torch import nn

from experiments.checkpointing.generators import of_edges, with_backward
from rmm_linear.checkpointing import capture
from rmm_linear.planning.graph import Graph


def residual_chain(blocks: int, *, size: int = 64) -> Graph:
    """A training graph: each third node of a chain also reads the one three before."""
    count = 3 * blocks + 1
    edges = [(node, node + 1) for node in range(count - 1)] + [(3 * block, 3 * block + 3) for block in range(blocks)]
    return with_backward(of_edges([[1.0, 4.0, 4.0][node % 3] for node in range(count)], [size] * count, edges))


def dense_blocks(blocks: int, layers: int, *, growth: int = 8) -> Graph:
    """A training graph: each layer of a block copies all outputs before it into one, and reads that."""
    costs, sizes, edges = [4.0], [2 * growth], []

    def layer(sources: list[int], width: int) -> int:
        copied = len(costs)
        costs.extend((1.0, 5.0 + len(sources)))
        sizes.extend((sum(sizes[source] for source in sources), width))
        edges.extend([*((source, copied) for source in sources), (copied, copied + 1)])
        return copied + 1

    last = 0
    for _ in range(blocks):
        outputs = [last]
        for _ in range(layers):
            outputs.append(layer(outputs, growth))
        last = layer(outputs, 2 * growth)
    return with_backward(of_edges(costs, sizes, edges))


def transformer() -> Graph:
    """Capture the training step of three `nn.TransformerEncoderLayer` blocks."""
    layers = (nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3))
    return capture(nn.Sequential(*layers), (torch.randn(4, 32, 32),)).graph
