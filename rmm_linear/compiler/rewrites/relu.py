"""ReLU's mask, a bit an element: its gradient reads the signs of its result alone, and stays exact.

Autograd saves ReLU's result. With the mask in its place, a product that reads the result too can read a code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites.coded import Code, Shape
from rmm_linear.compiler.rewrites.codes import Layout, in_parts, pack, unpack
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Reading, Readings, Rewrite
from rmm_linear.compiler.rewrites.step import Step, node_at

aten = torch.ops.aten


@dataclass(eq=False)
class Mask(Code):
    """A mask of ReLU's result: of the elements that pass the gradient on, which are above zero, or NaN."""

    @property
    def name(self) -> str:
        """Return another name than that of the code that the result may have."""
        return f"mask of {self.node.name}"

    @property
    def code_bytes(self) -> int:
        """Bytes that are kept: a mask has no steps."""
        layout = self.shape.layout
        return layout.group * layout.columns // 8

    def encode(self, editor: Editor) -> None:
        where: Any = {"before": self.node.next, "block_of": self.node, "is_backward": False}
        self.parts = [editor.insert(_mask, self.node, shape=self.shape, **where)]


@dataclass(eq=False)
class Relu(Rewrite):
    """ReLU's gradient from its mask."""

    def provided(self) -> dict[fx.Node, Reading]:
        """None: a mask has the signs alone."""
        return {}

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        sources = node_at(reader, 0), *self.code.parts
        editor.replace(reader, editor.insert(_masked, *sources, before=reader, shape=self.code.shape))


def candidates(step: Step) -> Iterator[Relu]:
    """Find gradients of ReLU."""
    for read in step.reads:
        if read.reader.target is not aten.threshold_backward.default or read.reader.args[1:] != (read.source, 0):
            continue
        relu = read.source
        while relu.target is aten.detach.default:
            # autograd saves an alias of a result
            relu = node_at(relu, 0)
        if relu.target is not aten.relu.default or not step.is_float(relu) or step.memories(relu) != {relu}:
            continue
        shape = Shape.of(relu.meta["val"])
        if shape is not None:
            rows = shape.layout.rows
            layout = Layout(rows, shape.layout.columns, 1, rows + -rows % 8)
            yield Relu(Mask(relu, "activation", 1, replace(shape, layout=layout)), [read])


def _mask(x: Tensor, *, shape: Shape) -> Tensor:
    rows = shape.layout.in_groups(shape.rows_of(x))
    return pack(in_parts(~(rows <= 0), 1), 1)


def _masked(gradient: Tensor, mask: Tensor, *, shape: Shape) -> Tensor:
    is_passed = shape.layout.in_rows(unpack(mask, 1)) != 0
    return shape.tensor_of(torch.where(is_passed, shape.rows_of(gradient), 0.0))
