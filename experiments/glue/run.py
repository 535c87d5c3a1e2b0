"""Run one configuration, or the whole grid of a named one: `python -m experiments.glue.run --help`.

Examples:
    python -m experiments.glue.run --method hadamard --ratio 0.2
    python -m experiments.glue.run --config minilm --task mrpc --method exact --data GLUE --model MODEL
    python -m experiments.glue.run --config demo --grid --report
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command_line import Parser, exit_status

DEFAULT_RESULTS = Path(__file__).parent / "results"

# every setting of `RunSettings`, with its help; spelt out, so that --help needs none of the imports that take seconds
_HELP = {
    "task": "cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli or demo",
    "data": "hub, demo, or a folder in the official GLUE layout",
    "model": "demo, a name on the hub, or a folder that from_pretrained reads",
    "method": "exact, checkpointing, budget, codes, fit, or a sketch: gaussian, hadamard, ...",
    "ratio": "rows kept over rows; in (0, 1]",
    "center": "keep the column mean of the input apart",
    "bits": "of codes: 8, 4, or 4/8 for 4 of activation functions and 8 of all else",
    "budget": "of steps within a byte budget, and of fit: such as 50%% of the step's peak, or 200MiB",
    "storage": "hold what is kept in int8, int4 or int2",
    "skip_padding": "leave out rows that the attention mask marks as padding",
    "keep_first": "keep the rows of each sequence's first token beside the sketch",
    "allocate": "choose each layer's ratio by its variance, at the same bytes in sum",
    "min_rows": "inputs with fewer rows stay exact",
    "exclude_modules": "linear layers that stay exact, by name or end of a name",
    "seed": "seed of the classification head, the order of the data, dropout and the sketches",
    "epochs": "passes over the training split",
    "max_steps": "stop after so many steps, where the schedule ends too; 0 for all",
    "batch_size": "sequences a training step",
    "eval_batch_size": "sequences an evaluation step",
    "max_length": "longest sequence in tokens; batches are padded to their own longest",
    "pad_multiple": "pad batches on to a multiple of so many tokens (codes compile each length); 0 for no more",
    "group_lengths": "make training batches of sequences of about the same length",
    "learning_rate": "peak learning rate",
    "schedule": "polynomial, linear or constant, after the warm-up",
    "warmup": "share of the steps that warm up",
    "weight_decay": "of AdamW",
    "beta1": "of AdamW",
    "beta2": "of AdamW",
    "epsilon": "of AdamW",
    "max_grad_norm": "clip gradients to this norm; 0 for no clipping",
    "precision": "float32 or bfloat16",
    "monitor": "steps in which the noise of each layer is measured once; 0 for no measurement",
    "save_steps": "steps between checkpoints within an epoch, besides its end; 0 for none",
    "timing": "whether the machine is quiet enough for times to mean something",
}
_INTEGERS = (
    *("min_rows", "seed", "max_steps", "batch_size", "eval_batch_size", "max_length", "pad_multiple"),
    *("monitor", "save_steps"),
)
_WORDS = ("task", "data", "model", "method", "bits", "budget", "storage", "schedule", "precision")
_SWITCHES = ("center", "skip_padding", "keep_first", "allocate", "group_lengths", "timing")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.glue.run",
        description="Fine-tune with one method, and write one result file a run.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="demo", help="named configuration, or a .json file (default: demo)")
    for name, text in _HELP.items():
        option = f"--{name.replace('_', '-')}"
        if name in _SWITCHES:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        elif name == "exclude_modules":
            parser.add_argument(option, nargs="*", metavar="NAME", help=text)
        else:
            kind = int if name in _INTEGERS else str if name in _WORDS else float
            parser.add_argument(option, type=kind, help=text)
    parser.add_argument("--grid", action="store_true", help="run every missing run of the configuration's grid")
    parser.add_argument("--results", type=Path, help="results folder (default: experiments/glue/results/<config>)")
    parser.add_argument("--report", action="store_true", help="end with the tables and the figure of the folder")
    parser.add_argument("--force", action="store_true", help="throw away earlier results of the same runs")
    parser.add_argument("--cpu", action="store_true", help="leave an accelerator alone")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    try:
        return exit_status(lambda: _run(_parser().parse_args(arguments)))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    _stay_off_the_network(options)
    # imports that take seconds come after the command line has been read
    from .settings import RunSettings, load_named_config

    config = load_named_config(options.config)
    known = {field.name for field in dataclasses.fields(RunSettings)}
    changes = {key: value for key, value in vars(options).items() if key in known and value is not None}
    runs = config.grid(**changes) if options.grid else [config.run(**changes)]
    results = options.results or DEFAULT_RESULTS / config.name

    from .training import check_folder, execute, finished_result

    # whatever stands in the way of the last run, or of the report, is better known before the first
    check_folder(runs, results, force=options.force)
    for number, run in enumerate(runs, start=1):
        done = None if options.force else finished_result(run, results)
        result = done or execute(run, results, force=options.force, cpu=options.cpu)
        print(f"[{number}/{len(runs)}] {_one_line(result)}{_when(result) if done else ''}", flush=True)
    if options.report:
        from .report import write_report

        print(write_report(results))
    return 0


def _stay_off_the_network(options: argparse.Namespace) -> None:
    """Put the hub's client offline where nothing is wanted of it; it reads the variable once, when it is imported."""
    # as `settings.config_path` has it, without that module's imports
    named = Path(__file__).parent / "configs" / f"{options.config}.json"
    path = Path(options.config) if options.config.endswith(".json") else named
    try:
        settings = dict(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        # what is wrong with it is told when it is loaded
        return
    data = options.data or settings.get("data", "demo")
    model = options.model or settings.get("model", "demo")
    if data != "hub" and (model == "demo" or Path(model).is_dir()):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _one_line(result: dict[str, Any]) -> str:
    if result["status"] == "diverged":
        return f"{result['name']}: diverged ({result['error']})"
    kept = result["kept_bytes"]
    return (
        f"{result['name']}: score {100 * result['final']['score']:.1f}, keeps {kept['model'] / 2**20:.2f} MiB "
        f"(exact {kept['exact_model'] / 2**20:.2f}), trained {result['train_seconds']:.1f} s"
    )


def _when(result: dict[str, Any]) -> str:
    """That a result is not of this call, and of which commit if not of this one."""
    from .provenance import commit

    now, then = commit()["commit"], result["commit"]
    where = "" if then == now else f", at commit {str(then)[:7]}; --force runs anew"
    return f"  (finished before{where})"


if __name__ == "__main__":
    sys.exit(main())
