"""The code that a compiled graph was made by: torch keeps graphs on disk, where later versions must not find them."""

import hashlib
from pathlib import Path

from rmm_linear.backend import IS_INTERPRETED, KERNELS_FOLDER

# They decide about the operators of a layer's graph, and about the shapes that they return.
_LIBRARY = ("*.py", "sketches/*.py")


def _of_library() -> str | None:
    """A hash of the files, None where there are none to read."""
    found = hashlib.sha256()
    library = Path(__file__).parent
    files = [file for pattern in _LIBRARY for file in library.glob(pattern)]
    files += KERNELS_FOLDER.glob("*/reference.py")
    # by folder and name: where the library is installed does not count
    for file in sorted(files, key=lambda file: file.parts[-2:]):
        found.update(file.name.encode())
        found.update(file.read_bytes())
    return found.hexdigest()[:16] if files else None


# Of the code that is imported now: files may change while the process runs. In the interpreter, where the ways of GPUs
# are open to tensors on a CPU, the files are not all that a graph depends on.
_FINGERPRINT = None if IS_INTERPRETED else _of_library()


def fingerprint(of: type) -> str | None:
    """Return a text that changes with the code by which the graph of a layer with this class of sketch is made.

    16 hexadecimal digits; None for a class of another package, whose code may be anywhere and look at anything.
    """
    return _FINGERPRINT if of.__module__.partition(".")[0] == __name__.partition(".")[0] else None
