"""From a model to a graph: capture one training step, forward and backward, as ops and storages.

The step runs once with tensors that have shapes and no contents. torch's ahead-of-time autograd gives the joint graph,
free of in-place writes; an op of it is a node that fills new memory, views and `getitem` are none. Which storages an op
reads and writes follows from the storages of those hollow tensors, their bytes as well.

What the captured step is:
- Parameters, buffers and the tensors among the arguments are inputs, and lie outside of the budget. A parameter that is
  used under two names is one input.
- Everything in Python happens once, at the capture: the branches that were taken then are taken forever. Where Python
  looks at a number in a tensor (`if mask.all():`), the sample's number decides, and every run checks that its own is
  the same. Shapes that depend on the contents of tensors, and Python's random numbers, cannot be captured.
- If the step returns a scalar that depends on parameters, it is the loss, and nothing else that is returned can be
  differentiated. Otherwise everything returned can.
"""

import contextlib
import operator
import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.checkpointing.costs import cost_of, unit_of
from rmm_linear.checkpointing.graph import Graph, Op, Storage
from rmm_linear.errors import CaptureError

# Reads buffers that it updates, but computes what others read from the batch alone: it may run again after the update.
_UPDATES_BUFFERS = {
    torch.ops.aten._native_batch_norm_legit_functional.default,
}
# With a reduction they return one number in memory as large as that of all numbers, which hollow tensors don't tell.
_REDUCED_IN_PLACE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}
_NOT_THE_USERS = ("/torch/", "rmm_linear/checkpointing/")
# Kernels with a workspace that torch says nothing about.
_HIDDEN_WORKSPACE = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"}
# What a step may return beside tensors.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class Arguments:
    """How a step is called: what is a tensor in its arguments, and all else.

    Attributes:
        spec: The structure of (args, kwargs).
        constants: Leaves that are no tensors, with None in the tensors' places.
        tensors: Places of the tensors among the leaves.
    """

    spec: Any
    constants: tuple[Any, ...]
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple["Arguments", list[Tensor]]:
        """Take arguments apart.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The structure, and the tensors.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, constants, places), [leaves[place] for place in places]

    def together(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put arguments together again.

        Args:
            tensors: The tensors, in the order of `tensors`.

        Returns:
            Positional and keyword arguments.
        """
        leaves = list(self.constants)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Returned:
    """One leaf of what a step returns.

    Attributes:
        kind: "result" (computed), "input" (an input, as it is) or "constant" (no tensor).
        index: Which result or input.
        value: The constant.
    """

    kind: str
    index: int = 0
    value: Any = None


@dataclass(frozen=True)
class Capture:
    """A training step as a graph, and what is needed to run it.

    Attributes:
        graph: What planners see.
        nodes: The node of each op.
        members: For each storage, the nodes whose values are the tensors that lie in it as its op writes them.
        inputs: Placeholders of the inputs: parameters, then buffers, then tensors among the arguments.
        tangents: Placeholder of the gradient of each differentiable result; None where none was asked for.
        results: The node of each result.
        gradients: The node of each input's gradient, None where there is none.
        updates: Pairs of an input's index and the node of its new contents.
        parameter_names: Names of the parameters among the inputs, in order.
        buffer_names: Names of the buffers among the inputs, in order.
        arguments: How the step is called.
        looked_at: Numbers in tensors that Python looked at, with the node of each.
        returned: What it returns, leaf by leaf.
        returned_spec: The structure of what it returns.
        module: The joint graph, with the constants that it needs.
    """

    graph: Graph
    nodes: tuple[fx.Node, ...]
    members: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    updates: tuple[tuple[int, fx.Node], ...]
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    arguments: Arguments
    looked_at: tuple[tuple[fx.Node, Any], ...]
    returned: tuple[Returned, ...]
    returned_spec: Any
    module: fx.GraphModule


class _Step(nn.Module):
    """The step as a function of tensors alone, which returns results alone."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        names: tuple[Sequence[str], Sequence[str]],
        arguments: Arguments,
        numbers: Sequence[Any],
    ) -> None:
        super().__init__()
        # None: write them down
        self.numbers: Sequence[Any] | None = numbers
        # in a list: the model's parameters come in as arguments, and are not this module's own
        self._hidden = [model]
        self._step = step
        self._names = [*names[0], *names[1]]
        self._arguments = arguments
        self.returned: tuple[Returned, ...] = ()
        self.returned_spec: Any = None
        self.differentiable: tuple[bool, ...] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (model,) = self._hidden
        count = len(self._names)
        args, kwargs = self._arguments.together(tensors[count:])
        caller = _Caller(self._step, model)
        state = {f"model.{name}": tensor for name, tensor in zip(self._names, tensors[:count], strict=True)}
        with _Numbers(self.numbers) as self._looked_at:
            value = torch.func.functional_call(caller, state, args, kwargs)
        leaves, self.returned_spec = pytree.tree_flatten(value)
        results: list[Tensor] = []
        returned: list[Returned] = []
        found: dict[int, Returned] = {id(tensor): Returned("input", place) for place, tensor in enumerate(tensors)}
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        scalars = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.requires_grad]
        differentiable: list[bool] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _PLAIN):
                    raise _UnknownResultError(
                        f"the step returns a {type(leaf).__name__}, whose tensors a plan can't hand over: return"
                        " tensors in tuples, lists and dicts (a cache of keys and values: config.use_cache = False)"
                    )
                returned.append(Returned("constant", value=leaf))
                continue
            if id(leaf) not in found:
                found[id(leaf)] = Returned("result", len(results))
                is_loss = leaf.requires_grad and (not scalars or any(leaf is scalar for scalar in scalars))
                # two results in one memory: the second one gets memory of its own
                result = leaf.clone() if leaf.untyped_storage()._cdata in storages else leaf
                storages.add(leaf.untyped_storage()._cdata)
                differentiable.append(is_loss)
                results.append(result if is_loss else result.detach())
            returned.append(found[id(leaf)])
        self.returned = tuple(returned)
        self.differentiable = tuple(differentiable)
        # a fresh tensor each: what is looked at may be an input, or returned as well
        return *results, *(tensor.detach().clone() for tensor in self._looked_at.tensors)

    def find_numbers(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run, and return the numbers that Python looked at."""
        self.forward(*tensors)
        return tuple(self._looked_at.found)


class _Numbers(TorchDispatchMode):
    """Answers with numbers of the sample where Python looks into a tensor; without any, writes them down."""

    def __init__(self, numbers: Sequence[Any] | None) -> None:
        super().__init__()
        self.numbers = numbers
        self.tensors: list[Tensor] = []
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        if self.numbers is None:
            self.found.append(func(*args))
            return self.found[-1]
        self.tensors.append(args[0])
        if len(self.tensors) > len(self.numbers):
            raise _UnknownNumberError
        return self.numbers[len(self.tensors) - 1]


class _UnknownNumberError(Exception):
    pass


class _UnknownResultError(Exception):
    pass


class _Caller(nn.Module):
    def __init__(self, step: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._step = step
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self.model, *args, **kwargs)

    def train(self, mode: bool = True) -> "_Caller":
        # the model's own modes stay
        self.training = mode
        return self


@contextlib.contextmanager
def _as_eager_runs_it() -> Iterator[None]:
    """Trace what eager mode runs: while tracing, torch replaces some ops by Python code with other roundings."""
    # Batch norms alone are left replaced: their buffers' updates would be lost otherwise.
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    removed: list[tuple[Any, Any, Any]] = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or "batch_norm" in packet:
            continue
        op: Any = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        for key in keys:
            if op is not None and key in op.py_kernels:
                removed.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


class _Blocks:
    """Which module runs at which sequence number of autograd: forward ops and their backward ops share one."""

    def __init__(self, model: nn.Module) -> None:
        self._spans: list[tuple[int, int, str]] = []
        self._open: list[tuple[str, int]] = []
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._open.append((name, torch._C._autograd._get_sequence_nr()))

        return hook

    def _leave(self, *_: Any) -> None:
        name, first = self._open.pop()
        self._spans.append((first, torch._C._autograd._get_sequence_nr(), name))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def of_sequence_numbers(self) -> dict[int, str]:
        found: dict[int, str] = {}
        # inner modules end before the modules that hold them
        for first, last, name in reversed(self._spans):
            found.update(dict.fromkeys(range(first, last), name))
        return found


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    step: Callable[..., Any] | None = None,
    costs: str = "roofline",
) -> Capture:
    """Capture a training step.

    Nothing is computed, and the model stays as it is.

    Args:
        model: Any module, in the mode in which it will be trained. One on the meta device is captured as if it were on
            the CPU: planning a large model takes no memory.
        args: Sample positional arguments; their shapes, dtypes and devices are those of the training.
        kwargs: Sample keyword arguments.
        step: Called as `step(model, *args, **kwargs)`; the model itself if None.
        costs: How ops are priced; see `rmm_linear.checkpointing.costs.cost_of`.

    Returns:
        The capture.

    Raises:
        CaptureError: If the step can't be captured; it names the line, and what can be done.
        ValueError: If nothing that the step returns can be differentiated.
    """
    arguments, tensors = Arguments.of(args, kwargs or {})
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    function = _Step(step or _call, model, (list(parameters), list(buffers)), arguments, ())
    inputs = (*parameters.values(), *buffers.values(), *tensors)
    # without its cache: what that returns the second time no longer shares memory as the op's results do
    mode = FakeTensorMode()
    mode.cache_enabled = False
    hollow = tuple(_hollow(tensor, mode) if tensor.is_meta else mode.from_tensor(tensor) for tensor in inputs)
    python_state = random.getstate()
    blocks = _Blocks(model)
    try:
        try:
            joint = _joint_graph(function, hollow)
        except _UnknownNumberError:
            function.numbers = _numbers_of_sample(function, inputs)
            joint = _joint_graph(function, hollow)
    except Exception as error:
        explained: CaptureError = _explained(error)
        raise explained from error
    finally:
        blocks.remove()
    if random.getstate() != python_state:
        random.setstate(python_state)
        raise CaptureError(
            "the step draws from Python's `random`, whose outcome a capture would freeze (LayerDrop does this): switch"
            " it off, or draw from torch"
        )
    return _Reading(joint, function, (tuple(parameters), tuple(buffers)), arguments, blocks, costs).capture()


def _joint_graph(function: _Step, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_as_eager_runs_it())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        return aot_export_joint_with_descriptors(stack, function, inputs).graph_module


def _numbers_of_sample(function: _Step, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The numbers that Python looks at when the step runs on the sample."""
    # Most follow from token ids and masks alone. So what is floating-point stays hollow, if that will do, and the rest
    # has its contents; otherwise the step runs in earnest as far as the loss, and keeps nothing.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    partly = [_hollow(tensor, mode) if tensor.is_floating_point() else tensor.detach().clone() for tensor in inputs]
    try:
        return _looked_at(function, partly)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return _looked_at(function, [tensor.detach().clone() for tensor in inputs])


def _looked_at(function: _Step, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    devices = {tensor.device.index for tensor in inputs if tensor.is_cuda}
    try:
        function.numbers = None
        with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
            return function.find_numbers(inputs)
    finally:
        function.numbers = ()


def _hollow(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor of the same shape without contents; on the CPU for one that is on no device."""
    device = "cpu" if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _explained(error: Exception) -> CaptureError:
    """Say where a capture failed, and what to do."""
    if isinstance(error, _UnknownResultError):
        return CaptureError(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not any(part in frame.filename for part in ("/torch/", "rmm_linear/checkpoint"))
    ]
    where = f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    kinds = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
        _UnknownNumberError,
    )
    if isinstance(error, kinds):
        return CaptureError(
            f"the step depends on the contents of a tensor{where}; a capture has none. Checkpoint the blocks without"
            " such code one by one (`checkpoint_model(block, ...)`), or replace the branch by `torch.where`"
        )
    return CaptureError(
        f"the step can't be captured{where}: {type(error).__name__}: {error}. Checkpoint the parts that can one by one"
    )


class _Reading:
    """Turns the joint graph of torch into ours."""

    def __init__(
        self,
        joint: fx.GraphModule,
        function: _Step,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        arguments: Arguments,
        blocks: _Blocks,
        costs: str,
    ) -> None:
        self._joint, self._function, self._names, self._arguments = joint, function, names, arguments
        self._blocks = blocks.of_sequence_numbers()
        self._costs = costs
        # memory of the hollow tensors -> our storage; None for what is outside of the budget
        self._storage_of: dict[int, int | None] = {}
        self._storages: list[Storage] = []
        self._members: list[list[fx.Node]] = []

    def capture(self) -> Capture:
        placeholders = {node.meta["desc"]: node for node in self._joint.graph.nodes if node.op == "placeholder"}
        count = sum(isinstance(key, PlainAOTInput) for key in placeholders)
        inputs = tuple(placeholders[PlainAOTInput(place)] for place in range(count))
        tangents = {
            key.output.idx: node
            for key, node in placeholders.items()
            if isinstance(key, TangentAOTInput) and isinstance(key.output, PlainAOTOutput)
        }
        self._refuse_unknown(placeholders, (PlainAOTInput, TangentAOTInput), "takes")
        (output,) = (node for node in self._joint.graph.nodes if node.op == "output")
        ends = {key: node for key, node in zip(output.meta["desc"], output.args[0], strict=True) if node is not None}
        self._refuse_unknown(ends, (PlainAOTOutput, GradAOTOutput, InputMutationAOTOutput), "returns")
        differentiable = self._function.differentiable
        if not any(differentiable):
            raise ValueError(
                "nothing that the step returns depends on a parameter that is trained: there is no backward pass to"
                " plan. Return the loss, and call the model in training mode"
            )
        results = tuple(ends[PlainAOTOutput(place)] for place in range(len(differentiable)))
        looked_at = tuple(
            (ends[PlainAOTOutput(len(differentiable) + place)], number)
            for place, number in enumerate(self._function.numbers or ())
        )
        gradients = tuple(ends.get(GradAOTOutput(PlainAOTInput(place))) for place in range(count))
        place_of: dict[Any, int] = {PlainAOTInput(place): place for place in range(count)}
        updates = tuple(
            (place_of[key.mutated_input], node) for key, node in ends.items() if isinstance(key, InputMutationAOTOutput)
        )
        for place, _ in updates:
            if inputs[place].meta["val"].requires_grad:
                raise CaptureError("the step writes into an input that is differentiated; write into a copy of it")
        hidden = sorted({str(node.target) for node in self._joint.graph.nodes if _packet(node) in _HIDDEN_WORKSPACE})
        if hidden:
            warnings.warn(
                f"{', '.join(hidden)} keeps a workspace whose size torch does not tell: the peak of a plan is too low"
                " by it. A loop over cells (`bptt_checkpoint`) has none",
                stacklevel=3,
            )
        graph, nodes = self._graph(
            results, [node for node, _ in looked_at], gradients, updates, {inputs[place] for place, _ in updates}
        )
        return Capture(
            graph=graph,
            nodes=nodes,
            members=tuple(map(tuple, self._members)),
            inputs=inputs,
            tangents=tuple(tangents.get(place) for place in range(len(differentiable))),
            results=results,
            gradients=gradients,
            updates=updates,
            parameter_names=self._names[0],
            buffer_names=self._names[1],
            arguments=self._arguments,
            looked_at=looked_at,
            returned=self._function.returned,
            returned_spec=self._function.returned_spec,
            module=self._joint,
        )

    @staticmethod
    def _refuse_unknown(found: Mapping[Any, Any], known: tuple[type, ...], verb: str) -> None:
        for key in found:
            if not isinstance(key, known):
                raise CaptureError(
                    f"the step {verb} something that plans don't know ({key}): tensor subclasses, and results that"
                    " share memory with each other, can't be captured; checkpoint the parts that can one by one"
                )

    def _graph(
        self,
        results: Sequence[fx.Node],
        looked_at: Sequence[fx.Node],
        gradients: Sequence[fx.Node | None],
        updates: Sequence[tuple[int, fx.Node]],
        updated: set[fx.Node],
    ) -> tuple[Graph, tuple[fx.Node, ...]]:
        ops: list[Op] = []
        nodes: list[fx.Node] = []
        depends_on_tangents: set[fx.Node] = set()
        is_backward = False
        for node in self._joint.graph.nodes:
            if node.op == "output":
                break
            if node.op in ("placeholder", "get_attr"):
                for tensor in tensors_of(node):
                    self._storage_of[tensor.untyped_storage()._cdata] = None
                is_tangent = node.op == "placeholder" and isinstance(node.meta["desc"], TangentAOTInput)
                depends_on_tangents.update([node] if is_tangent else [])
                continue
            if any(source in depends_on_tangents for source in node.all_input_nodes):
                depends_on_tangents.add(node)
                is_backward = True
            if node.target is operator.getitem:
                continue
            fresh = self._fresh(node)
            if not fresh and tensors_of(node):
                continue
            temporary = self._write(node, fresh)
            reads = dict.fromkeys(
                index
                for source in node.all_input_nodes
                for tensor in tensors_of(source)
                if (index := self._storage_of[tensor.untyped_storage()._cdata]) is not None
            )
            ops.append(self._op(node, tuple(reads), tuple(fresh.values()), temporary, is_backward, updated))
            nodes.append(node)
        # what is returned is the caller's from then on; new buffers are only there to be copied
        outputs = self._indices([*results, *(node for node in gradients if node is not None)])
        at_forward_end = self._indices([*results, *looked_at, *(node for _, node in updates)])
        graph = Graph(tuple(ops), tuple(self._storages), outputs, at_forward_end, unit_of(self._costs))
        return graph, tuple(nodes)

    def _indices(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        found = (self._storage_of[tensor.untyped_storage()._cdata] for node in nodes for tensor in tensors_of(node))
        return tuple(dict.fromkeys(index for index in found if index is not None))

    def _fresh(self, node: fx.Node) -> dict[int, int]:
        """Memory that the node fills, with the numbers of new storages for it."""
        fresh: dict[int, int] = {}
        for tensor in tensors_of(node):
            memory = tensor.untyped_storage()._cdata
            if memory not in self._storage_of and memory not in fresh:
                fresh[memory] = len(self._storages) + len(fresh)
        known = [tensor for tensor in tensors_of(node) if tensor.untyped_storage()._cdata in self._storage_of]
        if fresh and known:
            raise CaptureError(f"{node.target} returns both new memory and views: plans don't know such ops")
        return fresh

    def _write(self, node: fx.Node, fresh: dict[int, int]) -> int:
        """Add the node's storages; return the bytes of those that nobody looks at, which are no storages."""
        values = node.meta["val"]
        parts: list[tuple[fx.Node, Tensor]] = []
        if isinstance(values, Tensor):
            parts = [(node, values)]
        else:
            for user in node.users:
                if user.target is operator.getitem and isinstance(user.meta["val"], Tensor):
                    parts.append((user, user.meta["val"]))
        used: dict[int, list[fx.Node]] = {}
        for part, tensor in parts:
            used.setdefault(tensor.untyped_storage()._cdata, []).append(part)
        sizes = {tensor.untyped_storage()._cdata: _bytes_in_earnest(node, tensor) for tensor in tensors_of(node)}
        for memory in list(fresh):
            if memory not in used:
                del fresh[memory]
                continue
            fresh[memory] = len(self._storages)
            self._storage_of[memory] = fresh[memory]
            self._storages.append(Storage(used[memory][0].name, sizes[memory]))
            self._members.append(used[memory])
        return sum(size for memory, size in sizes.items() if memory not in fresh)

    def _op(
        self,
        node: fx.Node,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        temporary_bytes: int,
        is_backward: bool,
        updated: set[fx.Node],
    ) -> Op:
        target = node.target
        name = str(target)
        tags = getattr(target, "tags", ())
        namespace = getattr(target, "namespace", "")
        reads_updated = any(source in updated for source in node.all_input_nodes)
        return Op(
            name=node.name,
            cost=cost_of(node, self._costs),
            reads=reads,
            writes=writes,
            temporary_bytes=temporary_bytes,
            is_backward=is_backward,
            is_recomputable=namespace not in _COLLECTIVES
            and isinstance(target, torch._ops.OpOverload)
            and not (reads_updated and target not in _UPDATES_BUFFERS),
            is_random=torch.Tag.nondeterministic_seeded in tags,
            block=self._blocks.get(node.meta.get("seq_nr", -1), ""),
            kind=name.removesuffix(".default"),
        )


def _packet(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")


def _bytes_in_earnest(node: fx.Node, tensor: Tensor) -> int:
    """Bytes of the memory that a hollow tensor stands for."""
    if node.target in _REDUCED_IN_PLACE:
        numbers = torch.broadcast_shapes(
            *(each.shape for source in node.all_input_nodes for each in tensors_of(source))
        )
        return max(tensor.untyped_storage().nbytes(), numbers.numel() * tensor.element_size())
    return tensor.untyped_storage().nbytes()


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the hollow tensors that stand for a node's value.

    Args:
        node: A node of a captured graph.

    Returns:
        Its tensors; none for what is no tensor.
    """
    value = node.meta.get("val")
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
