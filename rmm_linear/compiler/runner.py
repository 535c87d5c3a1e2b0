"""Run a program in autograd's graph.

The forward part is one node of that graph, and so is each part of the backward part: a chain, which runs from the
results to the gradients that are ready last. A node's edges lead to the inputs whose gradients its part hands over, and
to the next part. So autograd accumulates each gradient as soon as it is there, before it goes on with the next part,
calls all hooks, leaves out gradients that `torch.autograd.grad` does not ask for, and adds gradients of a parameter
from elsewhere.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from rmm_linear.autocasting import Autocast, autocast_as, present_autocast
from rmm_linear.compiler.exact_program import Program, hidden_random_state, set_random_state, sources_of
from rmm_linear.compiler.fake_memory import tensors_of
from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.compiler.torch_private import AutoDispatchBelowAutograd
from rmm_linear.compiler.tracing import Returned
from rmm_linear.errors import AutocastBackwardError, DoubleBackwardError

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
# Results that are no new running statistics.
_RESULTS_OF_BATCH = (0, 1, 2)
_READ_MEMORY = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten._reshape_alias.default,
)


class Runner:
    """A captured step with the program of a schedule, to be called with tensors.

    If a gradient arrives at a result that the plan takes none for, `again` runs the forward pass again, by a plan that
    takes gradients of all results, and `on_other_gradient` is called: later steps need such a plan as well.
    """

    def __init__(
        self,
        capture: Capture,
        program: Program,
        again: Callable[..., Any],
        on_other_gradient: Callable[[], None],
    ) -> None:
        self.capture, self.program, self.again, self.on_other_gradient = capture, program, again, on_other_gradient
        self._last_pass: weakref.ref[_Pass] | None = None
        self.updated = frozenset(place for place, _ in capture.updates)
        self.only_updated = _only_updated(capture)
        # for each input's gradient, the results whose gradients it follows from
        sources = sources_of(capture)
        self.sources = [set() if node is None else sources[node] for node in capture.gradients]
        self.device_types = {tensor.device.type for node in capture.inputs for tensor in tensors_of(node)}
        # all parts run where the results are: the engine finishes a gradient there before it goes on
        self.device = next(tensor.device for node in capture.results for tensor in tensors_of(node))
        # whether the backward part reads memory as it lay at the capture
        after_tangents = (node for node, places in sources.items() if places)
        self._reads_memory = program.has_layouts or any(node.target in _READ_MEMORY for node in after_tangents)
        random = (node for op, node in zip(capture.graph.ops, capture.nodes, strict=True) if op.is_random)
        self.random_devices = {tensor.device for node in random for tensor in tensors_of(node)}
        # states of autocast around the backward pass, and whether it computes the same then
        self._is_same_under: dict[Autocast, bool] = {(): True}

    def as_captured(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Prepare the gradients that arrived at the results; None for a result that the loss does not depend on.

        They get the dtypes of the program, and keep their layout where the program can read it: the plain pass sums
        in the order of the layout in which gradients arrive.
        """
        given: list[Tensor | None] = []
        for tangent, node in zip(tangents, self.capture.tangents, strict=True):
            if node is None:
                given.append(None)
                continue
            (fake,) = tensors_of(node)
            if tangent is None:
                # no layout of its own: a sum has the layout of its first summand
                tangent = torch.zeros((), dtype=fake.dtype, device=fake.device).expand(fake.shape)
            tangent = tangent.to(fake.dtype)
            if self._reads_memory and tangent.stride() != fake.stride():
                like = torch.empty_strided(fake.shape, fake.stride(), dtype=tangent.dtype, device=tangent.device)
                tangent = like.copy_(tangent)
            given.append(tangent)
        return given

    def refuse_other_backward(self) -> None:
        """Refuse a backward pass that would compute in other dtypes, since autocast is on around it.

        Raises:
            AutocastBackwardError: If it would.
        """
        autocast = present_autocast(self.device_types)
        if autocast not in self._is_same_under:
            self._is_same_under[autocast] = self.capture.has_same_backward(autocast)
        if not self._is_same_under[autocast]:
            raise AutocastBackwardError(
                "backward() was called inside of torch.autocast, where ops of the plain backward pass would compute in"
                " other dtypes than those that were planned: call it outside, after the `with` block of the forward"
                " pass, as torch advises"
            )

    @property
    def awaits_backward(self) -> bool:
        """Whether the last forward pass still keeps its tensors for a backward pass."""
        last = self._last_pass() if self._last_pass is not None else None
        return last is not None and last.saved is not None

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the forward part."""
        inputs = [argument for argument in arguments if isinstance(argument, Tensor)]
        run = _Pass(self, arguments)
        self._last_pass = weakref.ref(run)
        results: Sequence[Any] = [None]
        # the engine prefers nodes that were made later: from the last part to the first
        for number in range(len(self.program.parts) - 1, -1, -1):
            own = (inputs[place] for place in self.program.parts[number].gradients)
            results = _Node.apply(run, number, inputs, results[0], *own)
        viewed = {leaf.index for leaf in self.capture.returned if leaf.kind == "view of result"}
        results = [_as_traced(each, self.capture.results[n]) if n in viewed else each for n, each in enumerate(results)]
        return [_value(leaf, inputs, results) for leaf in self.capture.returned]


def _as_traced(result: Tensor, node: fx.Node) -> Tensor:
    """Return a result in the layout of the trace, in which its views are described: Inductor may choose another one."""
    like = node.meta["val"].stride()
    if all(size < 2 or mine == its for size, mine, its in zip(result.shape, result.stride(), like, strict=True)):
        return result
    return torch.empty_strided(result.shape, like, dtype=result.dtype, device=result.device).copy_(result)


def _value(leaf: Returned, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
    if leaf.kind == "constant":
        return leaf.value
    base = (inputs if leaf.kind.endswith("input") else results)[leaf.index]
    if not leaf.kind.startswith("view"):
        return base
    size, stride, offset, is_differentiated = leaf.value
    if offset == 0 and sorted(zip(size, stride, strict=True)) == sorted(zip(base.shape, base.stride(), strict=True)):
        # its gradient then comes in the layout in which it would come from a transposed tensor
        pairs = sorted(zip(_order(size, stride), _order(base.shape, base.stride()), strict=True))
        view = base.permute([source for _, source in pairs])
    else:
        view = base.as_strided(size, stride, base.storage_offset() + offset)
    return view if is_differentiated else view.detach()


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dimensions from the one whose elements lie farthest apart to the one whose elements lie nearest."""
    return sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim]))


def _only_updated(capture: Capture) -> frozenset[int]:
    """Inputs that the step updates and computes nothing else from: running statistics of batch norms, counters."""
    found = set()
    for place, _ in capture.updates:
        following = {capture.inputs[place]}
        for node in capture.module.graph.nodes:
            if node.op != "output" and not following.isdisjoint(_sources_in_training(node)):
                following.add(node)
        if following.isdisjoint([*capture.results, *filter(None, capture.gradients)]):
            found.add(place)
    return frozenset(found)


def _sources_in_training(node: fx.Node) -> list[fx.Node]:
    """The nodes on which a node's value depends: a batch norm in training does not depend on running statistics."""
    if node.target is _BATCH_NORM_BACKWARD and node.args[7]:
        return [source for place in (0, 1, 2, 5, 6) if isinstance(source := node.args[place], fx.Node)]
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and source.target is _BATCH_NORM and node.args[1] in _RESULTS_OF_BATCH:
        return []
    return node.all_input_nodes


class _Pass:
    """One run of a step, forward and backward: the state that its nodes in autograd's graph share."""

    def __init__(self, runner: Runner, arguments: Sequence[Any]) -> None:
        self.runner = runner
        self._again = _Again(runner, arguments) if runner.capture.takes_loss_alone else None
        self.saved: list[Any] | None = None
        count = len(runner.capture.inputs)
        self._inputs: list[Tensor | None] = [None] * count
        self._gradients: list[Tensor | None] = [None] * count
        # results at which a gradient arrived; None for a pass that ran again
        self._arrived: set[int] | None = set()
        self._parts_run = 0
        self._backward: Iterator[None] | None = None
        # tensors that the caller can write into before the backward part reads them: name, alias, version
        self._versions: list[tuple[str, Tensor, int]] = []

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with as_kernels(self.runner.device_types):
            results, updates, self.saved = self.runner.program.forward(inputs)
        if self._again is not None:
            self._again.states_after = self._again.present_states()
        for buffer, contents in updates:
            buffer.copy_(contents)
        self._note_versions(results)
        return results

    def _note_versions(self, results: Sequence[Tensor]) -> None:
        program = self.runner.program
        # an alias: a result itself would hold this pass, and be held by it
        seen = [(f"result {place}", results[place].detach()) for place in program.shared]
        seen += [
            (f"a tensor of shape {tuple(constant.shape)} in the code", constant)
            for constant in program.constants
            if not constant.is_inference()
        ]
        self._versions = [(name, tensor, tensor._version) for name, tensor in seen]

    def _refuse_changed(self) -> None:
        """Refuse to compute with an overwritten tensor, as autograd does with saved tensors."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{name} of a planned step was modified in place before its backward pass, which reads it or"
                    " computes from it again: use an op that returns a new tensor (`x = x * 2` for `x *= 2`), or write"
                    " into a `clone()`"
                )
        self._versions.clear()

    def keep(self, ctx: Any, number: int, inputs: Sequence[Tensor]) -> None:
        """Let a node keep the inputs that its part reads."""
        ctx.run, ctx.number = self, number
        ctx.set_materialize_grads(False)
        reads = self.runner.program.parts[number].reads
        # an input that changes before it is read is noticed; buffers that the step itself updates do change
        ctx.kept = [place for place in reads if place not in self.runner.updated]
        ctx.save_for_backward(*(inputs[place] for place in ctx.kept))
        for place in reads & self.runner.updated:
            self._inputs[place] = inputs[place]

    def begin(self, tangents: Sequence[Tensor | None]) -> None:
        """Start the backward part."""
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "create_graph=True asks for a second derivative, and a planned step has a program for the first alone:"
                " run the step without its plan (remove_checkpointing(model), or without torch.compile)"
            )
        if self.saved is None:
            raise RuntimeError(
                "the backward pass of a planned step ran already, and its tensors are freed: run the step again, or"
                " add up the losses before one backward()"
            )
        nodes = self.runner.capture.tangents
        if any(tangent is not None and node is None for tangent, node in zip(tangents, nodes, strict=True)):
            self._run_again(tangents)
            return
        self._again = None
        self._refuse_changed()
        self.runner.refuse_other_backward()
        given = self.runner.as_captured(tangents)
        self._arrived = {place for place, tangent in enumerate(tangents) if tangent is not None}
        saved, self.saved = self.saved, None
        self._backward = self.runner.program.backward(self._inputs, saved, given, self._gradients)

    def _run_again(self, tangents: Sequence[Tensor | None]) -> None:
        """Compute the gradients of this step by another plan, for this one takes that of the loss alone."""
        self.runner.on_other_gradient()
        self.saved, again, self._again = None, self._again, None
        if again is None:
            raise RuntimeError(
                "a gradient arrived at a result beside the loss, and this step was planned for the gradient of its loss"
                " alone; later steps are planned for both: run this step again"
            )
        self._gradients = again.gradients(tangents)
        self._arrived, self._backward = None, itertools.repeat(None)

    def gradients_of(self, ctx: Any) -> Iterator[Tensor | None]:
        """Run a node's part, and hand its gradients over."""
        for place, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            self._inputs[place] = tensor
        assert self._backward is not None, "the first part begins"
        with as_kernels(self.runner.device_types):
            # a part none of whose inputs needs a gradient now has no node
            while self._parts_run <= ctx.number:
                next(self._backward)
                self._parts_run += 1
        parts = self.runner.program.parts
        if self._parts_run == len(parts):
            self._backward = None
        for place in parts[ctx.number].gradients:
            gradient, self._gradients[place] = self._gradients[place], None
            # an input that only other results depend on gets none, as in the plain step, and no zeros
            is_due = self._arrived is None or self.runner.sources[place] & self._arrived
            yield gradient if is_due else None


class _Again:
    """The arguments, random state and autocast of a forward pass: enough to run it once more."""

    def __init__(self, runner: Runner, arguments: Sequence[Any]) -> None:
        self._runner, self._arguments = runner, arguments
        self._versions = self._present_versions()
        self._autocast = present_autocast(runner.device_types)
        self._states = self.present_states()
        # of the end of the forward pass
        self.states_after: dict[torch.device, bytes] = {}

    def present_states(self) -> dict[torch.device, bytes]:
        """Return the random states of the devices on which the step draws."""
        return {device: hidden_random_state(device) for device in self._runner.random_devices}

    def _present_versions(self) -> list[int]:
        """Versions of the inputs that results depend on; the step itself updates running statistics."""
        inputs = [argument for argument in self._arguments if isinstance(argument, Tensor)]
        return [tensor._version for place, tensor in enumerate(inputs) if place not in self._runner.only_updated]

    def gradients(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        runner, capture = self._runner, self._runner.capture
        if self._present_versions() != self._versions:
            raise RuntimeError(
                "a gradient arrived at a result beside the loss of a planned step, and the step's inputs have changed"
                " since its forward pass; later steps are planned for it: run this step again"
            )
        fresh = [_fresh(argument) if isinstance(argument, Tensor) else argument for argument in self._arguments]
        places = [place for place, argument in enumerate(fresh) if isinstance(argument, Tensor)]
        for place in runner.only_updated:
            fresh[places[place]] = fresh[places[place]].clone()
        inputs = [argument for argument in fresh if isinstance(argument, Tensor)]
        others = [device for device in self._states if device.type != "cpu"]
        kind = others[0].type if others else "cuda"
        with torch.random.fork_rng([device.index for device in others], device_type=kind):
            for device, state in self._states.items():
                set_random_state(state, device)
            with torch.enable_grad(), autocast_as(self._autocast, runner.device_types):
                values = runner.again(*fresh)
            drawn = self.present_states()
        if drawn != self.states_after:
            raise RuntimeError(
                "a gradient arrived at a result beside the loss of a planned step, and plans for gradients of all"
                " results draw other random numbers; later steps are planned so: run this step again"
            )
        returned = zip(capture.returned, values, strict=True)
        results = {leaf.index: value for leaf, value in returned if leaf.kind == "result"}
        arrived = {place: tangent for place, tangent in enumerate(tangents) if tangent is not None}
        wanted = [place for place, tensor in enumerate(inputs) if tensor.requires_grad]
        given, own = [results[place] for place in arrived], [inputs[place] for place in wanted]
        found = torch.autograd.grad(given, own, list(arrived.values()), allow_unused=True)
        gradients = dict(zip(wanted, found, strict=True))
        return [gradients.get(place) for place in range(len(inputs))]


def _fresh(tensor: Tensor) -> Tensor:
    """Return the same values without history and hooks; a parameter stays a parameter, for plans depend on that."""
    found = tensor.detach().requires_grad_(tensor.requires_grad)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


class _Node(torch.autograd.Function):
    """A part of the backward part; the first node also runs the forward part.

    The result of a later node has no contents: it is the edge from the part before.
    """

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, number: int, inputs: Sequence[Tensor], following: Tensor | None, *own: Tensor
    ) -> tuple[Tensor, ...]:
        results = [torch.empty(0, device=run.runner.device)] if number else run.forward(inputs)
        run.keep(ctx, number, inputs)
        if not number:
            # results that need no gradient in the plain step, or are not floating-point, need none here
            needed = zip(results, run.runner.capture.has_gradient, strict=True)
            ctx.mark_non_differentiable(*(result for result, has_gradient in needed if not has_gradient))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.number:
            ctx.run.begin(tangents)
        return (None, None, None, None, *ctx.run.gradients_of(ctx))


@contextmanager
def as_kernels(device_types: Collection[str]) -> Iterator[None]:
    """Run ops as autograd runs them: nothing is recorded, the casts of autocast are ops of the program already."""
    # Some kernels (LSTM's on a CPU) save nothing for the backward pass unless gradients are enabled.
    is_casting = any(map(torch.is_autocast_enabled, device_types))
    off = autocast_as((), device_types) if is_casting else nullcontext()
    with torch.enable_grad(), AutoDispatchBelowAutograd(), off:
        yield
