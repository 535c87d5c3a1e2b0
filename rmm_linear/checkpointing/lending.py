"""A model lends its places to the tensors of a trace: afterwards it holds what it held, however the run ended.

What a run may change is copied before, wherever it can be reached: from the model's modules, the step, and the global
variables that its code mentions, through lists, dicts, sets, small arrays, objects, classes, and what functions close
over; of objects those attributes whose names the code mentions. What the run itself makes is its own.

Not watched: more than `_MOST_ENTRIES` in one place, of a longer list all but its length, attributes of tensors, the
`__dict__` of an object as a whole, and other containers of the standard library (`threading.local`).
"""

import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rmm_linear.checkpointing.changes import MISSING, PLAIN, Change, copied, differ, give_back, put
from rmm_linear.checkpointing.places import Variables, contents_of, parts_of, places_of_code, places_of_data
from rmm_linear.checkpointing.python_state import classes_of_users
from rmm_linear.checkpointing.side_effects import (
    Generator,
    OneWayIterator,
    OthersTensor,
    SideEffect,
    side_effects_on,
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
        self._effects: list[SideEffect] = [
            Generator("random", random.getstate, random.setstate),
            Generator("numpy.random", np.random.get_state, np.random.set_state),
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
            self._watch("", "", Variables(new, holder.__getitem__, holder.__setitem__, holder.__delitem__))

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
            self._effects += side_effects_on(name, found, self._tensors)
            for holder, is_object in (*places_of_data(found), *places_of_code(found)):
                contents = contents_of(holder)
                count += 1 + len(contents)
                for key, part in contents:
                    waiting.append((_path(name, key), (*through, key) if is_object else through, part))
                self._add(_Holder(module, attribute, name, holder, through, is_object=is_object))
            waiting += [(name, through, part) for part in parts_of(found)]

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
        restores: list[tuple[str, Callable[[], None]]] = [
            (each.path, functools.partial(each.restore, self._names)) for each in self._holders
        ]
        restores += [(each.path, each.restore) for each in self._effects]
        for path, restore in restores:
            try:
                restore()
            except Exception as error:
                failed.append(f"`{path}` ({type(error).__name__}: {error})")
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
        drawn = [f"`{each.path}`" for each in self._effects if isinstance(each, Generator) and each.has_changed]
        if drawn:
            raise NotFollowedError(
                f"the step, or another thread meanwhile, draws from {', '.join(drawn)}, whose outcome a capture would"
                " freeze: switch it off (LayerDrop: layerdrop = 0; SpecAugment: mask_time_prob = 0 and"
                " mask_feature_prob = 0), or draw from torch"
            )
        lost = [*self._lost]
        lost += [
            f"takes from the iterator `{each.path}`"
            for each in self._effects
            if isinstance(each, OneWayIterator) and each.has_changed
        ]
        lost += [
            f"writes into the tensor `{each.path}`, which is not the model's"
            for each in self._effects
            if isinstance(each, OthersTensor) and each.has_changed
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
        if isinstance(self._now, (set, np.ndarray)) or not any(
            id(part) in tensors for _, part in contents_of(self._now)
        ):
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
        pairs = zip(contents_of(self._lent), contents_of(self._before), strict=True)
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


def _path(name: str, key: Any) -> str:
    if key is None:
        return name
    return f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key!r}]"


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
            for holder, _ in places_of_data(found):
                waiting += [part for _, part in contents_of(holder)]
    return False
