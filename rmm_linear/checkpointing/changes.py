"""What a run of Python code changes: plain values are told apart by value, all else by identity."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch

# Stands for what is not there.
MISSING: Any = object()
# Lists in lists that are compared.
_DEEPEST = 20
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


def differ(old: Any, new: Any, depth: int = 0) -> bool:
    """Compare two values: lists, tuples and dicts by what is in them.

    Args:
        old: What was there.
        new: What is there.
        depth: How deep they lie.

    Returns:
        Whether they differ.
    """
    if old is new or depth > _DEEPEST:
        return old is not new
    if type(old) is not type(new):
        return True
    if isinstance(old, (list, tuple, deque)):
        return len(old) != len(new) or any(differ(a, b, depth + 1) for a, b in zip(old, new, strict=True))
    if isinstance(old, np.ndarray):
        return old.shape != new.shape or old.dtype != new.dtype or old.tobytes() != new.tobytes()
    if isinstance(old, dict):
        return old.keys() != new.keys() or any(differ(value, new[key], depth + 1) for key, value in old.items())
    return not (_has_a_value(old) and _are_equal(old, new))


def _has_a_value(value: Any) -> bool:
    """Tell whether two of a kind may be the same by what they are: numbers, dates, methods, records that are frozen."""
    if type(value) in PLAIN or isinstance(value, (np.generic, MethodType, set, frozenset)):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    is_frozen = parameters is not None and parameters.frozen and parameters.eq
    return is_frozen or type(value).__module__ in ("datetime", "decimal", "fractions", "pathlib", "uuid")


def _are_equal(old: Any, new: Any) -> bool:
    try:
        # what is not a number is as it was
        return bool(old == new) or bool(old != old and new != new)
    except Exception:
        return False


def copied(holder: Any) -> Any:
    """Copy what is in a list, a set, an array or a mapping, by no method of the user's.

    Args:
        holder: It.

    Returns:
        A plain one.
    """
    if isinstance(holder, dict):
        return dict.copy(holder)
    if isinstance(holder, np.ndarray):
        return holder.copy()
    if isinstance(holder, set):
        return {*set.__iter__(holder)}
    if isinstance(holder, list):
        return [*list.__iter__(holder)]
    if isinstance(holder, deque):
        return [*deque.__iter__(holder)]
    return dict(holder)


def give_back(holder: Any, contents: Any) -> None:
    """Let a list, a set, an array or a mapping hold what it held; by no method of the user's, and if it does not yet.

    Args:
        holder: It.
        contents: A copy of what was in it.
    """
    present = copied(holder)
    if isinstance(holder, np.ndarray):
        if differ(present, contents):
            holder[...] = contents
    elif isinstance(holder, set):
        if present != contents:
            set.clear(holder)
            set.update(holder, contents)
    elif isinstance(holder, (list, deque)):
        if len(present) == len(contents) and all(a is b for a, b in zip(present, contents, strict=True)):
            return
        if isinstance(holder, list):
            list.__setitem__(holder, slice(None), contents)
        else:
            deque.clear(holder)
            deque.extend(holder, contents)
    else:
        # one by one: what is there is never missing in between, for other threads
        for key in {**present, **contents}:
            if present.get(key, MISSING) is not contents.get(key, MISSING):
                put(holder, key, contents.get(key, MISSING))
        if isinstance(holder, dict) and [*copied(holder)] != [*contents]:
            for key, value in contents.items():
                put(holder, key, MISSING)
                put(holder, key, value)


def put(holder: Any, key: Any, value: Any) -> None:
    """Put a value into a mapping, by no method of the user's.

    Args:
        holder: The mapping.
        key: Where.
        value: What; `MISSING` takes away what is there.
    """
    kind: Any = next((kind for kind in (OrderedDict, dict) if isinstance(holder, kind)), type(holder))
    if value is not MISSING:
        kind.__setitem__(holder, key, value)
    elif kind.__contains__(holder, key):
        kind.__delitem__(holder, key)


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
