"""Plans in numbers that a user can read: `print(plan)`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rmm_linear.byte_sizes import Unit, unit_for
from rmm_linear.planning.coding import Coding
from rmm_linear.planning.graph import Graph, Op
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import Simulation, simulate
from rmm_linear.planning.stored_plans import library_version
from rmm_linear.planning.timeline import draw
from rmm_linear.tables import aligned

# ops of this library: sketches, and draws of seeds
_OURS, _DRAWING = "rmm_linear.", ("rmm_linear.draw_seed", "rmm_linear.unbind_copy")


@dataclass(frozen=True)
class CheckpointPlan:
    """The plan of one shape of a step.

    Attributes:
        graph: The captured step.
        schedule: The schedule that runs.
        planned: The schedule's peak, cost and timeline.
        plain: The same of the step without a plan.
        budget_bytes: The budget.
        eager_peak_bytes: The most that the step as written has in memory at any time in eager mode, counted as peaks of
            plans are; None if it is not known, as for shapes that came later than the sample. A budget in percent is
            of `plain.peak_bytes`: often less, since a captured step frees everything after its last use, and sometimes
            more, since it writes nothing in place.
        measured_peak_bytes: The peak that was measured of a schedule that Inductor compiled; None where none was.
        measured_ms: The time that was measured of the step, in ms, where ops are priced in "ms"; None where none was.
        coding: Which tensors are kept as codes.
        least_overhead: A bound: no schedule within the budget has less extra time over the plain step's. None where it
            is not known.
        no_bound: Why it is not known: scipy is not installed, or its solver took too long.
    """

    graph: Graph = field(repr=False)
    schedule: Schedule = field(repr=False)
    planned: Simulation = field(repr=False)
    plain: Simulation = field(repr=False)
    budget_bytes: int
    eager_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_ms: float | None = None
    coding: Coding = field(default_factory=Coding, repr=False)
    least_overhead: float | None = None
    no_bound: str = ""

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, budget_bytes: int | None = None) -> "CheckpointPlan":
        """Judge a schedule for a graph; without the budget that it was made for, its own peak is the budget."""
        planned = simulate(graph, schedule)
        plain = simulate(graph, Schedule.plain(graph))
        return cls(graph, schedule, planned, plain, planned.peak_bytes if budget_bytes is None else budget_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that is in memory at any time; parameters, buffers and the batch come on top."""
        return self.planned.peak_bytes

    @property
    def overhead(self) -> float:
        """Extra time over the plain step's, by the graph's costs."""
        return self.planned.overhead

    @property
    def paging_overhead(self) -> float:
        """Time of paging over the plain step's; it is a part of `overhead`."""
        loads = self.schedule.loads(self.graph)
        paged = sum(self.graph.sizes[index] for index in (*loads, *set(loads)))
        return paged * (self.graph.page_cost or 0.0) / self.graph.cost

    def with_gradients_freed(self) -> "CheckpointPlan":
        """Judge the same computations in steps that leave no gradient of a parameter behind.

        So are all micro-batches but the first, whose gradients are added to earlier gradients, and steps whose
        gradients an optimizer takes in the backward pass.
        """
        graph = self.graph.with_gradients_freed()
        made = self.schedule
        schedule = Schedule.from_order(graph, made.order, strategy=made.strategy, proof=made.proof)
        return CheckpointPlan.of(graph, schedule, self.budget_bytes)

    def by_block(self) -> dict[str, "BlockPlan"]:
        """Return the kept and recomputed bytes of each block: blocks by name, in the order in which they first run.

        A block's name has as many parts of a module's path, up to 8, as give at most 40 blocks; one part at least.
        """
        depth = 1
        while depth < 8 and len({_cut(op.block, depth + 1) for op in self.graph.ops}) <= 40:
            depth += 1
        kept_plain, kept = self.plain.forward_live, self.planned.forward_live
        times = Counter(self.schedule.order)
        blocks: dict[str, BlockPlan] = {}
        for position, op in enumerate(self.graph.ops):
            name = _cut(op.block, depth)
            sofar = blocks.get(name, BlockPlan(0, 0, 0.0, 0.0))
            sizes = {index: self.graph.storages[index].size_bytes for index in op.writes}
            blocks[name] = BlockPlan(
                sofar.plain_bytes + sum(size for index, size in sizes.items() if index in kept_plain),
                sofar.kept_bytes + sum(size for index, size in sizes.items() if index in kept),
                sofar.cost + op.cost,
                sofar.extra_cost + op.cost * max(0, times[position] - 1),
            )
        return blocks

    def figure(self, path: str | Path) -> None:
        """Draw the bytes in memory over the step, without and with the plan, to a file whose suffix says the format.

        Raises:
            ImportError: If matplotlib is missing.
        """
        plain = "no plan", self.graph, Schedule.plain(self.graph)
        draw(path, [plain, (self.schedule.strategy, self.graph, self.schedule)], self.budget_bytes)

    def card(self) -> str:
        """Describe the training steps for a model card, in Markdown."""
        sketched = sum(_is_sketch(op) and not op.is_backward for op in self.graph.ops)
        is_exact = self.coding.is_exact and not sketched
        # the other sketches are the backend's, and the coding lists them
        converted = sketched - sum(each.is_kept for each in self.coding.sketched)
        taken = self.measured_peak_bytes or self.peak_bytes
        lines = [
            f"peak beside weights, optimizer and batch: {self._sizes(self.plain.peak_bytes, taken)}",
            f"gradients: {'exact' if is_exact else 'estimates, unbiased but for the biases named below'}",
            f"computed twice: {100 * (self.overhead - self.paging_overhead):.1f} % of the step's work",
            *self._paging(),
            *([f"weight gradients of converted linear layers from {converted} sketches"] if converted else []),
            *self.coding.lines(self._unit),
        ]
        head = f"## Training memory\n\nSteps were planned by rmm_linear {library_version()}:\n"
        return "\n".join([head, *(f"- {line}" for line in lines)])

    def _paging(self) -> Iterator[str]:
        if paged := set(self.schedule.loads(self.graph)):
            sizes = self._sizes(sum(self.graph.sizes[index] for index in paged))
            time = f"{100 * self.paging_overhead:.1f} % of the plain step's time"
            yield f"paged out and back: {len(paged)} tensors, {sizes}; {time}"

    def __str__(self) -> str:
        return "\n".join([*self._headlines(), "", *self._table()])

    @property
    def _unit(self) -> Unit:
        return unit_for(self.plain.peak_bytes)

    def _sizes(self, *sizes: int) -> str:
        """Such as "3.00 -> 1.00 MiB"."""
        return f"{' -> '.join(map(self._unit.of, sizes))} {self._unit.name}"

    def _headlines(self) -> Iterator[str]:
        if self.schedule.strategy == "none" and self.budget_bytes == self.peak_bytes:
            yield f"peak {self._sizes(self.peak_bytes)}, no budget"
        else:
            share = 100 * self.peak_bytes / max(1, self.plain.peak_bytes)
            yield (
                f"peak {self._sizes(self.plain.peak_bytes, self.peak_bytes)} ({share:.1f} %), budget"
                f" {self._sizes(self.budget_bytes)}; extra compute"
                f" {100 * (self.overhead - self.paging_overhead):.1f} %; strategy"
                f" {self.schedule.strategy}"
            )
        if self.measured_peak_bytes is not None:
            yield f"measured peak of the compiled step {self._sizes(self.measured_peak_bytes)}"
        if self.graph.cost_unit == "ms":
            measured = "not yet measured" if self.measured_ms is None else f"measured {self.measured_ms:.4g} ms"
            yield f"predicted time of a step {self.planned.cost:.4g} ms, {measured}"
        yield from self._paging()
        if self.schedule.proof:
            yield f"{self.schedule.strategy}: {self.schedule.proof}"
        if self.least_overhead is not None:
            yield f"no plan within the budget has less than {100 * self.least_overhead:.1f} % of extra compute"
        elif self.no_bound:
            yield f"no bound of other plans is known: {self.no_bound}"
        if self.eager_peak_bytes is not None:
            parts = [100 * size / max(1, self.eager_peak_bytes) for size in (self.plain.peak_bytes, self.peak_bytes)]
            yield (
                f"eager mode takes {self._sizes(self.eager_peak_bytes)}; the captured step takes {parts[0]:.1f} % of"
                f" that without a plan, and {parts[1]:.1f} % with it"
            )
        outputs = sum(self.graph.storages[index].size_bytes for index in self.graph.outputs)
        of_what = "results" if self.graph.freed else "gradients and results"
        yield (
            f"at the end of the forward pass: {self._sizes(self.plain.forward_bytes, self.planned.forward_bytes)};"
            f" {self._sizes(outputs)} of {of_what} at the end, under any plan"
        )
        if set(self.graph.gradients) - self.graph.freed:
            freed = self.with_gradients_freed()
            yield (
                "where each gradient is added to one that is there, or taken in the backward pass: peak"
                f" {self._sizes(freed.plain.peak_bytes, freed.peak_bytes)}"
            )
        if any(_is_sketch(op) and not op.is_backward for op in self.graph.ops):
            sketches = [
                sum(self.graph.sizes[i] for i in held if _is_sketch(self.graph.ops[self.graph.writer[i]]))
                for held in (self.plain.forward_live, self.planned.forward_live)
            ]
            yield f"sketches at the end of the forward pass: {self._sizes(*sketches)}"
        yield from self.coding.lines(self._unit)

    def _table(self) -> Iterator[str]:
        rows = [("block", f"kept, {self._unit.name}", "planned", "computed again")]
        for name, block in self.by_block().items():
            again = f"{100 * block.extra_cost / block.cost:.0f} %" if block.extra_cost else "-"
            rows.append(
                (name or "(the model)", self._unit.of(block.plain_bytes), self._unit.of(block.kept_bytes), again)
            )
        yield from aligned(rows, numbers=(1, 2, 3), has_rule=False)


@dataclass(frozen=True)
class BlockPlan:
    """One block of a plan.

    Attributes:
        plain_bytes: The bytes that its ops keep at the end of the plain forward pass.
        kept_bytes: The bytes that they keep under the plan.
        cost: Time of its ops, each once.
        extra_cost: Time of recomputation.
    """

    plain_bytes: int
    kept_bytes: int
    cost: float
    extra_cost: float


def _is_sketch(op: Op) -> bool:
    return op.kind.startswith(_OURS) and op.kind not in _DRAWING


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])
