"""Where Python code can leave something: lists and the like, attributes, and what functions close over.

They are read and written by no method of the user's: a kind of dict may do more than to hold what it is given.
"""

import functools
import types
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import nn

from rmm_linear.checkpointing.changes import copied
from rmm_linear.checkpointing.python_state import (
    DICTS_OF_PYTHON,
    LARGEST_ARRAY_BYTES,
    LONGEST,
    attributes_of,
    classes_of_users,
    is_opaque,
    slots_of,
)


class Variables(MutableMapping[str, Any]):
    """Variables by name that lie in no dict, or some of those that lie in one.

    Args:
        names: Their names; those that have no value are not there.
        get: Reads one.
        put: Writes one.
        drop: Takes one away.
    """

    def __init__(
        self,
        names: Iterable[str],
        get: Callable[[str], Any],
        put: Callable[[str, Any], None],
        drop: Callable[[str], Any],
    ) -> None:
        self._names, self._get, self._put, self._drop = names, get, put, drop

    def __getitem__(self, name: str) -> Any:
        try:
            return self._get(name)
        except (AttributeError, ValueError):
            # an empty slot, an empty cell
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self._drop(name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def places_of_data(value: Any) -> list[tuple[Any, bool]]:
    """List what can change of a value that is no module, function or class.

    Args:
        value: It.

    Returns:
        Lists, sets, arrays and mappings, each with whether it is of an object's attributes.
    """
    if isinstance(value, np.ndarray):
        is_small = value.dtype != object and value.nbytes <= LARGEST_ARRAY_BYTES
        return [(value, False)] if type(value) is np.ndarray and value.flags.writeable and is_small else []
    if isinstance(value, list) and len(value) > LONGEST:
        # not compared between steps either, and named; what is appended is taken off
        return [(Variables(["its length"], lambda _: len(value), functools.partial(_shorten, value), str), False)]
    found: list[tuple[Any, bool]] = []
    if isinstance(value, (list, deque, set, dict)):
        if len(value) <= LONGEST:
            found.append((value, False))
    elif isinstance(value, nn.Module) or is_opaque(value):
        return []
    attributes, slots = attributes_of(value), slots_of(value)
    if attributes is not None:
        found.append((attributes, True))
    if slots and not isinstance(value, (list, deque, set, dict)):
        found.append(
            (
                Variables(
                    slots,
                    lambda name: slots[name].__get__(value),
                    lambda name, part: slots[name].__set__(value, part),
                    lambda name: slots[name].__delete__(value),
                ),
                True,
            )
        )
    return found


def _shorten(value: list[Any], _: str, length: int) -> None:
    list.__delitem__(value, slice(length, None))


def places_of_code(value: Any) -> list[tuple[Any, bool]]:
    """List what can change of a module, of a function, and of a class of the user's.

    Args:
        value: Anything.

    Returns:
        Mappings, each with whether it is of an object's attributes.
    """
    if isinstance(value, nn.Module):
        return [(vars(value), False)]
    if isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        closed_over = Variables(
            cells,
            lambda name: cells[name].cell_contents,
            lambda name, contents: setattr(cells[name], "cell_contents", contents),
            lambda name: delattr(cells[name], "cell_contents"),
        )
        return [(closed_over, False), (vars(value), True)]
    if isinstance(value, type) and value in classes_of_users(value):
        put, drop = functools.partial(type.__setattr__, value), functools.partial(type.__delattr__, value)
        return [(Variables(vars(value), vars(value).__getitem__, put, drop), True)]
    return []


def parts_of(value: Any) -> list[Any]:
    """List what is inside of a value beside what can change of it.

    Args:
        value: It.

    Returns:
        Its parts.
    """
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, types.FunctionType):
        return [value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, DICTS_OF_PYTHON):
        return [value.maps if isinstance(value, ChainMap) else vars(value)["data"]]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    # type(self).count += 1
    return [] if is_opaque(value) or isinstance(value, nn.Module) else list(classes_of_users(type(value)))


def contents_of(holder: Any) -> list[tuple[Any, Any]]:
    """List what is in a place that can change.

    Args:
        holder: A list, a set, an array or a mapping.

    Returns:
        Keys, None but for mappings, and values.
    """
    if isinstance(holder, np.ndarray):
        return []
    contents = copied(holder)
    return list(contents.items()) if isinstance(holder, Mapping) else [(None, part) for part in contents]
