"""What a run of Python code changes: plain values are told apart by value, all else by identity."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Stands for what is not there.
MISSING: Any = object()
# What is compared by value, and can't change.
PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice}


def is_plain(value: Any) -> bool:
    """Tell what is compared by value, and can't change.

    Args:
        value: Anything.

    Returns:
        Whether it is a number, a string or the like.
    """
    return type(value) in PLAIN


def differ(old: Any, new: Any) -> bool:
    """Compare two values: lists, tuples and dicts by what is in them.

    Args:
        old: What was there.
        new: What is there.

    Returns:
        Whether they differ.
    """
    if old is new:
        return False
    if type(old) is not type(new):
        return True
    if isinstance(old, (list, tuple, deque)):
        return len(old) != len(new) or any(map(differ, old, new))
    if isinstance(old, np.ndarray):
        return old.shape != new.shape or old.dtype != new.dtype or old.tobytes() != new.tobytes()
    if isinstance(old, (set, frozenset)):
        return old != new
    if isinstance(old, dict):
        return old.keys() != new.keys() or any(differ(value, new[key]) for key, value in old.items())
    return not (is_plain(old) and (old == new or (old != old and new != new)))


def give_back(holder: Any, contents: Any) -> None:
    """Let a list, a set, an array or a mapping hold what it held.

    Args:
        holder: It.
        contents: A copy of what was in it.
    """
    if isinstance(holder, list):
        holder[:] = contents
    elif isinstance(holder, np.ndarray):
        holder[...] = contents
    elif isinstance(holder, Mapping) and (not isinstance(holder, dict) or list(holder) == list(contents)):
        # what is there is never missing in between, for other threads
        present = dict(holder)
        for key in {**present, **contents}:
            if present.get(key, MISSING) is not contents.get(key, MISSING):
                put(holder, key, contents.get(key, MISSING))
    else:
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(contents)


def put(holder: Any, key: Any, value: Any) -> None:
    """Put a value into a mapping.

    Args:
        holder: The mapping.
        key: Where.
        value: What; `MISSING` takes away what is there.
    """
    if value is MISSING:
        holder.pop(key, None)
    else:
        holder[key] = value


@dataclass(frozen=True, eq=False)
class Change:
    """What a run changed, no tensor, and what was undone after it.

    Attributes:
        path: Its name.
        holder: The mapping of attributes, entries or variables in which it is; or the list, set or array.
        key: Its name there; None for what changed as a whole.
        before: What was there.
        after: What the run left there.
    """

    path: str
    holder: Any
    key: Any
    before: Any
    after: Any

    def again(self) -> None:
        """Make the change."""
        self._set(self.after)

    def undo(self) -> None:
        """Take it back."""
        self._set(self.before)

    def _set(self, value: Any) -> None:
        if self.key is None:
            give_back(self.holder, value)
        else:
            put(self.holder, self.key, value)

    def __str__(self) -> str:
        values = [value for value in (self.before, self.after) if is_plain(value)]
        is_short = len(values) == 2 and len(repr(values)) < 80
        return f"`{self.path}` ({values[0]!r}, then {values[1]!r})" if is_short else f"`{self.path}`"
