"""A screen holds the answer: what other packages tell their developers is not shown."""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of other packages, and show this library's as notes.

    Yields:
        Nothing. `python -W ...` and PYTHONWARNINGS bring all of them back.
    """
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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers and its hub tell errors alone; for after they are loaded."""
    with contextlib.ExitStack() as stack:
        for package, variable in (("transformers", "TRANSFORMERS_VERBOSITY"), ("huggingface_hub", "HF_HUB_VERBOSITY")):
            logs = importlib.import_module(f"{package}.utils.logging")
            if variable not in os.environ:
                stack.callback(logs.set_verbosity, logs.get_verbosity())
                logs.set_verbosity_error()
        yield
