"""The harness's command lines: a user's mistake is one line on stderr and exit status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from .errors import HarnessError


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes the way the rest of the harness does."""

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would exit.

        Args:
            message: What is wrong.

        Raises:
            HarnessError: Always.
        """
        raise HarnessError(f"{message}; see --help")


def exit_status(work: Callable[[], int]) -> int:
    """Do the work, and print what the user has to put right.

    Args:
        work: Returns an exit status.

    Returns:
        The same, or 2 after a `HarnessError`.
    """
    try:
        return work()
    except HarnessError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
