"""The program of a schedule: Python code of one line a step, cut where the forward pass ends.

A recomputation is a second call of the same op, a free is an assignment of None. A view is made where it is read first,
and goes with its storage; a view of an input goes with the pass. The two parts share tensors in a list that the
backward part empties, so that every tensor dies at the step at which the schedule frees it. The ops are those that
eager mode runs, in its order: outputs, gradients and buffers have the same bits. An op that draws random numbers is
recomputed from the random state that it had. A storage that a schedule loads is paged out where it is computed first.

The backward part hands each gradient over once no later step reads it, or the input that it belongs to: the caller
may change both. The backward part is a generator, which stops there; `rmm_linear.compiler.runner` resumes it.
"""

import keyword
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from rmm_linear.compiler.fake_memory import tensors_of
from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.paging import Pager, pager_for
from rmm_linear.planning.graph import reached
from rmm_linear.planning.schedule import Schedule, Step, end_of_forward, hand_over_places, validate

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_LITERALS = (int, bool, str, type(None))


class Part(NamedTuple):
    """A part of the backward pass, between two stops.

    Attributes:
        gradients: Inputs whose gradients it hands over at its end.
        reads: Inputs that it reads.
    """

    gradients: tuple[int, ...]
    reads: frozenset[int]


@dataclass(frozen=True)
class Program:
    """The code of a schedule.

    Attributes:
        forward: (inputs) -> (results, pairs of a buffer and its new contents, tensors saved for `backward`).
        backward: (inputs, saved, tangents, gradients) -> a generator, which empties `saved` and stops after each part,
            with that part's gradients in their places of `gradients`.
        parts: The parts, at least one.
        shared: Places of the results in whose memory the backward part reads.
        constants: Tensors that are no inputs, and that the backward part reads.
        has_layouts: Whether the backward part takes gradients of results in the layout of the trace alone.
    """

    forward: Callable[[Sequence[Tensor]], tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[Any]]]
    backward: Callable[
        [Sequence[Tensor | None], list[Any], Sequence[Tensor | None], list[Tensor | None]], Iterator[None]
    ]
    parts: tuple[Part, ...]
    shared: tuple[int, ...]
    constants: tuple[Tensor, ...]
    has_layouts: bool = False


def program_of(capture: Capture, schedule: Schedule, page_to: str | Path | None = None) -> Program:
    """Write the code of a schedule; storages that it loads are paged to `page_to`, see `rmm_linear.paging.pager_for`.

    Raises:
        ScheduleError: If the schedule cannot run; see `rmm_linear.planning.schedule.validate`.
    """
    validate(capture.graph, schedule)
    return _Writer(capture, schedule, page_to).program()


class _Writer:
    def __init__(self, capture: Capture, schedule: Schedule, page_to: str | Path | None) -> None:
        self._capture, self._schedule = capture, schedule
        self._globals: dict[str, Any] = {"_state": random_state, "_replay": _replay}
        # how often each storage that is paged will be loaded
        self._loads_left = Counter(schedule.loads(capture.graph))
        if self._loads_left:
            device = next(tensor.device for node in capture.results for tensor in tensors_of(node))
            self._globals |= {"_pager": lambda: pager_for(page_to, device), "_put": _put, "_take": _take}
        self._constants: dict[int, str] = {}
        # the name of each value that is in memory: inputs, tangents, members of live storages
        self._names: dict[fx.Node, str] = {node: f"inputs[{place}]" for place, node in enumerate(capture.inputs)}
        self._lines: list[str] = []
        self._live: dict[int, None] = {}
        self._states: dict[int, str] = {}
        self._spent: list[str] = []
        # names of the pages that will be loaded
        self._pages: dict[int, str] = {}
        self._numbers = {node: number for number, node in enumerate(capture.module.graph.nodes)}
        self._storage_of = {node: index for index, members in enumerate(capture.members) for node in members}
        # names of the live views, and the views in each live storage
        self._views: dict[fx.Node, str] = {}
        self._views_in: dict[int, list[fx.Node]] = {}
        # inputs and constants that have been read
        self._read: set[fx.Node] = set()
        self._constants_read: dict[str, Tensor] = {}
        self._sources = sources_of(capture)
        # names the inputs whose gradient lies in a storage; the key of gradients outside of the budget is None
        self._gradients: dict[int | None, list[int]] = {}
        for place, node in enumerate(capture.gradients):
            if node is not None:
                storages, _ = self._lies_in(node)
                self._gradients.setdefault(next(iter(storages), None), []).append(place)
        times = Counter(schedule.order)
        ops = capture.graph.runnable
        self._times_left = {op: count for op, count in times.items() if count > 1 and ops[op].is_random}

    def program(self) -> Program:
        steps = self._schedule.steps
        computations = [number for number, step in enumerate(steps) if step.kind == "compute"]
        # the step that computes the last result
        cut = computations[end_of_forward(self._capture.graph, self._schedule.order)]
        if self._loads_left:
            self._lines.append("pager = _pager()")
        for step in steps[: cut + 1]:
            self._step(step)
        # new tensor objects: a saved tensor must not be a returned tensor, or the two would hold each other
        results = [f"{self._value(node)}.detach()" for node in self._capture.results]
        self._lines.append(f"results = [{', '.join(results)}]")
        updates = [f"(inputs[{place}], {self._value(node)})" for place, node in self._capture.updates]
        self._lines.append(f"updates = [{', '.join(updates)}]")
        while cut + 1 < len(steps) and steps[cut + 1].kind == "free":
            cut += 1
            self._step(steps[cut])
        kept = self._kept(steps[cut + 1 :])
        members = [node for index in kept for node in self._capture.members[index]]
        pager = ["pager"] if any(self._loads_left.values()) else []
        saved = [*map(self._names.__getitem__, members), *self._states.values(), *pager, *self._pages.values()]
        # results in whose memory the caller can write before it is read
        are_shared = (not self._lies_in(node)[0].isdisjoint(kept) for node in self._capture.results)
        shared = tuple(place for place, is_one in enumerate(are_shared) if is_one)
        self._lines.append(f"return results, updates, [{', '.join(saved)}]")
        forward = self._function("forward(inputs)")
        self._views.clear()
        self._views_in.clear()
        self._constants_read.clear()
        self._lines = [f"{', '.join(saved)}, = saved"] if saved else []
        self._lines.append("saved.clear()")
        for place, node in enumerate(self._capture.tangents):
            if node is not None:
                self._names[node] = f"tangents[{place}]"
        parts = self._parts(steps, cut + 1)
        backward = self._function("backward(inputs, saved, tangents, gradients)")
        exec(compile(f"{forward}\n\n{backward}", "<schedule>", "exec"), self._globals)
        constants = tuple(self._constants_read.values())
        return Program(self._globals["forward"], self._globals["backward"], tuple(parts), shared, constants)

    def _parts(self, steps: Sequence[Step], first: int) -> list[Part]:
        order = self._schedule.order
        places = hand_over_places(self._capture.graph, order, {index for index in self._gradients if index is not None})
        position = sum(step.kind == "compute" for step in steps[:first])
        waiting: dict[int, list[int | None]] = {}
        for index in self._gradients:
            # gradients from before the backward part go with the first, gradients outside of the budget with the last
            at = len(order) - 1 if index is None else max(places[index], position)
            waiting.setdefault(at, []).append(index)
        parts = []
        ready: list[int | None] = []
        self._read.clear()
        for step in steps[first:]:
            if step.kind == "compute":
                # after the frees of the step before; the last part goes to the very end
                if ready and waiting:
                    parts.append(self._hand_over(ready))
                    ready = []
                ready += waiting.pop(position, [])
                position += 1
            elif step.target in ready:
                # it goes with being handed over
                del self._live[step.target]
                continue
            self._step(step)
        # a backward part without ops hands gradients over as well
        parts.append(self._hand_over([*ready, *(index for left in waiting.values() for index in left)]))
        return parts

    def _hand_over(self, storages: Sequence[int | None]) -> Part:
        """Give gradients away, keep nothing of them, and stop."""
        handed_over = [place for index in storages for place in self._gradients[index]]
        for place in handed_over:
            self._lines.append(f"gradients[{place}] = {self._value(self._capture.gradients[place])}")  # type: ignore[arg-type]
        for index in storages:
            if index is not None:
                self._forget(index)
        self._lines.append("yield")
        read = frozenset(place for place, node in enumerate(self._capture.inputs) if node in self._read)
        self._read.clear()
        return Part(tuple(handed_over), read)

    def _function(self, signature: str) -> str:
        return "\n    ".join([f"def {signature}:", *self._lines])

    def _kept(self, later: Sequence[Step]) -> list[int]:
        """Live storages, but for results that no later step reads: they are the caller's from now on."""
        graph = self._capture.graph
        needed = {index for step in later if step.kind == "compute" for index in graph.runnable[step.target].reads}
        given_away = set(graph.outputs) - needed - self._gradients.keys()
        return [index for index in self._live if index not in given_away]

    def _step(self, step: Step) -> None:
        if step.kind == "free":
            del self._live[step.target]
            self._forget(step.target)
            return
        if step.target >= len(self._capture.graph.ops):
            self._load(step.target - len(self._capture.graph.ops))
            return
        op, node = self._capture.graph.ops[step.target], self._capture.nodes[step.target]
        call = self._call(node)
        if step.target in self._times_left:
            call = self._drawn(step.target, node, call)
        is_whole = isinstance(node.meta.get("val"), Tensor)
        new = {index: self._written(index) for index in op.writes if index not in self._live}
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
        for index in new:
            if self._loads_left[index] and index not in self._pages:
                self._pages[index] = f"p{index}"
                self._lines.append(f"p{index} = _put(pager, [{', '.join(new[index])}])")

    def _written(self, storage: int) -> list[str]:
        """Note that a storage is in memory, and return the names of the tensors in it."""
        self._live[storage] = None
        names = {member: f"v{self._numbers[member]}" for member in self._capture.members[storage]}
        self._names.update(names)
        return list(names.values())

    def _load(self, storage: int) -> None:
        self._lines.append(f"{', '.join(self._written(storage))}, = _take(pager, p{storage})")
        self._loads_left[storage] -= 1
        if not self._loads_left[storage]:
            self._lines.append(f"{self._pages.pop(storage)} = None")

    def _forget(self, storage: int) -> None:
        """Let go of a storage, if it is there still."""
        names = [self._names.pop(node) for node in self._capture.members[storage] if node in self._names]
        views = self._views_in.pop(storage, ())
        names += [self._views.pop(node) for node in views if node in self._views]
        if names:
            self._lines.append(f"{' = '.join(names)} = None")

    def _drawn(self, op: int, node: fx.Node, call: str) -> str:
        self._times_left[op] -= 1
        function, _, arguments = call.partition("(")
        device = self._constant(next((tensor.device for tensor in tensors_of(node)), torch.device("cpu")))
        if op not in self._states:
            self._states[op] = f"s{op}"
            self._lines.append(f"s{op} = _state({device})")
            return call
        if not self._times_left[op]:
            self._spent.append(self._states.pop(op))
        return f"_replay(s{op}, {device}, {function}, {arguments}"

    def _call(self, node: fx.Node) -> str:
        arguments = [self._argument(argument) for argument in node.args]
        for name, value in node.kwargs.items():
            text = self._argument(value)
            arguments.append(f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}")
        # a gradient in another layout than the sample's may have to be copied here, as in the plain pass
        function = torch.reshape if self._sources[node] and node.target in _VIEWS else node.target
        return f"{self._constant(function)}({', '.join(arguments)})"

    def _value(self, node: fx.Node) -> str:
        """The name of a node's value; a view that is not there yet is made here."""
        if node.op == "placeholder":
            self._read.add(node)
        if node in self._names:
            return self._names[node]
        if node in self._views:
            self._read |= self._lies_in(node)[1]
            return self._views[node]
        if node.op == "get_attr":
            constant = fx.graph_module._get_attr(self._capture.module, str(node.target))
            if isinstance(constant, Tensor):
                self._constants_read[str(node.target)] = constant
            return self._constant(constant)
        assert node not in self._storage_of, f"{node} is not in memory"
        name = f"w{self._numbers[node]}"
        if node.target is getitem:
            line = f"{name} = {self._value(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
        else:
            line = f"{name} = {self._call(node)}"
        self._lines.append(line)
        self._views[node] = name
        for index in self._lies_in(node)[0]:
            self._views_in.setdefault(index, []).append(node)
        return name

    def _lies_in(self, view: fx.Node) -> tuple[set[int], set[fx.Node]]:
        """The storages, or the inputs, that a view lies in."""
        nodes = reached([view], lambda node: () if node in self._storage_of else node.all_input_nodes)
        inputs = {node for node in nodes if node.op == "placeholder"}
        return {self._storage_of[node] for node in nodes if node in self._storage_of}, inputs

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
            self._constants[id(value)] = name = f"c{len(self._constants)}"
            # an id is one as long as its object lives
            self._globals[name] = value
        return self._constants[id(value)]


def sources_of(capture: Capture) -> dict[fx.Node, set[int]]:
    """Find the results from whose gradients each node is computed."""
    places = {node: {place} for place, node in enumerate(capture.tangents) if node is not None}
    found: dict[fx.Node, set[int]] = {}
    for node in capture.module.graph.nodes:
        found[node] = places.get(node, set()).union(*(found[source] for source in node.all_input_nodes))
    return found


def _put(pager: Pager, tensors: Sequence[Tensor]) -> Any:
    """Page out the memory in which tensors lie."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
    places = [(each.dtype, each.storage_offset(), each.shape, each.stride()) for each in tensors]
    return pager.put([memory]), places


def _take(pager: Pager, page: Any) -> list[Tensor]:
    """Bring tensors back, as they lay in their memory."""
    kept, places = page
    (memory,) = pager.take(kept)
    storage = memory.untyped_storage()
    return [
        torch.empty(0, dtype=dtype, device=memory.device).set_(storage, offset, shape, stride)
        for dtype, offset, shape, stride in places
    ]


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator, in new memory of the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def hidden_random_state(device: torch.device) -> bytes:
    """Return the state of a device's default generator in memory of Python, which no plan counts."""
    return random_state(device).numpy().tobytes()


def set_random_state(state: Tensor | bytes, device: torch.device) -> None:
    """Set the state of a device's default generator to a result of `random_state` or `hidden_random_state`."""
    if isinstance(state, bytes):
        state = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _replay(state: Tensor, device: torch.device, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws random numbers in an earlier random state, and go back to the present one."""
    present = hidden_random_state(device)
    set_random_state(state, device)
    try:
        return function(*args, **kwargs)
    finally:
        set_random_state(present, device)
