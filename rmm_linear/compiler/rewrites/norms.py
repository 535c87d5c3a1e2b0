"""Codes of norms: of the normalised tensor, x^ = (x - mean) / deviation.

With h = gradient * weight, r = 1 / deviation and D features, the gradient of a LayerNorm is

    r (h - mean(h) - x^ mean(h x^)),

which reads x^ twice: the mean of x~_i x~_i h_i is above that of x^_i x^_i h_i by s_i^2 / 12 h_i, where s_i is the step
of the code, so that r h_i s_i^2 / (12 D) is added. Linear layers read the norm's output, weight x~ + bias, without
bias. An RMSNorm has no mean(h); models write it in single ops, of which the same two products are found.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import codes
from rmm_linear.compiler.rewrites.coded import Code, Shape
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Reading, Readings, Rewrite
from rmm_linear.compiler.rewrites.step import Read, Step, node_at, shape_of

aten = torch.ops.aten
# Linear, and elementwise but for an expanded last dimension.
_UNARY = {aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten._to_copy.default, aten.expand.default}


def candidates(step: Step, bits: int) -> Iterator[Rewrite]:
    """Find norms whose backward passes can read codes."""
    for read in step.reads:
        if read.reader.target is aten.native_layer_norm_backward.default and read.source is read.reader.args[1]:
            yield from _layer_norm(step, read, bits)
    for node in step.joint.graph.nodes:
        if node.target is aten.mul.Tensor and node not in step.gradients and step.is_float(node):
            yield from _rms_norm(step, node, bits)


@dataclass(eq=False)
class LayerNorm(Rewrite):
    """A LayerNorm over the last dimension."""

    norm: fx.Node = field(kw_only=True)

    def encode(self, editor: Editor) -> None:
        mean, rstd = _part(self.norm, 1), _part(self.norm, 2)
        where: Any = {"before": max(mean, rstd).next, "block_of": self.norm, "is_backward": False}
        x, key = node_at(self.norm, 0), self.code.key
        self.code.parts = editor.insert(_encode_normalised, x, mean, rstd, key, **self.code.how, **where)

    def provided(self) -> dict[fx.Node, Reading]:
        return {_part(self.norm, 0): self._output}

    def _output(self, editor: Editor, before: fx.Node) -> fx.Node:
        weight, bias = self.norm.args[2:4]
        given = [each for each in (weight, bias) if isinstance(each, fx.Node)]
        options: Any = {"block_of": self.norm, "has_weight": weight is not None, **self.code.how}
        return editor.insert(_output, *self.code.sources, *given, before=before, **options)

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        weight = [node_at(reader, 5)] if reader.args[5] is not None else []
        sources = node_at(reader, 0), node_at(reader, 4), *self.code.sources, *weight
        results = editor.insert(_layer_norm_backward, *sources, before=reader, **self.code.how)
        for user in list(reader.users):
            editor.replace(user, results[user.args[1]])


class Square(NamedTuple):
    """Two products that read the same tensor, the second one times a sum of the first one over a row.

    Attributes:
        first: A product with a gradient.
        factor: The gradient.
        chain: The sum of the product, and the ops that follow, in order: linear, and elementwise after the sum.
        second: The product with the end of the chain.
    """

    first: Read
    factor: fx.Node
    chain: tuple[fx.Node, ...]
    second: Read


@dataclass(eq=False)
class RMSNorm(Rewrite):
    """An RMSNorm in single ops: x^ = x r, with r, the scale, of a row; its backward pass reads the squares."""

    x: fx.Node = field(kw_only=True)
    scale: fx.Node = field(kw_only=True)
    squares: list[Square] = field(kw_only=True)

    def provided(self) -> dict[fx.Node, Reading]:
        """The output without weight, and the input."""
        return {self.code.node: self.code.read, self.x: self._input}

    def are_joint(self, first: fx.Node, last: fx.Node) -> bool:
        return any((square.first.reader, square.second.reader) == (first, last) for square in self.squares)

    def _input(self, editor: Editor, before: fx.Node) -> fx.Node:
        normalised = self.code.read(editor, before)
        options: Any = {"block_of": self.x, "dtype": self.x.meta["val"].dtype}
        return editor.insert(_quotient, normalised, self.scale, before=before, **options)

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        """Read the input; from the second product, subtract the mean of the product of both errors."""
        square = next(each for each in self.squares if reader in (each.first.reader, each.second.reader))
        if reader is square.first.reader:
            reader.replace_input_with(square.first.source, readings.read(square.first.source, editor, reader))
            return
        source = square.second.source
        reader.replace_input_with(source, readings.read(source, editor, reader))
        where: Any = {"before": reader.next, "block_of": reader}
        variance = editor.insert(_input_variance, self.code.parts[1], self.scale, shape=self.code.shape, **where)
        # a factor of the first product counts as well
        made = {self.x: variance}
        for node in _linear_chain(square.first.source, self.x) or ():
            made[node] = editor.copy(node, made, **where)
        made = {self.x: made[square.first.source]}
        for node in (*(_linear_chain(source, self.x) or ()), *square.chain):
            is_sum = node is square.chain[0]
            made[node] = editor.now(square.factor) if is_sum else editor.copy(node, made, **where)
        product = editor.copy(reader, {}, **where)
        editor.replace(reader, editor.insert(_difference, product, made[square.chain[-1]], made[source], **where))


def _layer_norm(step: Step, read: Read, bits: int) -> Iterator[LayerNorm]:
    x, mean, rstd = read.source, node_at(read.reader, 3), node_at(read.reader, 4)
    norm = node_at(rstd, 0) if rstd.target is operator.getitem else rstd
    is_known = norm.target is aten.native_layer_norm.default and {0, 1, 2} <= {user.args[1] for user in norm.users}
    # statistics over several dimensions are no statistics of a row
    if not is_known or node_at(norm, 0) is not x or len(read.reader.args[2]) != 1 or not step.is_float(x):  # type: ignore[arg-type]
        return
    shape = Shape.of(torch.empty(shape_of(x), dtype=x.meta["val"].dtype, device="meta"))
    if shape is not None:
        yield LayerNorm(Code(x, "norm", bits, shape), [read, Read(read.reader, mean)], norm=norm)


def _rms_norm(step: Step, node: fx.Node, bits: int) -> Iterator[RMSNorm]:
    if len(node.all_input_nodes) != 2 or node.kwargs:
        return
    x, scale = node_at(node, 0), node_at(node, 1)
    if shape_of(x)[-1:] == (1,):
        x, scale = scale, x
    shape = Shape.of(node.meta["val"])
    is_scaled = shape_of(scale) == (*shape_of(x)[:-1], 1) and shape_of(x) == shape_of(node) and shape_of(x)[-1] > 1
    if not _is_divisor(scale) or shape is None or not is_scaled or not step.is_float(x) or not step.memories(x):
        return
    reads = [read for read in step.reads if _linear_chain(read.source, x) is not None]
    squares = [square for read in reads if (square := _square(step, read, reads)) is not None]
    serves = list(dict.fromkeys(read for square in squares for read in (square.first, square.second)))
    # a sum that two products read has two covariances
    if squares and len({square.first for square in squares}) == len(squares):
        yield RMSNorm(Code(node, "norm", bits, shape), serves, x=x, scale=scale, squares=squares)


def _is_divisor(scale: fx.Node) -> bool:
    """Whether a scale is finite and not zero for any row."""
    while scale.target in (aten.detach.default, aten._to_copy.default):
        scale = node_at(scale, 0)
    is_root = scale.target is aten.pow.Tensor_Scalar and scale.args[1] in (-0.5,)
    return is_root or scale.target in (aten.rsqrt.default, aten.reciprocal.default)


def _square(step: Step, first: Read, reads: list[Read]) -> Square | None:
    """Follow a product through a sum over its row to a product that reads the same tensor."""
    reader = first.reader
    factors = [each for each in reader.all_input_nodes if each in step.gradients]
    if reader.target is not aten.mul.Tensor or len(factors) != 1 or shape_of(factors[0]) != shape_of(reader):
        return None
    chain: list[fx.Node] = []
    node = reader
    while len(node.users) == 1:
        (node,) = node.users
        if not chain:
            if node.target is not aten.sum.dim_IntList or not _is_over_rows(node, reader):
                return None
        elif (second := next((read for read in reads if read.reader is node), None)) is not None:
            is_product = node.target is aten.mul.Tensor and shape_of(node) == shape_of(reader)
            return Square(first, factors[0], tuple(chain), second) if is_product else None
        else:
            others = [each for each in node.all_input_nodes if each is not chain[-1]]
            is_scaling = node.target in (aten.mul.Tensor, aten.div.Tensor) and node.args[0] is chain[-1]
            if node.target not in _UNARY and not (is_scaling and not step.gradients.intersection(others)):
                return None
        chain.append(node)
    return None


def _is_over_rows(node: fx.Node, product: fx.Node) -> bool:
    last = len(shape_of(product)) - 1
    dims = [dim % (last + 1) for dim in node.args[1]]  # type: ignore[union-attr, operator]
    return dims == [last] and len(node.args) > 2 and bool(node.args[2])


def _linear_chain(source: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    """The ops from x to a tensor that is linear in it, in order; None if it is not."""
    chain: list[fx.Node] = []
    while source is not x:
        is_power = source.target is aten.pow.Tensor_Scalar and source.args[1] == 1
        is_linear = source.target in _UNARY or source.target is aten.detach.default or is_power
        if not is_linear or len(source.all_input_nodes) != 1 or shape_of(source) != shape_of(x):
            return None
        chain.insert(0, source)
        source = source.all_input_nodes[0]
    return chain


def _part(op: fx.Node, place: int) -> fx.Node:
    return next(user for user in op.users if user.args[1] == place)


def _encode_normalised(
    x: Tensor, mean: Tensor, rstd: Tensor, key: Tensor, *, shape: Shape, bits: int
) -> tuple[Tensor, Tensor]:
    return codes.encode(shape.rows_of((x.to(torch.float32) - mean) * rstd), key, shape.layout, bits=bits)


def _output(
    code: Tensor, steps: Tensor, key: Tensor, *given: Tensor, shape: Shape, bits: int, has_weight: bool
) -> Tensor:
    x = shape.tensor_of(codes.decode(code, steps, key, shape.layout, bits=bits))
    if has_weight:
        x = x * given[0]
    if len(given) > has_weight:
        x = x + given[-1]
    return x.to(shape.dtype)


def _layer_norm_backward(
    gradient: Tensor,
    rstd: Tensor,
    code: Tensor,
    steps: Tensor,
    key: Tensor,
    *weight: Tensor,
    shape: Shape,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    x = shape.tensor_of(codes.decode(code, steps, key, shape.layout, bits=bits))
    variance = shape.tensor_of(codes.error_variance(steps, shape.layout))
    gradient = gradient.to(torch.float32)
    h = gradient * weight[0] if weight else gradient
    covariance = h * variance * (1 / x.shape[-1])
    of_x = rstd * (h - h.mean(-1, keepdim=True) - x * (h * x).mean(-1, keepdim=True) + covariance)
    rows = tuple(range(x.dim() - 1))
    dtype = weight[0].dtype if weight else torch.float32
    return of_x.to(shape.dtype), (gradient * x).sum(rows).to(dtype), gradient.sum(rows).to(dtype)


def _quotient(x: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    return (x / scale).to(dtype)


def _input_variance(steps: Tensor, scale: Tensor, *, shape: Shape) -> Tensor:
    return shape.tensor_of(codes.error_variance(steps, shape.layout)) / (scale * scale)


def _difference(product: Tensor, chain: Tensor, variance: Tensor) -> Tensor:
    return (product - chain * variance).to(product.dtype)
