"""One sketch for layers that read the same input: query, key and value, gate and up, the members of a LoRA family.

An exact model keeps an input that three layers share once. Three sketches of the input would keep 3 ratio times its
bytes: more than the exact model above a ratio of 1/3. So layers that are given the same tensor in one forward pass keep
one sketch, with one S. The distribution of each weight gradient is unchanged; only the errors of the members become
correlated.

Groups are found while the model runs: layers share if they are called with the same tensor object, unchanged since (by
its version counter), have equal configurations and compute in one dtype. A group takes new members from the first
member's forward pass until the first backward pass of any member, as long as a graph keeps its sketch. A new group,
with a new S, begins after that, for a layer that is called with the tensor again, and for layers with one weight (whose
errors would add up). The version counter misses changes through `x.data` and through memory that numpy shares: the
later layer's gradient is then formed with the earlier values.

PEFT casts an input for each adapter anew, if the model has another dtype. Such copies count as their source:
`adapters.py` tells which tensor an adapted layer is given, and the graph tells whether the adapter's input is a copy of
that tensor. (If the tensor has no gradient, each adapter keeps its own sketch.)

Under torch.compile this module does not run: the compiler merges equal calls, so that layers of one graph that read one
tensor, or copies of it, draw one seed and keep one sketch, layers with one weight included (`rmm_linear.ops.draw_seed`,
and for our own backend `rmm_linear.compiler.shared_sketches`). Each estimate stays unbiased. `share_sketch=False` keeps
the sketches apart.

A group holds weak references to its input, its layers and its sketch, and lives as long as a graph that uses it. Every
layer draws a seed, even if it uses its group's: the random generator is in the same state with and without sharing, and
in both passes of a checkpoint.
"""

import threading
import weakref
from collections.abc import Hashable, MutableMapping
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rmm_linear.norm_cache import RowNorms

# The operation of `x.to(dtype)`.
_COPY = "ToCopyBackward0"


class SharedSketch:
    """A seed, and the tensors that the first member of a group computed from the input and the seed."""

    __slots__ = ("__weakref__", "_parts", "row_norms", "seed")

    def __init__(self) -> None:
        # the norms by which rows were drawn, if there is a cache
        self.row_norms: RowNorms | None = None
        # the first member's seed; None before the first call
        self.seed: Tensor | None = None
        # tensors of the kept rows, and of the sketch
        self._parts: list[tuple[weakref.ref[Tensor], ...]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the sketch has been freed, or a backward pass has used it."""
        return self.seed is not None and self.tensors() is None

    def seed_or(self, seed: Tensor) -> Tensor:
        """Return the group's seed if its sketch is still alive; otherwise make this member's seed the group's."""
        if self.seed is None or self.is_over:
            self.seed, self._parts = seed, None
        return self.seed

    def tensors(self) -> tuple[tuple[Tensor, ...], ...] | None:
        """Return the tensors made with the seed; None if there are none, some were freed, or the group is closed."""
        if self._parts is None:
            return None
        found = []
        for part in self._parts:
            alive = tuple(tensor for reference in part if (tensor := reference()) is not None)
            if len(alive) < len(part):
                return None
            found.append(alive)
        return tuple(found)

    def remember(self, *parts: tuple[Tensor, ...]) -> None:
        """Remember the tensors that were made with the seed, without keeping them alive."""
        # a weak reference to a tensor stays valid while a graph has saved the tensor
        self._parts = [tuple(map(weakref.ref, part)) for part in parts]

    def close(self) -> None:
        """Close the group: a backward pass has used this S."""
        self._parts = None


class _Input:
    """The layers that were called with one version of a tensor, and their groups by configuration."""

    def __init__(self, version: int) -> None:
        self.version = version
        # the layers of this forward pass by the dtype that they compute in, of any configuration
        self.readers: dict[torch.dtype, list[weakref.ref[nn.Module]]] = {}
        self.groups: dict[Hashable, tuple[weakref.ref[SharedSketch], list[weakref.ref[nn.Module]]]] = {}

    def group_of(self, layer: nn.Module, key: Hashable, dtype: torch.dtype) -> SharedSketch:
        """Find the group of a layer that is called with this input, or begin one."""
        own = weakref.ref(layer)
        readers = self.readers.get(dtype)
        if readers is None or any(reader() is layer for reader in readers):
            self.readers[dtype] = [own]
        else:
            # a long-lived input may be read by many layers that are deleted since
            readers[1:] = [reader for reader in readers[1:] if reader() is not None] + [own]
        found = self.groups.get(key)
        shared, members = (None, []) if found is None else (found[0](), found[1])
        if _is_of_use(shared) and not any(getattr(member(), "weight", None) is layer.weight for member in members):
            # likewise, members may be deleted while a graph keeps the sketch
            members[:] = [member for member in members if member() is not None]
            members.append(own)
            return shared
        # drop closed groups
        self.groups = {other: group for other, group in self.groups.items() if _is_of_use(group[0]())}
        shared = SharedSketch()
        self.groups[key] = weakref.ref(shared), [own]
        return shared


def _is_of_use(group: SharedSketch | None) -> TypeGuard[SharedSketch]:
    return group is not None and not group.is_over


class InputGroups(threading.local):
    """Finds the layers that a thread calls with the same tensor: `DataParallel` runs its replicas in threads."""

    def __init__(self) -> None:
        # keys compare by identity: == of tensors is elementwise
        self._inputs: MutableMapping[Tensor, _Input] = WeakIdKeyDictionary()
        # inputs of the adapted layers that are running, the innermost last, and their versions
        self._given: list[tuple[Tensor, int]] = []

    def enter(self, x: object) -> None:
        """Record the input of a running module whose layers may be called with copies of that input."""
        if isinstance(x, Tensor) and not x.is_inference():
            self._given.append((x, x._version))

    def leave(self, x: object) -> None:
        """Remove the record that `enter` made."""
        for place in reversed(range(len(self._given))):
            if self._given[place][0] is x:
                del self._given[place:]
                return

    def find(self, x: Tensor, layer: nn.Module, key: Hashable, dtype: torch.dtype) -> SharedSketch | None:
        """Return the group of a layer that is called with `x`: a new group unless another layer began one for x.

        Layers share if `key` and the dtype in which they compute are equal. Returns None for inference tensors, which
        have no version counter.
        """
        if x.is_inference():
            return None
        source, known = self._known(x)
        if known is None:
            known = self._inputs[source] = _Input(source._version)
        return known.group_of(layer, (key, dtype, x.dtype, x.device), dtype)

    def first_reader(self, x: Tensor, dtype: torch.dtype) -> nn.Module | None:
        """Return the first layer that was called with `x` in this forward pass and computes in `dtype`, or None."""
        known = None if x.is_inference() else self._known(x)[1]
        return known.readers[dtype][0]() if known is not None and dtype in known.readers else None

    def _known(self, x: Tensor) -> tuple[Tensor, _Input | None]:
        source = self._source_of(x) if self._given else x
        known = self._inputs.get(source)
        return source, known if known is not None and known.version == source._version else None

    def _source_of(self, x: Tensor) -> Tensor:
        """Find the tensor that x was cast from: the copy's gradient flows to the node that made the source."""
        if x._version or x.grad_fn is None or x.grad_fn.name() != _COPY:
            return x
        node, output = x.grad_fn.next_functions[0]
        for given, version in reversed(self._given):
            if given._version == version and node is not None:
                made = given.grad_fn
                is_source = getattr(node, "variable", None) is given if made is None else made is node
                if is_source and given.output_nr == output:
                    return given
        return x


current_groups = InputGroups()
