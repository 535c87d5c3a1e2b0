"""The result file of a run: one JSON document, replaced as a whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from experiments.command_line import HarnessError
from experiments.rows import replace_file

RUNNING, COMPLETE, FAILED, DIVERGED = "running", "complete", "failed", "diverged"
FORMAT = 1


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file whole or not at all, with a line for each top-level key; nan and inf become null."""
    finite = json.loads(json.dumps(result), parse_constant=lambda _: None)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in finite.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"

    def write(to: Path) -> None:
        with to.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write)


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
