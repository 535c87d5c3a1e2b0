"""Schedules kept on disk: a step that was planned once is not planned again by the next process.

They lie in a folder of the user's cache, a file each, named by a hash of the graph, the strategy and the library's
version, and by the budget. The cheapest plan that fits is taken, made for any budget: no plan is dearer than
one that was found before for a smaller budget. The environment variable RMM_LINEAR_PLANS names another folder, or is
"off". A schedule that is read is checked as any other; a file that can't be read or written is as if it were not
there.
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from rmm_linear.errors import ScheduleError
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import simulate

_SWITCH = "RMM_LINEAR_PLANS"
# Files that were not read for longest go first.
_MOST_FILES = 256


def stored_plan(graph: Graph, strategy: str, budget_bytes: int) -> tuple[Schedule | None, bool]:
    """Look for a schedule that was made for the same graph and strategy.

    Return the cheapest one that can run and fits, None if there is none; and whether one was made for this very budget.
    """
    folder = _folder()
    found: list[tuple[float, bool, Schedule]] = []
    # unlike Path.glob, it finds nothing in a folder that can't be read
    names = [] if folder is None else glob.glob(f"{_key(graph, strategy)}-*.json", root_dir=folder)
    for path in sorted(Path(folder or "", name) for name in names):
        with contextlib.suppress(OSError, ValueError, ScheduleError, RecursionError):
            schedule = Schedule.from_json(path.read_text(encoding="utf-8"))
            taken = simulate(graph, schedule)
            if taken.peak_bytes <= budget_bytes:
                is_other = path.name != _name(graph, strategy, budget_bytes)
                # what a solver has proved for a smaller budget need not hold for this one
                found.append((taken.cost, is_other, replace(schedule, proof="") if is_other else schedule))
                # last: a file may be there to be read alone
                path.touch()
    best = min(found, key=lambda each: each[:2])[2] if found else None
    return best, not all(is_other for _, is_other, _ in found)


def store_plan(graph: Graph, strategy: str, budget_bytes: int, schedule: Schedule) -> None:
    """Keep a schedule."""
    folder = _folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # whole or not at all, also where several processes write it
        number, part = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(schedule.to_json())
            Path(part).replace(folder / _name(graph, strategy, budget_bytes))
        finally:
            Path(part).unlink(missing_ok=True)
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST_FILES]:
            path.unlink(missing_ok=True)


def _folder() -> Path | None:
    named, cache = os.environ.get(_SWITCH), os.environ.get("XDG_CACHE_HOME")
    # without a home folder, no plan is kept
    with contextlib.suppress(RuntimeError):
        if named is not None:
            return None if named in ("", "0", "off") else Path(named).expanduser()
        return (Path(cache) if cache else Path.home() / ".cache") / "rmm_linear" / "plans"
    return None


def library_version() -> str:
    """Return the installed version of this library, or "not installed"."""
    try:
        return importlib.metadata.version("rmm-linear")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _key(graph: Graph, strategy: str) -> str:
    # the time of a byte is measured anew in each process
    paging = "" if graph.page_cost is None else f" pages {round(math.log2(graph.page_cost))}"
    return hashlib.sha256(f"{graph.fingerprint}{paging} {strategy} {library_version()}".encode()).hexdigest()


def _name(graph: Graph, strategy: str, budget_bytes: int) -> str:
    return f"{_key(graph, strategy)}-{budget_bytes}.json"
