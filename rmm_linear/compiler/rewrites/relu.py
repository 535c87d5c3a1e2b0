"""ReLU's mask, a bit an element: its gradient reads no more than signs, and stays exact.

Autograd saves what ReLU returned. With the mask in its place, a product that reads the tensor too can read a code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites.coded import Code, Shape
from rmm_linear.compiler.rewrites.codes import Layout, pack, unpack
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Provided, Readings
from rmm_linear.compiler.rewrites.rewrite import Rewrite
from rmm_linear.compiler.rewrites.step import Read, Step, node_at

aten = torch.ops.aten


@dataclass(eq=False)
class Mask(Code):
    """The elements of what ReLU returned that pass the gradient on: they are above zero, or NaN."""

    @property
    def name(self) -> str:
        """A name beside the one of the tensor's own code."""
        return f"mask of {self.node.name}"

    @property
    def code_bytes(self) -> int:
        """Bytes that are kept: a mask has no steps."""
        layout = self.shape.layout
        return layout.group * layout.columns // 8

    def encode(self, editor: Editor) -> None:
        """Make the mask of the node."""
        mask = editor.insert(_mask, self.node, before=self.node.next, block_of=self.node, shape=self.shape)
        self.parts = [mask]


@dataclass(eq=False)
class Relu(Rewrite):
    """ReLU's gradient from its mask."""

    def provided(self) -> dict[fx.Node, Provided]:
        """None: what ReLU returns has a code of its own, if other ops read it."""
        return {}

    def are_joint(self, first: fx.Node, last: fx.Node) -> bool:
        """Tell whether two ops may read the mask in one path: it is exact."""
        return True

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        """Mask the gradient that arrives."""
        gradient = node_at(reader, 0)
        new = editor.insert(
            _masked,
            gradient,
            *self.code.parts,
            before=reader,
            block_of=reader,
            is_backward=True,
            shape=self.code.shape,
        )
        editor.replace(reader, new)


def candidates(step: Step) -> Iterator[Relu]:
    """Find gradients of ReLU.

    Args:
        step: The step.
    """
    reads: dict[fx.Node, list[Read]] = {}
    for read in step.reads:
        if read.reader.target is not aten.threshold_backward.default or read.reader.args[1:] != (read.source, 0):
            continue
        relu = read.source
        while relu.target is aten.detach.default:
            # as autograd saves a result
            relu = node_at(relu, 0)
        if relu.target is aten.relu.default:
            reads.setdefault(relu, []).append(read)
    for relu, own in reads.items():
        shape = Shape.of(relu.meta["val"])
        if step.is_float(relu) and step.memories(relu) == {relu} and shape is not None:
            rows = shape.layout.rows
            layout = Layout(rows, shape.layout.columns, 1, rows + -rows % 8)
            yield Relu(Mask(relu, "activation", 1, replace(shape, layout=layout)), own)


def _mask(x: Tensor, *, shape: Shape) -> Tensor:
    rows = shape.layout.in_groups(shape.rows_of(x))
    return pack((~(rows <= 0)).to(torch.uint8), 1)


def _masked(gradient: Tensor, mask: Tensor, *, shape: Shape) -> Tensor:
    is_passed = shape.layout.in_rows(unpack(mask, 1)) != 0
    return shape.tensor_of(torch.where(is_passed, shape.rows_of(gradient), 0.0))
