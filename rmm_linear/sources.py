"""Which code a compiled graph was made by: torch keeps graphs on disk, where later versions must not find them."""

import hashlib
import secrets
from functools import cache
from pathlib import Path

import rmm_linear_kernels

_THIS_PROCESS = secrets.token_hex(8)
# What decides about the operators of a layer's graph, and about the shapes that they return.
_LIBRARY = ("*.py", "sketches/*.py", "ops/*.py")
_KERNELS = ("*/reference.py",)


def fingerprint(of: type) -> str:
    """Return a text that changes when the code changes that a layer's graph is made by.

    Args:
        of: The class of the layer's sketch.

    Returns:
        16 hexadecimal digits; those of this process alone for a class that is not this library's, whose code may be
        anywhere.
    """
    return _of_library() if of.__module__.partition(".")[0] == __name__.partition(".")[0] else _THIS_PROCESS


@cache
def _of_library() -> str:
    found = hashlib.sha256()
    kernels = Path(rmm_linear_kernels.__file__).parent
    files = [
        *(file for pattern in _LIBRARY for file in Path(__file__).parent.glob(pattern)),
        *(file for pattern in _KERNELS for file in kernels.glob(pattern)),
    ]
    for file in sorted(files):
        found.update(file.name.encode())
        found.update(file.read_bytes())
    # from an archive, say
    return found.hexdigest()[:16] if files else _THIS_PROCESS
