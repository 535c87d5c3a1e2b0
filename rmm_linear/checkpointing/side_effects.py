"""What a run does that no list, dict or object shows: draws, steps of iterators, caches, writes into tensors."""

import functools
import itertools
import random
import types
from collections.abc import Callable, Container
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear.checkpointing.changes import differ
from rmm_linear.checkpointing.python_state import LARGEST_ARRAY_BYTES


class Generator:
    """A generator of numbers that is not torch's, and its state before the run.

    Args:
        path: Its name.
        get: Reads its state.
        put: Writes its state.

    Attributes:
        has_changed: Whether the run drew from it.
    """

    def __init__(self, path: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.path, self.has_changed = path, False
        self._get, self._put, self._before = get, put, get()

    def restore(self) -> None:
        """Put it back after the run."""
        self.has_changed = differ(self._before, self._get())
        if self.has_changed:
            self._put(self._before)


class Cache:
    """Results that a function remembers: those of a run may be tensors of the trace.

    Args:
        path: Its name.
        function: A function with `functools.lru_cache`.
    """

    def __init__(self, path: str, function: Any) -> None:
        self.path = path
        self._function, self._misses = function, function.cache_info().misses

    def restore(self) -> None:
        """Put it back after the run."""
        if self._function.cache_info().misses != self._misses:
            self._function.cache_clear()


class OneWayIterator:
    """What yields its values once, and cannot be put back.

    Args:
        path: Its name.
        place: Tells where it is.

    Attributes:
        has_changed: Whether the run took a value.
    """

    def __init__(self, path: str, place: Callable[[], Any]) -> None:
        self.path, self.has_changed = path, False
        self._place, self._before = place, place()

    def restore(self) -> None:
        """Put it back after the run."""
        self.has_changed = self._place() != self._before


class OthersTensor:
    """A tensor that is not the model's, and its contents before the run.

    Args:
        path: Its name.
        tensor: It.

    Attributes:
        has_changed: Whether the run wrote into it.
    """

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self.has_changed = path, False
        self._tensor, self._version = tensor, tensor._version
        # its contents, and not an op of the trace
        with _disable_current_modes():
            self._before = tensor.detach().clone() if tensor.nbytes <= LARGEST_ARRAY_BYTES else None

    def restore(self) -> None:
        """Put it back after the run."""
        self.has_changed = self._tensor._version != self._version
        if self.has_changed and self._before is not None:
            with _disable_current_modes():
                self._tensor.detach().copy_(self._before)
            self._version = self._tensor._version


SideEffect = Generator | Cache | OneWayIterator | OthersTensor


def side_effects_on(name: str, value: Any, own: Container[int]) -> list[SideEffect]:
    """Note the state of what a run may use up.

    Args:
        name: The name of a value.
        value: It.
        own: Ids of tensors that the run may write into.

    Returns:
        What can tell afterwards whether the run did, at most one.
    """
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return [Generator(name, value.getstate, value.setstate)]
    if isinstance(value, np.random.RandomState):
        return [Generator(name, value.get_state, value.set_state)]
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return [Generator(name, lambda: bits.state, lambda state: setattr(bits, "state", state))]
    if isinstance(value, types.GeneratorType):
        return [OneWayIterator(name, lambda: value.gi_frame and value.gi_frame.f_lasti)]
    if isinstance(value, itertools.count):
        return [OneWayIterator(name, lambda: repr(value))]
    if isinstance(value, functools._lru_cache_wrapper):
        return [Cache(name, value)]
    is_known = id(value) in own or type(value) not in (Tensor, nn.Parameter)
    return [] if is_known or value.is_inference() or value.is_meta else [OthersTensor(name, value)]
