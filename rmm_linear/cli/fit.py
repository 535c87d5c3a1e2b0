"""`rmm-linear fit MODEL --budget 8GiB`: the ways in which a model fits into a byte budget, with peaks and times."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from rmm_linear.candidates import checked_noise
from rmm_linear.checkpointing.planned import PlannedStep
from rmm_linear.cli.models import add_model_options, build_model, check_model_options, hf_models, planning_heading
from rmm_linear.compiler.backend import Options
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.fitting import Fit, fit
from rmm_linear.planning.budget import Budget

HELP = "show how a model would train within a byte budget: exact, with codes, with sketches; peak and predicted time"
LARGEST = "max"
# Sequences of the small batch from which the search for the largest batch starts.
_FEW = 4
_NOTE = """\
The noise of codes and sketches depends on weights and data, and is not measured here: the fastest way is taken.
With a model and a batch, fit(model, batch, budget, noise) measures it, and takes the fastest way within the limit."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_options(parser, batch=_number_or_max, also=f', or "{LARGEST}" for as many as the budget allows')
    parser.add_argument("--budget", required=True, help="bytes, 8GiB, or 60%% of the exact captured step's peak")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.01,
        help="limit of the noise over the minibatch's: 0 allows exact steps alone, 0.05 sketches too (default: 0.01)",
    )
    parser.add_argument("--figure", help="draw the timelines, and peaks and times of all ways, to this file")


def _number_or_max(text: str) -> int | str:
    try:
        return text if text == LARGEST else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {LARGEST!r}") from None


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command with these options; return its text and its exit status."""
    check_model_options(options)
    noise, budget = checked_noise(options.noise), Budget.of(options.budget)
    if options.batch == LARGEST and budget.is_relative:
        raise ValueError(
            f"--batch {LARGEST} --budget {options.budget}: a percentage grows with the batch, so that every batch fits;"
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
    """The largest batch, to 3 %, for which a plan within the budget was found; 1 if there is none."""

    def peak_bytes(size: int, **options: Any) -> int:
        step = PlannedStep(model._call_impl, model, Options(**options))
        try:
            return step.capture((), batch_of(size))[1].peak_bytes
        except InfeasibleBudgetError as error:
            return error.least_bytes
        finally:
            step.forget()

    # the options with the lower peak for a small batch have it for a large batch too
    ways: list[dict[str, Any]] = [{"bits": 4}, {}] if noise else [{}]
    few_bytes, way = min(((peak_bytes(_FEW, **each), each) for each in ways), key=itemgetter(0))
    size, most, too_many = max(1, _FEW * budget_bytes // few_bytes), 0, None
    while too_many is None or too_many - most > max(1, most // 32):
        found_bytes = peak_bytes(size, budget=budget_bytes, **way)
        fits = found_bytes <= budget_bytes
        if sys.stderr.isatty():
            print(f"batch {size}: {'fits' if fits else 'does not fit'}", file=sys.stderr)
        most, too_many = (size, too_many) if fits else (most, size)
        # a plan without recomputation grows in proportion to the batch, up to the budget
        size = (
            max(size * budget_bytes // found_bytes, size + (size + 1) // 2)
            if too_many is None
            else (most + too_many) // 2
        )
    return max(1, most)


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
                # for a way that does not fit, the least peak that was found
                "peak_bytes": way.least_bytes,
                "time": way.time if math.isfinite(way.time) else None,
            }
            for way in found.candidates
        ],
    }
