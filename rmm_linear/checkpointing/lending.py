"""A model lends its places to the tensors of a trace: afterwards it holds what it held, however the run ended.

What a run may change is copied before, wherever it can be reached: from the model's modules, the step, and the global
variables that its code mentions, through lists, dicts, sets, small arrays, objects, classes, and what functions close
over. What the run itself makes is its own.
"""

import contextlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rmm_linear.checkpointing.changes import MISSING, PLAIN, Change, differ, give_back
from rmm_linear.checkpointing.python_state import (
    LARGEST_ARRAY_BYTES,
    LONGEST,
    classes_of_users,
    is_opaque,
    slots_of,
)

# Lists, dicts and objects in one place that are looked into.
_MOST_HOLDERS = 10_000
_REGISTRIES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}


class NotFollowedError(Exception):
    """The step does what a plan would lose; the text says what, and what can be done."""


@contextlib.contextmanager
def lent(
    model: nn.Module,
    step: Callable[..., Any],
    state: Sequence[Tensor],
    tensors: Sequence[Tensor],
    start: Sequence[Change] = (),
) -> Iterator["Loan"]:
    """Put other tensors in the place of a model's own for a run, and take back what it changes, however it ends.

    Args:
        model: The model.
        step: What is called with it.
        state: Its parameters, buffers and other tensors, each once.
        tensors: What takes their places.
        start: Changes of an earlier run, to begin with.

    Yields:
        What the run may change; what it did is known when the context is left.
    """
    # by identity, and not by name: a module may be registered under several
    loan = Loan({id(own): tensor for own, tensor in zip(state, tensors, strict=True)})
    try:
        for change in start:
            change.again()
        loan.watch_model(model)
        loan.watch_value(getattr(step, "__name__", "the step"), step)
        yield loan
        loan.end()
    finally:
        loan.restore()
        for change in reversed(start):
            change.undo()


class Loan:
    """What a run may change, as it is before, with other tensors in the place of some.

    Args:
        tensors: What takes the place of each tensor, by its id.

    Attributes:
        changes: What the run changes and a plan leaves as it is.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = tensors
        self._holders: list[_Holder] = []
        self._generators = [
            _Generator("random", random.getstate, random.setstate),
            _Generator("numpy.random", np.random.get_state, np.random.set_state),
        ]
        # what was watched, and what is not yet but will be
        self._seen: set[Any] = set()
        self._lost: list[str] = []
        self.changes: list[Change] = []

    def watch_model(self, model: nn.Module) -> None:
        """Watch what modules hold, and their classes.

        Args:
            model: The model.
        """
        self._seen.update(map(id, model.modules()))
        for path, module in model.named_modules():
            self._watch(path, type(module).__name__, vars(module))
        for kind in {type(module): None for module in model.modules()}:
            for base in classes_of_users(kind):
                self.watch_value(base.__name__, base)

    def watch_variables(self, holder: dict[str, Any], names: Iterable[str]) -> None:
        """Watch global variables.

        Args:
            holder: The dict in which they are.
            names: Their names, whether they are there or not.
        """
        new = [name for name in names if (id(holder), name) not in self._seen]
        self._seen.update((id(holder), name) for name in new)
        if new:
            self._watch("", "", _Variables(new, holder.__getitem__, holder.__setitem__, holder.__delitem__))

    def watch_value(self, name: str, value: Any, *, module: str = "", attribute: str = "") -> None:
        """Watch what is inside of a value.

        Args:
            name: Its name.
            value: It.
            module: The module that holds it, if one of the model's does.
            attribute: Its name there.
        """
        waiting, count = [(name, value)], 0
        while waiting and count < _MOST_HOLDERS:
            name, found = waiting.pop()
            if type(found) in PLAIN or id(found) in self._seen:
                continue
            self._seen.add(id(found))
            self._generators += _generators_of(name, found)
            for holder in (*_places_of_data(found), *_places_of_code(found)):
                count += 1
                waiting += [(_path(name, key), part) for key, part in _contents(holder)]
                self._add(_Holder(module, attribute, name, holder))
            waiting += [(name, part) for part in _parts(found)]

    def _watch(self, module: str, name: str, own: MutableMapping[str, Any]) -> None:
        # a variable is told by its own name, and not by that of a function that has it as well
        values = sorted(own.items(), key=lambda item: isinstance(item[1], types.FunctionType))
        self._add(_Holder(module, "", name, own))
        for attribute, value in values:
            self.watch_value(_path(name, attribute), value, module=module, attribute=attribute)

    def _add(self, holder: "_Holder") -> None:
        self._holders.append(holder)
        holder.lend(self._tensors)

    def end(self) -> None:
        """Find out what the run has changed."""
        for holder in self._holders:
            self._lost += holder.lost()
            self.changes += holder.changes()

    def restore(self) -> None:
        """Let everything be as it was before."""
        for holder in self._holders:
            give_back(holder.now, holder.before)
        for generator in self._generators:
            generator.restore()

    def refuse_lost(self) -> None:
        """Refuse a run that did what a plan would lose.

        Raises:
            NotFollowedError: If it left tensors or modules behind, or drew from generators other than torch's.
        """
        drawn = [f"`{generator.name}`" for generator in self._generators if generator.has_drawn]
        if drawn:
            raise NotFollowedError(
                f"the step draws from {', '.join(drawn)}, whose outcome a capture would freeze: switch it off"
                " (LayerDrop: layerdrop = 0; SpecAugment: mask_time_prob = 0 and mask_feature_prob = 0), or draw from"
                " torch"
            )
        if self._lost:
            raise NotFollowedError(
                f"the step {'; '.join(self._lost)}, which a plan would lose: write into a buffer that is there"
                " (`copy_`, `add_`), or return what is needed after the step; what is computed once is made before"
            )


class _Holder:
    """A place that can change: what was in it before the run, and what after something was lent in it."""

    def __init__(self, module: str, attribute: str, path: str, now: Any) -> None:
        self._module, self._attribute, self._path = module, attribute, path
        self.now, self.before = now, _copy(now)
        self._lent: Any = None

    def lend(self, tensors: Mapping[int, Tensor]) -> None:
        if isinstance(self.now, (list, deque, Mapping)):
            keyed = self.now.items() if isinstance(self.now, Mapping) else enumerate(self.now)
            for key, value in list(keyed):
                if id(value) in tensors:
                    self.now[key] = tensors[id(value)]  # type: ignore[index]
        self._lent = _copy(self.now)

    def _changed(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Path, key, old and new value of what the run has changed."""
        if not isinstance(self.now, Mapping):
            if differ(self._lent, self.now):
                yield self._path, None, self._lent, _copy(self.now)
            return
        # a copy: a user's own kind of dict may answer in its own way
        present = _copy(self.now)
        for key in {**self._lent, **present}:
            old, new = self._lent.get(key, MISSING), present.get(key, MISSING)
            if differ(old, new):
                yield _path(self._path, key), key, old, new

    def lost(self) -> Iterator[str]:
        """Say what the run has changed and a plan would leave as it was."""
        kind = _REGISTRIES.get(self._attribute)
        for path, key, old, new in self._changed():
            name = f"{self._module}.{key}".lstrip(".")
            if kind is not None:
                yield (
                    f"registers {kind} {name!r}"
                    if old is MISSING
                    else (f"puts another {kind} in the place of {kind} {name!r}")
                )
            # torch's own recurrent layers list their parameters there, and write it anew with each of them
            elif "_flat_weights" not in (key, self._attribute) and _is_traced(new):
                yield f"sets `{path}` to a tensor"

    def changes(self) -> Iterator[Change]:
        """Tell what else the run has changed."""
        if self._attribute not in _REGISTRIES:
            for path, key, old, new in self._changed():
                if not _is_traced(new):
                    yield Change(path, self.now, key, old, new)


class _Generator:
    """A generator of numbers that is not torch's, and its state before the run."""

    def __init__(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.name, self.has_drawn = name, False
        self._get, self._put, self._before = get, put, get()

    def restore(self) -> None:
        self.has_drawn = differ(self._before, self._get())
        if self.has_drawn:
            self._put(self._before)


class _Variables(MutableMapping[str, Any]):
    """Variables by name that lie in no dict, or some of those that lie in one."""

    def __init__(
        self,
        names: Iterable[str],
        get: Callable[[str], Any],
        put: Callable[[str, Any], None],
        drop: Callable[[str], None],
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


def _places_of_data(value: Any) -> list[Any]:
    """What can change of a value: lists and the like, and the attributes of objects; not of modules and functions."""
    if isinstance(value, (list, deque, set, dict)):
        # longer ones are not compared between steps either, and named
        return [value] if len(value) <= LONGEST else []
    if isinstance(value, np.ndarray):
        return [value] if value.dtype != object and value.nbytes <= LARGEST_ARRAY_BYTES else []
    if isinstance(value, nn.Module) or is_opaque(value):
        return []
    slots = slots_of(value)
    found: list[Any] = [vars(value)] if hasattr(value, "__dict__") else []
    if slots:
        found.append(_Variables(slots, partial(getattr, value), partial(setattr, value), partial(delattr, value)))
    return found


def _places_of_code(value: Any) -> list[Any]:
    """What can change of a module, of a function, and of a class of the user's."""
    if isinstance(value, nn.Module):
        return [vars(value)]
    if isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        closed_over = _Variables(
            cells,
            lambda name: cells[name].cell_contents,
            lambda name, contents: setattr(cells[name], "cell_contents", contents),
            lambda name: delattr(cells[name], "cell_contents"),
        )
        return [closed_over, vars(value)] if cells else [vars(value)]
    if isinstance(value, type) and value in classes_of_users(value):
        return [_Variables(vars(value), vars(value).__getitem__, partial(setattr, value), partial(delattr, value))]
    return []


def _parts(value: Any) -> list[Any]:
    """What is inside of a value beside what can change of it."""
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, types.FunctionType):
        return [value.__defaults__, value.__kwdefaults__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    return [value.func, value.args, value.keywords] if isinstance(value, partial) else []


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    """What is in a place that can change, with the keys in a mapping."""
    if isinstance(holder, Mapping):
        return list(holder.items())
    return [] if isinstance(holder, np.ndarray) else [(None, part) for part in holder]


def _path(name: str, key: Any) -> str:
    if key is None:
        return name
    return f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key!r}]"


def _copy(holder: Any) -> Any:
    return dict(holder) if isinstance(holder, Mapping) else holder.copy()


def _generators_of(name: str, value: Any) -> list[_Generator]:
    if isinstance(value, random.Random):
        return [_Generator(name, value.getstate, value.setstate)]
    if isinstance(value, np.random.RandomState):
        return [_Generator(name, value.get_state, value.set_state)]
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return [_Generator(name, lambda: bits.state, lambda state: setattr(bits, "state", state))]
    return []


def _is_traced(value: Any) -> bool:
    """Tell whether a value is a tensor of the trace, or holds one."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_HOLDERS:
        found = waiting.pop()
        if isinstance(found, (FakeTensor, FunctionalTensor)):
            return True
        if type(found) not in PLAIN and id(found) not in seen:
            seen.add(id(found))
            waiting += _parts(found) if isinstance(found, (tuple, frozenset)) else ()
            for holder in _places_of_data(found):
                waiting += [part for _, part in _contents(holder)]
    return False
