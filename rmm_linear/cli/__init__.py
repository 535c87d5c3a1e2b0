"""The command line: `rmm-linear COMMAND`."""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from rmm_linear.cli import doctor, fit, plan, profile

_COMMANDS = {"profile": profile, "plan": plan, "fit": fit, "doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, with the process's arguments if None, and return the exit status.

    The status is 0, 1 if the command found an error that it checks for, or 2 with one line on stderr for bad input.
    """
    parser = argparse.ArgumentParser(
        prog="rmm-linear",
        description="Measure the bytes that a model keeps for its backward pass, and plan training within a budget.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_options(commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False))
    options = parser.parse_args(arguments)
    try:
        with _quiet():
            text, status = _COMMANDS[options.command].run(options)
        print(text)
    except (ValueError, ImportError, OSError) as error:
        print(f"rmm-linear: error: {error}", file=sys.stderr)
        return 2
    return status


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings of other packages, and show this library's as notes; `python -W ...` shows all warnings."""
    if sys.warnoptions:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"rmm_linear\b")
        warnings.showwarning = _as_a_note
        yield


def _as_a_note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"rmm-linear: note: {' '.join(str(message).split())}", file=sys.stderr)
