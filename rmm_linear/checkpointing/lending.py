"""A model lends its places to the tensors of a trace: afterwards it holds what it held, however the run ended.

What a run may change is copied before, wherever it can be reached: from the model's modules, the step, and the global
variables that its code mentions, through lists, dicts, sets, small arrays, objects, classes, and what functions close
over; of objects those attributes whose names the code mentions. What the run itself makes is its own.

Not watched: more than `_MOST_ENTRIES` in one place, of a longer list all but its length, attributes of tensors, the
`__dict__` of an object as a whole, and other containers of the standard library (`threading.local`).
"""

import contextlib
import functools
import itertools
import random
import types
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear.checkpointing.changes import MISSING, PLAIN, Change, copied, differ, give_back, put
from rmm_linear.checkpointing.python_state import (
    DICTS_OF_PYTHON,
    LARGEST_ARRAY_BYTES,
    LONGEST,
    attributes_of,
    classes_of_users,
    is_opaque,
    slots_of,
)

# Entries of lists, dicts and objects in one place that are looked into.
_MOST_ENTRIES = 10_000
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
        self._others: list[_Other] = [
            _Generator("random", random.getstate, random.setstate),
            _Generator("numpy.random", np.random.get_state, np.random.set_state),
        ]
        # what was watched, and what is not yet but will be
        self._seen: set[Any] = set()
        # what the code mentions
        self._names: set[str] = set()
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
        self._names.update(names)
        new = [name for name in dict.fromkeys(names) if (id(holder), name) not in self._seen]
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
        waiting: list[tuple[str, tuple[str, ...], Any]] = [(name, (), value)]
        count = 0
        while waiting and count < _MOST_ENTRIES:
            name, through, found = waiting.pop()
            if type(found) in PLAIN or id(found) in self._seen:
                continue
            self._seen.add(id(found))
            self._others += _others_of(name, found, self._tensors)
            for holder, is_object in (*_places_of_data(found), *_places_of_code(found)):
                contents = _contents(holder)
                count += 1 + len(contents)
                for key, part in contents:
                    waiting.append((_path(name, key), (*through, key) if is_object else through, part))
                self._add(_Holder(module, attribute, name, holder, through, is_object=is_object))
            waiting += [(name, through, part) for part in _parts(found)]

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
            self._lost += holder.lost(self._names)
            self.changes += holder.changes(self._names)

    def restore(self) -> None:
        """Let everything be as it was before.

        Raises:
            NotFollowedError: If something refuses to be; all else is as it was.
        """
        failed: list[str] = []
        for each in (*self._holders, *self._others):
            try:
                each.restore(self._names)
            except Exception as error:
                failed.append(f"`{each.path}` ({type(error).__name__}: {error})")
        if failed:
            raise NotFollowedError(
                f"the step may have changed {', '.join(failed)}, which can't be put back: take it out of what is"
                " planned"
            )

    def refuse_lost(self) -> None:
        """Refuse a run that did what a plan would lose.

        Raises:
            NotFollowedError: If it left tensors or modules behind, wrote into tensors that are not the model's, or drew
                from generators other than torch's.
        """
        drawn = [f"`{each.path}`" for each in self._others if isinstance(each, _Generator) and each.has_changed]
        if drawn:
            raise NotFollowedError(
                f"the step, or another thread meanwhile, draws from {', '.join(drawn)}, whose outcome a capture would"
                " freeze: switch it off (LayerDrop: layerdrop = 0; SpecAugment: mask_time_prob = 0 and"
                " mask_feature_prob = 0), or draw from torch"
            )
        lost = [*self._lost]
        lost += [
            f"takes from the iterator `{each.path}`"
            for each in self._others
            if isinstance(each, _Iterator) and each.has_changed
        ]
        lost += [
            f"writes into the tensor `{each.path}`, which is not the model's"
            for each in self._others
            if isinstance(each, _Written) and each.has_changed
        ]
        if lost:
            raise NotFollowedError(
                f"the step {'; '.join(lost)}, which a plan would lose: write into a buffer that is there"
                " (`copy_`, `add_`), or return what is needed after the step; what is computed once is made before"
            )


class _Holder:
    """A place that can change: what was in it before the run, and what after something was lent in it."""

    def __init__(
        self,
        module: str,
        attribute: str,
        path: str,
        now: Any,
        through: tuple[str, ...] = (),
        *,
        is_object: bool = False,
    ) -> None:
        self._module, self._attribute, self.path = module, attribute, path
        self._through, self._is_object = through, is_object
        self._now, self._before = now, copied(now)
        self._lent = self._before

    def lend(self, tensors: Mapping[int, Tensor]) -> None:
        if isinstance(self._now, (set, np.ndarray)) or not any(id(part) in tensors for _, part in _contents(self._now)):
            return
        if isinstance(self._now, Mapping):
            self._lent = {key: tensors.get(id(value), value) for key, value in self._before.items()}
        else:
            self._lent = [tensors.get(id(value), value) for value in self._before]
        give_back(self._now, self._lent)

    def restore(self, names: set[str]) -> None:
        if not self._is_object and names.issuperset(self._through):
            give_back(self._now, self._before)
            return
        # by identity: others may have added to a list meanwhile
        pairs = zip(_contents(self._lent), _contents(self._before), strict=True)
        own = {id(lent): before for (_, lent), (_, before) in pairs if lent is not before}
        present = copied(self._now)
        if isinstance(self._now, Mapping):
            for key in {**self._before, **present}:
                now = present.get(key, MISSING)
                before = self._before.get(key, MISSING) if self._is_own(key, names) else own.get(id(now), now)
                if before is not now:
                    put(self._now, key, before)
        elif own:
            give_back(self._now, [own.get(id(value), value) for value in present])

    def _is_own(self, key: Any, names: set[str]) -> bool:
        """Whether code that mentions these names may have changed what is there."""
        return names.issuperset(self._through) and (not self._is_object or key in names)

    def _changed(self, names: set[str]) -> Iterator[tuple[str, Any, Any, Any]]:
        """Path, key, old and new value of what the run has changed."""
        present = copied(self._now)
        if not isinstance(self._now, Mapping):
            if self._is_own(None, names) and differ(self._lent, present):
                yield self.path, None, self._lent, present
            return
        for key in {**self._lent, **present}:
            old, new = self._lent.get(key, MISSING), present.get(key, MISSING)
            if self._is_own(key, names) and differ(old, new):
                yield _path(self.path, key), key, old, new

    def lost(self, names: set[str]) -> Iterator[str]:
        """Say what the run has changed and a plan would leave as it was."""
        kind = _REGISTRIES.get(self._attribute)
        for path, key, old, new in self._changed(names):
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

    def changes(self, names: set[str]) -> Iterator[Change]:
        """Tell what else the run has changed."""
        if self._attribute not in _REGISTRIES:
            for path, key, old, new in self._changed(names):
                if not _is_traced(new):
                    yield Change(path, self._now, key, old, new)


class _Generator:
    """A generator of numbers that is not torch's, and its state before the run."""

    def __init__(self, path: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.path, self.has_changed = path, False
        self._get, self._put, self._before = get, put, get()

    def restore(self, names: set[str]) -> None:
        self.has_changed = differ(self._before, self._get())
        if self.has_changed:
            self._put(self._before)


class _Cache:
    """Results that a function remembers: those of a run may be tensors of the trace."""

    def __init__(self, path: str, function: Any) -> None:
        self.path = path
        self._function, self._misses = function, function.cache_info().misses

    def restore(self, names: set[str]) -> None:
        if self._function.cache_info().misses != self._misses:
            self._function.cache_clear()


class _Iterator:
    """What yields its values once, and cannot be put back."""

    def __init__(self, path: str, place: Callable[[], Any]) -> None:
        self.path, self.has_changed = path, False
        self._place, self._before = place, place()

    def restore(self, names: set[str]) -> None:
        self.has_changed = self._place() != self._before


class _Written:
    """A tensor that is not the model's, and its contents before the run."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self.has_changed = path, False
        self._tensor, self._version = tensor, tensor._version
        # its contents, and not an op of the trace
        with _disable_current_modes():
            self._before = tensor.detach().clone() if tensor.nbytes <= LARGEST_ARRAY_BYTES else None

    def restore(self, names: set[str]) -> None:
        self.has_changed = self._tensor._version != self._version
        if self.has_changed and self._before is not None:
            with _disable_current_modes():
                self._tensor.detach().copy_(self._before)
            self._version = self._tensor._version


class _Variables(MutableMapping[str, Any]):
    """Variables by name that lie in no dict, or some of those that lie in one."""

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


def _places_of_data(value: Any) -> list[tuple[Any, bool]]:
    """What can change of a value that is no module, function or class, and whether that is an object's attributes."""
    if isinstance(value, np.ndarray):
        is_small = value.dtype != object and value.nbytes <= LARGEST_ARRAY_BYTES
        return [(value, False)] if type(value) is np.ndarray and value.flags.writeable and is_small else []
    if isinstance(value, list) and len(value) > LONGEST:
        # not compared between steps either, and named; what is appended is taken off
        return [(_Variables(["its length"], lambda _: len(value), functools.partial(_shorten, value), str), False)]
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
                _Variables(
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


def _places_of_code(value: Any) -> list[tuple[Any, bool]]:
    """What can change of a module, of a function, and of a class of the user's, and whether that is its attributes."""
    if isinstance(value, nn.Module):
        return [(vars(value), False)]
    if isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        closed_over = _Variables(
            cells,
            lambda name: cells[name].cell_contents,
            lambda name, contents: setattr(cells[name], "cell_contents", contents),
            lambda name: delattr(cells[name], "cell_contents"),
        )
        return [(closed_over, False), (vars(value), True)]
    if isinstance(value, type) and value in classes_of_users(value):
        put, drop = functools.partial(type.__setattr__, value), functools.partial(type.__delattr__, value)
        return [(_Variables(vars(value), vars(value).__getitem__, put, drop), True)]
    return []


def _parts(value: Any) -> list[Any]:
    """What is inside of a value beside what can change of it."""
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


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    """What is in a place that can change, with the keys in a mapping."""
    if isinstance(holder, np.ndarray):
        return []
    contents = copied(holder)
    return list(contents.items()) if isinstance(holder, Mapping) else [(None, part) for part in contents]


def _path(name: str, key: Any) -> str:
    if key is None:
        return name
    return f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key!r}]"


_Other = _Generator | _Cache | _Iterator | _Written


def _others_of(name: str, value: Any, tensors: Mapping[int, Tensor]) -> list[_Other]:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return [_Generator(name, value.getstate, value.setstate)]
    if isinstance(value, np.random.RandomState):
        return [_Generator(name, value.get_state, value.set_state)]
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return [_Generator(name, lambda: bits.state, lambda state: setattr(bits, "state", state))]
    if isinstance(value, types.GeneratorType):
        return [_Iterator(name, lambda: value.gi_frame and value.gi_frame.f_lasti)]
    if isinstance(value, itertools.count):
        return [_Iterator(name, lambda: repr(value))]
    if isinstance(value, functools._lru_cache_wrapper):
        return [_Cache(name, value)]
    is_known = id(value) in tensors or type(value) not in (Tensor, nn.Parameter)
    return [] if is_known or value.is_inference() or value.is_meta else [_Written(name, value)]


def _is_traced(value: Any) -> bool:
    """Tell whether a value is a tensor of the trace, or holds one."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_ENTRIES:
        found = waiting.pop()
        if isinstance(found, (FakeTensor, FunctionalTensor)):
            return True
        if type(found) not in PLAIN and id(found) not in seen:
            seen.add(id(found))
            if isinstance(found, (tuple, frozenset)):
                waiting += found
            for holder, _ in _places_of_data(found):
                waiting += [part for _, part in _contents(holder)]
    return False
