"""Codes of tensors that the backward pass reads linearly: in matrix products, for weight gradients, and in products."""

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from rmm_linear.compiler.rewrites.attention import FUSED, is_output, is_score
from rmm_linear.compiler.rewrites.coded import Code, Shape
from rmm_linear.compiler.rewrites.readings import Rewrite
from rmm_linear.compiler.rewrites.step import Read, Step, ancestors, shape_of
from rmm_linear.planning.coding import Bits

aten = torch.ops.aten
_LINEAR = {
    aten.mm.default,
    aten.bmm.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
}


def is_linear(read: Read) -> bool:
    """Tell whether an op is linear in a tensor that it reads; fused attention is taken to be so."""
    reader, source = read
    if reader.target in FUSED:
        return sum(arg is source for arg in reader.args) == 1 and any(
            reader.args[place] is source for place in FUSED[reader.target]
        )
    return reader.target in _LINEAR and sum(arg is source for arg in reader.args) == 1


def candidates(step: Step, reads: Iterable[Read], bits: Bits) -> Iterator[Rewrite]:
    """Find tensors whose codes could serve these reads."""
    found: dict[fx.Node, list[Read]] = {}
    for read in reads:
        source = read.source
        if is_linear(read) and step.is_float(source) and step.memories(source) == {step.base[source]}:
            count = shape_of(source).numel()
            # the first tensor that the source is a view of, and that has no more elements
            *_, whole = (
                each for each in ancestors(step, source) if step.is_float(each) and shape_of(each).numel() == count
            )
            found.setdefault(whole, []).append(read)
    for node, own in found.items():
        is_attention = is_output(step.base[node]) or any(read.reader.target in FUSED for read in own)
        kind, size = ("attention", bits.attention) if is_attention else ("linear", bits.linear)
        shape = Shape.of(node.meta["val"])
        if size and shape is not None:
            yield Rewrite(Code(node, kind, 8 if any(map(is_score, own)) else size, shape))
