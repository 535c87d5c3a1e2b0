"""Casts of parameters, made again in the backward pass: autocast casts each weight, and its cast would be kept.

A cast costs less than a code of it, and has no noise. What is no parameter may be gone, or be another, by then.
"""

from collections.abc import Collection

import torch
from torch import Tensor, fx


def cast_again(joint: fx.GraphModule, parameters: Collection[fx.Node], tangents: Collection[fx.Node]) -> None:
    """Let ops that depend on gradients read casts of parameters that are made in the backward pass.

    Args:
        joint: The joint graph, functional; changed in place.
        parameters: Their placeholders.
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
            for source in node.all_input_nodes:
                if source not in gradients and _cast_input(source) in parameters:
                    node.replace_input_with(source, made_again(source, node))
    joint.recompile()


def _cast_input(node: fx.Node) -> fx.Node | None:
    """The input that a tensor is a cast of, or a view of a cast."""
    is_cast = False
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        is_view = getattr(node.target, "is_view", False)
        if node.target is not torch.ops.aten._to_copy.default and not is_view:
            return None
        is_cast = is_cast or not is_view
        node = node.all_input_nodes[0]
    return node if is_cast else None


def _value(node: fx.Node, like: Tensor) -> Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with like.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value
