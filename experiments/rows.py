"""Results files of experiments: CSV whose rows are dictionaries, written whole or not at all."""

import contextlib
import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.command_line import HarnessError

# Columns of digits that are no numbers, such as a commit.
_TEXTS = ("commit", "peer_commit", "weights", "setting", "rmm_linear", "torch", "transformers", "peft")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a results file: numbers as numbers, True and False as bools, empty cells as None."""
    try:
        frame = pd.read_csv(
            path,
            keep_default_na=False,
            na_values=[""],
            dtype=dict.fromkeys(_TEXTS, "string"),
            dtype_backend="numpy_nullable",
        )
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path} can't be read ({error}); its experiment makes it") from error
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, order: Sequence[str] = ()) -> None:
    """Write at least one row; if `order` lists the models, the file's rows of models without new rows stay."""
    if order and path.exists():
        new = {row["model"] for row in rows}
        rows = [*(row for row in read_rows(path) if row["model"] not in new), *rows]
        rows.sort(key=lambda row: order.index(row["model"]) if row["model"] in order else len(order))
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def write(to: Path) -> None:
        with to.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    replace_file(path, write)


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file beside `path`, then put it in its place as a whole; an error leaves nothing behind."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise HarnessError(
            f"{path} can't be written ({error.strerror or error}); name a folder of yours for the results"
        ) from error
    finally:
        # it is in its place already, or the folder is none
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a results file with a line of JSON a row; [] if there is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        # a full disk leaves half a line, whose run is done again
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # the end of half a line
    end = "" if text[-1:] in ("", "\n") else "\n"
    with path.open("a", encoding="utf-8") as lines:
        lines.write(end + json.dumps(row, allow_nan=False) + "\n")


def grouped(rows: Iterable[dict[str, Any]], *columns: str) -> dict[Any, list[dict[str, Any]]]:
    """Return the rows of each value of a column, or of each tuple of the values of several columns."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(itemgetter(*columns)(row), []).append(row)
    return found
