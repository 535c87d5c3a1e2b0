"""The bytes in memory over a step, by kind, drawn for the plain program and for a plan side by side."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import simulate

# The kinds, from the bottom of the figure to its top.
KINDS = ("results and gradients", "activations", "computed or loaded again", "backward", "temporary")
_COLOURS = ("#9aa5b1", "#4477aa", "#ee7733", "#88ccaa", "#dddddd")
_MIB = 2**20


def bytes_by_kind(graph: Graph, schedule: Schedule) -> dict[str, list[int]]:
    """Return the bytes in memory while each op of a schedule runs: for each of `KINDS`, at every computation.

    They add up to the simulator's; random states count as activations.
    """
    kind_of: dict[int, str] = {}
    held = dict.fromkeys(KINDS, 0)
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    computed: set[int] = set()
    handed_over = {*graph.outputs, *graph.gradients}
    for step, taken in zip(schedule.steps, simulate(graph, schedule).bytes_at_step, strict=True):
        if step.kind == "free":
            held[kind_of.pop(step.target)] -= graph.storages[step.target].size_bytes
            continue
        op = graph.runnable[step.target]
        held["temporary"] = op.temporary_bytes
        for index in op.writes:
            size = graph.storages[index].size_bytes
            if index in kind_of:
                held["temporary"] += size
                continue
            if index in handed_over:
                kind = "results and gradients"
            elif op.is_backward:
                kind = "backward"
            else:
                kind = "computed or loaded again" if graph.writer[index] in computed else "activations"
            kind_of[index] = kind
            held[kind] += size
        computed.add(step.target)
        random_states = taken - sum(held.values())
        for kind in KINDS:
            found[kind].append(held[kind] + (random_states if kind == "activations" else 0))
    return found


def draw(
    path: str | Path,
    steps: Sequence[tuple[str, Graph, Schedule]],
    budget_bytes: int | None,
    beside: Callable[[Any], None] | None = None,
) -> None:
    """Draw timelines side by side, over the time that the ops take, to a file whose suffix says the format.

    The steps are titles, graphs and schedules, the plain one first. The budget is a line, if there is one, and `beside`
    is called with matplotlib's axes of one more panel.

    Raises:
        ImportError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install rmm-linear[report]") from error
    panels = len(steps) + (beside is not None)
    figure = Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    unit = steps[0][1].cost
    for axis, (title, graph, schedule) in zip(axes, steps, strict=False):
        times, paged = [0.0], set[int]()
        for index in schedule.order:
            # the first load stands for the way out as well
            ways = 2 if index >= len(graph.ops) and index not in paged else 1
            paged.add(index)
            times.append(times[-1] + ways * graph.runnable[index].cost / unit)
        layers = bytes_by_kind(graph, schedule)
        below = [0.0] * len(schedule.order)
        for kind, colour in zip(KINDS, _COLOURS, strict=True):
            above = [low + size / _MIB for low, size in zip(below, layers[kind], strict=True)]
            axis.fill_between(
                times, [*below, below[-1]], [*above, above[-1]], step="post", color=colour, linewidth=0, label=kind
            )
            below = above
        peak = max(below)
        axis.set_title(f"{title}: {peak:.1f} MiB", fontsize=10)
        axis.axhline(peak, color="black", linewidth=0.6, linestyle=":")
        if budget_bytes is not None:
            axis.axhline(budget_bytes / _MIB, color="crimson", linewidth=0.9, linestyle="--", label="budget")
        axis.set_xlabel("time, of the plain step's")
        axis.set_xlim(0, times[-1])
        axis.set_ylim(bottom=0)
        axis.sharey(axes[0])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("in memory, MiB")
    if beside is not None:
        beside(axes[-1])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
