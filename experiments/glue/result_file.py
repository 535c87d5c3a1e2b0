"""The result file of a run: one JSON document, replaced as a whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from experiments.command_line import HarnessError
from experiments.rows import replace_file

RUNNING, COMPLETE, FAILED, DIVERGED = "running", "complete", "failed", "diverged"
FORMAT = 1


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file so that a reader, or a power cut, never meets half of one; nan and inf become null.

    Each top-level key has a line: long columns of numbers stay diffable and don't take a line a number.
    """
    lines = [f" {json.dumps(key)}: {json.dumps(_finite(value), allow_nan=False)}" for key, value in result.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"

    def write(to: Path) -> None:
        with to.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a result file; None if there is none."""
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        known = result["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise HarnessError(f"{path} is not a result file of this harness; move it away or delete it")
    return result


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Read all result files of a folder, of which each JSON file has to be one."""
    return [result for path in sorted(folder.glob("*.json")) if (result := read_result(path)) is not None]
