"""Which code a compiled graph was made by: torch keeps graphs on disk, where later versions must not find them."""

import hashlib
import secrets
import weakref
from functools import cache
from pathlib import Path

import rmm_linear_kernels
from rmm_linear_kernels.interpreter import IS_INTERPRETED

# of classes whose code may be anywhere
_tokens: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
# What decides about the operators of a layer's graph, and about the shapes that they return.
_LIBRARY = ("*.py", "sketches/*.py", "ops/*.py")
_KERNELS = ("*/reference.py",)


def fingerprint(of: type) -> str:
    """Return a text that changes when the code changes that a layer's graph is made by.

    Args:
        of: The class of the layer's sketch.

    Returns:
        16 hexadecimal digits; for a class that is not this library's, whose code may be anywhere, those of this very
        class in this process.
    """
    library = _of_library() if of.__module__.partition(".")[0] == __name__.partition(".")[0] else None
    return library or _tokens.setdefault(of, secrets.token_hex(8))


@cache
def _of_library() -> str | None:
    """A hash of the files; None where there are none to read, and where kernels run without a GPU to tell them by."""
    if IS_INTERPRETED:
        return None
    found = hashlib.sha256()
    kernels = Path(rmm_linear_kernels.__file__).parent
    files = [
        *(file for pattern in _LIBRARY for file in Path(__file__).parent.glob(pattern)),
        *(file for pattern in _KERNELS for file in kernels.glob(pattern)),
    ]
    for file in sorted(files):
        found.update(file.name.encode())
        found.update(file.read_bytes())
    return found.hexdigest()[:16] if files else None
