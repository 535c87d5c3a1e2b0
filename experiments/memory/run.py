"""Measure the bytes that models keep for their backward pass, each method in turn: `python -m experiments.memory.run`.

Every row is a forward pass of the model as it would train, really converted or checkpointed, whose saved tensors are
counted; the prediction of `rmm_linear.memory.profile` from the exact model alone stands beside them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from experiments.command_line import Parser, add_models, chosen
from experiments.provenance import origin
from experiments.rows import write_rows
from rmm_linear import RMMConfig, convert_linears, revert_linears, summary
from rmm_linear.memory import MemoryReport, measure_kept_bytes, profile

from .models import WORKLOADS, Workload
from .report import ALONE, CHECKPOINTING, EXACT, FILE, OURS, RESULTS, write_report

RATIOS = (0.5, 0.2, 0.1)
# ratio 1 keeps all of an input, in fewer bits; a sketch in fewer bits goes further
STORED = ((1.0, "int8"), (1.0, "int4"), (0.5, "int4"), (0.2, "int4"))


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        family: EXACT, CHECKPOINTING, ALONE (every linear layer, heads included, keeps a sketch of its own) or OURS
            (layers of one input share a sketch, and layers of which a sketch frees nothing stay exact).
        config: The configuration of linear layers; None for exact layers.
    """

    family: str
    config: RMMConfig | None = None

    @contextmanager
    def applied(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Have a model train this way inside the context; yield the names of the layers that sketch."""
        model_methods: Any = model
        try:
            if self.family == CHECKPOINTING:
                # transformers 5.23 has a new name for it, and 5.10 only this one
                model_methods.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            elif self.family == ALONE:
                convert_linears(model, config=self.config, target_modules=".*")
            elif self.family == OURS:
                convert_linears(model, config=self.config, sample=batch)
            yield [row.name for row in summary(model).rows if row.config is not None]
        finally:
            if self.family == CHECKPOINTING:
                model_methods.gradient_checkpointing_disable()
                # enabling it makes the embeddings' output require gradients, and disabling leaves that as it is
                model_methods.disable_input_require_grads()
            revert_linears(model)

    def predicted_bytes(self, report: MemoryReport, sketched: list[str]) -> int | None:
        """Return the bytes that the exact model's report predicts; None for checkpointing, which has no prediction."""
        if self.family == CHECKPOINTING:
            return None
        return report.total_bytes if self.config is None else report.predict(self.config, layers=sketched)


METHODS = (
    Method(EXACT),
    Method(CHECKPOINTING),
    *(Method(ALONE, RMMConfig.from_recipe("paper", ratio=ratio, share_sketch=False)) for ratio in RATIOS),
    *(Method(OURS, RMMConfig(ratio=ratio)) for ratio in RATIOS),
    *(Method(OURS, RMMConfig(ratio=ratio, storage=storage)) for ratio, storage in STORED),
)


def measured_rows(workload: Workload) -> Iterator[dict[str, Any]]:
    """Measure one model with every method."""
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.sample(model)
    report = profile(model, **batch)
    # torch's fused kernel keeps no scores, and may not exist for these arguments
    is_fused = any("scaled_dot_product" in op for op in report.by_op())
    fused = f", {'fused' if is_fused else 'unfused'}" if workload.attention == "sdpa" else ""
    for method in METHODS:
        with method.applied(model, batch) as sketched:
            kept = measure_kept_bytes(model, **batch)
        knobs = ("ratio", "sketch", "center", "storage", "share_sketch")
        row = {
            "model": workload.name,
            "attention": workload.attention + fused,
            "batch": workload.batch,
            "seq": workload.length,
            "dtype": str(workload.dtype).removeprefix("torch."),
            "method": method.family,
            **{name: None if method.config is None else getattr(method.config, name) for name in knobs},
            "sketched_layers": len(sketched),
            "kept_bytes": kept,
            "predicted_bytes": method.predicted_bytes(report, sketched),
            "of_exact": round(kept / report.total_bytes, 4),
            "exact_bytes": report.total_bytes,
            "own_bytes": report.own_bytes,
        }
        yield row | {"peft": metadata.version("peft") if workload.lora else None} | origin()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m experiments.memory.run", description=__doc__.partition("\n")[0])
    add_models(parser, WORKLOADS)

    def work(options: argparse.Namespace) -> None:
        transformers.logging.set_verbosity_error()
        # of names that are to change in transformers 6
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
        for workload in chosen(WORKLOADS, options.models):
            rows = list(measured_rows(workload))
            # after each model: an interrupted run keeps its rows
            write_rows(RESULTS / FILE, rows, order=[each.name for each in WORKLOADS])
            print(f"{workload.name}: {len(rows)} rows", flush=True)
            gc.collect()
        print(write_report(RESULTS))

    return parser.run(work, arguments)


if __name__ == "__main__":
    sys.exit(main())
