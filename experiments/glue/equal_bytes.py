"""Ratios of their own against one for all, at equal bytes: how much less variance, on batches not used to choose them.

    python -m experiments.glue.variance equal-bytes --model MODEL --data GLUE

The layers are profiled on some training batches, `allocate_ratios` spends what a uniform ratio would keep, and both are
compared on other batches. (The training runs that go with it are `experiments.glue.run --allocate`.)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from experiments.blocks import table
from rmm_linear import RMMConfig, convert_linears
from rmm_linear.variance import Allocation, NoiseProfile, allocate_ratios, profile_noise

from .errors import HarnessError
from .sketch_noise import Subject, provenance_columns

FILE = "equal_bytes.csv"
# the ratios that RMMCallback chooses from, and the uniform ones that are to be beaten
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)
UNIFORM = (0.1, 0.25, 0.5)
STORAGES = (None, "int4", "int2")
TOTAL, RELATIVE = "total", "relative"
# poolers see a row a sequence, and stay exact
MIN_ROWS = 64


def equal_bytes(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train for a while, choose ratios on some batches, and compare them on as many others."""
    subject.train(options.steps)
    origin = provenance_columns(subject)
    convert_linears(subject.model, config=RMMConfig(ratio=1.0, skip_padding=True))
    batches = options.batches or 4
    chosen_by, compared_on = subject.batches(batches), subject.batches(batches)
    for storage in STORAGES:
        configs = [RMMConfig(ratio=ratio, storage=storage, skip_padding=True, min_rows=MIN_ROWS) for ratio in RATIOS]
        known, held_out = (_profile(subject, part, configs) for part in (chosen_by, compared_on))
        for ratio in UNIFORM:
            uniform = configs[RATIOS.index(ratio)]
            budget = known.uniform(uniform).saved_bytes
            for objective in (TOTAL, RELATIVE):
                allocation = allocate_ratios(known, budget, objective=objective)  # type: ignore[arg-type]
                yield {
                    "step": options.steps,
                    "storage": storage,
                    "ratio": ratio,
                    "objective": objective,
                    **_compared(known, uniform, allocation, "chosen_by"),
                    **_compared(held_out, uniform, allocation, "held_out"),
                    "least_ratio": min(config.ratio for config in allocation.configs.values()),
                    "largest_ratio": max(config.ratio for config in allocation.configs.values()),
                    "layers": len(allocation.layers),
                    "batches": batches,
                    **origin,
                }


def _profile(
    subject: Subject, batches: Sequence[dict[str, torch.Tensor]], configs: Sequence[RMMConfig]
) -> NoiseProfile:
    def run(batch: dict[str, torch.Tensor]) -> Callable[[], None]:
        def forward_and_backward() -> None:
            torch.manual_seed(0)
            subject.model(**batch).loss.backward()

        return forward_and_backward

    subject.model.train()
    profile = profile_noise(subject.model, [run(batch) for batch in batches], configs, layers_at_once=12)
    # poolers see too few rows to be sketched: their options are one
    sketched = [layer for layer in profile.layers if any(option.variance for option in layer.options)]
    if not sketched:
        raise HarnessError("no layer sees enough rows to be sketched; pass a larger --batch-size")
    return NoiseProfile(tuple(sketched))


def _compared(profile: NoiseProfile, uniform: RMMConfig, allocation: Allocation, prefix: str) -> dict[str, float]:
    """Variances and bytes of both on one profile, in total and as the mean over layers of relative ones."""
    both = {"uniform": profile.uniform(uniform), "allocated": profile.allocation(allocation.configs)}
    found: dict[str, float] = {}
    for name, each in both.items():
        found[f"{prefix}_{name}_bytes"] = each.saved_bytes
        found[f"{prefix}_{name}_total"] = each.relative_variance
        found[f"{prefix}_{name}_mean"] = statistics.fmean(
            layer.option.variance / layer.gradient_squared for layer in each.layers
        )
    return found


def comparison_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the comparison on held-out batches as markdown."""
    lines = []
    for row in records:
        is_total = row["objective"] == TOTAL
        key = "total" if is_total else "mean"
        before, after = row[f"held_out_uniform_{key}"], row[f"held_out_allocated_{key}"]
        kept = row["held_out_allocated_bytes"] / row["held_out_uniform_bytes"]
        objective = "sum of the variances" if is_total else "sum of the relative variances"
        change = [f"{100 * (kept - 1):+.1f} %", f"{before:.4g}", f"{after:.4g}", f"{100 * (after / before - 1):+.0f} %"]
        ratios = f"{row['least_ratio']:g} to {row['largest_ratio']:g}"
        lines.append([row["storage"] or "as the input", f"{row['ratio']:g}", objective, *change, ratios])
    header = ["storage", "uniform ratio", "objective", "bytes", "uniform", "allocated", "change", "ratios"]
    return table(header, lines)
