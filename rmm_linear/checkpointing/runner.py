"""Run a program in autograd's graph.

The forward part is one node of that graph, and so is each part of the backward part: a chain, which runs from the
results to the gradients that are ready last. A node's edges lead to the inputs whose gradients its part hands over, and
to the next part. So it is autograd that accumulates each gradient as soon as it is there, before it goes on with the
next part, and calls all hooks; that leaves out what nobody asked for (`torch.autograd.grad`); and that adds up what
reaches a parameter from elsewhere. Nothing of this is done here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from rmm_linear.checkpointing.autocasting import Autocast, autocast_as, present_autocast
from rmm_linear.checkpointing.capture import Capture, tensors_of
from rmm_linear.checkpointing.execute import after_tangents, program_of
from rmm_linear.checkpointing.schedule import Schedule
from rmm_linear.errors import AutocastBackwardError, DoubleBackwardError

_READ_MEMORY = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten._reshape_alias.default,
)


class Runner:
    """A captured step with a schedule, to be called with tensors.

    Args:
        capture: The captured step.
        schedule: A schedule for its graph.
    """

    def __init__(self, capture: Capture, schedule: Schedule) -> None:
        self.capture = capture
        self.schedule = schedule
        self.program = program_of(capture, schedule)
        self.updated = frozenset(place for place, _ in capture.updates)
        # for each input's gradient, the results whose gradients it follows from
        self.sources = _sources(capture)
        self.device_types = {tensor.device.type for node in capture.inputs for tensor in tensors_of(node)}
        # all parts run where the results are: the engine finishes a gradient there before it goes on
        self.device = next(tensor.device for node in capture.results for tensor in tensors_of(node))
        # whether the backward part reads memory as it lay at the capture
        self._reads_memory = any(node.target in _READ_MEMORY for node in after_tangents(capture))
        # states of autocast around the backward pass, and whether it computes the same then
        self._is_same_under: dict[Autocast, bool] = {(): True}

    def as_captured(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Prepare the gradients of the results.

        Args:
            tangents: What arrived; None for a result that the loss does not depend on.

        Returns:
            The same in the dtypes that the program knows, and as they lie if it can read them so: another layout is
            another order of summation, and the plain pass has the one in which they arrive.

        Raises:
            RuntimeError: If a gradient arrived that the step was not captured for.
        """
        given: list[Tensor | None] = []
        for place, (tangent, node) in enumerate(zip(tangents, self.capture.tangents, strict=True)):
            if node is None:
                if tangent is not None:
                    raise RuntimeError(
                        f"a gradient arrived at result {place} of a planned step, which was captured for its loss"
                        " alone: compute everything that is differentiated inside of the step (`checkpoint_step`)"
                    )
                given.append(None)
                continue
            (hollow,) = tensors_of(node)
            if tangent is None:
                # in no layout of its own: a sum has that of what it is added to
                tangent = torch.zeros((), dtype=hollow.dtype, device=hollow.device).expand(hollow.shape)
            tangent = tangent.to(hollow.dtype)
            if self._reads_memory and tangent.stride() != hollow.stride():
                like = torch.empty_strided(hollow.shape, hollow.stride(), dtype=tangent.dtype, device=tangent.device)
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

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Run the forward part.

        Args:
            inputs: Parameters, buffers, and the tensors among the arguments, as in `Capture.inputs`.

        Returns:
            What the step returns; `backward()` of its loss runs the rest.
        """
        run = _Pass(self)
        following: Tensor | None = None
        # the engine prefers nodes that were made later: from the last part to the first
        for number in range(len(self.program.parts) - 1, 0, -1):
            own = (inputs[place] for place in self.program.parts[number].gradients)
            following = _LaterPart.apply(run, number, inputs, following, *own)
        own = (inputs[place] for place in self.program.parts[0].gradients)
        results = _Run.apply(run, inputs, following, *own)
        leaves = [
            inputs[leaf.index] if leaf.kind == "input" else results[leaf.index] if leaf.kind == "result" else leaf.value
            for leaf in self.capture.returned
        ]
        return pytree.tree_unflatten(leaves, self.capture.returned_spec)


def _sources(capture: Capture) -> list[set[int]]:
    places = {node: place for place, node in enumerate(capture.tangents) if node is not None}
    found: dict[fx.Node, set[int]] = {}
    for node in capture.module.graph.nodes:
        found[node] = set().union(*(found[source] for source in node.all_input_nodes))
        if node in places:
            found[node].add(places[node])
    return [set() if node is None else found[node] for node in capture.gradients]


class _Pass:
    """One run of a step, forward and backward: what its nodes in autograd's graph share."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.saved: list[Any] | None = None
        count = len(runner.capture.inputs)
        self._inputs: list[Tensor | None] = [None] * count
        self._gradients: list[Tensor | None] = [None] * count
        self._arrived: set[int] = set()
        self._parts_run = 0
        self._backward: Iterator[None] | None = None
        # what the caller can write into before the backward part reads it: its name, an alias, its version
        self._versions: list[tuple[str, Tensor, int]] = []

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward part."""
        with _as_kernels(self.runner):
            results, updates, self.saved = self.runner.program.forward(inputs)
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
        """Refuse to compute with what was overwritten, as autograd does with what it saved."""
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
                " call remove_checkpointing(model), or the step itself, where second derivatives are needed"
            )
        if self.saved is None:
            raise RuntimeError(
                "the backward pass of a planned step ran already, and its tensors are freed: run the step again, or"
                " add up the losses before one backward()"
            )
        self._refuse_changed()
        self.runner.refuse_other_backward()
        given = self.runner.as_captured(tangents)
        self._arrived = {place for place, tangent in enumerate(tangents) if tangent is not None}
        saved, self.saved = self.saved, None
        self._backward = self.runner.program.backward(self._inputs, saved, given, self._gradients)

    def gradients_of(self, ctx: Any) -> Iterator[Tensor | None]:
        """Run a node's part, and hand its gradients over."""
        for place, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            self._inputs[place] = tensor
        assert self._backward is not None, "the first part begins"
        with _as_kernels(self.runner):
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
            yield gradient if self.runner.sources[place] & self._arrived else None


class _Run(torch.autograd.Function):
    """The forward part, and the first part of the backward part."""

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, inputs: Sequence[Tensor], following: Tensor | None, *own: Tensor
    ) -> tuple[Tensor, ...]:
        results = run.forward(inputs)
        run.keep(ctx, 0, inputs)
        # what needs no gradient in the plain step, and its numbers of other kinds, need none here
        needed = zip(results, run.runner.capture.has_gradient, strict=True)
        ctx.mark_non_differentiable(*(result for result, has_gradient in needed if not has_gradient))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run.begin(tangents)
        return (None, None, None, *ctx.run.gradients_of(ctx))


class _LaterPart(torch.autograd.Function):
    """A later part of the backward part. What it returns has no contents: the part before it leads here by it."""

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, number: int, inputs: Sequence[Tensor], following: Tensor | None, *own: Tensor
    ) -> Tensor:
        run.keep(ctx, number, inputs)
        return torch.empty(0, device=run.runner.device)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.run.gradients_of(ctx))


@contextmanager
def _as_kernels(runner: Runner) -> Iterator[None]:
    """Run ops as autograd runs them: nothing is recorded, the casts of autocast are ops of the program already."""
    # Some kernels (LSTM's on a CPU) leave out what the backward pass needs unless gradients are enabled.
    is_casting = any(map(torch.is_autocast_enabled, runner.device_types))
    off = autocast_as((), runner.device_types) if is_casting else nullcontext()
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), off:
        yield
