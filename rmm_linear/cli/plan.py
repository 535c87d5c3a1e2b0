"""`rmm-linear plan MODEL --budget 60%`: what a byte budget costs, without running or even holding the model."""

import argparse
import json
import math
from typing import Any

from rmm_linear.checkpointing import (
    CheckpointPlan,
    Graph,
    Schedule,
    available_strategies,
    capture,
    get_strategy,
    simulate,
)
from rmm_linear.checkpointing.budget import budget_in_bytes
from rmm_linear.checkpointing.strategies import Proposal, choose
from rmm_linear.cli.profile import DTYPES
from rmm_linear.config import RMMConfig
from rmm_linear.convert import convert_linears
from rmm_linear.errors import InfeasibleBudgetError

HELP = "plan what a model keeps and what it computes again, to train within a byte budget"
_SWEEP = (100, 90, 80, 70, 60, 50, 40, 30, 20, 10)
_MIB = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options.

    Args:
        parser: Its parser.
    """
    parser.add_argument("model", help="a name on the hub, or a folder or JSON file with a model's configuration")
    parser.add_argument("--budget", default="60%", help="bytes, 8GiB, or 60%% of what the model takes (default: 60%%)")
    parser.add_argument("--strategy", default="auto", help=f"{', '.join(available_strategies())} (default: auto)")
    parser.add_argument("--batch", type=int, default=8, help="sequences, or images (default: 8)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: 128)")
    parser.add_argument("--ratio", type=float, help="sketch the linear layers as well, with this ratio")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the model (default: float32)")
    parser.add_argument("--attention", help="attn_implementation of the model, such as sdpa or eager")
    parser.add_argument("--layers", type=int, help="as if the model had so many layers (num_hidden_layers)")
    parser.add_argument("--figure", help="draw the timelines to this file")
    parser.add_argument("--json", action="store_true", help="print JSON: the peaks, and the schedule")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command.

    Args:
        options: What `add_options` describes.

    Returns:
        What to print, and the exit status.

    Raises:
        ValueError: If the model or an option is not usable.
        InfeasibleBudgetError: If no schedule fits the budget; it names a budget that can be met.
        ImportError: If transformers, or for a figure matplotlib, is not installed.
    """
    from rmm_linear.integrations.hf_models import build_model, random_batch

    for name in ("batch", "seq", "layers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} is below 1")
    strategy = get_strategy(options.strategy)
    budget_in_bytes(options.budget, 1)
    changes: dict[str, Any] = {"attn_implementation": options.attention} if options.attention else {}
    # weights without contents: planning needs the shapes alone
    model = build_model(options.model, device="meta", dtype=DTYPES[options.dtype], layers=options.layers, **changes)
    batch = random_batch(model, batch=options.batch, length=options.seq)
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]
    exact = capture(model, (), batch).graph
    graph = exact
    if options.ratio is not None:
        convert_linears(model, config=RMMConfig(ratio=options.ratio))
        graph = capture(model, (), batch).graph
    frontier = strategy.frontier(graph)
    plain_bytes = simulate(exact, Schedule.plain(exact)).peak_bytes
    budget_bytes = budget_in_bytes(options.budget, plain_bytes)
    try:
        schedule = choose(graph, frontier, budget_bytes, strategy.name)
    except InfeasibleBudgetError as error:
        raise InfeasibleBudgetError(
            _in_mebibytes(error, graph, plain_bytes, strategy.name),
            budget_bytes=error.budget_bytes,
            least_bytes=error.least_bytes,
        ) from error
    plan = CheckpointPlan.of(graph, schedule, budget_bytes)
    if options.figure:
        plan.figure(options.figure)
    if options.json:
        found = {
            "model": options.model,
            "exact_peak_bytes": plain_bytes,
            "plain_peak_bytes": plan.plain.peak_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "budget_bytes": budget_bytes,
            "overhead": plan.overhead,
            "frontier": [{"peak_bytes": p.peak_bytes, "extra_cost": p.cost / graph.cost - 1} for p in frontier],
            "schedule": schedule.to_dict(),
        }
        return json.dumps(found), 0
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    heading = f"{options.model}, {options.dtype}, {shapes}; weights and the batch are not counted"
    if options.ratio is not None:
        heading += (
            f"\nexact layers: peak {plain_bytes / _MIB:.2f} MiB; layers sketched at {options.ratio:g}:"
            f" {plan.plain.peak_bytes / _MIB:.2f} MiB; with the plan: {plan.peak_bytes / _MIB:.2f} MiB"
        )
    return "\n\n".join([heading, str(plan), _sweep(graph, frontier, plain_bytes)]), 0


def _in_mebibytes(error: InfeasibleBudgetError, graph: Graph, plain_bytes: int, strategy: str) -> str:
    """The error in units that people read, with what there is no way around, and a budget that can be met."""

    def shown(size_bytes: int) -> str:
        return f"{size_bytes / _MIB:.2f} MiB ({100 * size_bytes / plain_bytes:.1f} %)"

    at_the_end = sum(graph.storages[index].size_bytes for index in set(graph.outputs))
    tenths = math.ceil(1000 * error.least_bytes / plain_bytes)
    while budget_in_bytes(f"{tenths / 10:g}%", plain_bytes) < error.least_bytes:
        tenths += 1
    return (
        f"{strategy} found no schedule within {shown(error.budget_bytes)} of the plain peak, {plain_bytes / _MIB:.2f}"
        f" MiB; the least that was found takes {shown(error.least_bytes)}, and gradients and results alone take"
        f" {shown(at_the_end)}; pass --budget {tenths / 10:g}%"
    )


def _sweep(graph: Graph, frontier: tuple[Proposal, ...], plain_bytes: int) -> str:
    """What other budgets cost."""
    lines = [f"{'budget':>8}  {'peak, MiB':>10}  {'extra compute':>13}"]
    for percent in _SWEEP:
        fitting = [proposal for proposal in frontier if proposal.peak_bytes <= plain_bytes * percent / 100]
        if not fitting:
            break
        best = min(fitting, key=lambda proposal: proposal.cost)
        lines.append(f"{percent:6d} %  {best.peak_bytes / _MIB:10.2f}  {100 * (best.cost / graph.cost - 1):11.1f} %")
    least = frontier[-1]
    lines.append(f"{'least':>8}  {least.peak_bytes / _MIB:10.2f}  {100 * (least.cost / graph.cost - 1):11.1f} %")
    return "\n".join(lines)
