"""Run all tests and measurements that need a GPU, in turn and within a budget of wall-clock time: `make gpu`.

    python kernels/benchmarks/gpu.py [--budget 480] [--only layer ...] [--results DIR]

Each stage runs one process, or several at the same time: each kernel's tests have separate processes, since an illegal
memory access ends all tests of its process. A stage is interrupted when its time is up, and pytest then lists the
failures; a failed stage does not stop other stages. The output of each process goes to `results/<gpu>/output/`, the
tables and `summary.json` to its parent. Processes run this script's interpreter; nothing is installed or downloaded.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from result_files import RESULTS, check_results_folder, commit_name, slug, write_text

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
BUDGET_SECONDS = 480.0
# Seconds between SIGINT and SIGKILL.
_GRACE_SECONDS = 5.0
# The most processes at the same time, since each has its own context in the GPU's memory.
_MOST_PROCESSES = min(16, os.cpu_count() or 1)
# Numbers of processes that share one file of the kernels' tests, and that share all other tests.
_FILE_SHARES, _TEST_SHARES = 2, 8


@dataclass(frozen=True)
class Stage:
    """Commands that run at the same time.

    Attributes:
        name: Name for `--only` and the output.
        commands: Each command by its name, run in the root of the repository.
        seconds: The stage's budget; time that earlier stages did not use is added.
        needs: Packages without which the stage is skipped.
    """

    name: str
    commands: dict[str, list[str]]
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a stage: "passed", "failed" or "skipped", and the exit status of each command that failed."""

    name: str
    status: str
    why: str = ""
    seconds: float = 0.0


def stages(results: Path) -> list[Stage]:
    """Return the stages, the most important first."""
    into = ("--results", str(results))
    glue = [sys.executable, "-m", "experiments.glue.run", "--config", "demo", "--precision", "bfloat16", "--no-timing"]
    glue += ["--force", "--results", str(results / "demo"), "--method"]
    methods = {"exact": ["exact"], "tenth": ["hadamard", "--ratio", "0.1"]}
    methods["half in int8"] = ["hadamard", "--ratio", "0.5", "--storage", "int8"]
    steps = [sys.executable, "-m", "experiments.checkpointing.steps", "codes", "--device", "cuda"]
    steps += ["--models", "roberta", *into, "--ways", "checkpointing in each block", "torch.compile", "both"]
    steps += ["8 bits", "budget 60%"]
    trainer = ("transformers", "datasets", "evaluate", "accelerate")
    # the seconds are the times on an H100, plus a quarter
    return [
        Stage("doctor", {"doctor": [sys.executable, "-m", "rmm_linear.cli", "doctor"]}, 30),
        Stage("layer", {"layer": _script("layer.py", "--device", "cuda", "--repeats", "20", *into)}, 20),
        Stage("kernels", {"kernels": _script("each_kernel.py", *into)}, 65, ("triton",)),
        Stage("kernel tests", _kernel_tests(), 80, ("pytest", "triton")),
        Stage("gpu tests", _other_tests(), 70, ("pytest",)),
        Stage("steps", {"steps": steps}, 160, trainer),
        Stage("fine-tuning", {name: [*glue, *method] for name, method in methods.items()}, 50, trainer),
    ]


def _script(name: str, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *options]


def _pytest(number: int, count: int, *options: str) -> list[str]:
    quiet = ("-q", "-p", "no:cacheprovider", "--color=no", "--tb=short", "-rfE")
    return [sys.executable, "-m", "pytest", *quiet, "--share", f"{number}/{count}", *options]


def _kernel_tests() -> dict[str, list[str]]:
    return {
        f"{path.stem} {number}": _pytest(number, _FILE_SHARES, "-m", "not slow", str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "tests" / "kernels" / "on_triton").glob("test_*.py"))
        for number in range(1, _FILE_SHARES + 1)
    }


def _other_tests() -> dict[str, list[str]]:
    # a file that imports a missing package must not stop the other files
    options = ("-m", "gpu and not slow", "--continue-on-collection-errors", "--ignore", "tests/kernels/on_triton")
    shares = range(1, _TEST_SHARES + 1)
    return {f"share {number}": _pytest(number, _TEST_SHARES, *options, "tests") for number in shares}


def run_stage(stage: Stage, seconds: float, folder: Path) -> Outcome:
    """Run one stage, and end all of its processes after this time; their output goes to the folder."""
    missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    if missing or seconds <= 0:
        return Outcome(stage.name, "skipped", f"not installed: {', '.join(missing)}" if missing else "no time was left")
    began = time.monotonic()

    def run(name: str) -> str:
        output = folder / f"{slug(f'{stage.name} {name}')}.txt"
        return _run(stage.commands[name], output, began + seconds - time.monotonic())

    with ThreadPoolExecutor(_MOST_PROCESSES) as pool:
        said = dict(zip(stage.commands, pool.map(run, stage.commands), strict=True))
    why = "; ".join(f"{name}: {fault}" for name, fault in said.items() if fault)
    return Outcome(stage.name, "failed" if why else "passed", why, round(time.monotonic() - began, 1))


def _run(command: Sequence[str], output: Path, seconds: float) -> str:
    """Run one command, and return the reason of its failure, or ""."""
    if seconds <= 0:
        return "no time was left to begin"
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    # compile kernels even if the shell's environment selects the interpreter
    environment.pop("TRITON_INTERPRET", None)
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
            return f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            return "its time was up"
        finally:
            # child processes may still run
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    # most often the process has already ended
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; the exit status is 0 if no stage failed, 1 if one did, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all stages")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="only these stages")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the GPU's folder")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    if not torch.cuda.is_available():
        print(f"gpu.py: no CUDA device that torch {torch.__version__} can use; nothing was run", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name(0)
    results = options.results / slug(gpu)
    known = stages(results)
    unknown = set(options.only) - {stage.name for stage in known}
    if unknown:
        names = ", ".join(stage.name for stage in known)
        parser.error(f"--only {' '.join(sorted(unknown))}: the stages are {names}")
    check_results_folder(parser, results)
    (results / "output").mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    planned = 0.0
    for stage in known:
        if options.only and stage.name not in options.only:
            continue
        # A stage may use the time that earlier stages left, within the whole budget.
        planned += stage.seconds
        elapsed = time.monotonic() - began
        outcomes.append(run_stage(stage, min(planned, options.budget) - elapsed, results / "output"))
        last = outcomes[-1]
        print(f"{last.name:14}{last.status:10}{last.seconds:>7.1f} s  {last.why}", flush=True)
        about = {"gpu": gpu, "commit": commit_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        found = about | {"stages": [asdict(outcome) for outcome in outcomes]}
        write_text(results / "summary.json", json.dumps(found, indent=1) + "\n")
    print(f"written to {results}")
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
