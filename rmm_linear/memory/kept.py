"""Count the storages that a forward pass keeps for its backward pass, each distinct storage once.

Autograd passes each tensor that it saves to the innermost `saved_tensors_hooks`. The hooks of this module record the
tensor's storage: a view keeps the whole storage alive, and one storage saved by three layers is kept once. Parameters
and buffers live anyway and do not count. A tensor with a graph is returned to autograd detached: otherwise an operation
that saves its own output (tanh, softmax) would form a reference cycle.

Inside `torch.utils.checkpoint` the innermost hooks are the checkpoint's own: tensors of a checkpointed block are not
kept, and not counted. Under `torch.compile` the hooks get the tensors that the compiled graph saves.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from rmm_linear.torch_private import innermost_saved_tensors_hooks

_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: several for a sparse one and for a wrapper such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    else:
        yield from (getattr(tensor, part)().untyped_storage() for part in _SPARSE_PARTS.get(tensor.layout, ()))


class StorageSet:
    """A set of storages, with their sizes, that does not keep the storages alive.

    A weak reference to a storage keeps its identity from being reused, so that a new storage in freed memory is not
    taken for the old storage.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.sizes: dict[StorageWeakRef, int] = {}
        for tensor in tensors:
            for storage in storages_of(tensor):
                self.add(storage)

    def add(self, storage: torch.UntypedStorage) -> StorageWeakRef:
        """Add a storage, unless the set has it, and return its key in `sizes`."""
        key = StorageWeakRef(storage)
        self.sizes.setdefault(key, storage.nbytes())
        return key

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return StorageWeakRef(storage) in self.sizes


def own_tensors(exclude: Iterable[nn.Module | Tensor]) -> Iterator[Tensor]:
    """Yield the parameters and buffers of modules, and tensors themselves; raise a ValueError for other objects."""
    for item in exclude:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, nn.Module):
            for tensor in (*item.parameters(), *item.buffers()):
                if not nn.parameter.is_lazy(tensor):
                    yield tensor
        else:
            raise ValueError(f"cannot exclude {type(item).__name__}; pass modules or tensors")


class SavedTensors:
    """Count the bytes that autograd keeps for the backward pass while this context is active.

    Args:
        *exclude: Modules, whose parameters and buffers do not count, and tensors that do not count. Their views do not
            count either.

    Warning:
        Tensors saved inside the context count even if their graph is freed before its end; tensors that are
        hidden from autograd (`ctx.x = x` in a custom Function) do not count. Tensors that are changed in place
        after they were saved are refused, also within `torch.autograd.graph.allow_mutation_on_saved_tensors`.

    Examples:
        >>> import torch
        >>> from rmm_linear.memory import SavedTensors
        >>> layer, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
        >>> with SavedTensors(layer) as kept:
        ...     y = layer(x)
        >>> kept.bytes, kept.holds(x)
        (512, True)
    """

    def __init__(self, *exclude: nn.Module | Tensor) -> None:
        self._exclude = exclude
        self._excluded = StorageSet(own_tensors(exclude))
        self._kept = StorageSet()
        self._hooks: saved_tensors_hooks | None = None
        # the enclosing counter: autograd calls the innermost hooks alone, and these pass tensors on
        self._outer: SavedTensors | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all distinct storages kept."""
        return sum(self._kept.sizes.values())

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a saved tensor lies in (any of) the storages of `tensor`."""
        return any(storage in self._kept for storage in storages_of(tensor))

    def _pack(self, tensor: Tensor) -> tuple[Any, ...]:
        outer = None
        if self._outer is not None:
            outer = partial(self._outer._unpack, self._outer._pack(tensor))
        for storage in storages_of(tensor):
            if storage not in self._excluded:
                self._kept.add(storage)
        # an inference tensor has no version counter, and autograd forbids its in-place changes
        version = None if tensor.is_inference() else tensor._version
        # only a tensor with a graph can be part of a cycle; other tensors keep their identity and attributes
        return tensor if tensor.grad_fn is None else tensor.detach(), version, outer

    @staticmethod
    def _unpack(packed: tuple[Any, ...]) -> Tensor:
        # a static method, so that a graph does not keep this object alive
        tensor: Tensor
        tensor, version, outer = packed
        if outer is not None:
            outer()
        # autograd does not check versions of packed tensors
        if version is not None and tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" {tuple(tensor.shape)} {tensor.dtype} tensor is at version {tensor._version}; expected version"
                f" {version}"
            )
        return tensor

    def __enter__(self) -> "SavedTensors":
        if self._hooks is not None:
            raise ValueError("this SavedTensors is active already; make a second one to nest them")
        # A module's tensors may have been moved or replaced since `__init__`.
        self._excluded = StorageSet(own_tensors(self._exclude))
        self._kept = StorageSet()
        innermost = innermost_saved_tensors_hooks()
        outer = None if innermost is None else getattr(innermost[0], "__self__", None)
        self._outer = outer if isinstance(outer, SavedTensors) else None
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*error)
            self._hooks = self._outer = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bytes={self.bytes}, storages={len(self._kept.sizes)})"


class WatchedModules(SavedTensors):
    """SavedTensors with forward hooks on modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model = model
        self._handles: list[RemovableHandle] = []

    def _watch(self, modules: Iterable[nn.Module], before: Callable[..., None], after: Callable[..., None]) -> None:
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().__exit__(*error)


def measure_kept_bytes(
    fn: Callable[..., object], *args: Any, exclude: Iterable[nn.Module | Tensor] = (), **kwargs: Any
) -> int:
    """Run `fn(*args, **kwargs)` with gradients enabled and return the bytes that it keeps for its backward pass.

    `fn` is a module, whose parameters and buffers do not count, or any function of tensors; `exclude` lists further
    modules and tensors that do not count. The result is dropped.

    Examples:
        >>> import torch
        >>> from rmm_linear.memory import measure_kept_bytes
        >>> measure_kept_bytes(torch.nn.Linear(8, 4), torch.randn(16, 8))
        512
    """
    owner = getattr(fn, "__self__", fn)
    with torch.enable_grad(), SavedTensors(*exclude, *([owner] if isinstance(owner, nn.Module) else [])) as kept:
        fn(*args, **kwargs)
    return kept.bytes
