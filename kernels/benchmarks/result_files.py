"""Write the benchmarks' result files atomically, and find their folder and their commit."""

import argparse
import csv
import io
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@cache
def commit_name() -> str:
    """Return the working tree's commit, with a + when it holds uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def slug(name: str) -> str:
    """Return a name as a part of a file's name: lower case, a dash for each character that is no letter or digit."""
    return "".join(character if character.isalnum() else "-" for character in name.lower()).strip("-")


def check_results_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of a `--results` option, or end the program before the measurement."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        parser.error(f"--results {folder}: {error.strerror}; name a folder that can be written to")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: an interrupted run leaves the former file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8", newline="")
    os.replace(partial, path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of at least one row, all with the same columns, atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
