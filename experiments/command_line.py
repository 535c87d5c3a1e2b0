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

    def __init__(self, about: str) -> None:
        """Describe the command by the first line of a text, and name it as the module that runs."""
        module = sys.modules["__main__"].__spec__
        name = None if module is None else f"python -m {module.name}"
        super().__init__(prog=name, description=about.partition("\n")[0], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise HarnessError(f"{message}; see --help")

    def run(self, work: Callable[[argparse.Namespace], int | None], arguments: Sequence[str] | None = None) -> int:
        """Do the work with the options; return the work's exit status, or 2 after a `HarnessError`."""
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


def report_command(
    write_report: Callable[[Path], str], default: Path | None = None, arguments: Sequence[str] | None = None
) -> int:
    """Write the report of the results folder that a command line names, or of `default`, and print it."""
    parser = Parser("Write tables and figures of a results folder into that folder.")
    parser.add_argument("folder", type=Path, nargs=None if default is None else "?", default=default)
    return parser.run(lambda options: print(write_report(options.folder)), arguments)
