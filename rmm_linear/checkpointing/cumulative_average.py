"""Batch norms that average over all batches (`momentum=None`), without a number that Python looks at.

Each step's momentum is one over the number of steps so far, which the module reads from a buffer. In a captured step an
op of its own reads that buffer instead: the same number, at the same time, and no plan is bound to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_RUNNING_MEAN, _MOMENTUM = 3, 6


def cumulative_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    count: Tensor,
    eps: float,
) -> Any:
    """Run a batch norm whose running statistics are averages over all batches.

    Args:
        x: Input, shape (rows, features, ...).
        weight: Shape (features,), or None.
        bias: Shape (features,), or None.
        running_mean: Shape (features,).
        running_var: Shape (features,).
        training: Whether the batch's statistics are used.
        count: How many batches there were, this one counted; an integer of shape ().
        eps: Added to the variance.

    Returns:
        Output, mean and inverse deviation of the batch, new running mean and variance.
    """
    # contents are zeros where ops are measured
    return _BATCH_NORM(x, weight, bias, running_mean, running_var, training, 1.0 / max(1.0, float(count)), eps)


def counted_by_modules(model: nn.Module) -> dict[str, str]:
    """Find the batch norms of a model that average over all batches.

    Args:
        model: The model.

    Returns:
        The name of each one's running mean, with the name of its count of batches.
    """
    names = {}
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.momentum is None and type(module).forward is _BatchNorm.forward:
            prefix = f"{path}." if path else ""
            names[f"{prefix}running_mean"] = f"{prefix}num_batches_tracked"
    return names


def let_ops_count(
    joint: fx.GraphModule,
    inputs: Mapping[fx.Node, str],
    looked_at: Sequence[tuple[fx.Node, Any]],
    counts: Mapping[str, str],
) -> list[tuple[fx.Node, Any]]:
    """Replace batch norms whose momentum follows from a number that Python looked at.

    Args:
        joint: The joint graph; changed in place.
        inputs: Names of the parameters and buffers.
        looked_at: Numbers, with the node of a copy of the tensor that each was in.
        counts: See `counted_by_modules`.

    Returns:
        Those of `looked_at` on which the graph still depends; the copies for others are gone from it.
    """
    norms: dict[str, list[fx.Node]] = {count: [] for count in counts.values()}
    for node in joint.graph.nodes:
        if node.target is _BATCH_NORM:
            count = counts.get(inputs.get(_origin(node.args[_RUNNING_MEAN]), ""), "")
            norms.get(count, []).append(node)
    done: set[fx.Node] = set()
    for name, nodes in norms.items():
        found = [(copy, number) for copy, number in looked_at if inputs.get(_origin(copy)) == name]
        if [1.0 / number for _, number in found] != [node.args[_MOMENTUM] for node in nodes]:
            continue
        for (copy, _), node in zip(found, nodes, strict=True):
            node.target = cumulative_batch_norm
            node.args = (*node.args[:_MOMENTUM], copy.args[0], *node.args[_MOMENTUM + 1 :])
            done.add(copy)
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    output.args = ([None if node in done else node for node in output.args[0]],)
    for node in done:
        joint.graph.erase_node(node)
    return [(node, number) for node, number in looked_at if node not in done]


def _origin(node: Any) -> Any:
    """The input that a node's contents follow from by way of first arguments."""
    while isinstance(node, fx.Node) and node.op != "placeholder" and node.args:
        node = node.args[_RUNNING_MEAN] if node.target is _BATCH_NORM else node.args[0]
    return node
