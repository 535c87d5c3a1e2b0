"""Experiments whose rows belong to models: which are chosen, and results files that are rewritten model by model."""

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from experiments.command_line import HarnessError
from experiments.rows import replace_file


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Workload = TypeVar("_Workload", bound=_Named)


def chosen(workloads: Sequence[_Workload], names: Sequence[str] | None) -> tuple[_Workload, ...]:
    """Return workloads by name, in the order that all have; all of them if no names are given.

    Raises:
        HarnessError: If there is no such workload.
    """
    known = [workload.name for workload in workloads]
    for name in names or ():
        if name not in known:
            raise HarnessError(f"there is no model {name!r}; choose among {', '.join(known)}")
    return tuple(workload for workload in workloads if names is None or workload.name in names)


def output_folder(given: Path | None, default: Path) -> Path:
    """Return the folder that results are written to: the given one, or the experiment's own, which is made.

    Raises:
        HarnessError: If the given one is none.
    """
    default.mkdir(exist_ok=True)
    output = given or default
    if not output.is_dir():
        raise HarnessError(f"--output {output} is no folder; make it first")
    return output


def read_rows(
    path: Path, *, kinds: Mapping[str, Callable[[str], Any]], needed: Collection[str], command: str
) -> list[dict[str, Any]]:
    """Read a results file, which `command` makes: numbers by `kinds`, and None for empty cells.

    Raises:
        HarnessError: If it is missing, empty, something else, or lacks a column that is `needed`.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                {key: kinds.get(key, str)(text) if text else None for key, text in row.items()}
                for row in csv.DictReader(file)
            ]
    except OSError as error:
        raise HarnessError(f"{path} can't be read ({error.strerror or error}); {command} makes it") from error
    except (ValueError, TypeError) as error:
        raise HarnessError(f"{path} is no results file of this experiment ({error}); make it anew") from error
    if not rows or not rows[0].keys() >= set(needed):
        raise HarnessError(f"{path} is no results file of this experiment; make it anew")
    return rows


def write_rows(
    path: Path, rows: Sequence[dict[str, Any]], *, old: Sequence[dict[str, Any]], names: Sequence[str]
) -> None:
    """Write a results file, models in the order of `names`; what it holds of models without new rows stays."""
    new = {row["model"] for row in rows}
    order = {name: place for place, name in enumerate(names)}
    together = [*(row for row in old if row["model"] not in new), *rows]
    together.sort(key=lambda row: order.get(row["model"], len(order)))
    columns = list(dict.fromkeys(column for row in together for column in row))

    def write(to: Path) -> None:
        with to.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(together)

    replace_file(path, write)
