"""Everything that only a GPU can say, in turn and within a budget of wall-clock time: `make gpu`.

    python kernels/benchmarks/gpu.py [--budget 480] [--only layer ...] [--results DIR]

Each stage runs in a process of its own and is ended when its time is up; what one stage does not use, later ones may. A
stage that fails stops no other. Everything lands in one folder, `results/<gpu>/`: the tables, `log.txt` with what the
stages printed, and after each stage `summary.json` and `summary.txt`. The interpreter is the one that runs this script;
nothing is installed or downloaded.

The exit status is 0 if no stage failed, 1 if one did, 2 if there is no GPU.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from result_files import RESULTS, check_results_folder, commit_name, slug, write_text

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
BUDGET_SECONDS = 480.0
# Lines of a stage's output that its summary shows.
_SHOWN = 12
# Asked in a process of its own: a CUDA context of this one would take memory from those that measure.
_PROBE = """
import importlib.util, json, platform
import torch
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
found["triton"] = __import__("triton").__version__ if importlib.util.find_spec("triton") else ""
found["pytest"] = bool(importlib.util.find_spec("pytest"))
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: For people and `--only`.
        command: What runs, in the root of the repository.
        seconds: Its budget; what earlier stages left over comes on top.
        environment: Variables beside those of this process.
        skip: Why it is not run, if it is not.
        shown: Lines at the end of its output that the summary shows.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""
    shown: int = _SHOWN


@dataclass(frozen=True)
class Outcome:
    """How a stage went.

    Attributes:
        name: The stage's.
        status: "passed", "failed", "timed out" or "skipped".
        why: The exit status, the limit that was reached, or why it was skipped.
        seconds: How long it ran.
        tail: The end of what it printed.
    """

    name: str
    status: str
    why: str
    seconds: float
    tail: str


def sanitizer() -> str | None:
    """Find compute-sanitizer, which CUDA's toolkit brings and does not put on the path.

    Returns:
        Its file, or None.
    """
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home) / "bin" for home in homes if home]
    folders += sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, folders))
    )


def stages(results: Path, *, has_pytest: bool, has_triton: bool) -> list[Stage]:
    """List what is run.

    Args:
        results: Folder of the tables.
        has_pytest: Whether the interpreter has pytest.
        has_triton: Whether it has triton.

    Returns:
        The stages, what matters most first; their budgets add up to `BUDGET_SECONDS`.
    """
    python = sys.executable
    no_pytest = "" if has_pytest else "pytest is not installed"
    no_kernels = "" if has_triton else "triton is not installed"
    checker = sanitizer()
    no_checker = no_kernels or ("" if checker else "compute-sanitizer is not installed (CUDA's toolkit has it)")
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
    # A package that some test imports and this machine lacks must not stop the others.
    whatever_is_missing = ["--continue-on-collection-errors"]
    # Only tensors' own allocations show a read beyond a tensor.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def script(name: str, *options: str) -> list[str]:
        return [python, str(SCRIPTS / name), *options]

    def checked(tool: str, *options: str) -> list[str]:
        return [checker or "", "--tool", tool, "--error-exitcode", "9", *options, *script("memory_checks.py")]

    into = ("--results", str(results))
    return [
        Stage("doctor", [python, "-m", "rmm_linear.cli", "doctor"], 30, shown=30),
        Stage("kernel tests", [*pytest, "-m", "not slow", "tests/kernels/on_triton"], 80, skip=no_pytest or no_kernels),
        Stage("gpu tests", [*pytest, *whatever_is_missing, "-m", "gpu and not slow", "tests"], 60, skip=no_pytest),
        Stage("kernels", script("each_kernel.py", *into), 120, skip=no_kernels, shown=120),
        Stage("layer", script("layer.py", "--device", "cuda", "--repeats", "20", *into), 80, shown=60),
        Stage("peak memory", script("peak_memory.py", *into), 30, shown=20),
        Stage("memcheck", checked("memcheck"), 40, environment=uncached, skip=no_checker),
        Stage("racecheck", checked("racecheck"), 40, environment=uncached, skip=no_checker),
    ]


def run_stage(stage: Stage, seconds: float, log: Path) -> Outcome:
    """Run one stage, with its output in the log.

    Args:
        stage: What to run.
        seconds: After how long it is ended, with all processes that it started.
        log: File that its output is added to.

    Returns:
        How it went.
    """
    if stage.skip:
        return Outcome(stage.name, "skipped", stage.skip, 0.0, "")
    if seconds <= 0:
        return Outcome(stage.name, "skipped", "no time was left", 0.0, "")
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        **stage.environment,
    }
    # Kernels are to be compiled here, whatever the shell is set up for.
    environment.pop("TRITON_INTERPRET", None)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n===== {stage.name}: {' '.join(map(str, stage.command))}\n")
        start = file.tell()
        file.flush()
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                stage.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(stage.name, "failed", f"could not be started: {error}", 0.0, "")
        try:
            status = process.wait(seconds)
            ended, why = "passed" if status == 0 else "failed", f"exit status {status}"
        except subprocess.TimeoutExpired:
            ended, why = "timed out", f"after {seconds:.0f} s"
        finally:
            _end(process)
    elapsed = time.monotonic() - began
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode("utf-8", "replace").rstrip().splitlines()
    return Outcome(stage.name, ended, why, round(elapsed, 1), "\n".join(lines[-stage.shown :]))


def _end(process: subprocess.Popen) -> None:
    """End the process and all that it started: they are a session of their own."""
    # gone already, most often
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    chosen: Sequence[Stage], *, budget: float, log: Path, report: Callable[[list[Outcome]], None]
) -> list[Outcome]:
    """Run the stages one after the other.

    Args:
        chosen: What to run.
        budget: Seconds for all of them.
        log: File that holds what they print; begun anew.
        report: Called with what is known after each stage.

    Returns:
        How each went.
    """
    log.write_text("", encoding="utf-8")
    outcomes: list[Outcome] = []
    began, planned = time.monotonic(), 0.0
    for stage in chosen:
        # What the stages before did not need of their budgets is this one's; what is beyond the whole is nobody's.
        planned += stage.seconds
        elapsed = time.monotonic() - began
        outcomes.append(run_stage(stage, min(max(planned - elapsed, 0), budget - elapsed), log))
        report(outcomes)
        last = outcomes[-1]
        print(f"{last.name:14}{last.status:10}{last.seconds:>7.1f} s  {last.why}", flush=True)
    return outcomes


def summary_text(about: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Return the summary for people.

    Args:
        about: What ran where.
        outcomes: How the stages went.

    Returns:
        A table of the stages, and the end of what each printed.
    """
    text = [", ".join(f"{name} {value}" for name, value in about.items() if value), ""]
    text += [f"{found.name:14}{found.status:10}{found.seconds:>7.1f} s  {found.why}" for found in outcomes]
    for found in outcomes:
        if found.tail:
            text += ["", f"===== {found.name}", found.tail]
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the stages.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 0 if no stage failed, 1 if one did, 2 without a GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all stages")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="only these stages")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the GPU's folder")
    options = parser.parse_args(arguments)
    if not options.budget > 0:
        parser.error(f"--budget {options.budget}: some seconds are needed")
    try:
        probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=True)
        about = json.loads(probe.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        print(f"gpu.py: {sys.executable} cannot import torch: {said[-1] if said else error}", file=sys.stderr)
        return 2
    if not about["gpu"]:
        print(f"gpu.py: no CUDA device that torch {about['torch']} can use; nothing was run", file=sys.stderr)
        return 2
    results = options.results / slug(about["gpu"])
    check_results_folder(parser, results)
    known = stages(results, has_pytest=about.pop("pytest"), has_triton=bool(about["triton"]))
    unknown = set(options.only) - {stage.name for stage in known}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: the stages are {', '.join(stage.name for stage in known)}")
    about = {"gpu": about.pop("gpu"), "commit": commit_name(), **about}
    print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)

    def report(outcomes: list[Outcome]) -> None:
        whole = {**about, "seconds": round(sum(found.seconds for found in outcomes), 1)}
        whole["stages"] = [asdict(found) for found in outcomes]
        write_text(results / "summary.json", json.dumps(whole, indent=1) + "\n")
        write_text(results / "summary.txt", summary_text(about, outcomes))

    chosen = [stage for stage in known if not options.only or stage.name in options.only]
    outcomes = run_all(chosen, budget=options.budget, log=results / "log.txt", report=report)
    print(f"written to {results}")
    return 0 if all(found.status in ("passed", "skipped") for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
