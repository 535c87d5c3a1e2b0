"""Rewrites of a training step: the backward pass reads codes of 8 or 4 bits in the place of tensors (docs/codes.md).

    casts.py         makes casts of parameters again, in place of keeping them
    step.py          finds which backward ops read which tensors
    norms.py, activations.py, relu.py, attention.py, products.py: find tensors that can be coded, and their readers
    choice.py        chooses among them
    sketches.py      estimates weight gradients of linear layers from sketches
    codes.py         codes a tensor, and reads the code
    readings.py      computes tensors from codes
    editing.py       changes the graph

A tensor is freed if codes serve all reads of it. Tensors that an unknown op reads stay exact, and the plan names them.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import attention
from rmm_linear.compiler.rewrites.choice import Choice
from rmm_linear.compiler.rewrites.codes import draw_keys
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Rewrite
from rmm_linear.compiler.rewrites.sketches import Sketch, sketches
from rmm_linear.compiler.rewrites.step import Step, size_bytes
from rmm_linear.planning.coding import Bits, CodedTensor, Coding, ExactTensor, FreedMemory, SketchedTensor

_DRAW = torch.ops.rmm_linear.draw_seed.default


def code_step(step: Step, bits: Bits, parameters: Collection[fx.Node], ratio: float | None) -> Coding:
    """Let the backward pass of a step read codes and sketches; its graph is changed in place.

    `ratio` is the rows of a sketch over rows, None for no sketches.
    """
    blocks, chosen = step.blocks, Choice(step, bits)
    sketched = [] if ratio is None else sketches(step, chosen, parameters, ratio)
    # the bias through the exponential of a score depends on the scores
    unbounded = {code for code, read in chosen.served_by() if attention.is_score(read)}
    memories = tuple(
        FreedMemory(node.name, size_bytes(node), tuple(sorted(code.name for code in codes)))
        for node, codes in chosen.freed().items()
    )
    noisy = {read.reader for code, read in chosen.served_by() if code.bits > 1}
    bending = {f"{op.target} of {blocks[op]}" if blocks.get(op) else str(op.target): None for op in step.bent(noisy)}
    if chosen.rewrites or sketched:
        _apply(step, chosen, sketched)
    coded = tuple(
        CodedTensor(
            rewrite.code.name,
            rewrite.code.kind,
            rewrite.code.bits,
            rewrite.code.node.meta["val"].nbytes,
            rewrite.code.code_bytes,
            None if rewrite.code in unbounded else rewrite.bias,
        )
        for rewrite in chosen.rewrites
    )
    exact: dict[fx.Node, ExactTensor] = {}
    freed = {read for sketch in sketched if sketch.is_kept for read in sketch.reads}
    for read in chosen.unserved:
        for node in () if read in freed else step.memories(read.source):
            tensor = ExactTensor(node.name, size_bytes(node), str(read.reader.target))
            exact.setdefault(node, tensor)
    of_sketches = tuple(
        SketchedTensor(
            sketch.reads[0].reader.name, len(sketch.reads), sketch.is_kept, sketch.tensor_bytes, sketch.sketch_bytes
        )
        for sketch in sketched
    )
    return Coding(coded, tuple(exact.values()), memories, tuple(bending), of_sketches, ratio)


def _apply(step: Step, chosen: Choice, sketched: Sequence[Sketch]) -> None:
    graph = step.joint.graph
    editor = Editor(step)
    first = next(node for node in graph.nodes if node.op == "call_function")
    count = len(chosen.rewrites) + len(sketched)
    keys = iter(editor.insert(_keys, step.input, before=first, is_backward=False, count=count))
    replacing: dict[fx.Node, Rewrite] = {}
    for rewrite, key in zip(chosen.rewrites, keys, strict=False):
        rewrite.code.key = key
        rewrite.encode(editor)
        replacing |= {read.reader: rewrite for read in rewrite.serves}
    estimated = {read.reader: sketch for sketch in sketched for read in sketch.reads}
    for sketch, key in zip(sketched, keys, strict=True):
        sketch.encode(step, editor, key, first)
    served: dict[fx.Node, list[fx.Node]] = {}
    for read in chosen.served:
        served.setdefault(read.reader, []).append(read.source)
    for node in step.number:
        for source in served.get(node, ()):
            node.replace_input_with(source, chosen.readings.read(source, editor, node))
        if node in replacing:
            replacing[node].replace(node, editor, chosen.readings)
        if node in estimated:
            estimated[node].replace(node, editor)
    # a converted layer draws also where it takes the seed of another one: later draws depend on it
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target is _DRAW)
    graph.lint()


def _keys(x: Tensor, *, count: int) -> tuple[Tensor, ...]:
    keys = draw_keys(_DRAW(x, None), count)
    # kernels of alike layers read a key at the same place, and are compiled once
    return tuple(torch.ops.rmm_linear.unbind_copy.default(keys))
