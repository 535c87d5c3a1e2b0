"""Measure the bytes that models keep for their backward pass, each method in turn: `python -m experiments.memory.run`.

Every row is a forward pass of the model as it would train, really converted or checkpointed, whose saved tensors are
counted; the prediction of `rmm_linear.memory.profile` from the exact model alone stands beside them. Models have
published shapes, and random weights and inputs: the bytes depend on shapes, dtypes and the model's code, and on no
value.

torch's fused attention for CPUs has no dropout, and falls back to an unfused one that keeps the scores, which no GPU
would: models that can do without have none in their attention here.
"""

import argparse
import copy
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from experiments.command_line import HarnessError, Parser, add_models
from experiments.provenance import origin
from experiments.rows import write_rows
from rmm_linear import RMMConfig, convert_linears, summary
from rmm_linear.integrations.hf_models import build_model, random_batch
from rmm_linear.memory import measure_kept_bytes, profile

from .report import ALONE, CHECKPOINTING, EXACT, FILE, OURS, RESULTS, write_report


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    name: str
    # of `models/`
    config: str
    batch: int
    # tokens of a sequence; of an image, its patches and the class token
    length: int
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    # values that differ from the published configuration
    changes: Mapping[str, Any] = field(default_factory=dict)
    # frozen, with LoRA adapters (PEFT's defaults) beside all linear layers but the head
    lora: bool = False

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Make the model, in training mode and with the dropout of its configuration, and its batch."""
        path = Path(__file__).parent / "models" / f"{self.config}.json"
        model = build_model(str(path), dtype=self.dtype, attn_implementation=self.attention, **self.changes)
        batch = random_batch(model, batch=self.batch, length=self.length, device="cpu")
        batch = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        if not self.lora:
            return model, batch
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise HarnessError("LoRA needs PEFT: pip install peft, or choose other models with --models") from error
        return get_peft_model(model, LoraConfig(target_modules="all-linear")).train(), batch


WORKLOADS = (
    Workload("roberta-base", "roberta-base", 8, 128, changes={"attention_probs_dropout_prob": 0.0}),
    Workload("roberta-base-eager", "roberta-base", 8, 128, attention="eager"),
    Workload("gpt2", "gpt2", 2, 512, changes={"attn_pdrop": 0.0}),
    Workload("vit-b-16", "vit-b-16", 8, 197),
    Workload("t5-small", "t5-small", 8, 128),
    Workload("llama-1b", "llama-1b", 1, 512, dtype=torch.bfloat16),
    Workload("llama-1b-lora", "llama-1b", 1, 512, dtype=torch.bfloat16, lora=True),
)
RATIOS = (0.5, 0.2, 0.1)
# ratio 1 keeps all of an input, in fewer bits; a sketch in fewer bits goes further
STORED = ((1.0, "int8"), (1.0, "int4"), (0.5, "int4"), (0.2, "int4"))
# ALONE: every linear layer, the output head included, keeps a sketch. OURS: linear layers that read the same input keep
# one sketch, and a linear layer stays exact where a sketch would free no bytes.
METHODS: tuple[tuple[str, RMMConfig | None], ...] = (
    (EXACT, None),
    (CHECKPOINTING, None),
    *((ALONE, RMMConfig.from_recipe("paper", ratio=ratio, share_sketch=False)) for ratio in RATIOS),
    *((OURS, RMMConfig(ratio=ratio)) for ratio in RATIOS),
    *((OURS, RMMConfig(ratio=ratio, storage=storage)) for ratio, storage in STORED),
)


def measured_rows(workload: Workload) -> Iterator[dict[str, Any]]:
    """Measure one model with every method."""
    torch.manual_seed(0)
    exact, batch = workload.build()
    report = profile(exact, **batch)
    # torch's fused kernel keeps no scores, and may not exist for these arguments
    is_fused = any("scaled_dot_product" in op for op in report.by_op())
    fused = f", {'fused' if is_fused else 'unfused'}" if workload.attention == "sdpa" else ""
    for family, config in METHODS:
        # the copy has new modules, and shares the parameters of `exact`
        model: Any = copy.deepcopy(exact, {id(each): each for each in exact.parameters()})
        predicted: int | None = report.total_bytes
        if family == CHECKPOINTING:
            # transformers 5.23 has a new name for it, and 5.10 only this one
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            predicted = None
        elif config is not None:
            options = {"target_modules": ".*"} if family == ALONE else {"sample": batch}
            convert_linears(model, config=config, **options)
        sketched = [row.name for row in summary(model).rows if row.config is not None]
        if config is not None:
            predicted = report.predict(config, layers=sketched)
        kept = measure_kept_bytes(model, **batch)
        yield {
            "model": workload.name,
            "attention": workload.attention + fused,
            "batch": workload.batch,
            "seq": workload.length,
            "dtype": str(workload.dtype).removeprefix("torch."),
            "method": family,
            **{name: getattr(config, name, None) for name in ("ratio", "sketch", "center", "storage", "share_sketch")},
            "sketched_layers": len(sketched),
            "kept_bytes": kept,
            "predicted_bytes": predicted,
            "of_exact": round(kept / report.total_bytes, 4),
            "exact_bytes": report.total_bytes,
            "own_bytes": report.own_bytes,
            "peft": metadata.version("peft") if workload.lora else None,
        } | origin()


def _work(options: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()
    # of names that are to change in transformers 6
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
    for workload in (each for each in WORKLOADS if each.name in options.models):
        rows = list(measured_rows(workload))
        # after each model: an interrupted run keeps its rows
        write_rows(RESULTS / FILE, rows, order=[each.name for each in WORKLOADS])
        print(f"{workload.name}: {len(rows)} rows", flush=True)
        gc.collect()
    print(write_report(RESULTS))


if __name__ == "__main__":
    parser = Parser(__doc__)
    add_models(parser, WORKLOADS)
    sys.exit(parser.run(_work))
