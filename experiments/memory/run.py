"""Measure what models keep for their backward pass, each method in turn: `python -m experiments.memory.run`.

Every row is a forward pass of the model as it would train, really converted or checkpointed, whose saved tensors are
counted; beside it stands what `rmm_linear.memory.profile` predicts from the exact model alone.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import rmm_linear
from experiments import provenance, results_by_model
from experiments.command_line import HarnessError, Parser, exit_status
from experiments.rows import replace_file
from rmm_linear.memory import MemoryReport, measure_kept_bytes, profile

from .methods import EXACT, METHODS, Method
from .models import WORKLOADS, Workload
from .on_gpu import BUDGETS_GIB, largest_batch, step_costs
from .report import FILE, GPU_FILE, read_rows, summary_table, write_report

RESULTS = Path(__file__).parent / "results"
# workloads whose report is kept as `print(profile(model, **batch))` prints it
PRINTED = ("roberta-base", "llama-1b-lora")
_QUICK_LAYERS = 2


def measured_rows(
    workload: Workload,
    *,
    methods: Sequence[Method] = METHODS,
    device: str = "cpu",
    layers: int | None = None,
    **changes: Any,
) -> Iterator[tuple[dict[str, Any], MemoryReport]]:
    """Measure one model with every method, one batch size after the other.

    Args:
        workload: The model and its batches.
        methods: The methods, exact ones first.
        device: Where to run.
        layers: As if the model had so many layers.
        **changes: Values of the model's configuration that are to be others.

    Yields:
        A row of the results, and the exact model's report.
    """
    torch.manual_seed(0)
    model = workload.build(device=device, layers=layers, **changes)
    origin = _origin(device, lora=workload.lora)
    dropout, attention_dropout = workload.dropout(model)
    for size in workload.batches:
        batch = workload.batch(model, size, device=device)
        report = profile(model, **batch)
        for method in methods:
            row = {
                "model": workload.name,
                "attention": _attention(workload, report),
                "batch": size,
                "seq": workload.length,
                "dtype": str(workload.dtype).removeprefix("torch."),
                "dropout": dropout,
                "attention_dropout": attention_dropout,
                **_described(method),
                **_measured(method, model, batch, report),
                "exact_bytes": report.total_bytes,
                "own_bytes": report.own_bytes,
            }
            if device != "cpu" and row["kept_bytes"] is not None:
                row |= _gpu_columns(workload, method, model, size)
            yield row | origin, report


def _described(method: Method) -> dict[str, Any]:
    config = method.config
    if config is None:
        return {"method": method.family} | dict.fromkeys(("ratio", "sketch", "centered", "storage", "shared"))
    return {
        "method": method.family,
        "ratio": config.ratio,
        "sketch": config.sketch,
        "centered": config.center,
        "storage": config.storage,
        "shared": config.share_sketch,
    }


def _measured(method: Method, model: nn.Module, batch: dict[str, Tensor], report: MemoryReport) -> dict[str, Any]:
    try:
        with method.applied(model, batch) as sketched:
            kept = measure_kept_bytes(model, **batch)
    except ValueError as error:
        # what `convert_linears` says of a model that it finds nothing to convert in
        nothing = dict.fromkeys(("sketched_layers", "kept_bytes", "predicted_bytes", "of_exact"))
        return nothing | {"note": " ".join(str(error).split())}
    return {
        "sketched_layers": len(sketched),
        "kept_bytes": kept,
        "predicted_bytes": method.predicted_bytes(report, sketched),
        "of_exact": round(kept / report.total_bytes, 4),
        "note": None,
    }


def _gpu_columns(workload: Workload, method: Method, model: nn.Module, size: int) -> dict[str, Any]:
    found = []
    for each in (size, 2 * size):
        batch = workload.batch(model, each, device="cuda")
        with method.applied(model, batch):
            found.append((each, *step_costs(model, batch)))
        gc.collect()
        torch.cuda.empty_cache()
    (small, small_peak, step_ms), (large, large_peak, _) = found
    fits = {
        f"largest_batch_{budget}_gib": largest_batch((small, small_peak), (large, large_peak), budget * 2**30)
        for budget in BUDGETS_GIB
    }
    return {"peak_bytes": small_peak, "step_ms": round(step_ms, 3), **fits}


def _attention(workload: Workload, report: MemoryReport) -> str:
    """What was asked for, and whether torch had a fused kernel for it: one keeps no scores."""
    if workload.attention != "sdpa":
        return workload.attention
    return "sdpa, fused" if any("scaled_dot_product" in op for op in report.by_op()) else "sdpa, unfused"


# as it is when a run begins: results that it writes are no change of the code
_commit = cache(provenance.commit)


def _origin(device: str, *, lora: bool) -> dict[str, Any]:
    commit, hardware = _commit(), provenance.hardware(torch.device(device))
    processor = f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    return {
        "rmm_linear": rmm_linear.__version__,
        "commit": (commit["commit"] or "none")[:7] + ("+" if commit["modified"] else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": metadata.version("peft") if lora else None,
        "hardware": hardware["gpu"] or processor,
    }


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a results file; what it holds of models that are not measured anew stays.

    Args:
        path: The CSV file.
        rows: The new rows.
    """
    old = read_rows(path) if path.exists() else []
    results_by_model.write_rows(path, rows, old=old, names=[workload.name for workload in WORKLOADS])


def write_printed(path: Path, row: dict[str, Any], report: MemoryReport) -> None:
    """Write a report as it prints, under the command that makes it.

    Args:
        path: The text file.
        row: A row of the same model and batch.
        report: The report.
    """
    head = (
        f"$ python -m experiments.memory.run --models {row['model']}\n"
        f"{row['batch']} x {row['seq']}, {row['dtype']}, attention {row['attention']}, dropout {row['dropout']:g}"
        f" ({row['attention_dropout']:g} in the attention),"
        f" {row['hardware']}, torch {row['torch']}, transformers {row['transformers']}, commit {row['commit']}"
    )
    replace_file(path, lambda to: to.write_text(f"{head}\n\n{report}\n", encoding="utf-8"))


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m experiments.memory.run", description=__doc__.partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--output", type=Path, help="folder of the results (default: this experiment's)")
    parser.add_argument(
        "--quick", action="store_true", help="two layers of each model, the first batch alone; writes no results"
    )
    options = parser.parse_args(arguments)
    chosen = results_by_model.chosen(WORKLOADS, options.models)
    transformers.logging.set_verbosity_error()
    # of names that are to change in transformers 6
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
    if options.quick and options.output is not None:
        raise HarnessError("--quick writes no results; leave --output out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise HarnessError("--device cuda: torch finds no GPU here; leave --device out")
    output = results_by_model.output_folder(options.output, RESULTS)

    quick: list[dict[str, Any]] = []
    for workload in chosen:
        if options.quick:
            each = replace(workload, batches=workload.batches[:1])
            quick += [row for row, _ in measured_rows(each, device=options.device, layers=_QUICK_LAYERS)]
            continue
        rows = []
        for row, report in measured_rows(workload, device=options.device):
            rows.append(row)
            print(_line(row), flush=True)
            is_first = (row["method"], row["batch"]) == (EXACT, workload.batches[0])
            if options.device == "cpu" and workload.name in PRINTED and is_first:
                write_printed(output / f"{workload.name}.txt", row, report)
        # after each model: an interrupted run keeps what it has
        write_rows(output / (FILE if options.device == "cpu" else GPU_FILE), rows)
        gc.collect()
    print(summary_table(quick) if options.quick else write_report(output))
    return 0


def _line(row: dict[str, Any]) -> str:
    knobs = " ".join(str(row[key]) for key in ("ratio", "storage") if row[key] is not None)
    result = row["note"] or f"{row['kept_bytes'] / 2**20:.1f} MiB, {100 * row['of_exact']:.1f} %"
    return f"{row['model']} x{row['batch']}: {row['method']} {knobs}".rstrip() + f": {result}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the user has something to put right.
    """
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
