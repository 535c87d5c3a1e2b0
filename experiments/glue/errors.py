"""The one exception of the harness that is the user's to fix."""


class HarnessError(ValueError):
    """A mistake in what the user asked for or supplied: the command line prints it as one line, without a traceback."""
