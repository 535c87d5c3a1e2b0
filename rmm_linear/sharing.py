"""One sketch for layers that read the same input: query, key and value, gate and up, the members of a LoRA family.

An exact model keeps an input that three layers share once. Three sketches of it would keep 3 ratio of it: more than the
exact model above a ratio of 1/3. So layers that are given the same tensor in one forward pass keep one sketch, with one
S. The estimate of each weight gradient is what it would be alone; only the errors of the members are correlated.

Groups are found while the model runs: layers share if they are called with the same tensor object, unchanged since (its
version counter tells), are configured alike and compute in one dtype. A group takes new members between the first
member's forward and the first backward of any: as long as a graph keeps its sketch, and nothing was learnt with its S.
After that, for a layer that comes back to the tensor, and for layers with one weight (whose errors would add up), a new
group begins, with a new S. A change through `x.data`, or through memory that numpy shares, is not counted by the
version: the later layer's gradient is then that of the earlier values.

PEFT casts an input for each adapter anew, if the model has another dtype. Such copies count as the tensor that they
were made of: `adapters.py` tells which tensor an adapted layer is given, and the graph whether the adapter's input is a
copy of it. (Where that tensor has no gradient, each adapter keeps its own sketch.)

Under torch.compile none of this runs: the compiler merges what is equal, one draw of a seed for a tensor that several
layers of one graph read, and one sketch (`rmm_linear.ops.draw_seed`, and for our own backend
`rmm_linear.compiler.shared_sketches`); copies of one tensor and layers with one weight too. Each estimate is unbiased
as before. `share_sketch=False` keeps them apart.

A group refers to its input, its layers and its sketch weakly, and lives as long as a graph that was made with it. Every
layer draws a seed, also one that uses its group's: the random generator is in the same state with and without sharing,
in both passes of a checkpoint as well.
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
    """A seed, and the tensors that the first member of a group made of the input with it."""

    __slots__ = ("__weakref__", "_parts", "row_norms", "seed")

    def __init__(self) -> None:
        # by which rows were drawn, if a cache has them
        self.row_norms: RowNorms | None = None
        # the first member's; None before
        self.seed: Tensor | None = None
        # tensors of the kept rows, and of the sketch
        self._parts: list[tuple[weakref.ref[Tensor], ...]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether its sketch is gone, or a backward pass has used it."""
        return self.seed is not None and self.tensors(self.seed) is None

    def seed_or(self, seed: Tensor) -> Tensor:
        """Return the seed of the sketch that is there, or else the one that this member has drawn: now the group's."""
        if self.seed is None or self.is_over:
            self.seed, self._parts = seed, None
        return self.seed

    def tensors(self, seed: Tensor) -> tuple[tuple[Tensor, ...], ...] | None:
        """Return the tensors made with a seed; None if there are none, some are gone, or the group is closed."""
        if self._parts is None or seed is not self.seed:
            return None
        found = []
        for part in self._parts:
            alive = tuple(tensor for reference in part if (tensor := reference()) is not None)
            if len(alive) < len(part):
                return None
            found.append(alive)
        return tuple(found)

    def remember(self, seed: Tensor, *parts: tuple[Tensor, ...]) -> None:
        """Remember the tensors that were made with a seed, without keeping them alive."""
        if seed is self.seed:
            # these hold while a graph has the tensors, whether or not Python does
            self._parts = [tuple(map(weakref.ref, part)) for part in parts]

    def close(self) -> None:
        """Close the group: a backward pass has used this S."""
        self._parts = None


class _Input:
    """The layers that were called with one version of a tensor, and their groups, by how they are configured."""

    def __init__(self, version: int) -> None:
        self.version = version
        # by the dtype that they compute in, whatever their configurations: the layers of this forward pass
        self.readers: dict[torch.dtype, list[weakref.ref[nn.Module]]] = {}
        self.groups: dict[Hashable, tuple[weakref.ref[SharedSketch], list[weakref.ref[nn.Module]]]] = {}

    def group_of(self, layer: nn.Module, key: Hashable, dtype: torch.dtype) -> SharedSketch:
        """Find the group of a layer that is called with this input, or begin one."""
        own = weakref.ref(layer)
        readers = self.readers.get(dtype)
        if readers is None or any(reader() is layer for reader in readers):
            self.readers[dtype] = [own]
        else:
            # an input that stays may see many layers come and go
            readers[1:] = [reader for reader in readers[1:] if reader() is not None] + [own]
        found = self.groups.get(key)
        shared, members = (None, []) if found is None else (found[0](), found[1])
        if _is_of_use(shared) and not any(_are_one(member(), layer) for member in members):
            # as with the readers: layers may come and go while a graph keeps the sketch
            members[:] = [member for member in members if member() is not None]
            members.append(own)
            return shared
        # without the closed ones
        self.groups = {other: group for other, group in self.groups.items() if _is_of_use(group[0]())}
        shared = SharedSketch()
        self.groups[key] = weakref.ref(shared), [own]
        return shared


def _are_one(member: nn.Module | None, layer: nn.Module) -> bool:
    """Tell whether two layers have one weight."""
    return member is layer or (member is not None and getattr(member, "weight", None) is layer.weight)


def _is_of_use(group: SharedSketch | None) -> TypeGuard[SharedSketch]:
    return group is not None and not group.is_over


class InputGroups(threading.local):
    """Finds the layers that a thread calls with the same tensor: `DataParallel` runs its replicas in threads."""

    def __init__(self) -> None:
        # by identity: a tensor's own comparison is element by element
        self._inputs: MutableMapping[Tensor, _Input] = WeakIdKeyDictionary()
        # inputs of the adapted layers that are running, the innermost last, and their versions
        self._given: list[tuple[Tensor, int]] = []

    def enter(self, x: object) -> None:
        """Take note that a module runs whose layers may be called with copies of its input."""
        if isinstance(x, Tensor) and not x.is_inference():
            self._given.append((x, x._version))

    def leave(self, x: object) -> None:
        """Forget what `enter` took note of."""
        for place in reversed(range(len(self._given))):
            if self._given[place][0] is x:
                del self._given[place:]
                return

    def find(self, x: Tensor, layer: nn.Module, key: Hashable, dtype: torch.dtype) -> SharedSketch | None:
        """Return the group of a layer that is called with `x`: a new one unless another layer has one on this tensor.

        Layers share if `key` and the dtype in which they compute are equal. None for tensors whose changes can't be
        noticed.
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
        """Find the tensor of another dtype that this one is a copy of: gradients of both go to one node."""
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
