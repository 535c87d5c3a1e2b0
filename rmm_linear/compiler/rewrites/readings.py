"""Readings: tensors of the forward pass as the backward pass computes them from codes, without bias; and rewrites.

A tensor that has a code is read from it. A tensor that follows from such tensors by ops that are linear in them is
computed again from their readings: views, casts, products with a number, a parameter, a mask or a statistic of
rows, sums. So is a product of two tensors with different codes, for their errors are independent. A tensor
that is small beside its results is kept and read as it is, with a code or without.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites.coded import Code
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.step import Read, Step, node_at, shape_of

aten = torch.ops.aten
# Linear in their first argument; the other arguments are no tensors.
_PASSED_THROUGH = {
    aten._to_copy.default,
    aten.clone.default,
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Scalar,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
# Views that depend on how their argument lies in memory.
_OF_MEMORY = {aten.as_strided.default, aten.view.dtype}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
# A tensor with so many times fewer elements than another one costs nothing.
_SMALL = 16
# (editor, before) -> the node that takes a tensor's place, in its shape and dtype.
Reading = Callable[[Editor, fx.Node], fx.Node]


class Readings:
    """Tells which tensors can be read from codes, and reads them.

    Attributes:
        provided: Tensors that are read directly, each with its code.
        exact: Tensors that are read as they are, for others that follow from them and from codes.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.provided: dict[fx.Node, tuple[Code, Reading]] = {}
        self.exact: set[fx.Node] = set()
        self._codes: dict[fx.Node, frozenset[Code] | None] = {}
        self._read: dict[fx.Node, fx.Node] = {}

    def provide(self, code: Code, readings: Mapping[fx.Node, Reading]) -> None:
        """Let tensors be read directly."""
        self.provided.update((node, (code, reading)) for node, reading in readings.items())
        self._codes.clear()

    def codes_of(self, node: fx.Node) -> frozenset[Code] | None:
        """Return the codes that a tensor is read from; None if it can't be read."""
        if node not in self._codes:
            self._codes[node] = None
            self._codes[node] = self._found(node)
        return self._codes[node]

    def read(self, node: fx.Node, editor: Editor, before: fx.Node) -> fx.Node:
        """Compute a tensor from codes, once: before its first reader, for ops come in the order of the graph."""
        if node not in self._read:
            self._read[node] = self._made(node, editor, before)
        return self._read[node]

    def _made(self, node: fx.Node, editor: Editor, before: fx.Node) -> fx.Node:
        if node in self.provided:
            _, reading = self.provided[node]
            return reading(editor, before)
        if node.target is operator.getitem:
            return self._dropped(node_at(node, 0), editor, before)
        made = {each: self.read(each, editor, before) for each in self._coded_sources(node)}
        where: Any = {"before": before, "block_of": node}
        if node.target in _VIEWS:
            # a reading may have another layout
            return editor.insert(torch.reshape, made[node_at(node, 0)], shape=tuple(shape_of(node)), **where)
        return editor.copy(node, made, **where)

    def _found(self, node: fx.Node) -> frozenset[Code] | None:
        if node in self.provided:
            return frozenset([self.provided[node][0]])
        if node.op != "call_function" or node in self._step.gradients or not self._step.is_float(node):
            return None
        if node.target is operator.getitem:
            op = node_at(node, 0)
            is_dropped = op.target is aten.native_dropout.default and node.args[1] == 0
            return self.codes_of(node_at(op, 0)) if is_dropped else None
        sources = node.all_input_nodes
        is_view = len(sources) == 1 and self._step.base[node] is not node and node.target not in _OF_MEMORY
        is_first_power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 1
        if is_view or is_first_power or node.target in _PASSED_THROUGH:
            return self.codes_of(sources[0]) if self._step.is_float(sources[0]) else None
        parts = self._coded_sources(node)
        exact = set(sources) - parts.keys()
        if not parts or not all(self._is_at_hand(each, node) for each in exact):
            return None
        together = frozenset().union(*parts.values())
        is_quotient = node.target is aten.div.Tensor and parts.keys() == {sources[0]} and node.args[0] is sources[0]
        is_product = (
            node.target is aten.mul.Tensor
            and len(sources) == sum(isinstance(arg, fx.Node) for arg in node.args)
            and len(together) == sum(map(len, parts.values()))
        )
        if node.target not in _SUMS and not is_quotient and not is_product:
            return None
        self.exact |= exact
        return together

    def _coded_sources(self, node: fx.Node) -> dict[fx.Node, frozenset[Code]]:
        sources = node.all_input_nodes
        found = {each: self.codes_of(each) for each in sources if len(sources) == 1 or not _is_small(each, node)}
        return {each: codes for each, codes in found.items() if codes is not None}

    def _dropped(self, dropout: fx.Node, editor: Editor, before: fx.Node) -> fx.Node:
        mask = next(each for each in dropout.users if each.args[1] == 1)
        x, p = self.read(node_at(dropout, 0), editor, before), dropout.args[1]
        return editor.insert(_dropped, x, mask, before=before, block_of=dropout, p=p)

    def _is_at_hand(self, source: fx.Node, node: fx.Node) -> bool:
        """Tell whether a tensor is there in the backward pass, or can be kept for hardly any bytes."""
        if not self._step.memories(source) or _is_small(source, node):
            return True
        # a mask is read exactly by the gradient of its own op
        is_number = self._step.is_float(source)
        return not is_number and any(each.source is source for each in self._step.reads)


@dataclass(eq=False)
class Rewrite:
    """One code, and its reads by ops with a formula of their own; an op that is linear in the tensor needs no formula.

    `bias` is a bound of the bias of the readings, see `rmm_linear.planning.coding.CodedTensor`.
    """

    code: Code
    serves: Sequence[Read] = field(default_factory=list)
    bias: float = 0.0

    def provided(self) -> dict[fx.Node, Reading]:
        """The tensors that other ops can read from the code: the coded tensor."""
        return {self.code.node: self.code.read}

    def are_joint(self, first: fx.Node, last: fx.Node) -> bool:
        """Tell whether two ops of `serves` may read the code in one path, for there is a formula for both."""
        return False

    def encode(self, editor: Editor) -> None:
        """Write the code into the forward pass."""
        self.code.encode(editor)

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        """Let an op of `serves` read from the code; ops come in the order of the graph."""
        raise NotImplementedError


def _is_small(source: fx.Node, node: fx.Node) -> bool:
    return shape_of(source).numel() * _SMALL <= shape_of(node).numel()


def _dropped(x: Tensor, mask: Tensor, *, p: float) -> Tensor:
    return x * mask * (1 / (1 - p) if p < 1 else 0.0)
