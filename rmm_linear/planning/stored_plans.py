"""Schedules kept on disk: a step that was planned once is not planned again by the next process.

They lie in a folder of the user's cache, a file each, named by a hash of the graph, the strategy, the budget and the
library's version. The environment variable RMM_LINEAR_PLANS names another folder, or is "off". What is read is checked
as any schedule from elsewhere is; what can't be read or written is as if it were not there.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

from rmm_linear.errors import ScheduleError
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import simulate

_SWITCH = "RMM_LINEAR_PLANS"
# Those that were not read for longest go first.
_MOST_FILES = 256


def stored_plan(graph: Graph, strategy: str, budget_bytes: int) -> Schedule | None:
    """Look for a schedule that was made for the same graph, strategy and budget.

    Returns:
        The schedule; None if there is none that can run and fits.
    """
    folder = _folder()
    if folder is None:
        return None
    path = folder / _name(graph, strategy, budget_bytes)
    try:
        schedule = Schedule.from_json(path.read_text(encoding="utf-8"))
        if simulate(graph, schedule).peak_bytes > budget_bytes:
            return None
    except (OSError, ValueError, ScheduleError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        path.touch()
    return schedule


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
    # where nobody knows the user's home, nothing is kept
    with contextlib.suppress(RuntimeError):
        if named is not None:
            return None if named in ("", "0", "off") else Path(named).expanduser()
        return (Path(cache) if cache else Path.home() / ".cache") / "rmm_linear" / "plans"
    return None


def _name(graph: Graph, strategy: str, budget_bytes: int) -> str:
    try:
        version = importlib.metadata.version("rmm-linear")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    text = f"{graph.fingerprint} {strategy} {budget_bytes} {version}"
    return hashlib.sha256(text.encode()).hexdigest() + ".json"
