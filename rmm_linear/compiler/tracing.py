"""Trace a graph of Dynamo, forward and backward, into AOTAutograd's joint graph.

Dynamo has followed the user's Python code already: its graph calls functions of torch on tensors, and that is all. The
trace runs it on fake tensors, which have shapes and no contents, and records the ops that eager mode would run, free of
in-place writes. `rmm_linear.compiler.joint_graph` turns the result into the graph that planners see.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils.checkpoint import checkpoint

from rmm_linear.autocasting import Autocast, weights_cast_once
from rmm_linear.compiler.fake_memory import eager_peak
from rmm_linear.compiler.shared_sketches import share_sketches
from rmm_linear.compiler.torch_private import (
    DataDependentOutputException,
    DispatchKey,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    aot_export_joint_with_descriptors,
    aot_options,
    checks_are_ops,
    compile_lock,
    decompositions,
    draw_by_seeds,
    line_of,
    renew_values,
    require,
    suggest_memory_format,
)
from rmm_linear.errors import CaptureError

# Dynamo's names begin with a function's argument or a method's object, and may read a module's dicts (`__getattr__`).
_NO_NAME = re.compile(
    r"^[LG]\['[^']*'\](?:\.__closure__\[\d+\]\.cell_contents|\.__self__|\._orig_mod)*\.?"
    r"|\b(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['([^']*)'\]"
)
# Batch norms -> the place of the argument whose layout is that of the first result
_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten._native_batch_norm_legit.default: 0,
    torch.ops.aten._native_batch_norm_legit.no_stats: 0,
    torch.ops.aten._native_batch_norm_legit_functional.default: 0,
    torch.ops.aten._native_batch_norm_legit_no_training.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
}
# Ops whose result has no contents yet.
_NEW_MEMORY = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
_GROUPED_MM = (
    "Experts in one grouped_mm are captured in bfloat16 alone: train in bfloat16, or choose another way to run them"
    ' (transformers: `model.set_experts_implementation("batched_mm")`)'
)
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@dataclass(frozen=True)
class Returned:
    """One of the values that a graph returns.

    Attributes:
        kind: "result" (computed), "input" (an input itself), "view of input", "view of result", or "constant" (no
            tensor).
        index: Which result or input.
        value: The constant; of a view size, stride, offset from its base, and whether it is differentiated.
    """

    kind: str
    index: int = 0
    value: Any = None


@dataclass(frozen=True)
class Traced:
    """A graph of Dynamo as AOTAutograd's joint graph.

    Attributes:
        joint: Forward and backward pass; "desc" in the meta of placeholders and outputs describes them.
        inputs: The fake inputs, one for each argument that is a tensor, with a name as "encoder.0.weight" for each.
        differentiable: For each result, whether its gradient is an input of the joint graph.
        has_gradient: For each result, whether it requires a gradient.
        blocks: The module that each node of the joint graph belongs to.
        has_contents: Whether the arguments are real tensors, of a size that this machine has room for.
    """

    joint: fx.GraphModule
    inputs: tuple[Tensor, ...]
    returned: tuple[Returned, ...]
    differentiable: tuple[bool, ...]
    has_gradient: tuple[bool, ...]
    names: tuple[str, ...]
    blocks: Mapping[fx.Node, str]
    has_contents: bool

    def copy(self) -> "Traced":
        """Copy the joint graph, which may then be changed; the copy has the same fake tensors."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.joint.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        blocks = {copies[node]: name for node, name in self.blocks.items()}
        return replace(self, joint=fx.GraphModule(self.joint, graph), blocks=blocks)


def trace(
    module: fx.GraphModule,
    arguments: Sequence[Any],
    *,
    loss_alone: bool = True,
    backward_autocast: Autocast = (),
    draws_by_seeds: bool = False,
) -> Traced:
    """Trace a graph of Dynamo, with its forward pass under autocast as it is now.

    Its checkpoints are inlined (`inline_checkpoints`), and its arguments are tensors, which may be fake, and numbers.
    With `draws_by_seeds`, random ops are traced as ops that draw by seeds, as Inductor draws.

    Raises:
        CaptureError: If it can't be traced; the error names the line and a remedy.
        MemoryError: If there is too little memory.
    """
    function = _Function(module, arguments, loss_alone=loss_alone)
    try:
        joint = _joint_graph(function, backward_autocast, draws_by_seeds=draws_by_seeds)
    except MemoryError:
        raise
    except Exception as error:
        explained: CaptureError = _explained(error)
        raise explained from error
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors = [node for node, argument in zip(placeholders, arguments, strict=True) if isinstance(argument, Tensor)]
    return Traced(
        joint,
        function.inputs,
        function.returned,
        function.differentiable,
        function.has_gradient,
        tuple(map(_name, tensors)),
        _blocks(joint),
        not any(isinstance(a, FakeTensor) or a.is_meta for a in arguments if isinstance(a, Tensor)),
    )


def inline_checkpoints(module: fx.GraphModule) -> int:
    """Let the bodies of `torch.utils.checkpoint` run as part of a graph: the plan takes the checkpoints' place.

    The graph is changed in place; the result is the number of its checkpoints.
    """
    found = 0
    # marked, so that `eager_peak_of` runs them as checkpoints
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
            continue
        name = str(node.args[0].target)
        found += 1 + inline_checkpoints(getattr(module, name))
        _, kwargs = require(type(node.target), "divide_kwargs")(node.kwargs)
        with module.graph.inserting_before(node):
            body = module.graph.call_module(name, node.args[1:], kwargs)
        body.meta["is_checkpoint"] = True
        node.replace_all_uses_with(body)
        module.graph.erase_node(node)
    if found:
        module.recompile()
    return found


def eager_peak_of(module: fx.GraphModule, arguments: Sequence[Any], *, loss_alone: bool) -> int | None:
    """Tell the most bytes that a graph has in memory at any time in eager mode; None if that can't be found out."""
    function = _Function(module, arguments, loss_alone=loss_alone)
    function.interpreter = Checkpointing

    def run() -> list[Tensor]:
        results = function(*function.inputs)
        return [result for result, is_one in zip(results, function.differentiable, strict=True) if is_one]

    try:
        with compile_lock(), torch.enable_grad(), _as_eager_runs_it(), torch.random.fork_rng(devices=[]), function.mode:
            return eager_peak(run, function.inputs)
    except Exception:
        # a number for people, which no plan needs
        return None


class Checkpointing(fx.Interpreter):
    """Runs a graph with the checkpoints that it had before they were inlined."""

    def run_node(self, n: fx.Node) -> Any:
        if not n.meta.get("is_checkpoint"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return checkpoint(getattr(self.module, str(n.target)), *args, use_reentrant=False, **kwargs)


class _Function(nn.Module):
    """A graph of Dynamo as a function of tensors alone, which returns new tensors alone."""

    interpreter: type[fx.Interpreter] = fx.Interpreter

    def __init__(self, module: fx.GraphModule, arguments: Sequence[Any], *, loss_alone: bool) -> None:
        super().__init__()
        self.mode = _FakeMode()
        self.inputs = tuple(_fake(argument, self.mode) for argument in arguments if isinstance(argument, Tensor))
        # in a tuple: its tensors are constants of the trace, and not this module's own
        self._hidden = (_on_cpu(module, arguments),)
        self._arguments = [None if isinstance(argument, Tensor) else argument for argument in arguments]
        self._places = [place for place, argument in enumerate(arguments) if isinstance(argument, Tensor)]
        self._are_leaves = [tensor.is_leaf for tensor in self.inputs]
        self._loss_alone = loss_alone
        self._has_cast_cache = torch.is_autocast_cache_enabled()
        self.returned: tuple[Returned, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.has_gradient: tuple[bool, ...] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = list(self._arguments)
        for place, tensor, is_leaf in zip(self._places, tensors, self._are_leaves, strict=True):
            # torch gives the trace's inputs a history, and autocast casts tensors with a history anew for each use
            if is_leaf and type(tensor.grad_fn).__name__ == "Error":
                tensor.detach_().requires_grad_()
            arguments[place] = tensor
        with weights_cast_once(self._has_cast_cache):
            values = self.interpreter(self._hidden[0]).run(*arguments)
        found = {id(tensor): Returned("input", place) for place, tensor in enumerate(tensors)}
        owner: dict[int, int] = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(tensors)}
        storages: set[int] = set()
        is_loss = [isinstance(v, Tensor) and v.requires_grad and not v.dim() and v.is_floating_point() for v in values]
        wholes = _wholes(values)
        returned: list[Returned] = []
        results: list[Tensor] = []
        differentiable, has_gradient = [], []
        for value, is_scalar in zip(values, is_loss, strict=True):
            if not isinstance(value, Tensor):
                returned.append(Returned("constant", value=value))
                continue
            if id(value) not in found:
                memory = value.untyped_storage()._cdata
                owned = owner.get(memory)
                whole = None if owned is not None else wholes.get(memory)
                if owned is not None and _is_view(value, tensors[owned]):
                    found[id(value)] = Returned("view of input", owned, _layout(value, tensors[owned]))
                elif whole is not None and whole is not value and _is_view(value, whole):
                    # the place of the whole may not be known yet
                    found[id(value)] = Returned("view of result", id(whole), _layout(value, whole))
                else:
                    found[id(value)] = Returned("result", len(results))
                    is_one = value.requires_grad and (is_scalar or not (self._loss_alone and any(is_loss)))
                    # parts of one memory that is not returned as a whole get memory of their own
                    result = value.clone() if memory in storages or owned is not None else value
                    storages.add(memory)
                    differentiable.append(is_one)
                    has_gradient.append(value.requires_grad)
                    results.append(result if is_one else result.detach())
            returned.append(found[id(value)])
        self.returned = tuple(
            replace(leaf, index=found[leaf.index].index) if leaf.kind == "view of result" else leaf for leaf in returned
        )
        self.differentiable, self.has_gradient = tuple(differentiable), tuple(has_gradient)
        return tuple(results)


def _wholes(values: Sequence[Any]) -> dict[int, Tensor]:
    """The first tensor that fills each memory, and of which others may be views."""
    found: dict[int, Tensor] = {}
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            is_whole = value.storage_offset() == 0 and value.numel() * value.element_size() == storage.nbytes()
            # a stride of 0 is an expanded tensor's
            if is_whole and 0 not in value.stride():
                found.setdefault(storage._cdata, value)
    return found


def _is_view(value: Tensor, base: Tensor) -> bool:
    is_alike = value.dtype == base.dtype and value.is_conj() == base.is_conj() and value.is_neg() == base.is_neg()
    return is_alike and (base.requires_grad or not value.requires_grad)


def _layout(value: Tensor, base: Tensor) -> Any:
    offset = value.storage_offset() - base.storage_offset()
    return value.size(), value.stride(), offset, value.requires_grad


@contextlib.contextmanager
def _as_eager_runs_it() -> Iterator[None]:
    """Trace the ops that eager mode runs: a trace replaces some ops by Python code with other roundings."""
    # Batch norms alone are left replaced: their buffers' updates would be lost otherwise.
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    removed: list[tuple[Any, Any, Any]] = []
    # an op that was not looked up before has no Python code
    packets = [packet for packet in list(vars(torch.ops.aten).values()) if isinstance(packet, OpOverloadPacket)]
    ops = [(packet.__name__, op) for packet in packets for op in list(vars(packet).values())]
    for name, op in ops:
        if not isinstance(op, OpOverload) or "batch_norm" in name:
            continue
        for key in keys:
            if key in op.py_kernels:
                removed.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    # a seed that is drawn and left, since another layer's is shared, moves the generator as in eager mode
    draw_seed = torch.ops.rmm_linear.draw_seed.default
    draw_seed._nondeterministic_seeded = True
    try:
        yield
    finally:
        draw_seed._nondeterministic_seeded = False
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _joint_graph(function: _Function, backward_autocast: Autocast, *, draws_by_seeds: bool) -> fx.GraphModule:
    states = [{"device_type": kind, "dtype": dtype} for kind, dtype in backward_autocast]
    with contextlib.ExitStack() as stack:
        stack.enter_context(compile_lock())
        stack.enter_context(torch.enable_grad())
        if not draws_by_seeds:
            stack.enter_context(_as_eager_runs_it())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(checks_are_ops())
        stack.enter_context(aot_options(backward_pass_autocast=states or "off"))
        stack.enter_context(fx.traceback.preserve_node_meta())
        table = decompositions(of_random_ops=True) if draws_by_seeds else None
        joint = aot_export_joint_with_descriptors(stack, function, function.inputs, decompositions=table).graph_module
    for node in joint.graph.nodes:
        # checks return nothing
        node.meta.setdefault("val", None)
    if draws_by_seeds:
        draw_by_seeds(joint)
    is_changed = not draws_by_seeds and _draw_as_memory_lies(joint)
    if share_sketches(joint, keeps_draws=not draws_by_seeds) or is_changed:
        joint.recompile()
        renew_values(joint)
    return joint


def _draw_as_memory_lies(joint: fx.GraphModule) -> bool:
    """Let dropouts draw in the order in which memory lies; return whether the graph has changed.

    Out of place, bernoulli draws row by row. Dropout calls the in-place op on new memory: the same numbers, in other
    places, if the memory lies as a transposed tensor.
    """
    is_changed = False
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        memory = node.args[0]
        strides = memory.meta["val"].stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if memory.target not in _NEW_MEMORY or order == sorted(order):
            continue
        inverse, is_changed = sorted(order, key=order.__getitem__), True
        permute, graph = torch.ops.aten.permute.default, joint.graph
        with graph.inserting_before(node):
            laid = graph.call_function(permute, (memory, order))
        with graph.inserting_after(node):
            drawn = graph.call_function(permute, (node, inverse))
        node.replace_all_uses_with(drawn)
        drawn.args, node.args = (node, inverse), (laid, *node.args[1:])
        for view in (laid, drawn):
            view.meta = node.meta.copy()
    return is_changed


class _FakeMode(FakeTensorMode):
    """Remembers the properties of the results of pointwise ops and views, which takes a third off a capture with codes.

    Of other ops, results that are returned a second time would no longer share memory as the op's results do.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # until `dispatch` tells otherwise
        self.cache_enabled = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = isinstance(func, OpOverload) and func.is_view
        self.cache_enabled = is_view or torch.Tag.pointwise in getattr(func, "tags", ())
        found: Any = super().dispatch(func, types, args, kwargs)
        is_norm = func in _BATCH_NORMS and isinstance(found, tuple) and found[0] is not None
        if not is_norm or found[0].device.type != "cpu":
            return found
        # a fake result has the strides of the input or the gradient; a result of the kernel has one of two layouts
        layout = suggest_memory_format(args[_BATCH_NORMS[func]])
        return (torch.empty_like(found[0], memory_format=layout), *found[1:])


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor of the same shape without contents; on the CPU for one that is on no device."""
    if not tensor.is_meta and not isinstance(tensor, FakeTensor):
        return mode.from_tensor(tensor)
    device = "cpu" if tensor.is_meta else tensor.device
    with mode, torch.enable_grad():
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )
        return fake if tensor.is_leaf else fake.view_as(fake)


def _on_cpu(module: fx.GraphModule, arguments: Sequence[Any]) -> fx.GraphModule:
    """The same graph for the CPU, if its arguments are on no device: planning needs shapes alone."""
    if not any(isinstance(argument, Tensor) and argument.is_meta for argument in arguments):
        return module
    meta, cpu = torch.device("meta"), torch.device("cpu")
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda leaf: cpu if leaf == meta else leaf)
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda leaf: cpu if leaf == meta else leaf)
    return fx.GraphModule(module, graph)


def _name(placeholder: fx.Node) -> str:
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", placeholder.name)
    return _NO_NAME.sub(r"\1", name() if callable(name) else name) or placeholder.name


def _blocks(joint: fx.GraphModule) -> dict[fx.Node, str]:
    found = {}
    for node in joint.graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        found[node] = _NO_NAME.sub(r"\1", path)
    return found


def _explained(error: Exception) -> CaptureError:
    """Name the line where a trace failed, and a remedy."""
    told = str(error)
    line = line_of(told)
    where = f" at {line}" if line else ""
    if isinstance(error, _DATA_DEPENDENT):
        return CaptureError(
            f"the step depends on the contents of a tensor{where}; a capture has none. Checkpoint the blocks without"
            " such code one by one (`checkpoint_model(block, ...)`), or replace the branch by `torch.where`. For"
            " torch.compile a Python float that changes from call to call is such a tensor: pass a tensor in its place"
        )
    hint = hint_for(told, "Checkpoint the parts that can one by one")
    return CaptureError(f"the step can't be captured{where}: {type(error).__name__}: {told}. {hint}")


def hint_for(told: str, otherwise: str) -> str:
    """Return a remedy for the text of an error, or a general remedy for an unknown error."""
    return _GROUPED_MM if "grouped_mm" in told else otherwise
