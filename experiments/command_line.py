"""The command lines of experiments: a user's mistake is one line on stderr and exit status 2."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class HarnessError(ValueError):
    """A mistake in the user's options or files; any function of experiments may raise it.

    The command line prints it as one line, without a traceback.
    """


class Parser(argparse.ArgumentParser):
    """A parser of an experiment's command line, which does the work as well."""

    def error(self, message: str) -> NoReturn:
        raise HarnessError(f"{message}; see --help")

    def run(self, work: Callable[[argparse.Namespace], int | None], arguments: Sequence[str] | None = None) -> int:
        """Parse the command line, and do the work with its options.

        Returns:
            The exit status: the work's or 0; after a `HarnessError` 2, and a line on stderr that names the mistake.
        """
        try:
            return work(self.parse_args(arguments)) or 0
        except HarnessError as error:
            print("error: " + " ".join(str(error).split()), file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from what is saved", file=sys.stderr)
            return 130
        return 2


def add_models(parser: argparse.ArgumentParser, models: Sequence[Any]) -> None:
    """Add an option `--models` that names some of the models of an experiment, all by default."""
    names = [model.name for model in models]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))


def chosen(models: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the models of these names, in the order of the experiment."""
    return [model for model in models if model.name in names]


def report_command(
    write_report: Callable[[Path], str], default: Path | None = None, arguments: Sequence[str] | None = None
) -> int:
    """Write the report of the results folder that a command line names, or of `default`, and print it."""
    parser = Parser(description="Write tables and figures of a results folder into that folder.")
    parser.add_argument("folder", type=Path, nargs=None if default is None else "?", default=default)
    return parser.run(lambda options: print(write_report(options.folder)), arguments)
