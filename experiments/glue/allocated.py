"""What every lever together reaches: low-bit storage, the first tokens kept, and a configuration for every layer.

    python -m experiments.glue.variance allocated --model MODEL --data GLUE

For a budget of bytes, configurations are chosen by the mean over the layers of their relative variance on some batches,
and compared on another one: the batch of `headline`. Four ways:

    one for all                       a sketch, a ratio and a storage that all layers share
    one for all, first token kept     the same, with `keep_tokens=(0,)` if that is better
    one a layer                       sketches, ratios and storages by `allocate_ratios(objective="relative")`
    one a layer, first token kept     the same, with `keep_tokens=(0,)` where that is better

All may keep what is within the allowance of the budget, all-in, and those for all layers have the largest ratio that
fits, to 0.001. The bytes are those of the batch that is compared on: they follow from its shape, which is known before
its gradients.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.blocks import table
from rmm_linear import RMMConfig
from rmm_linear.variance import LayerProfile, NoiseProfile, Option, allocate_ratios, gradient_noise
from rmm_linear.variance.profile import layer_options

from .sketch_noise import (
    ALL_ROWS,
    ALLOWANCE,
    HEADLINE_BUDGETS,
    REAL_ROWS,
    TO_LONGEST,
    TO_OWN,
    Captured,
    Subject,
    noise_of,
    provenance_columns,
)

FILE = "allocated.csv"
RATIOS = (0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STORAGES = (None, "int8", "int4", "int2")
# the default, and one that is best where it keeps nearly all rows
SKETCHES = ("hadamard", "rows_without_replacement")
FIRST = (0,)
_STEPS = 1000
# label -> whether layers choose for themselves, and what may be kept beside their sketches
WAYS: dict[str, tuple[bool, tuple[tuple[int, ...], ...]]] = {
    "one for all": (False, ((),)),
    "one for all, first token kept": (False, ((), FIRST)),
    "one a layer": (True, ((),)),
    "one a layer, first token kept": (True, ((), FIRST)),
}
BEST_WAY = "one a layer, first token kept"


def allocated(subject: Subject, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train for a while, choose configurations on batches after the first, and compare them on the first.

    Yields:
        A row a padding, treatment of it, budget and way; none of a budget that nothing fits.
    """
    subject.train(options.steps)
    origin, sequences, batches = provenance_columns(subject), options.batch_size, options.batches or 2
    for padding in (TO_LONGEST, TO_OWN):
        held_out = subject.capture(padding)
        others = [subject.capture(padding, batch=number) for number in range(1, batches + 1)]
        for rows in (ALL_ROWS, REAL_ROWS):
            skips = rows == REAL_ROWS
            known = _profile(others, held_out, skips=skips, sequences=sequences)
            layers, index = _with_sequences(held_out, sequences), _index(held_out, skips=skips)
            for budget, way in itertools.product(HEADLINE_BUDGETS, WAYS):
                chosen = choose(known, way, budget, whole=_whole(held_out))
                if chosen is None:
                    continue
                configs, kept = chosen
                began = time.perf_counter()
                yield {
                    "step": options.steps,
                    "padding": padding,
                    "rows": rows,
                    "budget": budget,
                    "way": way,
                    "bytes": kept / _whole(held_out),
                    **noise_of(layers, configs, index=index, draws=options.draws if way == BEST_WAY else None),
                    "seconds": round(time.perf_counter() - began, 1),
                    "configs": describe(list(configs.values())),
                    "layers": len(layers),
                    "batches": batches,
                    **origin,
                }


def _whole(captured: Captured) -> int:
    """Bytes of all inputs in bfloat16, all rows."""
    return sum(x.numel() for x, _ in captured.layers.values()) * torch.bfloat16.itemsize


def _index(captured: Captured, *, skips: bool) -> Tensor | None:
    if not skips:
        return None
    # refuses padding that has a gradient
    captured.chosen(REAL_ROWS)
    return captured.real.nonzero().squeeze(1)


def _with_sequences(captured: Captured, sequences: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        name: (x.unflatten(0, (sequences, -1)), g.unflatten(0, (sequences, -1)))
        for name, (x, g) in captured.layers.items()
    }


def _profile(others: Sequence[Captured], held_out: Captured, *, skips: bool, sequences: int) -> NoiseProfile:
    """Relative variances of the others, their mean; bytes of the batch that is compared on, in bfloat16."""
    rows, valid = held_out.real.numel(), int(held_out.real.sum())
    widths = [x.shape[1] for x, _ in held_out.layers.values()]

    def size(config: RMMConfig, width: int) -> int:
        return config.saved_bytes(rows, width, torch.bfloat16, valid, sequences)

    configs: list[RMMConfig] = []
    for tokens, storage, sketch in itertools.product(((), FIRST), STORAGES, SKETCHES):
        base = RMMConfig(sketch=sketch, storage=storage, keep_tokens=tokens, skip_padding=skips, min_rows=1)
        ratios = set(RATIOS)
        for budget in HEADLINE_BUDGETS:
            # the largest that fits, by bisection: bytes never fall with the ratio
            fitting = bisect.bisect_right(
                range(1, _STEPS + 1),
                ALLOWANCE * budget * _whole(held_out),
                key=lambda step, base=base: sum(size(base.replace(ratio=step / _STEPS), width) for width in widths),  # type: ignore[misc]
            )
            ratios |= {fitting / _STEPS} if fitting else set()
        # at ratio 1 there is no sketch, and no two of them
        configs += [base.replace(ratio=ratio) for ratio in sorted(ratios) if ratio < 1 or sketch == SKETCHES[0]]
    relative: dict[str, dict[RMMConfig, list[float]]] = {}
    for captured in others:
        index = _index(captured, skips=skips)
        for name, (x, g) in _with_sequences(captured, sequences).items():
            squared = gradient_noise(x, g, RMMConfig(ratio=1.0)).gradient_squared
            for option in layer_options(x, g, configs, index=index):
                found = relative.setdefault(name, {}).setdefault(option.config, [])
                found.append(option.variance / squared if squared else 0.0)
    layers = []
    for name, (x, _) in held_out.layers.items():
        options = tuple(
            Option(
                config=config,
                saved_bytes=size(config, x.shape[1]),
                variance=statistics.fmean(relative[name][config]),
            )
            for config in configs
        )
        layers.append(LayerProfile(name=name, gradient_squared=1.0, minibatch_variance=0.0, options=options))
    return NoiseProfile(tuple(layers))


def choose(known: NoiseProfile, way: str, budget: float, *, whole: int) -> tuple[dict[str, RMMConfig], int] | None:
    """Return the configurations of least mean variance within a budget, and their bytes; None if nothing fits."""
    own, tokens = WAYS[way]
    part = NoiseProfile(
        tuple(
            LayerProfile(
                name=layer.name,
                gradient_squared=layer.gradient_squared,
                minibatch_variance=layer.minibatch_variance,
                options=tuple(option for option in layer.options if option.config.keep_tokens in tokens),
            )
            for layer in known.layers
        )
    )
    most = int(ALLOWANCE * budget * whole)
    if sum(min(option.saved_bytes for option in layer.options) for layer in part.layers) > most:
        return None
    if own:
        allocation = allocate_ratios(part, most, objective="relative")
        return allocation.configs, allocation.saved_bytes
    uniform = [part.uniform(option.config) for option in part.layers[0].options]
    fitting = [each for each in uniform if each.saved_bytes <= most]
    if not fitting:
        return None
    best = min(fitting, key=lambda each: (sum(layer.option.variance for layer in each.layers), each.saved_bytes))
    return best.configs, best.saved_bytes


def describe(configs: Sequence[RMMConfig]) -> str:
    """Say what layers are given, such as "0.3 to 1, int2 x 30, int4 x 6, first token x 36"; no default sketch."""
    ratios = sorted({config.ratio for config in configs})
    words = [f"{ratios[0]:g}" if len(ratios) == 1 else f"{ratios[0]:g} to {ratios[-1]:g}"]
    for storage in STORAGES:
        count = sum(config.storage == storage for config in configs)
        if count:
            words.append(f"{storage or 'bfloat16'} x {count}")
    for sketch in SKETCHES[1:]:
        count = sum(config.sketch == sketch for config in configs)
        if count:
            words.append(f"{sketch} x {count}")
    count = sum(bool(config.keep_tokens) for config in configs)
    return ", ".join([*words, *([f"first token x {count}"] if count else [])])


def ways_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the comparison as markdown, a table a padding."""
    parts = []
    for padding, label in ((TO_LONGEST, "padded to 128"), (TO_OWN, "padded to its longest")):
        lines = []
        for budget, (rows, name) in itertools.product(
            HEADLINE_BUDGETS, ((ALL_ROWS, "all"), (REAL_ROWS, "padding left out"))
        ):
            panel = (padding, rows, budget)
            cell = {row["way"]: row for row in records if (row["padding"], row["rows"], row["budget"]) == panel}
            if cell:
                numbers = [_number(cell[way]) if way in cell else "-" for way in WAYS]
                lines.append([f"{budget:g}", name, *numbers, cell[BEST_WAY]["configs"] if BEST_WAY in cell else ""])
        text = table(["bytes", "rows", *WAYS, "that is, of the last way"], lines)
        parts.append(f"**{records[0]['task']}, {label}**\n\n{text}")
    return "\n\n".join(parts)


def _number(row: dict[str, Any]) -> str:
    """The variance and the bytes; for the last way also what was measured."""
    text = f"{row['closed_form']:.3g}"
    if row["way"] == BEST_WAY:
        text += f"; measured {row['measured']:.3g} ± {row['standard_error']:.1g} (z {row['z']:+.1f})"
    return f"{text} at {row['bytes']:.4f}"
