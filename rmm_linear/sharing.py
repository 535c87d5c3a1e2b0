"""One sketch for layers that read the same input: query, key and value, gate and up, the members of a LoRA family.

An exact model keeps an input that three layers share once. Three sketches of it would keep 3 ratio of it: more than the
exact model above a ratio of 1/3. So layers that are given the same tensor in one forward pass keep one sketch, with one
S. The estimates of their weight gradients are each as good as before; their errors are correlated, which no mean over
steps notices.

Who shares is found out while the model runs, and not by names: layers share if they are called with the same tensor
object, unchanged since (its version counter tells), and are configured alike. A layer that comes back to the same
tensor begins a new group, with a new S: a second forward pass over the same input, or a layer that runs twice.

Nothing is kept alive by this. A group refers to its input, its layers and its sketch weakly, and lives as long as the
input; where the sketch is gone (a checkpointed block keeps none), the next member makes it again of the same seed.
Every layer draws a seed, and leaves it where it shares: the random generator is in the same state whoever shares, in
both passes of a checkpoint as well.
"""

import threading
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef


class SharedSketch:
    """What the members of a group share: a seed, and what was made of the input with it.

    Attributes:
        seed: The first member's seed; None before.
    """

    def __init__(self) -> None:
        self.seed: Tensor | None = None
        self._dtype: torch.dtype | None = None
        # tensors of the kept rows, and of the sketch
        self._parts: tuple[tuple[TensorWeakRef, ...], ...] | None = None

    def seed_or(self, seed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the group's seed.

        Args:
            seed: The seed that this member has drawn: the group's if it is the first.
            dtype: Dtype that it computes in (autocast's may have changed since the first member).

        Returns:
            The first member's seed, or `seed` for a member that computes in another dtype.
        """
        if self.seed is None:
            self.seed, self._dtype = seed, dtype
        return self.seed if self._dtype == dtype else seed

    def tensors(self, seed: Tensor) -> tuple[tuple[Tensor, ...], ...] | None:
        """Return what was remembered.

        Args:
            seed: As `seed_or` returned it.

        Returns:
            The tensors, or None where nothing was, or some of it is gone.
        """
        if self._parts is None or seed is not self.seed:
            return None
        found = tuple(tuple(reference() for reference in part) for part in self._parts)
        if any(tensor is None for part in found for tensor in part):
            return None
        return found

    def remember(self, seed: Tensor, *parts: tuple[Tensor, ...]) -> None:
        """Remember what was made, without keeping it alive.

        Args:
            seed: The seed that it was made with.
            *parts: Tensors.
        """
        if seed is self.seed:
            self._parts = tuple(tuple(TensorWeakRef(tensor) for tensor in part) for part in parts)


class _Input:
    """A tensor that layers were called with, and the groups of its readers, by how they are configured."""

    def __init__(self, x: Tensor, forget: Callable[[weakref.ref[Tensor]], object]) -> None:
        self.reference = weakref.ref(x, forget)
        self.version = x._version
        # of this forward pass, whatever their configurations
        self.readers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.first: weakref.ref[nn.Module] | None = None
        self.groups: dict[Hashable, tuple[SharedSketch, weakref.WeakSet[nn.Module]]] = {}


class InputGroups:
    """Finds the layers that are called with the same tensor."""

    def __init__(self) -> None:
        # by id: a tensor's own comparison is element by element
        self._inputs: dict[int, _Input] = {}

    def __len__(self) -> int:
        return len(self._inputs)

    def find(self, x: Tensor, layer: nn.Module, key: Hashable) -> SharedSketch | None:
        """Return the group of a layer that is called with a tensor.

        Args:
            x: The tensor, as the layer was given it.
            layer: The layer.
            key: Equal for layers that may share.

        Returns:
            The group, a new one unless another layer has one on the same tensor; None for tensors whose changes can't
            be noticed.
        """
        if x.is_inference():
            return None
        known = self._inputs.get(id(x))
        if known is None or known.reference() is not x or known.version != x._version:
            inputs, place = self._inputs, id(x)

            def forget(reference: weakref.ref[Tensor]) -> None:
                # unless another tensor lies there by now
                if place in inputs and inputs[place].reference is reference:
                    del inputs[place]

            known = self._inputs[place] = _Input(x, forget)
        if layer in known.readers or not known.readers:
            known.readers, known.first = weakref.WeakSet(), weakref.ref(layer)
        known.readers.add(layer)
        shared, members = known.groups.get(key, (None, None))
        if shared is None or members is None or layer in members:
            shared, members = SharedSketch(), weakref.WeakSet()
            known.groups[key] = shared, members
        members.add(layer)
        return shared

    def first_reader(self, x: Tensor) -> nn.Module | None:
        """Return the first layer of those that were called with a tensor in this forward pass.

        Args:
            x: The tensor, as the layers were given it.

        Returns:
            The layer, or None where none is known.
        """
        known = self._inputs.get(id(x))
        if known is None or known.first is None or known.reference() is not x or known.version != x._version:
            return None
        return known.first()


class _Current(threading.local):
    """This thread's groups: `DataParallel` runs its replicas in threads."""

    def __init__(self) -> None:
        self.groups = InputGroups()


_current = _Current()


def shared_sketch(x: Tensor, layer: nn.Module, key: Hashable) -> SharedSketch | None:
    """Return the group that a layer shares its sketch with; see `InputGroups.find`.

    Args:
        x: The tensor that the layer is called with.
        layer: The layer.
        key: Equal for layers that may share.

    Returns:
        The group, or None.
    """
    return _current.groups.find(x, layer, key)


def first_reader(x: Tensor) -> nn.Module | None:
    """Return the first layer of those that share an input; see `InputGroups.first_reader`.

    Args:
        x: The tensor that a layer was called with.

    Returns:
        The layer, or None.
    """
    return _current.groups.first_reader(x)
