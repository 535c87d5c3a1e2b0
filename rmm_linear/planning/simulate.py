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
        peak_step: The step at which the peak is reached first.
        live_at_peak: Storages in memory at that step, its op's results included.
        bytes_at_step: Bytes in memory during each step.
        forward_steps: Steps until the last result is there.
        forward_bytes: Bytes in memory at the end of the forward pass: storages kept for the backward pass, and results.
        forward_live: Storages in memory then.
    """

    peak_bytes: int
    cost: float
    extra_cost: float
    peak_step: int
    live_at_peak: tuple[int, ...]
    bytes_at_step: tuple[int, ...]
    forward_steps: int
    forward_bytes: int
    forward_live: frozenset[int]

    @property
    def overhead(self) -> float:
        """Extra time over the plain program's."""
        plain = self.cost - self.extra_cost
        return self.extra_cost / plain if plain else 0.0


@dataclass(frozen=True)
class Proposal:
    """An order of computations, with its peak and time.

    Attributes:
        peak_bytes: Its peak.
        cost: Time of all its computations, in the graph's unit.
        order: Indices of ops, with repetitions.
    """

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
    held = peak = peak_step = 0
    live_at_peak: tuple[int, ...] = ()
    bytes_at_step = []
    cost = first_cost = 0.0
    computed: set[int] = set()
    computations = [number for number, step in enumerate(schedule.steps) if step.kind == "compute"]
    end = end_of_forward(graph, schedule.order)
    forward_steps = len(schedule.steps) if end < 0 else computations[end] + 1
    forward_bytes = 0
    forward_live: frozenset[int] | None = None
    for number, step in enumerate(schedule.steps):
        if step.kind == "free":
            live.remove(step.target)
            held -= graph.storages[step.target].size_bytes
            bytes_at_step.append(held)
            continue
        if forward_live is None and number >= forward_steps:
            forward_bytes, forward_live = held, frozenset(live)
        op = graph.runnable[step.target]
        is_load = step.target >= len(graph.ops)
        if times[step.target] > 1 and step.target not in computed:
            held += op.state_bytes
        during = held + op.temporary_bytes + sum(graph.storages[index].size_bytes for index in op.writes)
        held += sum(graph.storages[index].size_bytes for index in op.writes if index not in live)
        live.update(op.writes)
        bytes_at_step.append(during)
        if during > peak or not number:
            peak, peak_step, live_at_peak = during, number, tuple(sorted(live))
        is_first = step.target not in computed
        # the first load pays for the way out as well
        cost += (1 + (is_load and is_first)) * op.cost
        first_cost += op.cost if is_first and not is_load else 0.0
        computed.add(step.target)
        left[step.target] -= 1
        if times[step.target] > 1 and not left[step.target]:
            held -= op.state_bytes
    return Simulation(
        peak_bytes=peak,
        cost=cost,
        extra_cost=cost - first_cost,
        peak_step=peak_step,
        live_at_peak=live_at_peak,
        bytes_at_step=tuple(bytes_at_step),
        forward_steps=forward_steps,
        forward_bytes=held if forward_live is None else forward_bytes,
        forward_live=frozenset(live) if forward_live is None else forward_live,
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
