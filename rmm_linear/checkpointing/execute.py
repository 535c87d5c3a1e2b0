"""Run a schedule: Python code of one line a step, cut where the forward pass ends.

A recomputation is a second call of the same op, a free is an assignment of None. A view is made where it is read first,
and goes with its storage; one of an input goes with the pass. What the two parts share is held in a list that the
backward part empties, so that every tensor dies at the step at which the schedule frees it. The ops are those that
eager mode runs, in its order: outputs, gradients and buffers have the same bits. An op that draws random numbers is
recomputed from the random state that it had.
"""

import keyword
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from rmm_linear.checkpointing.capture import Capture, tensors_of
from rmm_linear.checkpointing.schedule import Schedule, Step, validate
from rmm_linear.errors import DoubleBackwardError

_LITERALS = (int, bool, str, type(None))


@dataclass(frozen=True)
class Program:
    """The code of a schedule.

    Attributes:
        forward: (inputs) -> (results, pairs of a buffer and its new contents, what is saved for `backward`).
        backward: (inputs, saved, tangents) -> gradients of the inputs; empties `saved`.
        read_in_backward: Inputs that `backward` reads.
        source: The code, for people.
    """

    forward: Callable[[Sequence[Tensor]], tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[Any]]]
    backward: Callable[[Sequence[Tensor | None], list[Any], Sequence[Tensor | None]], list[Tensor | None]]
    read_in_backward: frozenset[int]
    source: str


def program_of(capture: Capture, schedule: Schedule) -> Program:
    """Write the code of a schedule.

    Args:
        capture: A captured step.
        schedule: A schedule for its graph.

    Returns:
        The program.

    Raises:
        ScheduleError: If the schedule cannot run; see `rmm_linear.checkpointing.schedule.validate`.
    """
    validate(capture.graph, schedule)
    return _Writer(capture, schedule).program()


class _Writer:
    def __init__(self, capture: Capture, schedule: Schedule) -> None:
        self._capture, self._schedule = capture, schedule
        self._globals: dict[str, Any] = {"_state": _saved_random_state, "_replay": _replay, "_check": _check}
        self._constants: dict[int, str] = {}
        self._kept_alive: list[Any] = []
        # the name of each value that is in memory: inputs, tangents, members of live storages
        self._names: dict[fx.Node, str] = {node: f"inputs[{place}]" for place, node in enumerate(capture.inputs)}
        self._lines: list[str] = []
        self._live: dict[int, None] = {}
        self._states: dict[int, str] = {}
        self._spent: list[str] = []
        self._numbers = {node: number for number, node in enumerate(capture.module.graph.nodes)}
        self._storage_of = {node: index for index, members in enumerate(capture.members) for node in members}
        # names of the views that there are, and those that lie in each live storage
        self._views: dict[fx.Node, str] = {}
        self._views_in: dict[int, list[fx.Node]] = {}
        self._read: set[fx.Node] = set()
        times = Counter(schedule.order)
        self._times_left = {op: count for op, count in times.items() if count > 1 and capture.graph.ops[op].is_random}

    def program(self) -> Program:
        steps, cut = self._schedule.steps, self._cut()
        for step in steps[: cut + 1]:
            self._step(step)
        self._hand_over()
        self._end_forward(steps, cut)
        while cut + 1 < len(steps) and steps[cut + 1].kind == "free":
            cut += 1
            self._step(steps[cut])
        saved = self._saved()
        self._lines.append(f"return results, updates, [{', '.join(saved)}]")
        forward = self._function("forward(inputs)")
        self._read.clear()
        self._views.clear()
        self._views_in.clear()
        self._lines = [f"{', '.join(saved)}, = saved"] if saved else []
        self._lines.append("saved.clear()")
        for place, node in enumerate(self._capture.tangents):
            if node is not None:
                self._names[node] = f"tangents[{place}]"
        for step in steps[cut + 1 :]:
            self._step(step)
        gradients = ["None" if node is None else self._value(node) for node in self._capture.gradients]
        self._lines.append(f"return [{', '.join(gradients)}]")
        backward = self._function("backward(inputs, saved, tangents)")
        source = f"{forward}\n\n{backward}"
        exec(compile(source, "<schedule>", "exec"), self._globals)
        read = frozenset(place for place, node in enumerate(self._capture.inputs) if node in self._read)
        return Program(self._globals["forward"], self._globals["backward"], read, source)

    def _cut(self) -> int:
        """The step that computes the last result."""
        graph = self._capture.graph
        missing = {graph.writer[index] for index in graph.results}
        for number, step in enumerate(self._schedule.steps):
            if step.kind == "compute":
                missing.discard(step.target)
                if not missing:
                    return number
        raise AssertionError("validate lets no such schedule pass")

    def _function(self, signature: str) -> str:
        return "\n    ".join([f"def {signature}:", *self._lines])

    def _hand_over(self) -> None:
        # new tensor objects: what is saved must not be what is returned, or the two would hold each other
        for node, number in self._capture.looked_at:
            self._lines.append(f"_check({self._value(node)}, {self._constant(number)})")
        results = [f"{self._value(node)}.detach()" for node in self._capture.results]
        self._lines.append(f"results = [{', '.join(results)}]")
        updates = [f"(inputs[{place}], {self._value(node)})" for place, node in self._capture.updates]
        self._lines.append(f"updates = [{', '.join(updates)}]")

    def _end_forward(self, steps: Sequence[Step], cut: int) -> None:
        """Note which live storages are of no more use to the program: results, which are the caller's from now on."""
        read_later: set[int] = set()
        for step in steps[cut + 1 :]:
            if step.kind == "compute":
                read_later.update(self._capture.graph.ops[step.target].reads)
        gradient_storages = set(self._capture.graph.outputs) - set(self._capture.graph.results)
        self._given_away = set(self._live) - read_later - gradient_storages
        self._given_away &= set(self._capture.graph.outputs)

    def _saved(self) -> list[str]:
        members = [
            self._names[node]
            for index in self._live
            if index not in self._given_away
            for node in self._capture.members[index]
        ]
        return [*members, *self._states.values()]

    def _step(self, step: Step) -> None:
        if step.kind == "free":
            del self._live[step.target]
            names = [self._names.pop(node) for node in self._capture.members[step.target]]
            views = self._views_in.pop(step.target, ())
            names += [self._views.pop(node) for node in views if node in self._views]
            self._lines.append(f"{' = '.join(names)} = None")
            return
        op, node = self._capture.graph.ops[step.target], self._capture.nodes[step.target]
        call = self._call(node)
        if step.target in self._times_left:
            call = self._drawn(step.target, node, call)
        is_whole = isinstance(node.meta.get("val"), Tensor)
        new = [index for index in op.writes if index not in self._live]
        self._live.update(dict.fromkeys(new))
        for index in new:
            for member in self._capture.members[index]:
                self._names[member] = f"v{self._numbers[member]}"
        if is_whole and new:
            self._lines.append(f"{self._names[node]} = {call}")
        elif new:
            self._lines.append(f"parts = {call}")
            for index in new:
                for member in self._capture.members[index]:
                    self._lines.append(f"{self._names[member]} = parts[{member.args[1]}]")
            self._lines.append("parts = None")
        else:
            self._lines.append(call)
        for state in self._spent:
            self._lines.append(f"{state} = None")
        self._spent.clear()

    def _drawn(self, op: int, node: fx.Node, call: str) -> str:
        self._times_left[op] -= 1
        function, _, arguments = call.partition("(")
        if op not in self._states:
            device = next((tensor.device for tensor in tensors_of(node)), torch.device("cpu"))
            self._states[op] = f"s{op}"
            self._lines.append(f"s{op} = _state({self._constant(device)})")
            return call
        state = self._states[op]
        device_name = self._constant(next((tensor.device for tensor in tensors_of(node)), torch.device("cpu")))
        if not self._times_left[op]:
            self._spent.append(self._states.pop(op))
        return f"_replay({state}, {device_name}, {function}, {arguments}"

    def _call(self, node: fx.Node) -> str:
        arguments = [self._argument(argument) for argument in node.args]
        for name, value in node.kwargs.items():
            text = self._argument(value)
            arguments.append(f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}")
        return f"{self._constant(_as_in_place(node))}({', '.join(arguments)})"

    def _value(self, node: fx.Node) -> str:
        """The name of a node's value; a view that is not there yet is made here."""
        if node.op == "placeholder":
            self._read.add(node)
        if node in self._names:
            return self._names[node]
        if node in self._views:
            return self._views[node]
        if node.op == "get_attr":
            return self._constant(fx.graph_module._get_attr(self._capture.module, str(node.target)))
        assert node not in self._storage_of, f"{node} is not in memory"
        name = f"w{self._numbers[node]}"
        if node.target is getitem:
            line = f"{name} = {self._value(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
        else:
            line = f"{name} = {self._call(node)}"
        self._lines.append(line)
        self._views[node] = name
        for index in self._storages_of(node):
            self._views_in.setdefault(index, []).append(node)
        return name

    def _storages_of(self, view: fx.Node) -> set[int]:
        """The storages that a view lies in; none, if it lies in an input."""
        found: set[int] = set()
        waiting = [view]
        while waiting:
            node = waiting.pop()
            if node in self._storage_of:
                found.add(self._storage_of[node])
            else:
                waiting.extend(node.all_input_nodes)
        return found

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self._value(argument)
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(self._argument(part) for part in argument)}]"
        if type(argument) in _LITERALS or (type(argument) is float and math.isfinite(argument)):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        if id(value) not in self._constants:
            # an id is one as long as its object lives
            self._kept_alive.append(value)
            self._constants[id(value)] = name = f"c{len(self._constants)}"
            self._globals[name] = value
        return self._constants[id(value)]


def _as_in_place(node: fx.Node) -> Any:
    """The function of a node, whose result has the layout that the plain program's has."""
    # Out of place, bernoulli lays its result out row by row whatever its argument's layout is. The in-place one, which
    # dropout calls on new memory, goes through that as it lies: the same numbers, in other places.
    source = node.args[0] if node.args else None
    if (
        node.target is torch.ops.aten.bernoulli.p
        and isinstance(source, fx.Node)
        and source.target in (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
    ):
        return _bernoulli
    return node.target


def _bernoulli(like: Tensor, p: float) -> Tensor:
    return torch.empty_like(like).bernoulli_(p)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _saved_random_state(device: torch.device) -> Tensor:
    # a copy that torch dispatches, so that whoever measures memory sees it
    return _random_state(device).clone()


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class OtherBranchError(Exception):
    """Python would have seen another number in a tensor than at the capture."""


def _check(tensor: Tensor, number: Any) -> None:
    found = tensor.item()
    # no number at all is the same as no number at all
    if found != number and (found == found or number == number):
        raise OtherBranchError


def _replay(state: Tensor, device: torch.device, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws random numbers in an earlier random state, and go back to the present one."""
    present = _random_state(device)
    _set_random_state(state, device)
    try:
        return function(*args, **kwargs)
    finally:
        _set_random_state(present, device)


class _Run(torch.autograd.Function):
    """One step: results forward, gradients backward."""

    @staticmethod
    def forward(ctx: Any, runner: "Runner", *inputs: Tensor) -> tuple[Tensor, ...]:
        program = runner.program
        with _as_kernels(inputs):
            results, updates, ctx.saved = program.forward(inputs)
        for buffer, contents in updates:
            buffer.copy_(contents)
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        # an input that changes before the backward pass is noticed; buffers that the step itself updates do change
        checked = [place for place in program.read_in_backward if place not in runner.updated]
        ctx.checked = checked
        ctx.save_for_backward(*(inputs[place] for place in checked))
        ctx.unchecked = {place: inputs[place] for place in program.read_in_backward if place in runner.updated}
        # what needs no gradient in the plain step, and its numbers of other kinds, need none here
        needed = zip(results, runner.capture.has_gradient, strict=True)
        ctx.mark_non_differentiable(*(result for result, has_gradient in needed if not has_gradient))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        runner = ctx.runner
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "create_graph=True asks for a second derivative, and a planned step has a program for the first alone:"
                " call remove_checkpointing(model), or the step itself, where second derivatives are needed"
            )
        if ctx.saved is None:
            raise RuntimeError(
                "the backward pass of a planned step ran already, and its tensors are freed: run the step again, or"
                " add up the losses before one backward()"
            )
        capture = runner.capture
        given: list[Tensor | None] = []
        for place, (tangent, node) in enumerate(zip(tangents, capture.tangents, strict=True)):
            if node is None and tangent is not None:
                raise RuntimeError(
                    f"a gradient arrived at result {place} of a planned step, which was captured for its loss alone:"
                    " compute everything that is differentiated inside of the step (`checkpoint_step`)"
                )
            if node is not None and tangent is None:
                (hollow,) = tensors_of(node)
                tangent = torch.zeros(hollow.shape, dtype=hollow.dtype, device=hollow.device)
            elif node is not None and tangent is not None:
                (hollow,) = tensors_of(node)
                tangent = tangent.to(hollow.dtype)
                if tangent.stride() != hollow.stride():
                    # the program's views are those of the layout that was captured
                    like = torch.empty_strided(
                        hollow.shape, hollow.stride(), dtype=tangent.dtype, device=tangent.device
                    )
                    tangent = like.copy_(tangent)
            given.append(tangent)
        inputs: list[Tensor | None] = [None] * len(capture.inputs)
        for place, tensor in zip(ctx.checked, ctx.saved_tensors, strict=True):
            inputs[place] = tensor
        for place, tensor in ctx.unchecked.items():
            inputs[place] = tensor
        saved, ctx.saved = ctx.saved, None
        with _as_kernels(inputs):
            gradients = runner.program.backward(inputs, saved, given)
        arrived = {place for place, tangent in enumerate(tangents) if tangent is not None}
        # an input that only other results depend on gets none, as in the plain step, and no zeros
        return (
            None,
            *(
                gradient if sources & arrived else None
                for gradient, sources in zip(gradients, runner.sources, strict=True)
            ),
        )


@contextmanager
def _as_kernels(inputs: Sequence[Tensor | None]) -> Iterator[None]:
    """Run ops as autograd runs them: nothing is recorded, the casts of autocast are ops of the program already."""
    # Some kernels (LSTM's on a CPU) leave out what the backward pass needs unless gradients are enabled.
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        for kind in {tensor.device.type for tensor in inputs if tensor is not None}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _sources(capture: Capture) -> list[set[int]]:
    places = {node: place for place, node in enumerate(capture.tangents) if node is not None}
    found: dict[fx.Node, set[int]] = {}
    for node in capture.module.graph.nodes:
        found[node] = set().union(*(found[source] for source in node.all_input_nodes))
        if node in places:
            found[node].add(places[node])
    return [set() if node is None else found[node] for node in capture.gradients]


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

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Run the forward part.

        Args:
            inputs: Parameters, buffers, and the tensors among the arguments, as in `Capture.inputs`.

        Returns:
            What the step returns; `backward()` of its loss runs the rest.
        """
        results = _Run.apply(self, *inputs)
        leaves = [
            inputs[leaf.index] if leaf.kind == "input" else results[leaf.index] if leaf.kind == "result" else leaf.value
            for leaf in self.capture.returned
        ]
        return pytree.tree_unflatten(leaves, self.capture.returned_spec)
