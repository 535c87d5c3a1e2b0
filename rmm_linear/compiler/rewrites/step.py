"""A training step as rewrites see it: which ops of the backward pass read which tensors of the forward pass."""

import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rmm_linear.autocasting import autocast_as
from rmm_linear.compiler.costs import COLLECTIVES, described, tensors_in
from rmm_linear.compiler.fake_memory import memories_of, tensors_of
from rmm_linear.compiler.torch_private import OpOverload, fake_mode_of
from rmm_linear.planning.graph import reached

# Linear in a gradient, though autograd saves it for its shape or for another derivative, or stops there, or refuses
# complex numbers.
_LINEAR = {"_fft_r2c", "detach", "gather", "index_add", "put", "select_scatter", "slice_scatter", "take"}
# Linear in a gradient, unless the arguments at all of these places are gradients.
_UNLESS = {
    "convolution": (0, 1),
    **dict.fromkeys(("_linalg_solve_ex", "linalg_lu_solve", "linalg_solve_triangular"), (0,)),
    **dict.fromkeys(("cholesky_solve", "xlogy"), (1,)),
}
# Not linear, though autograd takes their slopes for constant.
_STEPS = {"ceil", "floor", "fmod", "frac", "remainder", "round", "sign", "trunc"}
# Constants in the shape of a gradient.
_CONSTANTS = re.compile(r"aten\.(new_\w+\.|\w+_like\.|fill\.Scalar|zero\.|bernoulli\.p)")
# Libraries other than torch's own ops whose ops are linear, unless they reduce by another function than a sum.
_LINEAR_LIBRARIES = {"rmm_linear", *COLLECTIVES}
# Types of `grad_fn` where autograd has no formula.
_UNKNOWN = {"NoneType", "NotImplemented"}
# Elementwise, and without torch's tag.
UNTAGGED = {getattr(torch.ops.aten, name).default for name in ("_to_copy", "mish_backward", "softplus_backward")}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Read(NamedTuple):
    """An op that depends on gradients reads a tensor of the forward pass, or one that is computed from such tensors."""

    reader: fx.Node
    source: fx.Node


class Step:
    """A joint graph, a functional one, and the reads of its backward pass.

    Attributes:
        blocks: The module that each node belongs to.
        gradients: Nodes that depend on a tangent, the placeholder of the gradient of a result.
        number: The place of each node in the graph.
        base: For each node, the node that writes the memory in which its value lies.
        reads: The reads of ops that depend on gradients, in the order of the ops.
        input: An input of a dtype that codes know; None if there is none.
    """

    def __init__(self, joint: fx.GraphModule, tangents: Collection[fx.Node], blocks: Mapping[fx.Node, str]) -> None:
        self.joint, self.blocks = joint, blocks
        self.mode = fake_mode_of(node.meta.get("val") for node in joint.graph.nodes)
        self.gradients: set[fx.Node] = set(tangents)
        self.number = {node: number for number, node in enumerate(joint.graph.nodes)}
        self.base: dict[fx.Node, fx.Node] = {}
        self.reads: list[Read] = []
        self._begin = len(self.number)
        self._memories: dict[fx.Node, frozenset[fx.Node]] = {}
        inputs = [node for node in joint.graph.nodes if node.op == "placeholder" and node not in self.gradients]
        self.input = next((node for node in inputs if self._is_float(node)), None)
        writer: dict[int, fx.Node] = {}
        returned: set[fx.Node] = set()
        for node in joint.graph.nodes:
            if node.op == "output":
                returned = {each for each in node.all_input_nodes if each not in self.gradients}
                break
            value = node.meta.get("val")
            is_tensor = isinstance(value, Tensor)
            self.base[node] = writer.setdefault(value.untyped_storage()._cdata, node) if is_tensor else node
            if any(source in self.gradients for source in node.all_input_nodes):
                self.gradients.add(node)
                self._begin = min(self._begin, self.number[node])
                self.reads += [Read(node, each) for each in node.all_input_nodes if each not in self.gradients]
        # the caller keeps results
        self._kept_anyway = {self.base[node] for node in returned}

    def memories(self, source: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes of the forward pass whose memory is kept if the backward pass reads a tensor exactly."""
        if source not in self._memories:
            base = self.base[source]
            if base.op != "call_function" or base in self._kept_anyway:
                found: frozenset[fx.Node] = frozenset()
            elif self.number[base] < self._begin:
                found = frozenset([base])
            else:
                found = frozenset().union(*map(self.memories, base.all_input_nodes))
            self._memories[source] = found
        return self._memories[source]

    def is_float(self, node: fx.Node) -> bool:
        """Tell whether a node is a tensor of a dtype that codes know, on the device of the inputs."""
        device = None if self.input is None else self.input.meta["val"].device
        return self._is_float(node) and node.meta["val"].device == device

    @staticmethod
    def _is_float(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.dtype in FLOATS

    def leads_to(self, first: fx.Node, last: fx.Node) -> bool:
        """Tell whether an op depends on another one through gradients."""
        end = self.number[last]
        return last in reached([first], lambda node: [u for u in node.users if self.number.get(u, math.inf) <= end])

    def bent(self, readers: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Yield ops that are not linear in noisy gradients that they read, so that their results are biased.

        The readers are ops that read codes, where noise comes in.
        """
        noisy = set(readers)
        # layers of one kind have the same ops
        known: dict[str, bool] = {}
        for node in self.number:
            found = noisy.intersection(node.all_input_nodes)
            if found and node.op == "call_function" and not _CONSTANTS.match(str(node.target)):
                # a comparison is named, and not the ops that follow
                if not isinstance(value := node.meta["val"], Tensor) or _is_number(value):
                    noisy.add(node)
                if isinstance(node.target, OpOverload):
                    read = {each: (each.meta["val"], each in found) for each in node.all_input_nodes}
                    args = fx.node.map_arg((node.args, node.kwargs), read.__getitem__)
                    key = f"{node.target} {list(node.kwargs)} {described(args)}"
                    if key not in known:
                        known[key] = self._is_linear(node, node.target, found)
                    if not known[key]:
                        yield node
                elif node.target is not operator.getitem and not str(node.target).endswith("backward"):
                    # a kernel, or an op that takes a function
                    yield node

    def _is_linear(self, node: fx.Node, op: OpOverload, gradients: set[fx.Node]) -> bool:
        """Whether autograd knows an op's derivative, and would save none of the gradients, nor a result, for it."""
        given = dict(zip((argument.name for argument in op._schema.arguments), node.args, strict=False)) | node.kwargs
        others = [value for name, value in given.items() if not name.startswith("grad")]
        name = op.overloadpacket.__name__
        if op.namespace in _LINEAR_LIBRARIES:
            return given.get("reduce_op", "sum") in ("sum", "avg")
        if op.namespace != "aten" or name in _STEPS or given.get("rounding_mode") is not None:
            return False
        if name == "copy" and _is_number(node.meta["val"]):
            return True
        if name in _LINEAR or (name in _UNLESS and not gradients.issuperset(node.args[each] for each in _UNLESS[name])):
            return True
        # the gradients of a backward op are named so
        if gradients.isdisjoint(pytree.tree_leaves(others)):
            return True
        made = {each: each.meta["val"] for each in node.all_input_nodes}
        saved: dict[int, Tensor] = {}
        with (
            autocast_as((), {made[each].device.type for each in gradients}),
            self.mode,
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: saved.setdefault(tensor.untyped_storage()._cdata, tensor), lambda tensor: tensor
            ),
        ):
            made |= {each: made[each].detach().requires_grad_() for each in gradients}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            try:
                results = tensors_in(op(*args, **kwargs))
            except RuntimeError:
                return False
        if any(type(each.grad_fn).__name__ in _UNKNOWN for each in results):
            return False
        own = {each.untyped_storage()._cdata for each in (*results, *(made[each] for each in gradients))}
        return all(map(_is_number, results)) and own.isdisjoint(saved)


def _is_number(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def node_at(node: fx.Node, place: int) -> fx.Node:
    """Return an argument of a node that is a node too."""
    argument = node.args[place]
    assert isinstance(argument, fx.Node)
    return argument


def size_bytes(node: fx.Node) -> int:
    """Return the bytes of the memory of a node's values."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(node)}.values())


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node that is a tensor."""
    return node.meta["val"].shape


def ancestors(step: Step, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes in whose memory a view lies, from the node itself to the node that wrote the memory."""
    while True:
        yield node
        if step.base[node] is node:
            return
        (memory,) = memories_of(node)
        node = next(each for each in node.all_input_nodes if memory in memories_of(each))
