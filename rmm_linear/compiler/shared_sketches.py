"""Let converted layers that read one tensor keep one sketch, as in eager mode.

Each layer of a traced step draws a seed and compresses its input. Layers that are configured alike share both if their
inputs are equal: one tensor, or casts and other copies of it that are computed alike. Nothing else is merged, so that
the step computes as eager mode does.
"""

import operator
from typing import Any

import torch
from torch import fx

from rmm_linear.compiler.torch_private import OpOverload, aot

_DRAW = torch.ops.rmm_linear.draw_seed.default
_COMPRESS = torch.ops.rmm_linear.compress.default
_GRAD_WEIGHT = torch.ops.rmm_linear.grad_weight.default


def share_sketches(joint: fx.GraphModule, *, keeps_draws: bool) -> bool:
    """Let layers share the sketch of equal inputs with one seed, and tell whether a sketch is shared.

    The joint graph, a functional one, is changed in place; fake values of views of merged nodes are not updated. With
    `keeps_draws` a layer that takes another one's seed draws its own all the same, as in eager mode, so that
    later draws are the same.
    """
    first_of: dict[fx.Node, fx.Node] = {}
    known: dict[Any, fx.Node] = {}
    of_seed: set[fx.Node] = set()
    is_changed = False
    for node in list(joint.graph.nodes):
        if any(isinstance(source.meta.get("desc"), aot.TangentAOTInput) for source in node.all_input_nodes):
            # the backward pass begins
            break
        if not _has_equals(node):
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: first_of.get(source, source))
        # layers of other configurations draw for themselves
        configs = {str(user.args[2]) for user in node.users if user.target is _COMPRESS} if node.target is _DRAW else ()
        first_of[node] = first = known.setdefault((node.target, str(arguments), frozenset(configs)), node)
        if node.target is _DRAW or not of_seed.isdisjoint(node.all_input_nodes):
            of_seed.add(node)
        elif {user.target for user in (*node.users, *first.users)} != {_GRAD_WEIGHT}:
            # rows that are kept as they are depend on no seed, and nothing else reads them
            continue
        if first is node:
            continue
        is_changed = True
        node.replace_all_uses_with(first)
        if node.target is not _DRAW or not keeps_draws:
            joint.graph.erase_node(node)
    return is_changed


def _has_equals(node: fx.Node) -> bool:
    """Tell whether an equal call has an equal value; draws count, for equal draws become one."""
    if node.target is _DRAW or node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    # ops by which a draw differs from any other
    return node.target is not torch.ops.aten.empty.memory_format and not node.is_impure()
