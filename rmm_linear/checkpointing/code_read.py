"""Which names does the Python code of a step read? Those that the code mentions that ran while it was captured."""

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Code that reads no state of the user's: this library, torch, and the standard library without what is installed in it.
_LIBRARY = str(Path(__file__).resolve().parent.parent)
_OTHERS = (_LIBRARY, str(Path(torch.__file__).resolve().parent), "<frozen ")
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
_NOT_THE_USERS = {"torch", "numpy", "rmm_linear", *sys.stdlib_module_names}


@dataclass(frozen=True, eq=False)
class Read:
    """What Python code that ran may have read.

    Attributes:
        names: Names of attributes, and strings that may be such.
        places: Global variables: the dict in which each is, and its name there.
    """

    names: frozenset[str] = frozenset()
    places: tuple[tuple[dict[str, Any], str], ...] = ()

    def extended(self, other: "Read") -> "Read":
        """Add what other code may have read.

        Args:
            other: What that is.

        Returns:
            This one itself, if nothing is new.
        """
        known = {(id(holder), name) for holder, name in self.places}
        more = [place for place in other.places if (id(place[0]), place[1]) not in known]
        if not more and other.names <= self.names:
            return self
        return Read(self.names | other.names, (*self.places, *more))


class CodeThatRan:
    """Notes which code runs, see `noted`."""

    def __init__(self, watch: Callable[[dict[str, Any], Iterable[str]], None]) -> None:
        # of each piece of code its global variables
        self._found: dict[CodeType, dict[str, Any]] = {}
        self._watch = watch

    def note(self, frame: FrameType) -> None:
        """Note the code of a frame.

        Args:
            frame: The frame.
        """
        code, variables = frame.f_code, frame.f_globals
        if code not in self._found:
            self._found[code] = variables
            if _is_the_users(code.co_filename):
                for holder in _global_variables(code, variables):
                    self._watch(holder, _names_in(code))

    def read(self) -> Read:
        """Say what the code may have read.

        Returns:
            Names, and global variables.
        """
        names: set[str] = set()
        places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        for code, variables in self._found.items():
            if not _is_the_users(code.co_filename):
                continue
            names.update(_names_in(code))
            for holder in _global_variables(code, variables):
                places.update({(id(holder), name): (holder, name) for name in code.co_names if name in holder})
        return Read(frozenset(names), tuple(places.values()))


def _names_in(code: CodeType) -> tuple[str, ...]:
    # getattr(config, "scale")
    return (*code.co_names, *(part for part in code.co_consts if isinstance(part, str) and part.isidentifier()))


def _global_variables(code: CodeType, variables: dict[str, Any]) -> list[dict[str, Any]]:
    """The dicts in which they are: the module's own, and those of the modules that the code mentions or imports."""
    found = [variables]
    # settings.SCALE, package.settings.SCALE; the list grows
    for holder in found:
        for name in code.co_names:
            for module in (holder.get(name), sys.modules.get(name)):
                if isinstance(module, ModuleType) and module.__name__.partition(".")[0] not in _NOT_THE_USERS:
                    inside = vars(module)
                    if not any(inside is known for known in found):
                        found.append(inside)
    return found


def _is_the_users(filename: str) -> bool:
    if filename.startswith(_OTHERS):
        return False
    return not filename.startswith(_STANDARD) or any(part in filename for part in _INSTALLED)


@contextmanager
def noted(watch: Callable[[dict[str, Any], Iterable[str]], None]) -> Iterator[CodeThatRan]:
    """Note which Python code runs in this thread.

    Args:
        watch: Called before code of the user runs first, with the dicts of its global variables, and the names that it
            mentions.

    Yields:
        What ran; complete when the context is left.
    """
    found = CodeThatRan(watch)
    with _noting(found.note):
        yield found


@contextmanager
def noted_in_backward(watch: Callable[[dict[str, Any], Iterable[str]], None]) -> Iterator[CodeThatRan]:
    """Note which Python code autograd runs in this thread: custom Functions, hooks of tensors.

    Args:
        watch: As for `noted`.

    Yields:
        What ran; complete when the context is left.
    """
    found, thread = CodeThatRan(watch), threading.get_ident()
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def noted_run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        with _noting(found.note):
            return run(*args, **kwargs)

    autograd._engine_run_backward = noted_run
    try:
        yield found
    finally:
        autograd._engine_run_backward = run


def _noting(note: Callable[[FrameType], None]) -> AbstractContextManager[None]:
    return _monitored(note) if sys.version_info >= (3, 12) else _traced(note)


@contextmanager
def _traced(note: Callable[[FrameType], None]) -> Iterator[None]:
    before = sys.gettrace()

    def trace(frame: FrameType, event: Any, argument: Any) -> Any:
        note(frame)
        # a debugger, or what measures which lines tests run, goes on
        return before and before(frame, event, argument)

    with _Ops(trace):
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


class _Ops(TorchDispatchMode):
    """Runs the ops of torch untraced: below them is no code of the user, and it takes longer than all other."""

    def __init__(self, trace: Callable[..., Any]) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_traced = sys.gettrace() is self._trace
        if is_traced:
            sys.settrace(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if is_traced:
                sys.settrace(self._trace)


@contextmanager
def _monitored(note: Callable[[FrameType], None]) -> Iterator[None]:
    # asks once for each piece of code, where a trace function is called at each call
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    free = [number for number in range(6) if monitoring.get_tool(number) is None]
    if not free:
        with _traced(note):
            yield
        return

    thread = threading.get_ident()

    def started(code: CodeType, offset: int) -> Any:
        if threading.get_ident() != thread:
            # all threads come here; the code may yet run in this one
            return None
        note(sys._getframe(1))
        return monitoring.DISABLE

    event = monitoring.events.PY_START
    monitoring.use_tool_id(free[-1], "rmm_linear")
    try:
        monitoring.register_callback(free[-1], event, started)
        monitoring.restart_events()
        monitoring.set_events(free[-1], event)
        yield
    finally:
        monitoring.set_events(free[-1], 0)
        monitoring.register_callback(free[-1], event, None)
        monitoring.free_tool_id(free[-1])
