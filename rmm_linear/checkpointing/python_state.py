"""What a plan depends on beside the contents of tensors: a plan is used again where all of it is as it was.

A capture runs the step's Python code once. What that code may read is walked through at every step and compared:

- of each module: its class, mode, hooks, attributes, and which parameters and buffers are the same tensor;
- numbers, strings and the like by value; lists, dicts and objects by what is in them, of an object the fields whose
  names the code that ran mentions; functions by their code, and what they close over;
- tensors that a module holds as plain attributes, also in lists and dicts, are inputs of the step like its buffers;
  other tensors, and objects that cannot be looked into, by identity;
- global variables that the code that ran mentions, with what is in them.

Code that ran is that of the forward and of the backward pass, custom Functions and hooks of tensors included, in the
thread that captures.

What lies deeper than `_DEEPEST`, or is longer than `LONGEST`, is not looked into, and named. There is no bound in
total: many short lists and dicts are all compared at every step.

Not noticed: fields whose names are put together while the code runs, environment variables, and what is inside of
objects of torch, numpy, this library, the standard library or C extensions.
"""

import argparse
import enum
import functools
import sys
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rmm_linear.checkpointing.changes import MISSING, PLAIN
from rmm_linear.checkpointing.code_read import Read
from rmm_linear.checkpointing.replaced_forward import ReplacedForward

_DEEPEST = 8
LONGEST = 10_000
LARGEST_ARRAY_BYTES = 4096
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_TABLES_OF_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Their hooks compute with tensors alone.
_PACKAGES_WITH_HOOKS = {"torch", "transformers", "rmm_linear"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Objects of these packages are taken as they are; of the standard library, records alone are looked into.
_OPAQUE = {"torch", "numpy", "rmm_linear", "builtins", *sys.stdlib_module_names}
# Dicts and lists that are written in Python.
DICTS_OF_PYTHON = (UserDict, UserList, ChainMap, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)


class PythonState:
    """The state of a step in Python, once walked through.

    Args:
        model: The model.
        step: What is called with it; None for the model itself.
        read: What the step's code reads.
        named: Whether to note the path of each value, which takes time.

    Attributes:
        tensors: Parameters, then buffers, each once, in the order of `named_parameters` and `named_buffers`; then
            other tensors that modules hold.
        names: Names of those that are neither parameter nor buffer.
        values: All else, to be compared.
        unfollowed: Names of what is not looked into.
    """

    def __init__(
        self, model: nn.Module, step: Callable[..., Any] | None = None, read: Read | None = None, named: bool = False
    ) -> None:
        self._read = read if read is not None else Read()
        self._marks: list[tuple[int, str]] | None = [] if named else None
        self.values: list[Any] = []
        self.unfollowed: list[str] = []
        self.names: list[str] = []
        # what `values` holds the id of lives as long as that
        self._kept: list[Any] = []
        self._seen: dict[int, int] = {}
        self._others: list[Tensor] = []
        self._places: dict[int, int] = {}
        modules = list(model.modules())
        registered = [*_registered(modules, "_parameters"), *_registered(modules, "_buffers")]
        for tensor in registered:
            self._places.setdefault(id(tensor), len(self._places))
        self._modules = {id(module) for module in modules}
        self._classes: dict[type, None] = {}
        paths = [name for name, _ in model.named_modules()] if named else [""] * len(modules)
        for path, module in zip(paths, modules, strict=True):
            self._module(module, path or type(module).__name__ if named else None)
        if step is not None:
            self._value(step, getattr(step, "__name__", "the step") if named else None, 0, False)
        for holder, name in self._read.places:
            self.values.append(name)
            self._value(holder.get(name, MISSING), name if named else None, 0, False)
        done = 0
        while done < len(self._classes):
            # what is inside of a class may be of another one
            self._class(list(self._classes)[done])
            done += 1
        self.tensors: list[Tensor] = [*dict.fromkeys(registered), *self._others]

    def forget_tensors(self) -> None:
        """Let go of the tensors, which `values` holds by their place: it is compared as before."""
        self.tensors, self._others = [], []

    def difference(self, values: Sequence[Any]) -> str:
        """Say where this state, walked through with names, differs from another one's values.

        Args:
            values: The other one's.

        Returns:
            The name of what differs first, with both values if they are plain.
        """
        assert self._marks is not None
        pairs = enumerate(zip(values, self.values, strict=False))
        first = next((place for place, (old, new) in pairs if old != new), min(len(values), len(self.values)))
        path = next((path for place, path in reversed(self._marks) if place <= first), "the model")
        if first < min(len(values), len(self.values)):
            old, new = values[first], self.values[first]
            # a value comes after its type
            is_value = first and self.values[first - 1] is type(new) and type(new) in {bool, int, float, str}
            if is_value and type(old) is type(new) and len(repr((old, new))) < 80:
                return f"{path} ({old!r}, then {new!r})"
        return path

    def _mark(self, path: str | None) -> None:
        if path is not None and self._marks is not None:
            self._marks.append((len(self.values), path))

    def _module(self, module: nn.Module, path: str | None) -> None:
        own, values = vars(module), self.values
        self._mark(path)
        values += (id(module), type(module), module.training)
        self._classes[type(module)] = None
        for kind in _HOOKS:
            if own[kind]:
                # each has a number of its own
                values += (kind, *own[kind])
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is not None:
                    # the same number for the same tensor: weights that are tied later make another state
                    values += (name, self._places.get(id(tensor), id(tensor)))
        for name, value in own.items():
            if isinstance(value, ReplacedForward):
                # a plan is the same before and after it takes the forward's place
                value = value.before
                if value is None:
                    continue
            if name not in _OF_EVERY_MODULE:
                values.append(name)
                if type(value) in PLAIN and path is None:
                    values += (type(value), value)
                else:
                    self._value(value, path and f"{path}.{name}", 0, True)

    def _value(self, value: Any, path: str | None, depth: int, lendable: bool) -> None:
        kind = type(value)
        self._mark(path)
        self.values.append(kind)
        if kind in PLAIN:
            self.values.append(value)
        elif isinstance(value, Tensor):
            self._tensor(value, path, lendable)
        elif id(value) in self._seen:
            self.values.append(self._seen[id(value)])
        elif depth > _DEEPEST:
            self._as_it_is(value)
            self.unfollowed.append(path or "")
        else:
            if not isinstance(value, (types.MethodType, tuple)):
                self._seen[id(value)] = len(self._seen)
                self._kept.append(value)
            self._parts(value, path, depth, lendable)

    def _parts(self, value: Any, path: str | None, depth: int, lendable: bool) -> None:
        if isinstance(value, (*_SEQUENCES, *_SETS, dict)):
            self._container(value, path, depth, lendable)
        elif isinstance(value, nn.Module):
            if id(value) in self._modules:
                self.values.append(id(value))
            else:
                self._module(value, path)
                for name, child in value.named_children():
                    self._value(child, path and f"{path}.{name}", depth, False)
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth)
        elif isinstance(value, types.MethodType):
            self._value(value.__func__, path, depth + 1, False)
            self._value(value.__self__, path, depth + 1, False)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._value(part, path, depth + 1, False)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._array(value, path)
        elif isinstance(value, (UserDict, UserList, ChainMap)):
            self._value(value.maps if isinstance(value, ChainMap) else value.data, path, depth + 1, False)
        elif is_opaque(value):
            self._as_it_is(value)
            if isinstance(value, type):
                # `class CFG` as a namespace
                self._classes[value] = None
        else:
            self._fields(value, path, depth)

    def _as_it_is(self, value: Any) -> None:
        self._kept.append(value)
        self.values.append(id(value))

    def _tensor(self, tensor: Tensor, path: str | None, lendable: bool) -> None:
        place = self._places.get(id(tensor))
        if place is None and lendable and type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            place = self._places[id(tensor)] = len(self._places)
            self._others.append(tensor)
            self.names.append(path or "")
        if place is not None:
            self.values.append(place)
            return
        self._as_it_is(tensor)
        # `tensor.data = other` leaves the object
        strided = tensor.layout is torch.strided and not tensor.is_meta
        self.values += (tensor.requires_grad, tensor.data_ptr() if strided else 0)

    def _array(self, array: Any, path: str | None) -> None:
        if array.nbytes <= LARGEST_ARRAY_BYTES and type(array) is np.ndarray:
            self.values += (array.shape, array.dtype.str, array.tobytes())
            return
        self._as_it_is(array)
        self.unfollowed.append(path or "")

    def _container(self, value: Any, path: str | None, depth: int, lendable: bool) -> None:
        self.values.append(len(value))
        if len(value) > LONGEST:
            self._as_it_is(value)
            self.unfollowed.append(path or "")
            return
        parts: Any = value
        if isinstance(value, dict):
            parts = value.values()
            if {*map(type, value)} <= PLAIN:
                self.values.append(tuple(value))
            else:
                for key in value:
                    self._value(key, path, depth + 1, False)
        # most are of numbers and strings: these are compared at once
        if {*map(type, parts)} <= PLAIN:
            self.values.append(frozenset(value) if isinstance(value, _SETS) else tuple(parts))
            return
        if isinstance(value, _SETS):
            # in no order that can be told
            self._as_it_is(value)
            return
        keys = value if isinstance(value, dict) else range(len(value))
        lendable = lendable and isinstance(value, (list, dict))
        for key, part in zip(keys, list(parts), strict=True):
            self._value(part, path and f"{path}[{key!r}]", depth + 1, lendable)

    def _function(self, function: types.FunctionType, path: str | None, depth: int) -> None:
        self._as_it_is(function.__code__)
        for part in (function.__defaults__, function.__kwdefaults__):
            if part:
                self._value(part, path, depth + 1, False)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:
                # not there yet
                contents = MISSING
            self._value(contents, path and f"{name} of {path}", depth + 1, False)

    def _fields(self, value: Any, path: str | None, depth: int) -> None:
        self._classes[type(value)] = None
        for name, field in fields_of(value):
            if name in self._read.names:
                self.values.append(name)
                self._value(field, path and f"{path}.{name}", depth + 1, False)

    def _class(self, kind: type) -> None:
        """Attributes and methods of a class that the code mentions."""
        for base in classes_of_users(kind):
            for name in sorted((self._read.names | {"forward"}) & base.__dict__.keys()):
                self.values += (base, name)
                path = f"{base.__name__}.{name}" if self._marks is not None else None
                self._value(base.__dict__[name], path, 1, False)


def _registered(modules: Sequence[nn.Module], kind: str) -> Iterator[Tensor]:
    for module in modules:
        for tensor in vars(module)[kind].values():
            if tensor is not None:
                yield tensor


def is_opaque(value: Any) -> bool:
    """Tell which objects are not looked into.

    Args:
        value: An object.

    Returns:
        Whether it is taken as it is.
    """
    if isinstance(value, _RECORDS):
        return False
    if type(value) in PLAIN:
        return True
    opaque = (type, enum.Enum, ReplacedForward, types.ModuleType, types.BuiltinFunctionType)
    return isinstance(value, opaque) or type(value).__module__.partition(".")[0] in _OPAQUE


def classes_of_users(kind: type) -> Iterator[type]:
    """List a class and its bases, without those that are not looked into.

    Args:
        kind: The class.

    Yields:
        Classes of users.
    """
    yield from (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _OPAQUE)


def slots_of(value: Any) -> dict[str, Any]:
    """List the slots of an object.

    Args:
        value: The object.

    Returns:
        By the name of an attribute that is in no dict, what reads and writes it whatever the class does about that.
    """
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__):
        found |= {name: slot for name, slot in vars(kind).items() if isinstance(slot, types.MemberDescriptorType)}
    return found


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Find the dict of an object's attributes.

    Args:
        value: The object.

    Returns:
        The dict itself, by no method of the user's; None if it has none.
    """
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """List the attributes of an object.

    Args:
        value: The object.

    Yields:
        Their names and values; `MISSING` for a slot in which there is nothing.
    """
    yield from list((attributes_of(value) or {}).items())
    for name, slot in slots_of(value).items():
        try:
            yield name, slot.__get__(value)
        except AttributeError:
            yield name, MISSING


def hooks_inside(model: nn.Module, *, with_own: bool) -> list[str]:
    """Name hooks of users that run inside of a captured step.

    Args:
        model: The model.
        with_own: Whether the model's own hooks are inside of it.

    Returns:
        Names of modules with the names of their hooks.
    """
    found = []
    for name, module in model.named_modules():
        if module is model and not with_own:
            continue
        for kind in _TABLES_OF_HOOKS:
            for hook in vars(module)[kind].values():
                package = str(getattr(hook, "__module__", "")).partition(".")[0]
                if package not in _PACKAGES_WITH_HOOKS:
                    text = getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
                    what = kind[1:-1].replace("_", " ").replace("pre hook", "pre-hook")
                    found.append(f"{what} `{text}` of {name or type(module).__name__}")
    return found
