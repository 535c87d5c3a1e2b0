"""`rmm-linear profile MODEL`: the bytes that a model keeps for its backward pass: exact, converted, checkpointed."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rmm_linear.byte_sizes import unit_for
from rmm_linear.cli.fused_attention import fused_attention
from rmm_linear.cli.models import add_model_options, build_model, check_model_options, hf_models, shapes_of
from rmm_linear.config import RMMConfig
from rmm_linear.convert import summary
from rmm_linear.errors import first_line
from rmm_linear.memory import MemoryReport, profile
from rmm_linear.names import pattern
from rmm_linear.sketches import STORAGES, available_sketches
from rmm_linear.tables import aligned

HELP = "show the bytes that a model keeps for its backward pass, exact, sketched and checkpointed"
_RATIOS = (0.5, 0.2, 0.1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_options(parser)
    default = ",".join(f"{ratio:g}" for ratio in _RATIOS)
    parser.add_argument("--ratio", default=default, help=f"ratios to compare, with commas (default: {default})")
    parser.add_argument("--sketch", choices=available_sketches(), default=RMMConfig.sketch, help="(default: hadamard)")
    parser.add_argument("--storage", choices=STORAGES, help="round sketches to fewer bits")
    parser.add_argument(
        "--meta", action="store_true", help="compute shapes alone: takes no memory for a model of any size"
    )


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Run the command with these options; return its text and its exit status."""
    check_model_options(options)
    try:
        ratios = [float(ratio) for ratio in options.ratio.split(",")]
    except ValueError:
        raise ValueError(
            f"--ratio {options.ratio} is no list of numbers; pass them with commas, such as 0.5,0.1"
        ) from None
    configs = [RMMConfig(ratio=ratio, sketch=options.sketch, storage=options.storage) for ratio in ratios]
    device = "meta" if options.meta else "cpu"
    with hf_models() as models, fused_attention():
        model = build_model(models, options, device=device)
        batch = models.random_batch(model, batch=options.batch, length=options.seq, device=device)
        try:
            report = profile(model, **batch)
            columns = _compared(model, batch, report, configs)
        except Exception as error:
            where = "shapes alone" if options.meta else f"random tensors of {options.batch} x {options.seq}"
            hint = "leave --meta out, or try --attention eager" if options.meta else "try other --batch and --seq"
            raise ValueError(
                f"the {type(model).__name__} can't be run on {where} ({first_line(error)}); {hint}, or call"
                " rmm_linear.memory.profile(model, ...) with your own batch"
            ) from error
    if options.json:
        found = {
            "model": options.model,
            "batch": {name: list(tensor.shape) for name, tensor in batch.items()},
            "columns": [{"name": name, "bytes": size} for name, size in columns.items()],
            "report": report.to_dict(),
        }
        return json.dumps(found), 0
    notes = [f"{options.model}, {options.dtype}, random weights and inputs: {shapes_of(batch)}"]
    if options.meta:
        notes.append(
            "shapes alone: attention is estimated as a GPU's fused kernel, which keeps no scores (--attention eager"
            " counts them)"
        )
    # the unfused attention of scaled_dot_product_attention uses this softmax
    elif any(keeper.op == "safe_softmax" for storage in report.storages for keeper in storage.keepers):
        notes.append(
            "attention is not fused here, and its scores count (torch's fused kernel for CPUs takes no dropout and no"
            " bias that needs a gradient; a GPU's keeps less)"
        )
    others = {(pattern(name), reason) for name, reason in summary(model).others.items()}
    notes += [f"never sketched: {name}: {reason}" for name, reason in sorted(others)]
    return "\n\n".join(["\n".join(notes), str(report), _table(columns)]), 0


def _compared(
    model: nn.Module, batch: Mapping[str, Tensor], report: MemoryReport, configs: list[RMMConfig]
) -> dict[str, int]:
    """The bytes that the model would keep in training: exact, sketched, and checkpointed if supported."""
    columns = {"exact": report.total_bytes}
    names = report.default_layers
    for config in configs:
        kind = "input" if config.ratio == 1 and config.storage else f"{config.sketch} {config.ratio:g}"
        kind += f" in {config.storage}" if config.storage else ""
        left = report.frees_nothing(dict.fromkeys(names, config))
        columns[f"{kind}, every layer"] = report.predict(config)
        columns[f"{kind}, where it frees anything"] = report.predict(config, layers=names - left.keys())
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable()
        try:
            columns["gradient checkpointing"] = profile(model, **batch).total_bytes
        except RuntimeError:
            # on the meta device this fails: transformers reads values of its masks
            if not any(parameter.is_meta for parameter in model.parameters()):
                raise
        finally:
            model.gradient_checkpointing_disable()  # type: ignore[operator]
    return columns


def _table(columns: Mapping[str, int]) -> str:
    exact = max(1, columns["exact"])
    unit = unit_for(exact)
    rows = [("kept for the backward pass", unit.name, "of exact")]
    rows += [(name, unit.of(size), f"{100 * size / exact:.1f} %") for name, size in columns.items()]
    return "\n".join(aligned(rows, numbers=(1, 2), has_rule=False))
