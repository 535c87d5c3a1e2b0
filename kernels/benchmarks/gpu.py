"""Everything that only a GPU can say, in turn and within a budget of wall-clock time: `make gpu`.

    python kernels/benchmarks/gpu.py [--budget 480] [--only layer ...] [--results DIR]

Each stage runs in a process of its own; tests, and what compute-sanitizer looks at, in several at the same time. The
first stage compiles what the doctor, the benchmarks and the memory checks launch, side by side, so that these find it
in Triton's cache; what is wrong with it, they tell. A stage is ended when its time is up: with an interrupt, on which
pytest still tells what failed, and by force a few seconds later. What one stage does not use, later ones may; one that
fails stops no other. The stage `aims` measures nothing: it judges the tables in the folder, of a former run where
this one wrote none, and fails if an aim is missed or none could be judged. Everything lands in `results/<gpu>/`: the
tables, in `output/` what each process prints while it prints it, and after each stage `summary.json` and `summary.txt`.
The interpreter is the one that runs this script; nothing is installed or downloaded.

The exit status is 0 if no stage but the first failed, 1 if one did, 2 if there is no GPU.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from result_files import RESULTS, check_results_folder, commit_name, slug, write_text

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
BUDGET_SECONDS = 480.0
# Lines of a stage's output that its summary shows.
_SHOWN = 12
# Between the interrupt and the end by force.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
# Processes that share a file of the kernels' tests, and those that compile for a minute and more, which come first.
_FILE_SHARES = 2
_SHARES_OF_FILES = {
    "test_hadamard_sketch_kernel": 6,
    "test_butterflies": 4,
    "test_hadamard_at_once_kernel": 4,
    "test_quantize_and_mean_kernel": 4,
}
# All other tests; the memory checks; and what is launched of each kernel to have it compiled.
_TEST_SHARES, _CHECK_SHARES, _KERNEL_SHARES = 8, 4, 3
# What a test's file has that asks for a GPU, by its mark or by the suite's fixture.
_FOR_A_GPU = re.compile(r"\bpytest\.mark\.gpu\b|\bdef test_\w+\([^)]*\bdevice\b")
# At the same time: each has a context of its own in the GPU's memory.
_MOST_PROCESSES = 16
# The stage that only prepares others.
_PREPARING = "compile"
# Asked in a process of its own: a CUDA context of this one would take memory from those that measure.
_PROBE = """
import importlib.util, json, platform
import torch
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
found["triton"] = __import__("triton").__version__ if importlib.util.find_spec("triton") else ""
packages = "pytest triton transformers datasets evaluate accelerate".split()
found["missing"] = [name for name in packages if not importlib.util.find_spec(name)]
print(json.dumps(found))
"""
# Without any of these, nothing is fine-tuned.
_HARNESS = ("transformers", "datasets", "evaluate", "accelerate")


@dataclass(frozen=True)
class Stage:
    """One command, or several that run at the same time.

    Attributes:
        name: For people and `--only`.
        command: What runs, in the root of the repository; several by their names, of which as many run at a time as
            there are cores, and 16 at most.
        seconds: Its budget; what earlier stages left over comes on top.
        environment: Variables beside those of this process.
        skip: Why it is not run, if it is not.
        shown: Lines at the end of its output that the summary shows; of several commands, at the end of each that did
            not pass.
    """

    name: str
    command: Sequence[str] | Mapping[str, Sequence[str]]
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
        why: The exit status, the limit that was reached, or why it was skipped; of several commands, for each that did
            not pass.
        seconds: How long it ran.
        tail: The end of what it printed.
    """

    name: str
    status: str
    why: str
    seconds: float
    tail: str


@dataclass
class _Part:
    """A command of a stage, and how it goes: why it ended is empty until it has."""

    name: str
    command: Sequence[str]
    output: Path
    process: subprocess.Popen | None = None
    began: float = 0.0
    seconds: float = 0.0
    status: str = ""
    why: str = ""


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


def stages(results: Path, scratch: Path, missing: Sequence[str]) -> list[Stage]:
    """List what is run.

    Returns:
        The stages, what matters most first; their budgets leave some of `BUDGET_SECONDS` to end the last one.
    """

    def without(*names: str) -> str:
        lacking = [name for name in names if name in missing]
        return f"{', '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} not installed" if lacking else ""

    no_pytest, no_kernels = without("pytest"), without("triton")
    checker = sanitizer()
    no_checker = no_kernels or ("" if checker else "compute-sanitizer is not installed (CUDA's toolkit has it)")
    # Only tensors' own allocations show a read beyond a tensor.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # The harness takes one GPU, and stops where it sees several.
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    doctor = [sys.executable, "-m", "rmm_linear.cli", "doctor"]
    into = ("--results", str(results))

    def checked(tool: str) -> dict[str, list[str]]:
        # Calls that fail and are asked again are usual; what fails for good, torch and Triton raise.
        options = ("--error-exitcode", "9", "--report-api-errors", "no")
        return _memory_checks(checker or "", "--tool", tool, *options)

    return [
        Stage(_PREPARING, _compiling(scratch, doctor), 80, skip=no_kernels),
        Stage("doctor", doctor, 15, shown=30),
        Stage("layer", _script("layer.py", "--device", "cuda", "--repeats", "20", *into), 65, shown=60),
        Stage("kernels", _script("each_kernel.py", *into), 70, skip=no_kernels, shown=120),
        Stage("kernel tests", _kernel_tests(), 70, skip=no_pytest or no_kernels, shown=40),
        Stage("gpu tests", _other_tests(), 40, skip=no_pytest, shown=40),
        Stage("peak memory", _script("peak_memory.py", *into), 25, shown=20),
        Stage("memcheck", checked("memcheck"), 40, environment=uncached, skip=no_checker),
        Stage("racecheck", checked("racecheck"), 30, environment=uncached, skip=no_checker),
        Stage("aims", _script("aims.py", *into), 10, shown=60),
        Stage("fine-tuning", _fine_tuning(results), 30, environment=one, skip=without(*_HARNESS)),
    ]


def _script(name: str, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *options]


def _memory_checks(*before: str) -> dict[str, list[str]]:
    """What launches every kernel on tiny shapes, in several processes; after another command."""
    checks = _script("memory_checks.py", "--share")
    return {f"memory checks {share}": [*before, *checks, share] for share in _shares(_CHECK_SHARES)}


def _compiling(scratch: Path, doctor: list[str]) -> dict[str, list[str]]:
    """What launches what later stages measure, once; what takes longest comes first."""
    once = ("--repeats", "1", "--results", str(scratch))
    return {
        "layer": _script("layer.py", "--device", "cuda", *once),
        **{f"kernels {share}": _script("each_kernel.py", "--share", share, *once) for share in _shares(_KERNEL_SHARES)},
        "doctor": doctor,
        **_memory_checks(),
    }


def _pytest(*options: str) -> list[str]:
    quiet = ("-q", "-p", "no:cacheprovider", "--color=no", "--tb=short", "-rfE")
    return [sys.executable, "-m", "pytest", *quiet, *options]


def _kernel_tests() -> dict[str, list[str]]:
    """Each file by itself: a bad access in one kernel is the end of all tests of its process."""
    files = sorted((ROOT / "tests" / "kernels" / "on_triton").glob("test_*.py"))
    counts = {path: _SHARES_OF_FILES.get(path.stem, _FILE_SHARES) for path in files}
    return {
        f"{path.stem} {share}": _pytest("-m", "not slow", "--share", share, str(path.relative_to(ROOT)))
        for path in sorted(files, key=lambda path: -counts[path])
        for share in _shares(counts[path])
    }


def _other_tests() -> dict[str, list[str]]:
    """Of the files that have any; one that imports what this machine lacks must not stop the others."""
    folder = ROOT / "tests"
    others = (path for path in folder.rglob("test_*.py") if path.parent.name != "on_triton")
    files = sorted(str(path.relative_to(ROOT)) for path in others if _FOR_A_GPU.search(path.read_text("utf-8")))
    options = ("--continue-on-collection-errors", "-m", "gpu and not slow")
    return {share: _pytest(*options, "--share", share, *files) for share in _shares(_TEST_SHARES)}


def _fine_tuning(results: Path) -> dict[str, list[str]]:
    """The demo of the GLUE harness, all methods at the same time: the scores count, the times do not."""
    run = [sys.executable, "-m", "experiments.glue.run", "--config", "demo", "--precision", "bfloat16", "--no-timing"]
    run += ["--force", "--results", str(results / "demo")]
    sketch = ("--method", "hadamard", "--ratio")
    return {
        "exact": [*run, "--method", "exact"],
        "half": [*run, *sketch, "0.5"],
        "tenth": [*run, *sketch, "0.1"],
        "half in int8": [*run, *sketch, "0.5", "--storage", "int8"],
    }


def _shares(count: int) -> list[str]:
    return [f"{number}/{count}" for number in range(1, count + 1)]


def run_stage(stage: Stage, seconds: float, folder: Path) -> Outcome:
    """Run one stage, with the output of each command in a file.

    Args:
        stage: What to run.
        seconds: After how long it is ended, with all processes that it started.
        folder: Where the files are; they are named after the stage and the command.
    """
    if stage.skip:
        return Outcome(stage.name, "skipped", stage.skip, 0.0, "")
    if seconds <= 0:
        return Outcome(stage.name, "skipped", "no time was left", 0.0, "")
    are_several = isinstance(stage.command, Mapping)
    commands = stage.command if isinstance(stage.command, Mapping) else {"": stage.command}
    parts = [_Part(name, command, folder / f"{slug(f'{stage.name} {name}')}.txt") for name, command in commands.items()]
    waiting, running = list(parts), []
    began = time.monotonic()
    try:
        while (waiting or running) and time.monotonic() < began + seconds:
            while waiting and len(running) < min(_MOST_PROCESSES, os.cpu_count() or 1):
                part = waiting.pop(0)
                _start(part, stage.environment)
                if part.process is not None:
                    running.append(part)
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                status = part.process.returncode
                part.status, part.why = "passed" if status == 0 else "failed", f"exit status {status}"
                part.seconds = time.monotonic() - part.began
                # what it may have left behind
                _end([part.process])
            if running:
                time.sleep(_POLL_SECONDS)
    finally:
        _end([part.process for part in running])
    for part in running:
        part.status, part.why = "timed out", f"after {seconds:.0f} s"
        part.seconds = time.monotonic() - part.began
    for part in waiting:
        part.status, part.why = "timed out", "no time was left to begin"
    statuses = [part.status for part in parts]
    ended = next((status for status in ("failed", "timed out") if status in statuses), "passed")
    elapsed = round(time.monotonic() - began, 1)
    if not are_several:
        return Outcome(stage.name, ended, parts[0].why, elapsed, _tail(parts[0], stage.shown))
    why = "; ".join(f"{part.name}: {part.why}" for part in parts if part.status != "passed")
    tails = [
        f"--- {part.name}: {part.status}, {part.seconds:.1f} s\n"
        + _tail(part, 1 if part.status == "passed" else stage.shown)
        for part in parts
    ]
    return Outcome(stage.name, ended, why or f"all {len(parts)} of them", elapsed, "\n".join(tails))


def _start(part: _Part, variables: dict[str, str]) -> None:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    # Kernels are to be compiled here, whatever the shell is set up for.
    environment.pop("TRITON_INTERPRET", None)
    part.began = time.monotonic()
    with part.output.open("w", encoding="utf-8") as file:
        file.write(f"$ {' '.join(map(str, part.command))}\n")
        file.flush()
        try:
            part.process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell's background job ignores interrupts, and so would what it starts.
                preexec_fn=_heed_interrupts,
            )
        except OSError as error:
            part.status, part.why = "failed", f"could not be started: {error}"


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _tail(part: _Part, count: int) -> str:
    """Return the last lines of what it printed, which comes after the command."""
    if not part.output.exists():
        return ""
    lines = part.output.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[1:]
    return "\n".join(lines[-count:])


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they started: each is a session of its own. First they may say what they know."""
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGINT)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for process in processes:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    # gone already, most often
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def run_all(
    chosen: Sequence[Stage],
    *,
    began: float,
    budget: float,
    folder: Path,
    report: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Run the stages one after the other.

    Args:
        chosen: What to run.
        began: When the budget's seconds began, `time.monotonic()`.
        budget: Seconds after which the last one is told to end.
        folder: Where files hold what they print; those of a former run are removed.
        report: Called with what is known after each stage.
    """
    folder.mkdir(exist_ok=True)
    for former in folder.glob("*.txt"):
        former.unlink()
    outcomes: list[Outcome] = []
    planned = 0.0
    for stage in chosen:
        # What the stages before did not need of their budgets is this one's; what is beyond the whole is nobody's.
        planned += stage.seconds
        elapsed = time.monotonic() - began
        outcomes.append(run_stage(stage, min(max(planned - elapsed, 0), budget - elapsed), folder))
        report(outcomes)
        last = outcomes[-1]
        print(f"{last.name:14}{last.status:10}{last.seconds:>7.1f} s  {last.why}", flush=True)
    return outcomes


def summary_text(about: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Return the summary for people.

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
        The exit status: 0 if no stage but the first failed, 1 if one did, 2 without a GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all stages")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="only these stages")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the GPU's folder")
    options = parser.parse_args(arguments)
    began = time.monotonic()
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
    missing = about.pop("missing")
    about = {"gpu": about.pop("gpu"), "commit": commit_name(), **about}

    def report(outcomes: list[Outcome]) -> None:
        whole = {**about, "seconds": round(sum(found.seconds for found in outcomes), 1)}
        whole["stages"] = [asdict(found) for found in outcomes]
        write_text(results / "summary.json", json.dumps(whole, indent=1) + "\n")
        write_text(results / "summary.txt", summary_text(about, outcomes))

    with tempfile.TemporaryDirectory() as scratch:
        known = stages(results, Path(scratch), missing)
        unknown = set(options.only) - {stage.name for stage in known}
        if unknown:
            names = ", ".join(stage.name for stage in known)
            parser.error(f"--only {' '.join(sorted(unknown))}: the stages are {names}")
        print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)
        chosen = [stage for stage in known if not options.only or stage.name in options.only]
        outcomes = run_all(chosen, began=began, budget=options.budget, folder=results / "output", report=report)
    print(f"written to {results}")
    counting = [outcome for outcome in outcomes if outcome.name != _PREPARING]
    return 0 if all(outcome.status in ("passed", "skipped") for outcome in counting) else 1


if __name__ == "__main__":
    sys.exit(main())
