"""The harness's command lines: a user's mistake is one line on stderr and exit status 2."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .errors import HarnessError


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes the way the rest of the harness does."""

    def error(self, message: str) -> NoReturn:
        """Raise `HarnessError`, where argparse would exit."""
        raise HarnessError(f"{message}; see --help")


def exit_status(work: Callable[[], int]) -> int:
    """Do the work; after a `HarnessError`, print what the user has to put right and return 2."""
    try:
        return work()
    except HarnessError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2


def report_command(
    arguments: Sequence[str] | None,
    write_report: Callable[[Path], str],
    *,
    prog: str,
    description: str,
    default: Path | None = None,
) -> int:
    """Write the report of the results folder that a command line names, or of `default`, and print it.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the user has something to put right.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("folder", type=Path, nargs=None if default is None else "?", default=default)
    folder = parser.parse_args(arguments).folder

    def work() -> int:
        print(write_report(folder))
        return 0

    return exit_status(work)
