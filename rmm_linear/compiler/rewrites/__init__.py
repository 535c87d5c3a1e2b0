"""Rewrites of a training step: the backward pass reads codes of 8 or 4 bits in the place of tensors, without bias.

    casts.py         makes casts of parameters again, in place of keeping them
    step.py          finds which backward ops read which tensors
    norms.py, activations.py, attention.py, products.py: find tensors that can be coded, and the reads each code serves
    choice.py        chooses among them
    codes.py         codes a tensor, and reads the code
    readings.py      computes tensors from codes
    editing.py       changes the graph

A tensor is freed if codes serve all reads of it. Tensors that an unknown op reads stay exact, and the plan names them.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import attention
from rmm_linear.compiler.rewrites.choice import Choice
from rmm_linear.compiler.rewrites.codes import draw_keys
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.rewrite import Rewrite
from rmm_linear.compiler.rewrites.step import Step, size_bytes
from rmm_linear.planning.coding import Bits, CodedTensor, Coding, ExactTensor


def code_step(
    joint: fx.GraphModule, tangents: Collection[fx.Node], blocks: Mapping[fx.Node, str], bits: Bits
) -> Coding:
    """Let the backward pass of a step read codes.

    Args:
        joint: The joint graph, functional; changed in place.
        tangents: Placeholders of the gradients of its results.
        blocks: The module that each node belongs to.
        bits: Bits of the codes.
    """
    step = Step(joint, tangents, blocks)
    chosen = Choice(step, bits)
    # no bound is known for what goes through the exponential of a score
    unbounded = {code for code, read in chosen.served_by() if attention.is_score(read)}
    freed_bytes = sum(map(size_bytes, chosen.freed()))
    bending = {
        f"{op.target} of {blocks[op]}" if blocks.get(op) else str(op.target): None
        for op in step.bent({read.reader for _, read in chosen.served_by()})
    }
    if chosen.rewrites:
        _apply(step, chosen)
    coded = tuple(
        CodedTensor(
            rewrite.code.node.name,
            blocks.get(rewrite.code.node, ""),
            rewrite.code.kind,
            rewrite.code.bits,
            rewrite.code.node_bytes,
            rewrite.code.code_bytes,
            None if rewrite.code in unbounded else rewrite.bias,
        )
        for rewrite in chosen.rewrites
    )
    exact: dict[fx.Node, ExactTensor] = {}
    for read in chosen.unserved:
        for node in step.memories(read.source):
            tensor = ExactTensor(node.name, blocks.get(node, ""), size_bytes(node), str(read.reader.target))
            exact.setdefault(node, tensor)
    return Coding(coded, tuple(exact.values()), freed_bytes, tuple(bending))


def _apply(step: Step, chosen: Choice) -> None:
    graph = step.joint.graph
    editor = Editor(step)
    first = next(node for node in graph.nodes if node.op == "call_function")
    keys = editor.insert(_keys, step.input, before=first, block_of=first, count=len(chosen.rewrites))
    replacing: dict[fx.Node, Rewrite] = {}
    for rewrite, key in zip(chosen.rewrites, keys, strict=True):
        rewrite.code.key = key
        rewrite.encode(editor)
        replacing |= {read.reader: rewrite for read in rewrite.serves}
    served: dict[fx.Node, list[fx.Node]] = {}
    for read in chosen.served:
        served.setdefault(read.reader, []).append(read.source)
    for node in step.number:
        for source in served.get(node, ()):
            node.replace_input_with(source, chosen.readings.read(source, editor, node))
        if node in replacing:
            replacing[node].replace(node, editor, chosen.readings)
        if node in chosen.repeated:
            attention.run_again(node, editor)
    graph.eliminate_dead_code()
    graph.lint()
    step.joint.recompile()


def _keys(x: Tensor, *, count: int) -> tuple[Tensor, ...]:
    keys = draw_keys(torch.ops.rmm_linear.draw_seed.default(x, None), count)
    # kernels of alike layers read a key at the same place, and are compiled once
    return tuple(torch.ops.rmm_linear.unbind_copy.default(keys))
