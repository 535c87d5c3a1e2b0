"""What a run of Python code changes: plain values are told apart by value, all else by identity."""

from dataclasses import dataclass
from typing import Any

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
    if isinstance(old, (list, tuple)):
        return len(old) != len(new) or any(map(differ, old, new))
    if isinstance(old, dict):
        return old.keys() != new.keys() or any(differ(value, new[key]) for key, value in old.items())
    return not (is_plain(old) and (old == new or (old != old and new != new)))


@dataclass(frozen=True, eq=False)
class Change:
    """What a run changed, no tensor, and what was undone after it.

    Attributes:
        path: Its name.
        holder: The list, or the dict of attributes or entries, in which it is.
        key: Its name there; None for a list, which changed as a whole.
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
        if self.key is None:
            self.holder[:] = self.after
        elif self.after is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = self.after

    def undo(self) -> None:
        """Take the change of an attribute, an entry or a variable back; lists are restored otherwise."""
        if self.key is not None:
            self.holder[self.key] = self.before

    def __str__(self) -> str:
        values = [value for value in (self.before, self.after) if is_plain(value)]
        is_short = len(values) == 2 and len(repr(values)) < 80
        return f"`{self.path}` ({values[0]!r}, then {values[1]!r})" if is_short else f"`{self.path}`"
