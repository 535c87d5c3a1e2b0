"""`rmm-linear plan MODEL --budget 60%`: what a byte budget costs, without running or even holding the model."""

import argparse
import contextlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

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
from rmm_linear.cli.model_names import checked
from rmm_linear.cli.profile import DTYPES, refuse_below_one
from rmm_linear.cli.quiet import quiet_transformers
from rmm_linear.config import RMMConfig
from rmm_linear.convert import convert_linears
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.budget import Budget, refusal
from rmm_linear.planning.planner import plan_graph

HELP = "plan what a model keeps and what it computes again, to train within a byte budget"
# Other budgets that are planned for the table, in percent.
_SWEEP = (80, 60, 40, 20)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    parser.add_argument("model", help="a name on the hub, or a folder or JSON file with a model's configuration")
    parser.add_argument(
        "--budget", default="60%", help="bytes, 8GiB, or 60%% of what the captured step takes (default: 60%%)"
    )
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
    """Run the command with these options.

    Raises:
        ValueError: If the model or an option is not usable.
        InfeasibleBudgetError: If no schedule fits the budget; it names a budget that can be met.
        ImportError: If transformers, or for a figure matplotlib, is not installed.
    """
    name = checked(options.model)
    refuse_below_one(options)
    strategy, budget = options.strategy, Budget.of(options.budget)
    get_strategy(strategy)
    config = None if options.ratio is None else RMMConfig(ratio=options.ratio)
    if options.figure:
        _refuse_figure(Path(options.figure))
    # after all that can be refused without it: it takes seconds to load
    hf_models = importlib.import_module("rmm_linear.integrations.hf_models")
    with quiet_transformers():
        return _run(options, name, strategy, budget, config, hf_models), 0


def _refuse_figure(path: Path) -> None:
    """Refuse what can't be drawn to, before the minutes that a plan may take."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install rmm-linear[report]") from error
    if not path.parent.is_dir():
        raise ValueError(f"--figure {path}: there is no folder {str(path.parent)!r}")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--figure {path}: choose a name that ends in one of {', '.join(sorted(known))}")


def _run(
    options: argparse.Namespace,
    name: str,
    strategy: str,
    budget: Budget,
    config: RMMConfig | None,
    hf_models: ModuleType,
) -> str:
    changes: dict[str, Any] = {"attn_implementation": options.attention} if options.attention else {}
    # weights without contents: planning needs the shapes alone
    model = hf_models.build_model(name, device="meta", dtype=DTYPES[options.dtype], layers=options.layers, **changes)
    batch = hf_models.random_batch(model, batch=options.batch, length=options.seq)
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False
    captured = capture(model, (), batch)
    exact = graph = captured.graph
    if config is not None:
        convert_linears(model, config=config)
        captured = capture(model, (), batch)
        graph = captured.graph
    plain_bytes = simulate(exact, Schedule.plain(exact)).peak_bytes
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
            "exact_peak_bytes": plain_bytes,
            "plain_peak_bytes": plan.plain.peak_bytes,
            "eager_peak_bytes": plan.eager_peak_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "budget_bytes": budget_bytes,
            "overhead": plan.overhead,
            "least_overhead": plan.least_overhead,
            "frontier": [{"peak_bytes": other.peak_bytes, "extra_cost": other.overhead} for other in others.values()],
            "schedule": plan.schedule.to_dict(),
        }
        return json.dumps(found)
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    heading = f"{options.model}, {options.dtype}, {shapes}; weights and the batch are not counted"
    if options.ratio is not None:
        heading += (
            f"\nexact layers: peak {readable(plain_bytes)}; layers sketched at {options.ratio:g}:"
            f" {readable(plan.plain.peak_bytes)}; with the plan: {readable(plan.peak_bytes)}"
        )
    return "\n\n".join([heading, str(plan), _table(others, plain_bytes)])


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
