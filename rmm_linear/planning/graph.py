"""The graph that a planner sees: ops that cost time, storages that cost bytes.

Memory belongs to storages and not to ops: an op may write several, and views write none. A graph of one node an op
predicted 89.6 MB where 65.1 MB were measured. So the graph is bipartite. An op reads storages and writes others, each
storage is written by one op; tensors outside of the budget (parameters, buffers, the batch) are no storages.

The ops come in the order in which the plain program runs them. Of a training step, the ops that depend on the gradient
of the loss are the backward ones; `results` are the storages that must be there when the forward pass ends (the loss,
other results of the step, new contents of buffers), `outputs` must be there at the very end. `gradients`
leave before: each is handed over once no later op needs it. A gradient that is an output as well stays in memory from
then on, as its parameter's `.grad`; another is gone, since an optimizer takes it in the backward pass, or it is added
to an earlier gradient.

Where storages can be paged, a planner may bring one back in place of computing it again: a copy went to a file or to
another memory when it was first computed, and a load makes it a storage again. Orders name ops by their numbers; the
load of storage i has the number `len(ops) + i`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")

# Plans on disk are of the graphs of this version.
_VERSION = 2


@dataclass(frozen=True)
class Storage:
    """A piece of memory.

    Attributes:
        name: Any name, for people.
        size_bytes: Its size, at least 0.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Op:
    """A computation.

    Attributes:
        name: Any name, for people.
        cost: Its time in the graph's unit, more than 0.
        reads: Indices of the storages that it reads.
        writes: Indices of the storages that it writes; no other op writes them.
        temporary_bytes: Bytes that it holds only while it runs, beside its results.
        is_backward: Whether it depends on the gradient of the loss.
        is_recomputable: Whether it may run a second time; communication and ops with effects may not.
        is_random: Whether it draws random numbers: such ops keep their order, and draw the same numbers again.
        holds_back: Indices of gradients that are handed over only after it has run: it reads their parameter, which an
            optimizer may change from then on, or they go together with one that it reads or writes.
        state_bytes: Size of the random state that is kept from its first computation to its last, if it has several.
        block: The module that it belongs to, as a dotted path; empty where unknown.
        kind: The operation, for instance "aten.mm".
    """

    name: str
    cost: float
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    temporary_bytes: int = 0
    is_backward: bool = False
    is_recomputable: bool = True
    is_random: bool = False
    holds_back: tuple[int, ...] = ()
    state_bytes: int = 0
    block: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Graph:
    """Ops in the order of the plain program, and the storages that they read and write.

    Attributes:
        ops: The ops: forward ops, then backward ops.
        storages: The storages.
        outputs: Indices of the storages that must be there at the end.
        results: Indices of the storages that must be there when the forward pass ends, which is as soon as they are.
        cost_unit: The unit of costs: "ms", "flops", "bytes", "ops".
        gradients: Indices of the storages that are handed over as soon as no op needs them any more; see above.
        page_cost: Time in which a byte is paged out, or back, in `cost_unit`; None if nothing can be paged.

    Raises:
        ValueError: If the graph is empty or cyclic, a storage has no writer or two, a size is negative, a cost is not
            positive, a forward op comes after a backward one or reads what one wrote, an index is out of range, or
            anything is of another type than it is said to be.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    cost_unit: str = field(default="ops")
    gradients: tuple[int, ...] = ()
    page_cost: float | None = None

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError("the graph has no ops: there is nothing to plan")
        _check_fields(self, "the graph")
        for storage in self.storages:
            _check_fields(storage, f"storage {storage.name!r}")
        written: dict[int, int] = {}
        seen_backward = ""
        for position, op in enumerate(self.ops):
            _check_fields(op, f"op {op.name!r}")
            if seen_backward and not op.is_backward:
                raise ValueError(f"forward op {op.name!r} comes after backward op {seen_backward!r}; put it before")
            seen_backward = op.name if op.is_backward else seen_backward
            for index in (*op.reads, *op.writes, *op.holds_back):
                self._check_index(index, f"op {op.name!r}")
            for index in op.reads:
                if index not in written:
                    raise ValueError(
                        f"op {op.name!r} reads {self.storages[index].name!r} before it is written: the graph is cyclic,"
                        " or its ops are not in an order in which they can run"
                    )
            for index in op.writes:
                if index in written:
                    other = self.ops[written[index]].name
                    raise ValueError(
                        f"storage {self.storages[index].name!r} is written by {other!r} and by {op.name!r}; give each a"
                        " storage of its own"
                    )
                written[index] = position
        for index, storage in enumerate(self.storages):
            if index not in written:
                raise ValueError(f"storage {storage.name!r} is written by no op; leave out what is not computed")
        for kind, wrong in (("output", ""), ("result", "backward"), ("gradient", "forward")):
            for index in getattr(self, f"{kind}s"):
                self._check_index(index, f"{kind}s")
                if wrong == ("backward" if self.ops[written[index]].is_backward else "forward"):
                    raise ValueError(f"{kind} {self.storages[index].name!r} is written by a {wrong} op")

    def _check_index(self, index: int, where: str) -> None:
        if not 0 <= index < len(self.storages):
            raise ValueError(f"{where} names storage {index}, of which there are {len(self.storages)}")

    @cached_property
    def runnable(self) -> tuple[Op, ...]:
        """The ops, and after them the load of each storage; orders number them so."""
        rate = self.page_cost or 0.0
        loads = (
            Op(f"load {storage.name}", rate * storage.size_bytes, writes=(index,), kind="load")
            for index, storage in enumerate(self.storages)
        )
        return (*self.ops, *loads)

    @cached_property
    def writer(self) -> tuple[int, ...]:
        """Index of the op that writes each storage."""
        found = [0] * len(self.storages)
        for position, op in enumerate(self.ops):
            for index in op.writes:
                found[index] = position
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the ops that read each storage, in order."""
        found: list[list[int]] = [[] for _ in self.storages]
        for position, op in enumerate(self.ops):
            for index in dict.fromkeys(op.reads):
                found[index].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage."""
        return tuple(storage.size_bytes for storage in self.storages)

    @cached_property
    def bytes_while_running(self) -> tuple[int, ...]:
        """The bytes that each op or load adds while it runs: all results, written again or not, and temporaries."""
        return tuple(op.temporary_bytes + sum(map(self.sizes.__getitem__, op.writes)) for op in self.runnable)

    @cached_property
    def stateful(self) -> tuple[int, ...]:
        """Indices of the ops that have a random state."""
        return tuple(index for index, op in enumerate(self.ops) if op.state_bytes)

    @cached_property
    def freed(self) -> frozenset[int]:
        """Indices of the gradients that are gone once they are handed over."""
        return frozenset(self.gradients).difference(self.outputs)

    def with_gradients_freed(self) -> "Graph":
        """Return the same graph for steps that leave no gradient of a parameter behind."""
        return replace(self, outputs=tuple(index for index in self.outputs if index not in self.gradients))

    @cached_property
    def forward_count(self) -> int:
        """Number of forward ops; they come first."""
        return sum(not op.is_backward for op in self.ops)

    @cached_property
    def cost(self) -> float:
        """Time of the plain program, each op once."""
        return sum(op.cost for op in self.ops)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that depend on everything but the names, the temporaries and the cost of paging.

        Temporaries of a CPU's kernels depend on the number of threads; a schedule runs with any temporaries.
        """
        plain = {"version": _VERSION, **asdict(self)}
        del plain["page_cost"]
        for part in (*plain["ops"], *plain["storages"]):
            del part["name"]
        for op in plain["ops"]:
            del op["temporary_bytes"]
        return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return the starts and all that they lead to, step by step; `following` says where each of these leads."""
    found: set[T] = set()
    waiting = list(starts)
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += following(each)
    return found


def _check_fields(part: Op | Storage | Graph, where: str) -> None:
    """Refuse values of another type than their field's, and numbers out of range."""
    for each in fields(part):
        wrong = _what_is_wrong(getattr(part, each.name), each.type)
        if wrong:
            raise ValueError(f"{where} has {each.name}={getattr(part, each.name)!r}{wrong}")


def _what_is_wrong(value: Any, kind: Any) -> str:
    if kind is str:
        return "" if isinstance(value, str) else ", which is no text"
    if kind is bool:
        return "" if isinstance(value, bool) else ", which is no bool"
    if kind is int:
        return ", which is no int" if not _is_int(value) else "; sizes are at least 0" if value < 0 else ""
    if kind is float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return "" if is_number and 0 < value < float("inf") else "; costs are positive and finite"
    if kind == float | None:
        return "" if value is None else _what_is_wrong(value, float)
    if kind == tuple[int, ...]:
        return "" if isinstance(value, tuple) and all(map(_is_int, value)) else ", which is not a tuple of ints"
    return ""


def _is_int(value: Any) -> bool:
    # a bool counts as an int for Python
    return isinstance(value, int) and not isinstance(value, bool)
