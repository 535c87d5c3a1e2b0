"""Puts functions of torch into a joint graph: traced, and in the place of an op or beside it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rmm_linear.autocasting import autocast_as
from rmm_linear.compiler.fake_memory import tensors_of
from rmm_linear.compiler.rewrites.step import Step
from rmm_linear.compiler.torch_private import OpOverload, fake_tensor

_Traced = tuple[fx.Graph, Any]
# Ops of derivatives, as ops that Inductor computes in the loop that reads them.
_SIMPLER: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.detach.default: lambda x: x,
    torch.ops.aten.fill.Scalar: lambda x, value: torch.full(x.shape, value, dtype=x.dtype, device=x.device),
}


class Editor:
    """Changes the joint graph of a step."""

    def __init__(self, step: Step) -> None:
        self._graph, self._mode, self._blocks = step.joint.graph, step.mode, step.blocks
        self._traced: dict[Any, _Traced] = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._devices = {
            tensor.device.type for node in step.number if isinstance(tensor := node.meta.get("val"), Tensor)
        }

    def insert(
        self,
        function: Callable[..., Any],
        /,
        *sources: Any,
        before: fx.Node,
        block_of: fx.Node | None = None,
        is_backward: bool = True,
        **options: Any,
    ) -> Any:
        """Put a function of the tensors of some nodes, and of other hashable arguments, before a node of the graph.

        It belongs to the module of the node `block_of`, or else of `before`. Return the node of its result, or a list
        if it returns a tuple.
        """
        values = [node.meta["val"] for node in sources]
        shapes = tuple((value.shape, value.stride(), value.dtype, value.device) for value in values)
        key = (function, shapes, tuple(options.items()))
        if key not in self._traced:
            self._traced[key] = self._trace(function, values, options)
        traced, results = self._traced[key]
        placeholders = [node for node in traced.nodes if node.op == "placeholder"]
        made = dict(zip(placeholders, sources, strict=True))
        memories = {
            _memory(node.meta["val"]): (value.untyped_storage(), value.storage_offset() * value.element_size())
            for node, value in zip(placeholders, values, strict=True)
        }
        for node in traced.nodes:
            if node.op == "call_function":
                made[node] = self._copy(node, made, before, block_of or before, is_backward)
                made[node].meta["val"] = pytree.tree_map_only(
                    Tensor, lambda each: self._alike(each, memories), node.meta["val"]
                )
        return fx.node.map_arg(results, made.__getitem__)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let all readers of a node read another one."""
        old.replace_all_uses_with(new)
        self._replaced[old] = new
        memory = _memory(old.meta["val"])
        waiting = list(new.users)
        while waiting:
            # views of the old node are views of the new one
            node = waiting.pop()
            is_view = any(_memory(tensor) == memory for tensor in tensors_of(node))
            if is_view and node.op == "call_function":
                node.meta["val"] = self._value(node)
                waiting += node.users

    def now(self, node: fx.Node) -> fx.Node:
        """Return the node that has taken a node's place, if one has."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def copy(self, node: fx.Node, made: dict[fx.Node, fx.Node], **where: Any) -> fx.Node:
        """Copy a node, with the inputs replaced that are keys of `made`; `insert` has the other arguments."""
        copy = self._copy(node, made, **where)
        copy.meta["val"] = self._value(copy)
        return copy

    def _copy(
        self, node: fx.Node, made: dict[fx.Node, fx.Node], before: fx.Node, block_of: fx.Node, is_backward: bool = True
    ) -> fx.Node:
        with self._graph.inserting_before(before):
            copy = self._graph.node_copy(node, lambda each: made.get(each, each))
        copy.meta = {"block": block_of.meta.get("block", self._blocks.get(block_of, ""))}
        if is_backward:
            copy.meta["is_backward"] = True
        return copy

    def _alike(self, value: Tensor, memories: dict[int, tuple[torch.UntypedStorage, int]]) -> Tensor:
        """Make a fake tensor like a traced tensor, in a tenth of the time that the op takes on fake tensors."""
        storage = value.untyped_storage()
        memory, begin_bytes = memories.setdefault(
            storage._cdata, (torch.UntypedStorage(storage.nbytes(), device="meta"), 0)
        )
        return fake_tensor(self._mode, value, memory, begin_bytes // value.element_size() + int(value.storage_offset()))

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with self._mode, torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _trace(self, function: Callable[..., Any], values: Sequence[Tensor], options: dict[str, Any]) -> _Traced:
        with autocast_as((), self._devices), self._mode, torch.no_grad():
            inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            module = make_fx(lambda *tensors: function(*tensors, **options), decomposition_table=_SIMPLER)(*inputs)
            ops = (node.target for node in module.graph.nodes)
            if any(isinstance(op, OpOverload) and op._schema.is_mutable for op in ops):
                # derivatives of GELU are computed in place
                module = make_fx(torch.func.functionalize(module), decomposition_table=_SIMPLER)(*inputs)
        module.graph.eliminate_dead_code()
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        constants = [node for node in module.graph.nodes if node.op == "get_attr"]
        assert not constants, f"{function} makes constants"
        return module.graph, output.args[0]


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata
