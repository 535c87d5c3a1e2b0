"""A schedule: computations, recomputations, and frees, step by step. Plain data.

A planner decides on an *order*: a sequence of ops in which some occur more than once. All else follows: an op reads
the result of the latest computation before it, so that a storage can go after the last read before it is written anew,
or for good. `Schedule.from_order` writes these frees down. Outputs stay from their first computation to the end,
gradients that are no outputs until they are handed over.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from rmm_linear.errors import ScheduleError
from rmm_linear.planning.graph import Graph

_VERSION = 1


class Step(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: "compute" or "free".
        target: The number of the op that is computed, or of the load that runs (`Graph.runnable`); or the storage that
            is freed.
    """

    kind: Literal["compute", "free"]
    target: int


@dataclass(frozen=True)
class Schedule:
    """Steps for one graph.

    Attributes:
        steps: The steps, in order.
        graph: Fingerprint of the graph that they belong to.
        strategy: Name of the strategy that made it.
        proof: The bound that the strategy's solver proved, as a sentence; empty for strategies without a solver.
    """

    steps: tuple[Step, ...]
    graph: str
    strategy: str = ""
    proof: str = ""

    @classmethod
    def from_order(cls, graph: Graph, order: Iterable[int], *, strategy: str = "", proof: str = "") -> "Schedule":
        """Make a schedule that frees each storage as early as the order of computations allows; see `validate`."""
        order = list(order)
        steps: list[Step] = []
        for op, freed in zip(order, frees_of_order(graph, order), strict=True):
            steps.append(Step("compute", op))
            steps.extend(Step("free", index) for index in freed)
        return cls(tuple(steps), graph.fingerprint, strategy, proof)

    @classmethod
    def plain(cls, graph: Graph) -> "Schedule":
        """Make the schedule of the plain program: each op once, everything freed after its last use."""
        return cls.from_order(graph, range(len(graph.ops)), strategy="none")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ops and loads in the order in which they run, with repetitions."""
        return tuple(step.target for step in self.steps if step.kind == "compute")

    def loads(self, graph: Graph) -> list[int]:
        """Return the storages that are brought back from their pages, once for each time."""
        return [target - len(graph.ops) for target in self.order if target >= len(graph.ops)]

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain data, for JSON and `from_dict`."""
        return {
            "version": _VERSION,
            "graph": self.graph,
            "strategy": self.strategy,
            "proof": self.proof,
            "steps": [[step.kind, step.target] for step in self.steps],
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Schedule":
        """Make a schedule of a result of `to_dict`.

        Raises:
            ValueError: If this is no schedule.
            ScheduleError: If a step is neither computed nor freed, or its target is no int.
        """
        if not isinstance(plain, dict) or plain.get("version") != _VERSION:
            raise ValueError(f"this is no schedule of version {_VERSION}: pass what Schedule.to_dict returned")
        try:
            steps = tuple(Step(kind, target) for kind, target in plain["steps"])
            graph, strategy, proof = plain["graph"], plain["strategy"], plain.get("proof", "")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the schedule's data is incomplete: {error!r}") from error
        for name, value in (("graph", graph), ("strategy", strategy), ("proof", proof)):
            if not isinstance(value, str):
                raise ValueError(f"the schedule has {name}={value!r}, which is no text")
        for number, step in enumerate(steps):
            _check_types(number, step)
        return cls(steps, graph, strategy, proof)

    def to_json(self) -> str:
        """Return the schedule as JSON, for `from_json`."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Make a schedule of a result of `to_json`."""
        return cls.from_dict(json.loads(text))


def frees_of_order(graph: Graph, order: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the storages that can go after each place of the order."""
    # storages that stay from their computation on, after all readers; a gradient only until it is handed over
    stays = bytearray(len(graph.storages))
    for index in graph.outputs:
        stays[index] = 1
    needed_at: dict[int, list[int]] = {end_of_forward(graph, order): [i for i in graph.results if not stays[i]]}
    leaving = hand_over_places(graph, order, graph.freed) if graph.freed else {}
    for index, position in leaving.items():
        needed_at.setdefault(position, []).append(index)
    freed: list[tuple[int, ...]] = [()] * len(order)
    # from the end: storages whose present contents are read later on
    wanted = bytearray(stays)
    ops = graph.runnable
    for position in range(len(order) - 1, -1, -1):
        op = ops[order[position]]
        # tensors that no later op reads: results that are not wanted, inputs that it is the last to read
        gone = []
        for index in needed_at.get(position, ()):
            if not wanted[index]:
                gone.append(index)
                wanted[index] = 1
            stays[index] = 1
        for index in op.writes:
            if not wanted[index]:
                gone.append(index)
            wanted[index] = stays[index]
        for index in op.reads:
            if not wanted[index]:
                gone.append(index)
                wanted[index] = 1
        freed[position] = tuple(gone)
    return freed


def hand_over_places(graph: Graph, order: Sequence[int], gradients: Collection[int]) -> dict[int, int]:
    """Return the place of the order at which each gradient is handed over: no later op reads it, or holds it back."""
    found: dict[int, int] = {}
    for position, op_index in enumerate(order):
        op = graph.runnable[op_index]
        for index in op.writes:
            if index in gradients:
                found.setdefault(index, position)
        for index in (*op.reads, *op.holds_back):
            if index in found:
                found[index] = position
    return found


def _check_types(number: int, step: Step) -> None:
    where = f"step {number} ({step.kind} {step.target!r})"
    if step.kind not in ("compute", "free"):
        raise ScheduleError(f"{where}: the kind is neither 'compute' nor 'free'", number)
    # a bool counts as an int for Python
    if isinstance(step.target, bool) or not isinstance(step.target, int):
        raise ScheduleError(f"{where}: the target is no int", number)


def end_of_forward(graph: Graph, order: Sequence[int]) -> int:
    """Return the place at which the last result is computed first; -1 if there are none, or one is missing."""
    missing = {graph.writer[index] for index in graph.results}
    for position, op in enumerate(order if missing else ()):
        missing.discard(op)
        if not missing:
            return position
    return -1


def validate(graph: Graph, schedule: Schedule) -> None:
    """Check that a schedule can run, and that it computes the plain program's results.

    Raises:
        ScheduleError: If it belongs to another graph, or a step is wrong: it says which one, and why.
    """
    if schedule.graph != graph.fingerprint:
        raise ScheduleError(
            f"the schedule was made for graph {schedule.graph}, and this is {graph.fingerprint}: the model, its input"
            " or the way of capturing it has changed; plan again"
        )
    live: set[int] = set()
    computed: set[int] = set()
    results_missing = {graph.writer[index] for index in graph.results}
    has_backward = any(op.is_backward for op in graph.ops)
    last_random = -1
    for number, step in enumerate(schedule.steps):
        where = f"step {number} ({step.kind} {step.target})"
        _check_types(number, step)
        if step.kind == "free":
            if not 0 <= step.target < len(graph.storages):
                raise ScheduleError(f"{where}: there are {len(graph.storages)} storages", number)
            if step.target not in live:
                raise ScheduleError(f"{where}: {graph.storages[step.target].name!r} is not in memory", number)
            if results_missing and step.target in graph.results:
                name = graph.storages[step.target].name
                raise ScheduleError(f"{where}: {name!r} is a result, and the forward pass has not ended", number)
            live.remove(step.target)
            continue
        if not 0 <= step.target < len(graph.runnable):
            raise ScheduleError(
                f"{where}: there are {len(graph.ops)} ops, and {len(graph.storages)} loads after them", number
            )
        op = graph.runnable[step.target]
        if step.target >= len(graph.ops):
            index = step.target - len(graph.ops)
            for is_wrong, why in (
                (graph.page_cost is None, "would be paged, and page_to names no place for pages"),
                (graph.writer[index] not in computed, "has not been computed, and has no page"),
                (index in live, "is in memory"),
                (index in graph.gradients, "is a gradient, which is handed over and not paged"),
            ):
                if is_wrong:
                    raise ScheduleError(f"{where}: {graph.storages[index].name!r} {why}", number)
        for index in op.reads:
            if index not in live:
                state = "was freed" if graph.writer[index] in computed else "has not been computed"
                raise ScheduleError(f"{where}: {op.name!r} reads {graph.storages[index].name!r}, which {state}", number)
        for index in op.holds_back:
            if index in graph.freed and graph.writer[index] in computed and index not in live:
                name = graph.storages[index].name
                raise ScheduleError(f"{where}: {op.name!r} reads a parameter whose gradient {name!r} has gone", number)
        if step.target in computed:
            if not op.is_recomputable:
                raise ScheduleError(f"{where}: {op.name!r} must not run twice", number)
        elif op.is_random:
            if step.target < last_random:
                other = graph.ops[last_random].name
                raise ScheduleError(
                    f"{where}: {op.name!r} draws after {other!r}, and the plain program before it", number
                )
            if has_backward and not op.is_backward and graph.results and not results_missing:
                raise ScheduleError(f"{where}: {op.name!r} draws after the forward pass has ended", number)
            last_random = step.target
        elif not op.is_recomputable and not op.is_backward and has_backward and graph.results and not results_missing:
            raise ScheduleError(
                f"{where}: {op.name!r}, which must not run twice, runs after the forward pass has ended", number
            )
        if op.is_backward and results_missing:
            name = graph.ops[min(results_missing)].name
            raise ScheduleError(f"{where}: backward op {op.name!r} runs before {name!r}, a result", number)
        computed.add(step.target)
        results_missing.discard(step.target)
        live.update(op.writes)
    for index in graph.outputs:
        if index not in live:
            raise ScheduleError(f"output {graph.storages[index].name!r} is not in memory at the end")
    for index in graph.gradients:
        if graph.writer[index] not in computed:
            raise ScheduleError(f"gradient {graph.storages[index].name!r} is never computed")
    for position, op in enumerate(graph.ops):
        if position not in computed and (op.is_random or not op.is_recomputable):
            raise ScheduleError(f"{op.name!r}, which has an effect, is never computed")
