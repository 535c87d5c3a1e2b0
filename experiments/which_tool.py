"""The tables of "Which tool when" in README.md, from committed results."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.blocks import table
from experiments.checkpointing.report import (
    BLOCKS,
    CODES_ON_GPU,
    COMPILED,
    EAGER,
    EXACT,
    INDUCTOR,
    read_compiled,
    size_of,
)
from experiments.glue.sketch_noise import ALL_ROWS, ONE_FOR_ALL
from experiments.memory.report import method_name
from experiments.rows import grouped, read_rows

# The step whose plans are shown, the models whose kept bytes are, and the layer whose time is.
STEP, CODED, KEPT, KEPT_WITH_LORA = "roberta", "roberta", "roberta-base", "llama-1b-lora"
LAYER: dict[str, Any] = {"rows": 4096, "in_features": 768, "out_features": 3072}
LAYER |= {"sketch": "hadamard", "center": True, "ratio": 0.5}
# The step on a GPU that others are compared with: torch.compile with checkpoints in each block.
CHECKPOINTED = "both"
CHECKPOINTING = "checkpointing in each block"
_EXACT_WAYS = (EAGER, COMPILED, CHECKPOINTING, CHECKPOINTED, "budget 60%")
_COMPARED = "(for comparison)"
_BLOCKS, _COMPILED_BLOCKS = "`torch.utils.checkpoint` in each block", "the same under `torch.compile`"
Row = dict[str, Any]
_PLAN = '`torch.compile(model, backend="rmm_linear", options={"budget": ...})`'
_CODES = '`torch.compile(model, backend="rmm_linear", options={"bits": 8})`'


def which_table(checkpointing: Path, memory: Path, noises: Path, benchmarks: Path) -> str:
    """Return a table of each tool's memory, time and noise, and a sentence on the measurements."""
    rows = [row for row in read_compiled(checkpointing) if row["model"] == STEP]
    eager = next(row for row in rows if (row["method"], row["setting"]) == (EAGER, ""))
    blocks = {row["method"]: row for row in rows if row["setting"] == BLOCKS}
    least_bytes = min(row["peak_bytes"] for row in blocks.values())
    coded = {row["method"]: row for row in read_rows(checkpointing / "codes.csv") if row["model"] == CODED}
    first = coded[EAGER]
    steps = [
        ("a step that fits, by one call", '`fit(model, batch, budget="60%")`', coded["fit 60%"]),
        ("a step that fits, by one call", '`fit(model, batch, budget="40%")`', coded["fit 40%"]),
        ("little memory, hardly any noise", _CODES, coded["8 bits"]),
        ("exact gradients, little time", _PLAN, coded["budget 60%"]),
        (_COMPARED, "`torch.compile`", coded[COMPILED]),
        (_COMPARED, _BLOCKS, coded[CHECKPOINTING]),
        (_COMPARED, _COMPILED_BLOCKS, coded[CHECKPOINTED]),
        ("exact gradients, little memory", _PLAN, _fastest(rows, INDUCTOR, least_bytes)),
        ("the same, bit for bit", "`checkpoint_model(model, batch, budget=...)`", _fastest(rows, EXACT, least_bytes)),
        (_COMPARED, _BLOCKS, blocks[EAGER]),
        (_COMPARED, _COMPILED_BLOCKS, blocks[COMPILED]),
    ]
    config, (coded_layers, width) = json.loads(eager["config"]), size_of(first)
    sizes = f"{coded_layers} x {width}", f"{config['num_hidden_layers']} x {config['hidden_size']}"
    lines = []
    for want, call, row in steps:
        of, size = (first, sizes[0]) if row in coded.values() else (eager, sizes[1])
        variance = "none" if row["method"] in _EXACT_WAYS or of is eager else f"{row['error'] ** 2:.1g}"
        peak, took = (row[name] / of[name] for name in ("peak_bytes", "step_s"))
        lines.append([want, call, size, f"peak {100 * peak:.0f} %", f"{took:.2f}", variance])
    kept = {(row["model"], method_name(row)): row["of_exact"] for row in read_rows(memory)}
    noise = {
        (row["ratio"], row["storage"]): row["relative_variance"]
        for row in read_rows(noises)
        if (row["task"], row["way"], row["rows"]) == ("mrpc", ONE_FOR_ALL, ALL_ROWS)
        and (row["sketch"], row["center"]) == ("hadamard", True)
    }
    layers = [
        ("eager mode, hardly any noise", '`RMMConfig(ratio=1.0, storage="int8")`', KEPT, 1.0, "int8", "-"),
        ("eager mode, less memory", '`RMMConfig(ratio=1.0, storage="int4")`', KEPT, 1.0, "int4", "-"),
        ("wide layers on a CPU", "`convert_linears(model, ratio=0.5)`", KEPT, 0.5, None, _layer_time(benchmarks)),
        ("LoRA", '`RMMConfig(ratio=1.0, storage="int8")` for `lora_A`', KEPT_WITH_LORA, 1.0, "int8", "-"),
    ]
    for want, call, model, ratio, storage, time in layers:
        share = kept[model, method_name({"method": "rmm_linear", "ratio": ratio, "storage": storage})]
        variance = f"{noise[ratio, storage]:.2g}" if model == KEPT else "-"
        lines.append([want, call, model, f"keeps {100 * share:.0f} %", time, variance])
    told = (
        "The peak and the time of a whole step are divided by the peak and the time of the eager step. The column"
        f' "measured on" has layers x width of a RoBERTa, batch {first["batch"]} x {first["size"]} for {sizes[0]} and'
        f" {eager['batch']} x {eager['size']} for {sizes[1]}, {first['hardware']}, torch {first['torch']}. Steps of one"
        " model were timed by turns; steps of different models cannot be compared. The noise of a step is the variance"
        f' of the whole gradient over the gradient\'s square. "Keeps" divides the bytes kept for the backward pass by'
        " the bytes that the model keeps with exact layers. The time of a sketched 4096 x 768 -> 3072 layer is divided"
        " by the time of `nn.Linear`; its noise is the variance of a layer's weight gradient over the gradient's"
        " square, a mean of 36 layers on MRPC; in a narrow model a sketch takes time ([docs/noise.md](docs/noise.md))."
        " [docs/results.md](docs/results.md) has more measurements."
    )
    header = ["you want", "call", "measured on", "memory", "time", "noise"]
    return f"{table(header, lines)}\n\n{told}"


def gpu_table(checkpointing: Path) -> str:
    """Return a table of steps on a GPU, over torch.compile's with checkpoints in each block."""
    rows = [row for row in read_rows(checkpointing / CODES_ON_GPU) if row["peak_bytes"] is not None]
    lines = []
    for own in grouped(rows, "model").values():
        ways = {row["method"]: row for row in own}
        if CHECKPOINTED not in ways:
            continue
        # the time in kernels over the eager step's of the same process
        times = {way: row["kernels_s"] / row["eager_kernels_s"] for way, row in ways.items()}
        activations = ways[CHECKPOINTED]["activation_peak_bytes"]
        over = {
            way: (times[way] / times[CHECKPOINTED], row["activation_peak_bytes"] / activations)
            for way, row in ways.items()
        }
        fits = [way for way in over if way.startswith("fit ")]
        # the fastest plan of a budget by hand that takes no more activations than the checkpoints
        plans = [way for way in over if way.startswith("budget ") and over[way][1] <= 1]
        shown = (fits, sorted(plans, key=lambda way: over[way][0])[:1], ["8 bits"])
        cells = ["; ".join(_gpu_cell(way, *over[way]) for way in found) or "-" for found in shown]
        layers, width = size_of(own[0])
        lines.append([f"{own[0]['model']}, {layers} layers of {width}", *cells])
    first = rows[0]
    told = (
        "Each cell divides the time in kernels, and the peak of activations, of a step by the same numbers of a step"
        ' with `torch.compile` and checkpoints in each block. A percentage is a budget. The column "plan" has the'
        ' fastest measured plan whose activations take no more than the checkpointed step\'s; "-" means that no such'
        f" step was measured. The steps ran on an {first['hardware']}, torch {first['torch']}, {first['precision']}."
    )
    return f"{table(['model', '`fit`', 'plan', '8 bits'], lines)}\n\n{told} [docs/gpu.md](docs/gpu.md) has all steps."


def _gpu_cell(way: str, time: float, activations: float) -> str:
    _, _, budget = way.partition(" ")
    return f"{time:.2f}, {activations:.2f}" + (f" ({budget})" if budget.endswith("%") else "")


def _fastest(rows: Sequence[Row], method: str, most_bytes: int) -> Row:
    small = [row for row in rows if row["method"] == method and (row["peak_bytes"] or math.inf) <= most_bytes]
    return min(small, key=lambda row: row["step_s"])


def _layer_time(folder: Path) -> str:
    for path in sorted(folder.rglob("layer-*.csv")):
        for row in read_rows(path):
            if all(row[name] == value for name, value in LAYER.items()):
                return f"{row['time_ratio']:.2f}"
    raise ValueError(f"{folder} has no time of the layer {LAYER}; `make bench` measures it")
