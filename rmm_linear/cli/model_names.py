"""Names of models as users type them: a mistyped path is told at once, and never looked for on a hub."""

import difflib
import os
import re
from pathlib import Path

_ON_A_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


def checked(name: str) -> str:
    """Tell names on the hub from paths, and refuse paths that lead nowhere.

    Returns:
        The name, with the home folder in the place of "~".

    Raises:
        ValueError: If it is a path, and there is no model; or neither a path nor a name on the hub.
    """
    path = Path(name).expanduser()
    if name and path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"the folder {name!r} has no config.json; pass one that has, or a name on the hub")
    if name and path.exists():
        return str(path) if name.startswith("~") else name
    if _is_path(name):
        near = [str(path.parent / each) for each in _near(path)]
        # Path drops what users type before and after
        lost = name.startswith("./") and not path.is_absolute()
        hint = f"; did you mean {('./' if lost else '') + near[0]!r}?" if near else ""
        raise ValueError(f"there is no file or folder {name!r}{hint}")
    if not _ON_A_HUB.fullmatch(name):
        raise ValueError(f"{name!r} is no name on the hub, and no file or folder that is here")
    return name


def _is_path(name: str) -> bool:
    starts, ends = (".", "/", "~"), ("/", os.sep, ".json")
    # "models/gpt2" is a name on the hub as well, but not where there is a folder "models"
    first = name.partition("/")[0]
    return (
        name.startswith(starts)
        or name.endswith(ends)
        or "\\" in name
        or name.count("/") > 1
        or ("/" in name and Path(first).is_dir())
    )


def _near(path: Path) -> list[str]:
    try:
        siblings = [each.name for each in path.parent.iterdir()]
    except OSError:
        return []
    return difflib.get_close_matches(path.name, siblings, n=1)
