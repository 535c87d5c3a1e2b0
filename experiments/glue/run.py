"""Run one configuration, or the whole grid of a named one: `python -m experiments.glue.run --help`."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.command_line import Parser

from .settings import RunSettings, load_named_config, stay_offline

DEFAULT_RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("Fine-tune with one method, and write one result file a run.")
    parser.add_argument("--config", default="demo", help="named configuration, or a .json file (default: demo)")
    for setting in dataclasses.fields(RunSettings):
        kind: Any = str(setting.type).removesuffix(" | None")
        option: dict[str, Any] = {"type": {"int": int, "float": float}.get(kind, str)}
        if kind == "bool":
            option = {"action": argparse.BooleanOptionalAction}
        elif kind.startswith("tuple"):
            option = {"nargs": "*", "metavar": "NAME"}
        parser.add_argument(f"--{setting.name.replace('_', '-')}", **option, help=setting.metadata["help"])
    parser.add_argument("--grid", action="store_true", help="run every missing run of the configuration's grid")
    parser.add_argument("--results", type=Path, help="results folder (default: experiments/glue/results/<config>)")
    parser.add_argument("--report", action="store_true", help="end with the tables and the figure of the folder")
    parser.add_argument("--force", action="store_true", help="throw away earlier results of the same runs")
    return parser.run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    config = load_named_config(options.config)
    names = {setting.name for setting in dataclasses.fields(RunSettings)}
    changes = {key: value for key, value in vars(options).items() if key in names and value is not None}
    runs = config.grid(**changes) if options.grid else [config.run(**changes)]
    results = options.results or DEFAULT_RESULTS / config.name
    stay_offline(*runs)

    from experiments import provenance

    from .training import execute, finished_result

    for number, run in enumerate(runs, start=1):
        done, when = None if options.force else finished_result(run, results), ""
        result = done or execute(run, results, force=options.force)
        if done:
            anew = f", at commit {str(result['commit'])[:7]}; --force runs anew"
            when = f"  (finished before{'' if result['commit'] == provenance.commit()['commit'] else anew})"
        print(f"[{number}/{len(runs)}] {_one_line(result)}{when}", flush=True)
    if options.report:
        from .report import write_report

        print(write_report(results))


def _one_line(result: dict[str, Any]) -> str:
    if result["status"] == "diverged":
        return f"{result['name']}: diverged ({result['error']})"
    kept = result["kept_bytes"]
    return (
        f"{result['name']}: score {100 * result['final']['score']:.1f}, keeps {kept['model'] / 2**20:.2f} MiB "
        f"(exact {kept['exact_model'] / 2**20:.2f}), trained {result['train_seconds']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
