"""`rmm-linear fit MODEL --budget 8GiB`: how a model would fit into a byte budget, and what each way would take."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from rmm_linear.candidates import checked_noise
from rmm_linear.checkpointing.planned import PlannedStep
from rmm_linear.cli.models import add_model_options, build_model, check_model_options, hf_models, planning_heading
from rmm_linear.compiler.backend import Options
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.fitting import Fit, fit
from rmm_linear.planning.budget import Budget
from rmm_linear.planning.plan import CheckpointPlan

HELP = "show how a model would train within a byte budget: exact, with codes, with sketches; peak and predicted time"
LARGEST = "max"
_NOTE = """\
The noise of codes and sketches depends on weights and data, and is not measured here: the fastest way is taken.
With a model and a batch, fit(model, batch, budget, noise) measures it, and takes the fastest way within the limit."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_options(parser, batch=_number_or_max, also=f', or "{LARGEST}" for as many as the budget allows')
    parser.add_argument("--budget", required=True, help="bytes, 8GiB, or 60%% of what the exact captured step takes")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.01,
        help="limit of the noise over the minibatch's: 0 allows exact steps alone, 0.05 sketches too (default: 0.01)",
    )
    parser.add_argument("--figure", help="draw the timelines, and peaks and times of all ways, to this file")


def _number_or_max(text: str) -> int | str:
    return text if text == LARGEST else int(text)


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command with these options; an error says what to put right."""
    check_model_options(options)
    noise, budget = checked_noise(options.noise), Budget.of(options.budget)
    if options.batch == LARGEST and budget.is_relative:
        raise ValueError(
            f"--batch {LARGEST} --budget {options.budget}: a percentage grows with the batch, so that it limits none;"
            " pass a budget in bytes, such as 8GiB"
        )
    with hf_models() as models:
        model = build_model(models, options, device="meta", caches=False)

        def batch_of(size: int) -> Mapping[str, Tensor]:
            found: Mapping[str, Tensor] = models.random_batch(model, batch=size, length=options.seq, device="meta")
            return found

        size = options.batch
        if size == LARGEST:
            size = _largest_batch(model, batch_of, budget.in_bytes(0), noise)
        batch = batch_of(size)
        found = fit(model, batch, options.budget, noise)
    if options.figure:
        found.figure(options.figure)
    if options.json:
        return json.dumps({"model": options.model, "batch": size, "length": options.seq, **_content(found)}), 0
    heading = planning_heading(options, batch, "are compiled by Inductor")
    if options.batch == LARGEST:
        heading += f"\n{size} is the largest batch that was found to fit"
    return "\n\n".join([heading, _NOTE, str(found)] if noise else [heading, str(found)]), 0


def _largest_batch(
    model: nn.Module, batch_of: Callable[[int], Mapping[str, Tensor]], budget_bytes: int, noise: float
) -> int:
    """The largest batch that was found to have a plan within a budget, to 3 %, by bisection; 1 if there is none."""
    ways: list[dict[str, Any]] = [{"bits": 4}, {}] if noise else [{}]

    def planned(size: int, **options: Any) -> CheckpointPlan | None:
        step = PlannedStep(model._call_impl, model, Options(**options))
        try:
            return step.capture((), batch_of(size))[1]
        except InfeasibleBudgetError:
            return None
        finally:
            step.forget()

    def fits(size: int) -> bool:
        return any(planned(size, budget=budget_bytes, **way) for way in ways)

    def without_recomputing(way: Mapping[str, Any]) -> int:
        # peaks grow by as much with each sequence
        two, four = (plan.peak_bytes for size in (2, 4) if (plan := planned(size, **way)))
        return 4 + 2 * (budget_bytes - four) // max(1, four - two)

    most = max(1, *map(without_recomputing, ways))
    if not fits(most):
        most = 1
    too_many = 2 * most
    while fits(too_many):
        most, too_many = too_many, 2 * too_many
    while too_many - most > max(1, most // 32):
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    return most


def _content(found: Fit) -> dict[str, Any]:
    return {
        "exact_peak_bytes": found.plain_bytes,
        "budget_bytes": found.budget_bytes,
        "noise_limit": found.noise_limit,
        "chosen": found.chosen.name,
        "options": found.options,
        "ways": [
            {
                "name": way.name,
                "options": dict(way.options),
                "fits": way.plan is not None,
                # of a way that does not fit, the least that was found
                "peak_bytes": way.least_bytes,
                "time": way.time if math.isfinite(way.time) else None,
            }
            for way in found.candidates
        ],
    }
