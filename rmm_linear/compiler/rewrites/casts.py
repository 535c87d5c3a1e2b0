"""Casts of parameters, made again in the backward pass: autocast casts each weight, and its cast would be kept.

A cast costs less than a code of it, and has no noise. Other inputs than parameters may be changed or freed by then.
"""

from collections.abc import Collection

import torch
from torch import fx

from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.step import Step


def cast_again(step: Step, parameters: Collection[fx.Node]) -> None:
    """Let ops that depend on gradients read casts of parameters that are made in the backward pass.

    The step's graph is changed in place.
    """
    editor = Editor(step)
    again: dict[fx.Node, fx.Node] = {}

    def made_again(node: fx.Node, before: fx.Node) -> fx.Node:
        """The cast, or a view of it, made before the first op that reads it."""
        if node.op == "placeholder":
            return node
        if node not in again:
            (source,) = node.all_input_nodes
            made = {source: made_again(source, before)}
            again[node] = editor.copy(node, made, before=before, block_of=node)
        return again[node]

    for reader, source in step.reads:
        if _cast_input(source) in parameters:
            reader.replace_input_with(source, made_again(source, reader))


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
