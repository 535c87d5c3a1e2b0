"""`rmm-linear plan MODEL --budget 60%`: the plan within a byte budget and its cost, on the meta device alone."""

import argparse
import json
from dataclasses import replace

from rmm_linear.checkpointing import available_strategies, capture, get_strategy
from rmm_linear.cli.models import add_model_options, build_model, check_model_options, hf_models, planning_heading
from rmm_linear.planning.budget import Budget
from rmm_linear.planning.planner import plan_graph

HELP = "plan which tensors a model keeps and which it computes again, to train within a byte budget"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_options(parser)
    parser.add_argument(
        "--budget", default="60%", help="bytes, 8GiB, or 60%% of the captured step's peak (default: 60%%)"
    )
    parser.add_argument("--strategy", default="auto", help=f"{', '.join(available_strategies())} (default: auto)")
    parser.add_argument("--figure", help="draw the timelines to this file")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command with these options; return its text and its exit status."""
    check_model_options(options)
    budget = Budget.of(options.budget)
    get_strategy(options.strategy)
    with hf_models() as models:
        model = build_model(models, options, device="meta", caches=False)
        batch = models.random_batch(model, batch=options.batch, length=options.seq, device="meta")
        captured = capture(model, (), batch)
    plan = plan_graph(captured.graph, budget, options.strategy)
    plan = replace(plan, eager_peak_bytes=captured.eager_peak_bytes)
    if options.figure:
        plan.figure(options.figure)
    if options.json:
        found = {
            "model": options.model,
            "plain_peak_bytes": plan.plain.peak_bytes,
            "eager_peak_bytes": plan.eager_peak_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "overhead": plan.overhead,
            "least_overhead": plan.least_overhead,
            "schedule": plan.schedule.to_dict(),
        }
        return json.dumps(found), 0
    return f"{planning_heading(options, batch, 'run op by op')}\n\n{plan}", 0
