"""The simulator: bytes at every step of a schedule, and its time.

While an op runs, memory holds the storages from before, all its results (also results in memory, when it runs a
second time, and results that no op reads), and its temporaries. An op that draws random numbers and runs several times
has the random state kept for it. The peak is the largest such sum. A storage that is loaded was paged out before, once:
both take time, and no op runs meanwhile. Measured peaks equal the simulated peak to the byte
(`rmm_linear.compiler.exact_program` runs schedules; the tests measure with an instrument of their own).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule, end_of_forward, frees_of_order, validate


@dataclass(frozen=True)
class Simulation:
    """The peak and the time of a schedule.

    Attributes:
        peak_bytes: The most that is in memory at any time; parameters, buffers and the batch are not counted.
        cost: Time of all computations and of paging, in the graph's unit.
        extra_cost: Time beyond the plain program's.
        bytes_at_step: Bytes in memory during each step.
        forward_bytes: Bytes in memory at the end of the forward pass: storages kept for the backward pass, and results.
        forward_live: Storages in memory then.
    """

    peak_bytes: int
    cost: float
    extra_cost: float
    bytes_at_step: tuple[int, ...]
    forward_bytes: int
    forward_live: frozenset[int]

    @property
    def overhead(self) -> float:
        """Extra time over the plain program's."""
        plain = self.cost - self.extra_cost
        return self.extra_cost / plain if plain else 0.0


@dataclass(frozen=True)
class Proposal:
    """An order of computations (indices of ops, with repetitions), with its peak, and its time in the graph's unit."""

    peak_bytes: int
    cost: float
    order: tuple[int, ...]


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Run a schedule without computing anything, and return its peak, cost and timeline.

    Raises:
        ScheduleError: If the schedule cannot run; see `validate`.
    """
    validate(graph, schedule)
    times = Counter(schedule.order)
    left = times.copy()
    live: set[int] = set()
    held = place = 0
    bytes_at_step = []
    cost = first_cost = 0.0
    computed: set[int] = set()
    end = end_of_forward(graph, schedule.order)
    forward: tuple[int, frozenset[int]] | None = None
    for step in schedule.steps:
        if step.kind == "free":
            live.remove(step.target)
            held -= graph.storages[step.target].size_bytes
            bytes_at_step.append(held)
            continue
        if forward is None and 0 <= end < place:
            forward = held, frozenset(live)
        place += 1
        op = graph.runnable[step.target]
        is_load = step.target >= len(graph.ops)
        if times[step.target] > 1 and step.target not in computed:
            held += op.state_bytes
        bytes_at_step.append(held + graph.bytes_while_running[step.target])
        held += sum(graph.storages[index].size_bytes for index in op.writes if index not in live)
        live.update(op.writes)
        is_first = step.target not in computed
        # the first load pays for the way out as well
        cost += (1 + (is_load and is_first)) * op.cost
        first_cost += op.cost if is_first and not is_load else 0.0
        computed.add(step.target)
        left[step.target] -= 1
        if times[step.target] > 1 and not left[step.target]:
            held -= op.state_bytes
    forward_bytes, forward_live = forward or (held, frozenset(live))
    return Simulation(
        peak_bytes=max(bytes_at_step, default=0),
        cost=cost,
        extra_cost=cost - first_cost,
        bytes_at_step=tuple(bytes_at_step),
        forward_bytes=forward_bytes,
        forward_live=forward_live,
    )


def peak_and_cost(graph: Graph, order: Sequence[int]) -> tuple[int, float]:
    """Return the result of `simulate` for `Schedule.from_order`, faster and without a check: for planners' loops."""
    ops = graph.runnable
    cost = sum(ops[index].cost for index in order)
    if graph.page_cost is not None:
        cost += sum(ops[index].cost for index in {*order} if index >= len(graph.ops))
    return max(bytes_of_order(graph, order), default=0), cost


def plain_peak_bytes(graph: Graph) -> int:
    """Return the peak of the plain program."""
    return peak_and_cost(graph, range(len(graph.ops)))[0]


def bytes_of_order(graph: Graph, order: Sequence[int]) -> list[int]:
    """Return the bytes in memory during each computation of an order of ops and loads, without a check."""
    ops, sizes = graph.runnable, graph.sizes
    times = Counter(order)
    states = {index: ops[index].state_bytes for index in graph.stateful if times[index] > 1}
    left = times.copy()
    live = bytearray(len(sizes))
    held = 0
    during = []
    for op_index, freed in zip(order, frees_of_order(graph, order), strict=True):
        if op_index in states:
            if left[op_index] == times[op_index]:
                held += states[op_index]
            left[op_index] -= 1
        during.append(held + graph.bytes_while_running[op_index])
        for index in ops[op_index].writes:
            if not live[index]:
                live[index] = 1
                held += sizes[index]
        for index in freed:
            live[index] = 0
            held -= sizes[index]
        if op_index in states and not left[op_index]:
            held -= states[op_index]
    return during
