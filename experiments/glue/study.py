"""The study: learning rate and epochs tuned for exact layers, then every method with these, seed by seed.

`configs/study.json` is a named configuration with the parts that a plain grid lacks: `tuning` has the values that exact
is tried with (seed 0), and the choice goes to `task_settings`; the methods of `fewer_seeds` and the tasks of `last`
have their own seeds; the methods of `at_the_end` have them too, and run last; `train_rows` cuts a task's
training split. Each finished run is a line of `rows.jsonl`, or of `tuning.jsonl`: its result file without the columns
over the steps.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.command_line import HarnessError, Parser
from experiments.provenance import REPOSITORY
from experiments.rows import append_json_line, read_json_lines, replace_file

from .result_file import COMPLETE, read_result, write_result
from .settings import EXACT, NamedConfig, RunSettings, config_path, load_named_config
from .tasks import TASKS

ROWS, TUNING = "rows.jsonl", "tuning.jsonl"
_WAIT_SECONDS = 60


class Study:
    """The runs of a configuration, which runs are done, and which settings are still to choose."""

    def __init__(self, config: str, results: Path, work: Path, *, data: str | None, model: str | None) -> None:
        self.path, self.results, self.work, self.data = config_path(config), results, work, data
        self._changes = {} if model is None else {"model": model}
        self.config: NamedConfig = load_named_config(config)
        self._content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))

    def _runs(self, config: NamedConfig, **part: Any) -> list[RunSettings]:
        runs = dataclasses.replace(config, **part).grid(**self._changes)
        return [dataclasses.replace(run, data=self._data_of(run.task)) if self.data else run for run in runs]

    def _data_of(self, task: str) -> str:
        assert self.data is not None
        rows = self._content.get("train_rows", {}).get(task)
        return self.data if rows is None else str(cut_training_split(task, Path(self.data), self.work / "data", rows))

    def tuning_runs(self, task: str) -> list[RunSettings]:
        """Exact runs of a task, one for each learning rate and number of epochs to try."""
        tuning = self._content["tuning"]
        (run,) = self._runs(self.config, tasks=(task,), methods=({"method": EXACT},), seeds=(0,))
        return [
            dataclasses.replace(run, learning_rate=rate, epochs=epochs)
            for epochs in tuning["epochs"][task]
            for rate in tuning["learning_rate"]
        ]

    def is_tuned(self, task: str) -> bool:
        return "learning_rate" in self.config.task_settings.get(task, {})

    def plan(self) -> list[tuple[str, RunSettings]]:
        """All runs in their order, with the file of each row."""
        config, names = self.config, ("fewer_seeds", "last", "at_the_end")
        few, last, end = ({key: tuple(each) for key, each in self._content.get(name, {}).items()} for name in names)
        runs = self._runs(config) + (self._runs(config, **few) if few else [])
        # stable: the methods of a task keep the order that the grid gives them
        runs.sort(key=lambda run: (run.seed, config.tasks.index(run.task)))
        planned = []
        for tasks, grid in ((config.tasks, runs), (last.get("tasks", ()), self._runs(config, **last) if last else [])):
            planned += [(TUNING, run) for task in tasks if not self.is_tuned(task) for run in self.tuning_runs(task)]
            planned += [(ROWS, run) for run in grid]
        return planned + [(ROWS, run) for run in (self._runs(config, **end) if end else ())]

    def rows(self, file: str) -> list[dict[str, Any]]:
        return read_json_lines(self.results / file)

    def choose(self) -> None:
        """Write the best values of each task whose tuning is done into the configuration."""
        chosen = {}
        for task in self._content["tuning"]["epochs"]:
            configs = [] if self.is_tuned(task) else [run.recorded() for run in self.tuning_runs(task)]
            tried = {json.dumps(row["config"]): row for row in self.rows(TUNING) if row["config"] in configs}
            complete = [row for row in tried.values() if row["status"] == COMPLETE]
            if len(tried) == len(configs) and complete:
                best = max(complete, key=_merit)["config"]
                chosen[task] = {key: best[key] for key in ("learning_rate", "epochs")}
        if chosen:
            self._content["task_settings"] = self._content.get("task_settings", {}) | chosen
            write_result(self.path, self._content)
            self.config = load_named_config(str(self.path))
            print(f"chosen for exact, and written into {self.path.name}: {chosen}", flush=True)

    def record(self, file: str, run: RunSettings, folder: Path) -> None:
        """Append a finished run's row, made of its result file."""
        from .training import result_path

        # from the file, where numbers that JSON lacks are null
        result = read_result(result_path(run, folder))
        assert result is not None
        row = {key: value for key, value in result.items() if key not in ("format", "steps")}
        append_json_line(self.results / file, row)

    def hours_left(self, left: Sequence[RunSettings]) -> str:
        """Say how many hours one process needs by the time of an epoch in finished runs; "" if no run has finished."""
        seconds: dict[str, list[float]] = {}
        for row in (*self.rows(TUNING), *self.rows(ROWS)):
            seconds.setdefault(row["config"]["task"], []).append(row["wall_seconds"] / row["config"]["epochs"])
        if not seconds:
            return ""
        unknown = list(itertools.chain(*seconds.values()))
        hours = sum(run.epochs * statistics.median(seconds.get(run.task, unknown)) for run in left) / 3600
        return f", about {hours:.1f} hours left for one process"


def _merit(row: dict[str, Any]) -> tuple[float, ...]:
    # of equal scores the cheaper and the smaller step
    return row["final"]["score"], -row["config"]["epochs"], -row["config"]["learning_rate"]


@functools.cache
def cut_training_split(task: str, data: Path, folder: Path, rows: int) -> Path:
    """Return a data folder whose training split is a fixed sample of the official one, in its order."""
    source, target = data / TASKS[task].folder, folder / TASKS[task].folder
    assert not TASKS[task].width
    try:
        header, *lines = (source / "train.tsv").read_bytes().splitlines(keepends=True)
        dev = (source / TASKS[task].dev_file).read_bytes()
    except (OSError, ValueError) as error:
        raise HarnessError(f"the task {task} has no readable train.tsv and dev.tsv in {source} ({error})") from error
    chosen = sorted(random.Random(0).sample(range(len(lines)), min(rows, len(lines))))
    content = {"train.tsv": b"".join([header, *(lines[at] for at in chosen)]), TASKS[task].dev_file: dev}
    for name, wanted in content.items():
        # another process may be reading it
        if not (target / name).is_file() or (target / name).read_bytes() != wanted:
            replace_file(target / name, functools.partial(Path.write_bytes, data=wanted))
    return folder


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold a lock, and tell whether it was free. The system drops the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def work_through(study: Study) -> int:
    """Do all runs that no other process does, until none is left."""
    from .training import execute

    failed: set[Path] = set()
    while True:
        study.choose()
        planned = study.plan()
        done = {file: [row["config"] for row in study.rows(file)] for file in (ROWS, TUNING)}
        left = [(file, run) for file, run in planned if run.recorded() not in done[file]]
        is_waiting = False
        for file, run in left:
            folder = study.work / f"lr{run.learning_rate:g}-epochs{run.epochs:g}"
            if (file == ROWS and not study.is_tuned(run.task)) or folder / run.name in failed:
                continue
            with claimed(folder / f"{run.name}.lock") as is_mine:
                if not is_mine:
                    is_waiting = True
                    continue
                # another process may have finished it since the rows were read
                if run.recorded() in [row["config"] for row in study.rows(file)]:
                    break
                place, hours = len(planned) - len(left) + 1, study.hours_left([run for _, run in left])
                print(f"[{place}/{len(planned)}] {folder.name} {run.name}{hours}", flush=True)
                try:
                    execute(run, folder)
                    study.record(file, run, folder)
                except HarnessError:
                    raise
                # after any error the other runs go on
                except Exception:
                    traceback.print_exc()
                    failed.add(folder / run.name)
                break
        else:
            if not is_waiting:
                return len(failed)
            time.sleep(_WAIT_SECONDS)


def run_again(study: Study, name: str) -> None:
    """Do one run of the study once more, and print its score beside the rows'; no row is written."""
    from .training import execute, finished_result

    # the data of other tasks need not be there
    data, study.data = study.data, None
    runs = {run.name: run for file, run in study.plan() if file == ROWS}
    study.data = data
    if name not in runs:
        raise HarnessError(f"the study has no run {name!r}; its runs are {', '.join(sorted(runs))}")
    run, folder = runs[name], study.work / "again"
    if data is not None:
        run = dataclasses.replace(run, data=study._data_of(run.task))
    score = execute(run, folder, force=finished_result(run, folder) is not None)["final"]["score"]
    rows = (row for row in study.rows(ROWS) if row["name"] == name)
    known = ", ".join(f"{row['final']['score']:.4f} on {row['hardware']['device']}" for row in rows)
    print(f"{name}: score {score:.4f}; in the rows {known or 'none'}")


def _work(options: argparse.Namespace) -> int | None:
    os.nice(19)
    # Linux weighs processes of one terminal against each other, and terminals by this number
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    torch.set_num_threads(1)
    study = Study(options.config, options.results, options.work, data=options.data, model=options.model)
    if options.again is not None:
        run_again(study, options.again)
        return None
    return min(work_through(study), 1)


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--data", help="folder in the official GLUE layout")
    parser.add_argument("--model", help="folder that from_pretrained reads")
    parser.add_argument("--config", default="study", help="configuration, by name or path (default: study)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "study")
    parser.add_argument("--again", metavar="NAME", help="do the run of this name once more")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "study", help="locks and checkpoints")
    sys.exit(parser.run(_work))
