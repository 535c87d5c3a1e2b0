"""From AOTAutograd's joint graph to the graph that planners see: ops that cost time, storages that cost bytes.

An op is a node that fills new memory; views and `getitem` are none. Which storages an op reads and writes follows from
the storages of the fake tensors of the trace, and so do their bytes. Parameters, buffers and all other arguments are
inputs, and lie outside of the budget.
"""

import hashlib
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from rmm_linear.autocasting import Autocast, autocast_as, present_autocast
from rmm_linear.compiler.costs import COLLECTIVES, cost_of, unit_of
from rmm_linear.compiler.fake_memory import memories_of, real_bytes, tensors_of
from rmm_linear.compiler.fusing import fuse
from rmm_linear.compiler.rewrites import code_step
from rmm_linear.compiler.rewrites.casts import cast_again
from rmm_linear.compiler.rewrites.step import Step
from rmm_linear.compiler.torch_private import OpOverload, aot
from rmm_linear.compiler.tracing import Returned, Traced, trace
from rmm_linear.compiler.workspaces import workspace_bytes
from rmm_linear.errors import CaptureError, NothingToTrainError
from rmm_linear.planning.coding import Bits, Coding
from rmm_linear.planning.graph import Graph, Op, Storage

# Reads buffers that it updates, but computes its results from the batch alone: it may run again after the update.
_UPDATES_BUFFERS = {torch.ops.aten._native_batch_norm_legit_functional.default}
# Kernels with a workspace that torch says nothing about.
_HIDDEN_WORKSPACE = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"}
# Inductor computes them by up to three reductions of each row.
_BY_ROWS = {
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
}
# Seed and offset of a GPU's generator.
_DEVICE_STATE_BYTES = 16
_EXACT = Bits()


@dataclass(frozen=True)
class Capture:
    """A training step as a graph, and the parts of the joint graph that run it.

    Attributes:
        graph: The graph that planners see.
        nodes: The node of each op.
        inlined: For each op, the nodes that Inductor computes in the loop of its node, in order; see
            `rmm_linear.compiler.fusing`.
        members: For each storage, the nodes whose values are the tensors that lie in it as its op writes them.
        inputs: Placeholders of the inputs, in the order of the traced graph's tensor arguments.
        tangents: Placeholder of the gradient of each differentiable result; None where none was asked for.
        results: The node of each result.
        has_gradient: For each result, whether it requires a gradient in the plain step.
        gradients: The node of each input's gradient, None where there is none.
        updates: Pairs of an input's index and the node of its new contents.
        names: A name for each input, for people.
        returned: The results of the traced graph, in order.
        module: The joint graph, with the constants that it needs.
        has_same_backward: Whether the graph is the same where the backward pass runs under a given autocast.
        coding: Which tensors the backward pass reads from codes.
        rewritten: Captures the same trace with codes of other bits, and sketches of another share of rows; None if the
            step runs: it must not hold the trace.
        eager_peak_bytes: The most that the graph, run op by op in eager mode, has in memory at any time; None if that
            was not asked for, or could not be found out.
    """

    graph: Graph
    nodes: tuple[fx.Node, ...]
    inlined: tuple[tuple[fx.Node, ...], ...]
    members: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    results: tuple[fx.Node, ...]
    has_gradient: tuple[bool, ...]
    gradients: tuple[fx.Node | None, ...]
    updates: tuple[tuple[int, fx.Node], ...]
    names: tuple[str, ...]
    returned: tuple[Returned, ...]
    module: fx.GraphModule
    has_same_backward: Callable[[Autocast], bool]
    coding: Coding
    rewritten: Callable[[Bits, float | None], "Capture"] | None
    eager_peak_bytes: int | None = None

    def __reduce__(self) -> str:
        # the process crashed after a capture and its copy were freed, with the fake tensors in both
        raise TypeError("a captured step can't be copied or pickled: copy the model, and plan the copy")

    @property
    def takes_loss_alone(self) -> bool:
        """Whether a result that requires a gradient has none in the plan, since a scalar is taken for the loss."""
        return any(has and node is None for has, node in zip(self.has_gradient, self.tangents, strict=True))


def read_joint_graph(
    module: fx.GraphModule,
    arguments: Sequence[Any],
    *,
    costs: str = "roofline",
    gradients: str = "kept",
    loss_alone: bool = True,
    for_inductor: bool = False,
    bits: Bits = _EXACT,
    sketch: float | None = None,
) -> Capture:
    """Trace a graph of Dynamo forward and backward, and turn it into a graph for planners.

    No argument is written into. On a CPU each op runs on random numbers once for each kind of its arguments, which
    tells how much memory the op's kernel allocates. Checkpoints of the graph are inlined (`inline_checkpoints`), and
    arguments on the meta device are taken for tensors on the CPU. `rmm_linear.compiler.backend.Options` describes the
    options. If Inductor will compile the step, random ops draw by seeds and run once, and each op of the graph is an op
    of the trace with the ops that Inductor fuses into it.

    Raises:
        CaptureError: If the step can't be captured; the error names the line and a remedy.
        NothingToTrainError: If no result can be differentiated.
    """
    options: dict[str, Any] = {"loss_alone": loss_alone, "draws_by_seeds": for_inductor}
    traced = trace(module, arguments, **options)
    trained = sum(tensor.requires_grad for tensor in traced.inputs)
    if traced.differentiable != traced.has_gradient and len(_inputs_with_gradients(traced)) < trained:
        whole = trace(module, arguments, **options | {"loss_alone": False})
        # a scalar that trains fewer tensors than all results is no loss, such as a VAE's divergence
        if _inputs_with_gradients(whole) != _inputs_with_gradients(traced):
            traced, options["loss_alone"] = whole, False
    kinds = {tensor.device.type for tensor in traced.inputs}
    forward_autocast = present_autocast(kinds)
    # fake inputs: the capture must not keep parameters alive that the model no longer has
    fake = iter(traced.inputs)
    fakes = [next(fake) if isinstance(argument, Tensor) else argument for argument in arguments]
    # of the graph as it was traced: it is changed below
    fingerprint = _fingerprint(traced.joint)

    def has_same_backward(autocast: Autocast) -> bool:
        with autocast_as(forward_autocast, kinds):
            again = trace(module, fakes, backward_autocast=autocast, **options)
        return _fingerprint(again.joint) == fingerprint

    parameters = [isinstance(argument, nn.Parameter) for argument in arguments if isinstance(argument, Tensor)]

    def read(bits: Bits, sketch: float | None) -> Capture:
        reading = _Reading(
            traced.copy(), parameters, costs, for_inductor=for_inductor, frees_gradients=gradients == "freed"
        )
        try:
            return reading.capture(bits, sketch, has_same_backward=has_same_backward, rewritten=read)
        except (ValueError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CaptureError(
                f"the step's graph has something that plans don't know: {type(error).__name__}: {error}. Checkpoint the"
                " parts without it one by one (`checkpoint_model(block, ...)`)"
            ) from error

    return read(bits, sketch)


@dataclass(eq=False)
class _Reading:
    """Turns the joint graph of torch into ours."""

    traced: Traced
    are_parameters: Sequence[bool]
    costs: str
    for_inductor: bool
    frees_gradients: bool

    def __post_init__(self) -> None:
        self._joint = self.traced.joint
        # memory of the fake tensors -> index of the storage; None for memory outside of the budget
        self._storage_of: dict[int, int | None] = {}
        self._storages: list[Storage] = []
        self._members: list[list[fx.Node]] = []
        # nodes that are computed in the loop of another node
        self._loop_of: dict[fx.Node, fx.Node] = {}
        self._updated_memories: set[int] = set()

    def capture(self, bits: Bits, sketch: float | None, **functions: Any) -> Capture:
        placeholders = {node.meta["desc"]: node for node in self._joint.graph.nodes if node.op == "placeholder"}
        count = sum(isinstance(key, aot.PlainAOTInput) for key in placeholders)
        inputs = tuple(placeholders[aot.PlainAOTInput(place)] for place in range(count))
        tangents = {
            key.output.idx: node
            for key, node in placeholders.items()
            if isinstance(key, aot.TangentAOTInput) and isinstance(key.output, aot.PlainAOTOutput)
        }
        self._refuse_unknown(placeholders, (aot.PlainAOTInput, aot.TangentAOTInput), "takes")
        self._refuse_sparse()
        coding = Coding()
        parameters = [node for node, is_one in zip(inputs, self.are_parameters, strict=True) if is_one]
        parts = self._joint, tangents.values(), self.traced.blocks
        if bits != _EXACT:
            cast_again(Step(*parts), parameters)
        if bits != _EXACT or sketch is not None:
            coding = code_step(Step(*parts), bits, parameters, sketch)
        output = self._joint.graph.output_node()
        self._make_dense(output, placeholders)
        ends = {key: node for key, node in zip(output.meta["desc"], output.args[0], strict=True) if node is not None}  # type: ignore[arg-type]
        self._refuse_unknown(ends, (aot.PlainAOTOutput, aot.GradAOTOutput, aot.InputMutationAOTOutput), "returns")
        differentiable = self.traced.differentiable
        if not any(differentiable):
            raise NothingToTrainError
        results = tuple(ends[aot.PlainAOTOutput(place)] for place in range(len(differentiable)))
        gradients = tuple(ends.get(aot.GradAOTOutput(aot.PlainAOTInput(place))) for place in range(count))
        updates = tuple(
            (inputs.index(placeholders[key.mutated_input]), node)
            for key, node in ends.items()
            if isinstance(key, aot.InputMutationAOTOutput)
        )
        self._refuse_trained([place for place, _ in updates])
        if len(tangents) < sum(isinstance(key, aot.TangentAOTInput) for key in placeholders):
            raise CaptureError(
                "the step writes a value that is differentiated into an argument, in place: write into a copy of it"
            )
        hidden = sorted({str(node.target) for node in self._joint.graph.nodes if _packet(node) in _HIDDEN_WORKSPACE})
        if hidden:
            warnings.warn(
                f"{', '.join(hidden)} keeps a workspace whose size torch does not tell: the peak of a plan is too low"
                " by it. A loop over cells (`bptt_checkpoint`) has none",
                stacklevel=3,
            )
        if self.for_inductor:
            self._loop_of = fuse(self._joint, tangents.values(), {inputs[place] for place, _ in updates})
        self._updated_memories.update(memory for place, _ in updates for memory in memories_of(inputs[place]))
        ops, loops = self._ops()
        # results are the caller's from then on; new contents of buffers are only copied
        outputs = self._indices([*results, *filter(None, gradients)])
        at_forward_end = self._indices([*results, *(node for _, node in updates)])
        graph = Graph(tuple(ops), tuple(self._storages), outputs, at_forward_end, unit_of(self.costs))
        graph = self._with_gradients(graph, loops, inputs, gradients)
        return Capture(
            graph=graph,
            nodes=tuple(loop[-1] for loop in loops),
            inlined=tuple(tuple(loop[:-1]) for loop in loops),
            members=tuple(map(tuple, self._members)),
            inputs=inputs,
            tangents=tuple(tangents.get(place) for place in range(len(differentiable))),
            results=results,
            has_gradient=self.traced.has_gradient,
            gradients=gradients,
            updates=updates,
            names=self.traced.names,
            returned=self.traced.returned,
            module=self._joint,
            coding=coding,
            **functions,
        )

    def _refuse_sparse(self) -> None:
        for node in self._joint.graph.nodes:
            if any(isinstance(value, torch.Generator) for value in node.kwargs.values()):
                raise CaptureError(
                    "the step draws from a generator of its own, which a plan can't follow: draw from torch's"
                    " (`torch.manual_seed`), or outside of the step, and pass the numbers as an argument"
                )
            if any(tensor.layout is not torch.strided for tensor in tensors_of(node)):
                name = self.traced.blocks[node]
                raise CaptureError(
                    f"{name or 'the step'!r} has a sparse gradient, whose memory a plan can't follow: sparse = False"
                    " makes it a dense one, or checkpoint the parts after it one by one"
                )

    def _refuse_trained(self, updated: Sequence[int]) -> None:
        for place in updated:
            if not self.traced.inputs[place].requires_grad:
                continue
            if not self.are_parameters[place]:
                raise CaptureError("the step writes into an argument that is differentiated: write into a copy of it")
            raise CaptureError(
                f"the step writes into parameter {self.traced.names[place]!r}, which is trained: do so before the"
                " step, in place and under torch.no_grad(). For nn.Embedding(max_norm=...) that is max_norm = None and"
                " `torch.embedding_renorm_(embedding.weight, ids, max_norm, norm_type)`"
            )

    def _make_dense(self, output: fx.Node, own: Mapping[Any, fx.Node]) -> None:
        """Copy gradients that autograd would copy: in another layout, or not one parameter's alone. Copies count."""
        returned = list(output.args[0])  # type: ignore[arg-type]
        is_gradient = [isinstance(key, aot.GradAOTOutput) for key in output.meta["desc"]]
        takers = Counter(node for node, is_one in zip(returned, is_gradient, strict=True) if is_one)
        for place, (key, node) in enumerate(zip(output.meta["desc"], returned, strict=True)):
            if node is None or not isinstance(key, aot.GradAOTOutput):
                continue
            gradient, tensor = node.meta["val"], own[key.grad_of].meta["val"]
            is_computed = node.op == "call_function"
            is_dense = gradient.stride() == tensor.stride() or gradient.numel() <= 1
            assert isinstance(key.grad_of, aot.PlainAOTInput)
            # a placeholder's value is a leaf in any case
            is_leaf = self.traced.inputs[key.grad_of.idx].is_leaf
            if not is_leaf or (is_dense and is_computed and takers[node] == 1):
                continue
            takers[node] -= 1
            with self._joint.graph.inserting_after(node) if is_computed else self._joint.graph.inserting_before(output):
                with tensor.fake_mode:
                    made = torch.empty_like(tensor, memory_format=torch.preserve_format)
                # an input's contents may change, or be gone, before its gradient is copied
                copy = self._joint.graph.call_function(dense_copy, (node, made.stride()))
                copy.meta["val"] = made
            returned[place] = copy
        output.args = (returned,)

    @staticmethod
    def _refuse_unknown(found: Mapping[Any, Any], known: tuple[type, ...], verb: str) -> None:
        for key in found:
            if not isinstance(key, known):
                raise CaptureError(
                    f"the step {verb} something that plans don't know ({key}): tensor subclasses, and results that"
                    " share memory with each other, can't be captured; checkpoint the parts that can one by one"
                )

    def _ops(self) -> tuple[list[Op], list[list[fx.Node]]]:
        """The ops, and for each op the nodes that are computed in its loop; the last one writes its storages."""
        ops: list[Op] = []
        loops: list[list[fx.Node]] = []
        inlined: dict[fx.Node, list[fx.Node]] = {}
        is_backward = False
        for node in self._joint.graph.nodes:
            if node.op == "output":
                break
            if node.op == "get_attr":
                constant = getattr(self._joint, str(node.target))
                if isinstance(constant, Tensor) and constant.requires_grad:
                    raise CaptureError(
                        f"the step uses a tensor of shape {tuple(constant.shape)} that needs a gradient and is neither"
                        " a parameter of the model nor an argument: make it one of the two"
                    )
                node.meta.setdefault("val", constant)
            if node.op in ("placeholder", "get_attr"):
                self._storage_of.update(dict.fromkeys(memories_of(node)))
                continue
            # the backward part begins with the first op of a gradient, or with an op before it that reads a code
            reads_tangent = any(isinstance(each.meta.get("desc"), aot.TangentAOTInput) for each in node.all_input_nodes)
            is_backward = is_backward or "is_backward" in node.meta or reads_tangent
            if node.target is operator.getitem:
                continue
            if node in self._loop_of:
                self._storage_of[node.meta["val"].untyped_storage()._cdata] = None
                inlined.setdefault(self._loop_of[node], []).append(node)
                continue
            memories = dict.fromkeys(memories_of(node))
            fresh = [memory for memory in memories if memory not in self._storage_of]
            if 0 < len(fresh) < len(memories):
                raise CaptureError(f"{node.target} returns both new memory and views: plans don't know such ops")
            if memories and not fresh:
                continue
            writes, temporary = self._write(node, fresh)
            temporary += _row_bytes(node) if self.for_inductor else 0
            loops.append([*inlined.get(node, ()), node])
            ops.append(self._op(loops[-1], writes, temporary, is_backward))
        if self.traced.has_contents:
            own = workspace_bytes([loop[-1] for loop in loops])
            ops = [replace(op, temporary_bytes=op.temporary_bytes + size) for op, size in zip(ops, own, strict=True)]
        return ops, loops

    def _with_gradients(
        self, graph: Graph, loops: list[list[fx.Node]], inputs: Sequence[fx.Node], gradients: Sequence[fx.Node | None]
    ) -> Graph:
        """Say which storages are gradients of parameters, and which ops read these parameters."""
        gradients_of: dict[int, set[int]] = {}
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is not None:
                gradients_of.setdefault(memories_of(tensor)[0], set()).update(self._indices([gradient]))
        ops = []
        for op, loop in zip(graph.ops, loops, strict=True):
            held_back = set().union(*(gradients_of.get(memory, ()) for memory in _memories_read(loop)))
            ops.append(replace(op, holds_back=tuple(sorted(held_back))))
        pairs = list(zip(self.are_parameters, gradients, strict=True))
        # gradients of other arguments wait for the op that made the argument, or are the caller's
        others = set(self._indices(gradient for is_one, gradient in pairs if gradient is not None and not is_one))
        of_parameters = self._indices(gradient for is_one, gradient in pairs if gradient is not None and is_one)
        handed_over = tuple(
            index for index in of_parameters if index not in others and graph.ops[graph.writer[index]].is_backward
        )
        graph = _with_biases_together(replace(graph, ops=tuple(ops), gradients=handed_over))
        return graph.with_gradients_freed() if self.frees_gradients else graph

    def _indices(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        found = (self._storage_of[memory] for node in nodes for memory in memories_of(node))
        return tuple(dict.fromkeys(index for index in found if index is not None))

    def _write(self, node: fx.Node, fresh: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Add the node's storages; return their numbers, and the bytes of results that no op reads, which get none."""
        parts = [node]
        if not isinstance(node.meta["val"], Tensor):
            parts = [user for user in node.users if user.target is operator.getitem]
        used: dict[int, list[fx.Node]] = {}
        for part in parts:
            if isinstance(part.meta["val"], Tensor):
                used.setdefault(part.meta["val"].untyped_storage()._cdata, []).append(part)
        sources = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
        sizes = {t.untyped_storage()._cdata: real_bytes(node.target, sources, t) for t in tensors_of(node)}
        first = len(self._storages)
        for memory in fresh:
            if memory in used:
                self._storage_of[memory] = len(self._storages)
                self._storages.append(Storage(used[memory][0].name, sizes[memory]))
                self._members.append(used[memory])
        return tuple(range(first, len(self._storages))), sum(sizes[memory] for memory in fresh if memory not in used)

    def _op(self, loop: Sequence[fx.Node], writes: tuple[int, ...], temporary_bytes: int, is_backward: bool) -> Op:
        node, target = loop[-1], loop[-1].target
        name = target.__name__ if isinstance(target, FunctionType) else str(target)
        tags = getattr(target, "tags", ())
        namespace = getattr(target, "namespace", "")
        read = _memories_read(loop)
        reads_updated = not self._updated_memories.isdisjoint(read)
        if reads_updated and is_backward and "batch_norm" not in name:
            raise CaptureError(
                f"the backward pass reads a buffer that the step has written into ({name}): read a copy of it (`clone`)"
            )
        is_random, state_bytes = torch.Tag.nondeterministic_seeded in tags, 0
        if is_random:
            device = next((tensor.device.type for tensor in tensors_of(node)), "cpu")
            state_bytes = torch.get_rng_state().nbytes if device == "cpu" else _DEVICE_STATE_BYTES
        # seeds and the like are smaller than the random state that a second computation would need
        is_worth_it = not is_random or (
            not self.for_inductor and sum(self._storages[index].size_bytes for index in writes) > state_bytes
        )
        return Op(
            name=node.name,
            cost=cost_of(loop, self.costs, is_compiled=self.for_inductor),
            reads=tuple(index for memory in read if (index := self._storage_of[memory]) is not None),
            writes=writes,
            temporary_bytes=temporary_bytes,
            is_backward=is_backward,
            # an op without results is a check, which may raise
            is_recomputable=is_worth_it
            and node.meta["val"] is not None
            and namespace not in COLLECTIVES
            and (isinstance(target, OpOverload) or target in _UPDATES_BUFFERS)
            and not (reads_updated and target not in _UPDATES_BUFFERS),
            is_random=is_random,
            state_bytes=state_bytes,
            block=self.traced.blocks.get(node, node.meta.get("block", "")),
            kind=name.removesuffix(".default"),
        )


def _memories_read(loop: Iterable[fx.Node]) -> dict[int, None]:
    sources = (source for node in loop for source in node.all_input_nodes)
    return dict.fromkeys(memory for source in sources for memory in memories_of(source))


def _with_biases_together(graph: Graph) -> Graph:
    """Let a gradient wait for a smaller one that the next op writes: a weight's for the bias's."""
    # each time that gradients are handed over takes 20 to 40 microseconds
    group_of: dict[int, list[int]] = {}
    ordered = sorted(graph.gradients, key=lambda index: graph.writer[index])
    for before, index in zip([None, *ordered], ordered, strict=False):
        group = []
        if before is not None and graph.writer[index] == graph.writer[before] + 1:
            is_smaller = graph.storages[index].size_bytes < graph.storages[before].size_bytes
            group = group_of[before] if is_smaller else []
        group.append(index)
        group_of[index] = group
    ops = []
    for op in graph.ops:
        touched = {*op.reads, *op.writes, *op.holds_back}
        held_back = set(op.holds_back).union(*(group_of[index] for index in touched if index in group_of))
        ops.append(replace(op, holds_back=tuple(sorted(held_back.difference(op.reads, op.writes)))))
    return replace(graph, ops=tuple(ops))


def dense_copy(gradient: Tensor, stride: Sequence[int]) -> Tensor:
    """Copy a gradient into the layout of its parameter."""
    return gradient.new_empty_strided(gradient.shape, stride).copy_(gradient)


def _row_bytes(node: fx.Node) -> int:
    """Bytes of the numbers that Inductor computes for each row, beside the results."""
    if _packet(node) not in _BY_ROWS:
        return 0
    tensor = tensors_of(node)[0]
    return 3 * 4 * (tensor.numel() // max(1, tensor.shape[-1] if tensor.dim() else 1))


def _inputs_with_gradients(traced: Traced) -> set[Any]:
    output = traced.joint.graph.output_node()
    ends = zip(output.meta["desc"], output.args[0], strict=True)  # type: ignore[arg-type]
    return {key.grad_of for key, node in ends if isinstance(key, aot.GradAOTOutput) and node is not None}


def _fingerprint(joint: fx.GraphModule) -> str:
    found = hashlib.sha256()
    for node in joint.graph.nodes:
        kinds = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_of(node)]
        found.update(f"{node} {node.op} {node.target} {node.args} {node.kwargs} {kinds}\n".encode())
    return found.hexdigest()


def _packet(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
