"""Casts of a step's inputs, made again in the backward pass: autocast casts each weight, and its cast would be kept.

A cast costs less than a code of it, and has no noise.
"""

from collections.abc import Collection

import torch
from torch import Tensor, fx


def cast_again(joint: fx.GraphModule, tangents: Collection[fx.Node]) -> None:
    """Let ops that depend on gradients read casts of inputs that are made in the backward pass.

    Args:
        joint: The joint graph, functional; changed in place.
        tangents: Placeholders of the gradients of its results.
    """
    gradients, graph = set(tangents), joint.graph
    again: dict[fx.Node, fx.Node] = {}

    def made_again(node: fx.Node, before: fx.Node) -> fx.Node:
        """The cast, or a view of it, made before the first op that reads it."""
        if node.op == "placeholder":
            return node
        if node not in again:
            source = made_again(node.all_input_nodes[0], before)
            with graph.inserting_before(before):
                again[node] = graph.node_copy(node, lambda each: source)
            value = node.meta["val"]
            again[node].meta = node.meta | {"val": _value(again[node], value), "is_backward": True}
        return again[node]

    for node in list(graph.nodes):
        if node.op == "output":
            break
        if any(source in gradients for source in node.all_input_nodes):
            gradients.add(node)
            for source in [each for each in node.all_input_nodes if each not in gradients and _is_cast_of_input(each)]:
                node.replace_input_with(source, made_again(source, node))
    joint.recompile()


def _is_cast_of_input(node: fx.Node) -> bool:
    """Tell whether a tensor is a cast of an input, or a view of one."""
    is_cast = False
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        is_view = getattr(node.target, "is_view", False)
        if node.target is not torch.ops.aten._to_copy.default and not is_view:
            return False
        is_cast = is_cast or not is_view
        node = node.all_input_nodes[0]
    return is_cast and node.op == "placeholder"


def _value(node: fx.Node, like: Tensor) -> Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with like.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value
