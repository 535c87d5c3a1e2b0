"""`rmm-linear plan MODEL --budget 60%`: what a byte budget costs, without running or even holding the model."""

import argparse
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace

from rmm_linear.byte_sizes import readable, unit_for
from rmm_linear.checkpointing import (
    CheckpointPlan,
    Graph,
    Schedule,
    available_strategies,
    capture,
    get_strategy,
    simulate,
)
from rmm_linear.cli.models import add_model_options, build_model, check_model_options, hf_models, planning_heading
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.budget import Budget, refusal
from rmm_linear.planning.planner import plan_graph

HELP = "plan what a model keeps and what it computes again, to train within a byte budget"
# Other budgets that are planned for the table, in percent.
_SWEEP = (80, 60, 40, 20)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_options(parser)
    parser.add_argument(
        "--budget", default="60%", help="bytes, 8GiB, or 60%% of what the captured step takes (default: 60%%)"
    )
    parser.add_argument("--strategy", default="auto", help=f"{', '.join(available_strategies())} (default: auto)")
    parser.add_argument("--figure", help="draw the timelines to this file")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command with these options.

    Raises:
        ValueError: If the model or an option is not usable.
        InfeasibleBudgetError: If no schedule fits the budget; it names a budget that can be met.
        ImportError: If transformers, or for a figure matplotlib, is not installed.
    """
    check_model_options(options)
    strategy, budget = options.strategy, Budget.of(options.budget)
    get_strategy(strategy)
    with hf_models() as models:
        model = build_model(models, options, device="meta", caches=False)
        batch = models.random_batch(model, batch=options.batch, length=options.seq)
        captured = capture(model, (), batch)
    graph = captured.graph
    plain_bytes = simulate(graph, Schedule.plain(graph)).peak_bytes
    budget_bytes = budget.in_bytes(plain_bytes)
    try:
        plan = plan_graph(graph, Budget.of(budget_bytes), strategy)
    except InfeasibleBudgetError as error:
        raise InfeasibleBudgetError(
            _refusal(budget, graph, plain_bytes, error.least_bytes, strategy),
            budget_bytes=error.budget_bytes,
            least_bytes=error.least_bytes,
        ) from error
    plan = replace(plan, eager_peak_bytes=captured.eager_peak_bytes)
    others = _others(graph, plain_bytes, strategy)
    if options.figure:
        plan.figure(options.figure)
    if options.json:
        found = {
            "model": options.model,
            "plain_peak_bytes": plain_bytes,
            "eager_peak_bytes": plan.eager_peak_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "budget_bytes": budget_bytes,
            "overhead": plan.overhead,
            "least_overhead": plan.least_overhead,
            "frontier": [{"peak_bytes": other.peak_bytes, "extra_cost": other.overhead} for other in others.values()],
            "schedule": plan.schedule.to_dict(),
        }
        return json.dumps(found), 0
    return "\n\n".join([planning_heading(options, batch), str(plan), _table(others, plain_bytes)]), 0


def _refusal(budget: Budget, graph: Graph, plain_bytes: int, least_bytes: int, strategy: str) -> str:
    """The error in the user's unit, with what there is no way around, and a budget that can be met."""
    at_the_end = sum(graph.storages[index].size_bytes for index in set(graph.outputs))
    enough = str(budget.that_holds(least_bytes, plain_bytes)).removesuffix(" bytes").replace(" ", "")
    return (
        f"{refusal(budget, plain_bytes, least_bytes, strategy)}; gradients and results alone take"
        f" {readable(at_the_end)}; pass --budget {enough}"
    )


def _others(graph: Graph, plain_bytes: int, strategy: str) -> dict[int, CheckpointPlan]:
    """Plans for other budgets, in percent, as far as they can be met."""
    plans: dict[int, CheckpointPlan] = {}
    with contextlib.suppress(InfeasibleBudgetError):
        for percent in _SWEEP:
            plans[percent] = plan_graph(graph, Budget.of(plain_bytes * percent // 100), strategy)
    return plans


def _table(plans: Mapping[int, CheckpointPlan], plain_bytes: int) -> str:
    unit = unit_for(plain_bytes)
    lines = [f"{'budget':>8}  {f'peak, {unit.name}':>10}  {'extra compute':>13}  {'at least':>8}"]
    for percent, plan in plans.items():
        least = "" if plan.least_overhead is None else f"{100 * plan.least_overhead:6.1f} %"
        lines.append(f"{percent:6} %  {unit.of(plan.peak_bytes):>10}  {100 * plan.overhead:11.1f} %  {least:>8}")
    return "\n".join(lines)
