"""A model lends its places to the tensors of a trace: afterwards it holds what it held, however the run ended."""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rmm_linear.checkpointing.changes import MISSING, Change, differ
from rmm_linear.checkpointing.python_state import is_opaque

# Lists, dicts and objects of one attribute that are looked into.
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
) -> Iterator[list[Change]]:
    """Put other tensors in the place of a model's own for a run, however it ends; refuse what a plan would lose.

    Args:
        model: The model.
        step: What is called with it.
        state: Its parameters, buffers and other tensors, each once.
        tensors: What takes their places.
        start: Changes of an earlier run, to begin with.

    Yields:
        What the run changes and a plan leaves as it is, once the context is left.

    Raises:
        NotFollowedError: If the run leaves other tensors or modules behind.
    """
    # by identity, and not by name: a module may be registered under several
    replaced = {id(own): tensor for own, tensor in zip(state, tensors, strict=True)}
    before = [_Attributes(name, type(module).__name__, vars(module)) for name, module in model.named_modules()]
    before.append(_Attributes("", getattr(step, "__name__", "the step"), _ClosedOver(step)))
    changes: list[Change] = []
    try:
        for change in start:
            change.again()
        for attributes in before:
            attributes.lend(replaced)
        yield changes
        lost: list[str] = []
        for attributes in before:
            lost += attributes.lost()
            changes += attributes.changes()
    finally:
        for change in start:
            change.undo()
        for attributes in before:
            attributes.restore()
    if lost:
        raise NotFollowedError(
            f"the step {'; '.join(lost)}, which a plan would lose: write into a buffer that is there (`copy_`, `add_`),"
            " or return what is needed after the step; what is computed once is made before"
        )


@dataclass(eq=False)
class _Holder:
    """A list, or a dict of attributes or entries, what was in it, and what was lent in it."""

    attribute: str
    path: str
    now: Any
    before: Any
    lent: Any = None

    def changed(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Path, key, old and new value of what the run has changed."""
        if isinstance(self.now, list):
            if len(self.now) != len(self.lent) or any(map(differ, self.now, self.lent)):
                yield self.path, None, self.lent, list(self.now)
            return
        for key in {**self.lent, **self.now}:
            old, new = self.lent.get(key, MISSING), self.now.get(key, MISSING)
            if differ(old, new):
                yield f"{self.path}.{key}" if isinstance(key, str) else f"{self.path}[{key!r}]", key, old, new


class _Attributes:
    """What a module holds, or a function closes over, also in its lists, dicts (as parameters are) and objects."""

    def __init__(self, path: str, name: str, own: MutableMapping[str, Any]) -> None:
        self._path = path
        self._holders = [_Holder("", name, own, dict(own))]
        for attribute, value in list(own.items()):
            for found in _holders(value):
                self._holders.append(_Holder(attribute, f"{name}.{attribute}", found, found.copy()))

    def lend(self, tensors: Mapping[int, Tensor]) -> None:
        for holder in self._holders:
            for key, value in list(enumerate(holder.now) if isinstance(holder.now, list) else holder.now.items()):
                if id(value) in tensors:
                    holder.now[key] = tensors[id(value)]
            holder.lent = holder.now[:] if isinstance(holder.now, list) else dict(holder.now)

    def lost(self) -> Iterator[str]:
        """Say what the run has changed and a plan would leave as it was."""
        for holder in self._holders:
            kind = _REGISTRIES.get(holder.attribute)
            for path, key, old, new in holder.changed():
                name = f"{self._path}.{key}".lstrip(".")
                if kind is not None:
                    yield (
                        f"registers {kind} {name!r}"
                        if old is MISSING
                        else (f"puts another {kind} in the place of {kind} {name!r}")
                    )
                # torch's own recurrent layers list their parameters there, and write it anew with each of them
                elif "_flat_weights" not in (key, holder.attribute) and _is_traced(new):
                    yield f"sets `{path}` to a tensor"

    def changes(self) -> Iterator[Change]:
        """Tell what else the run has changed."""
        for holder in self._holders:
            if holder.attribute not in _REGISTRIES:
                for path, key, old, new in holder.changed():
                    if not _is_traced(new):
                        yield Change(path, holder.now, key, old, new)

    def restore(self) -> None:
        for holder in self._holders:
            _give_back(holder.now, holder.before)


class _ClosedOver(MutableMapping[str, Any]):
    """The variables that a function closes over, by name."""

    def __init__(self, step: Any) -> None:
        is_function = inspect.isfunction(step)
        cells = zip(step.__code__.co_freevars, step.__closure__ or (), strict=True) if is_function else ()
        self._cells = {name: cell for name, cell in cells if cell != types.CellType()}

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _holders(value: Any) -> Iterator[Any]:
    """Lists and dicts in a value, and the dicts in which objects hold their attributes."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_HOLDERS:
        found = waiting.pop()
        if isinstance(found, tuple):
            waiting.extend(found)
            continue
        if not isinstance(found, (list, dict)):
            if isinstance(found, nn.Module) or is_opaque(found) or not hasattr(found, "__dict__"):
                continue
            found = vars(found)
        if id(found) not in seen and isinstance(found, (list, dict)):
            seen.add(id(found))
            yield found
            waiting.extend(found.values() if isinstance(found, dict) else found)


def _is_traced(value: Any) -> bool:
    hollow = (FakeTensor, FunctionalTensor)
    return isinstance(value, hollow) or any(
        isinstance(part, hollow)
        for holder in _holders(value)
        for part in (holder.values() if isinstance(holder, dict) else holder)
    )


def _give_back(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
    elif list(value) == list(before):
        # what is there is never missing in between, for other threads
        value.update(before)
    else:
        value.clear()
        value.update(before)
