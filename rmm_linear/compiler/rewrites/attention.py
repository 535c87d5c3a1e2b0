"""Codes of attention: queries, keys, values and output of the fused ops, and the probabilities of the op by op form.

The gradient of a fused op is linear in the values and in the output. Queries and keys go through an exponential, which
is read as if it was linear: the bias is about half the variance of the scores' errors. Their own codes have 8 bits.

The gradient of a softmax, p (g - sum(p g)), reads p twice: g_i s_i^2 / 12 is added, where s_i is the step of the code.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import codes
from rmm_linear.compiler.rewrites.coded import Code, Shape
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Readings, Rewrite
from rmm_linear.compiler.rewrites.step import Read, Step, node_at

aten = torch.ops.aten
# Backward ops of fused attention, and the places of query, key, value and output among their arguments.
FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2, 3, 4),
    aten._scaled_dot_product_flash_attention_backward.default: (1, 2, 3, 4),
    aten._scaled_dot_product_cudnn_attention_backward.default: (1, 2, 3, 4),
    aten._scaled_dot_product_efficient_attention_backward.default: (1, 2, 3, 5),
}
# Ops between the gradient of a product with probabilities and that of the softmax.
_BETWEEN = {aten._to_copy.default, aten.mul.Tensor, aten.masked_fill.Scalar, aten.slice_backward.default}
_BETWEEN |= {aten._unsafe_view.default, aten.clone.default, aten.native_dropout_backward.default}


@dataclass(eq=False)
class Softmax(Rewrite):
    """The probabilities of an attention that runs op by op."""

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        sources, options = (reader.args[0], *self.code.sources), {"dtype": reader.meta["val"].dtype, **self.code.how}
        editor.replace(reader, editor.insert(_softmax_backward, *sources, before=reader, **options))


def candidates(step: Step, bits: int) -> Iterator[Softmax]:
    """Find softmaxes whose gradients come from matrix products: that of log p, 1 / p, would multiply p's error."""
    for read in step.reads:
        if read.reader.target is not aten._softmax_backward_data.default or read.source is not read.reader.args[1]:
            continue
        gradient, dim = node_at(read.reader, 0), read.reader.args[2]
        while gradient.target in _BETWEEN or getattr(gradient.target, "is_view", False):
            gradient = next(each for each in gradient.all_input_nodes if each in step.gradients)
        base = step.base[read.source]
        is_known = gradient.target in (aten.mm.default, aten.bmm.default) and bool(step.memories(base))
        is_whole = is_known and step.is_float(base) and base.meta["val"].stride() == read.source.meta["val"].stride()
        shape = Shape.of(base.meta["val"]) if is_whole else None
        if shape is not None and dim in (-1, base.meta["val"].dim() - 1):
            yield Softmax(Code(base, "attention", bits, shape), [read])


def is_output(node: fx.Node) -> bool:
    """Tell whether a node is the output of a fused attention."""
    is_first = node.target is operator.getitem and node.args[1:] == (0,)
    return is_first and "scaled_dot_product" in str(node_at(node, 0).target)


def is_score(read: Read) -> bool:
    """Tell whether a fused backward op computes scores from a tensor: it is a query or a key."""
    return read.reader.target in FUSED and read.source in read.reader.args[1:3]


def _softmax_backward(
    gradient: Tensor, code: Tensor, steps: Tensor, key: Tensor, *, shape: Shape, bits: int, dtype: torch.dtype
) -> Tensor:
    p = shape.tensor_of(codes.decode(code, steps, key, shape.layout, bits=bits))
    variance = shape.tensor_of(codes.error_variance(steps, shape.layout))
    product = p * gradient
    return (product - p * product.sum(-1, keepdim=True) + variance * gradient).to(dtype)
