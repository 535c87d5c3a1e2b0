"""The command line: `rmm-linear COMMAND`."""

import argparse
import sys
from collections.abc import Sequence

from rmm_linear.cli import doctor, fit, plan, profile
from rmm_linear.cli.quiet import quiet

_COMMANDS = {"profile": profile, "plan": plan, "fit": fit, "doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process if None.

    Returns:
        The exit status: 0, 1 if the command found what it looks for to be wrong, or 2 with one line on stderr if the
        user has something to put right.
    """
    parser = argparse.ArgumentParser(
        prog="rmm-linear", description="Linear layers that keep a sketch of their input.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_options(commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False))
    options = parser.parse_args(arguments)
    try:
        with quiet():
            text, status = _COMMANDS[options.command].run(options)
        print(text)
    except (ValueError, ImportError) as error:
        print(f"rmm-linear: error: {error}", file=sys.stderr)
        return 2
    return status
