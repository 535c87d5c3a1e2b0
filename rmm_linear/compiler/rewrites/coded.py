"""Codes of nodes of a joint graph: made after the node in the forward pass, read before a node of the backward pass."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import codes
from rmm_linear.compiler.rewrites.codes import Layout
from rmm_linear.compiler.rewrites.editing import Editor

# Fewer rows have steps that take more than they are worth.
_FEWEST_ROWS = 128


@dataclass(frozen=True)
class Shape:
    """How a dense tensor is laid out in rows and columns, as its memory is.

    Attributes:
        order: Its dimensions in the order of its memory; `sizes` has the same order.
        layout: Rows and columns: the last dimension in memory, which are the channels of a channels_last image; or the
            last two of another transposed view of more than three, as the heads of an attention are.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    @classmethod
    def of(cls, x: Tensor) -> "Shape | None":
        """Lay a tensor out; None if it has too few rows for a code."""
        if x.dim() < 2 or x.numel() == 0 or 0 in x.stride():
            return None
        strides = x.stride()
        order = tuple(sorted(range(x.dim()), key=lambda place: (-strides[place], place)))
        sizes = tuple(x.shape[place] for place in order)
        last = 2 if order != tuple(range(x.dim())) and x.dim() > 3 and order[-1] != 1 else 1
        columns = math.prod(sizes[-last:])
        rows = x.numel() // columns
        return None if rows < _FEWEST_ROWS else cls(order, sizes, x.dtype, Layout.of(rows, columns))

    def rows_of(self, x: Tensor) -> Tensor:
        """Lay the tensor out as (rows, columns)."""
        return x.permute(self.order).reshape(self.layout.rows, self.layout.columns)

    def tensor_of(self, rows: Tensor) -> Tensor:
        """Undo `rows_of`, in the dtype of the rows."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return rows.view(self.sizes).permute(inverse)


@dataclass(eq=False)
class Code:
    """The code of a tensor.

    Attributes:
        node: The node that is coded; the code of a norm is of the node before weight and bias.
        kind: The kind of ops that it is for.
        bits: 8 or 4; 1 for a mask.
        tail: Where the tensor is cut, its excess being coded apart; None if it is not cut.
        cube: See `rmm_linear.compiler.rewrites.codes.encode_with_tail`.
        parts: The nodes of the code, as `rmm_linear.compiler.rewrites.codes.encode` returns them.
    """

    node: fx.Node
    kind: str
    bits: int
    shape: Shape
    tail: float | None = None
    cube: float = 0.0
    key: fx.Node = field(init=False)
    parts: list[fx.Node] = field(init=False)

    @property
    def name(self) -> str:
        """The name of the tensor, as `rmm_linear.planning.coding.CodedTensor` has it."""
        return self.node.name

    @property
    def code_bytes(self) -> int:
        """Bytes that are kept."""
        layout = self.shape.layout
        return layout.code_bytes(self.bits) + (4 * layout.groups * layout.columns if self.tail else 0)

    def encode(self, editor: Editor) -> None:
        """Code the node itself."""
        where: Any = {"before": self.node.next, "block_of": self.node, "is_backward": False}
        cut: Any = {"tail": self.tail, "cube": self.cube}
        self.parts = editor.insert(_encode, self.node, self.key, **where, **self.how, **cut)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The nodes that a reading needs: the code's parts, and its key."""
        return *self.parts, self.key

    @property
    def how(self) -> dict[str, Any]:
        """The properties of a code that functions need to write or read it."""
        return {"shape": self.shape, "bits": self.bits}

    def read(self, editor: Editor, before: fx.Node) -> fx.Node:
        """Read the tensor from its code, in its own dtype and layout."""
        return editor.insert(_decode, *self.sources, before=before, block_of=self.node, **self.how)


def _encode(x: Tensor, key: Tensor, *, shape: Shape, bits: int, tail: float | None, cube: float) -> tuple[Tensor, ...]:
    rows = shape.rows_of(x)
    if tail is None:
        return codes.encode(rows, key, shape.layout, bits=bits)
    return codes.encode_with_tail(rows, key, shape.layout, bits=bits, tail=tail, cube=cube)


def _decode(code: Tensor, steps: Tensor, key: Tensor, *, shape: Shape, bits: int) -> Tensor:
    rows = codes.decode(code, steps, key, shape.layout, bits=bits)
    if shape.dtype == torch.float16:
        # a reading may be half a step beyond the largest element
        most = torch.finfo(torch.float16).max
        rows = rows.clamp(-most, most)
    # cast first: Inductor writes the rows, as they lie in memory, and all shapes of the tensor are views of them
    return shape.tensor_of(rows.to(shape.dtype))
