"""profile: record the tensors that one forward pass keeps for its backward pass, and the operations that keep them.

During one forward pass, autograd passes each saved tensor to the hooks of `kept.py`, and hooks on all modules tell
which module is running. Afterwards the graph tells which operation keeps the tensor, and by which name: reading a
node's saved tensors calls the unpack hooks. No backward pass runs. The result is a `MemoryReport` (`report.py`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rmm_linear.adapters import is_adapted
from rmm_linear.convertible import why_not
from rmm_linear.functional import compute_dtype
from rmm_linear.layer import SketchedLayer, features, is_linear_layer, layer_input
from rmm_linear.memory.kept import SavedTensors, WatchedModules, storages_of
from rmm_linear.memory.report import INPUT_ROLES, Keeper, KeptStorage, LinearCall, MemoryReport, Status
from rmm_linear.memory.unchanged import unchanged
from rmm_linear.names import in_output_head, strip_wrappers
from rmm_linear.producers import is_free_to_keep
from rmm_linear.rows import sequences_of
from rmm_linear.sharing import InputGroups, SharedSketch

# The names by which a linear layer's product saves its weight.
_WEIGHT_ROLES = ("mat2", "weight", "other")
_NO_RECOMPUTING = "rmm_linear reads a graph without running any of it"


@dataclass
class _Pack:
    """A tensor that autograd saved, and the number of the linear layer's call that it belongs to."""

    storages: tuple[StorageWeakRef, ...]
    device: str
    call: int | None
    keeper: Keeper


@dataclass
class _Call:
    """A call of a linear layer, completed while its forward runs."""

    known: LinearCall
    module: nn.Module
    trains: bool
    wants_gradient: bool = False
    packs: int = 0


class _Recorder(WatchedModules):
    """Records the saved tensors of a forward pass by module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # modules that are running, the innermost last
        self._running: list[tuple[str, nn.Module, int | None]] = []
        self.packs: list[_Pack] = []
        self.calls: list[_Call] = []
        self._read: list[int] = []
        self._groups = InputGroups()
        # nodes of modules' outputs: the model's output need not depend on all of them
        self._nodes: list[Any] = []
        self._group_numbers: dict[SharedSketch, int] = {}

    def _pack(self, tensor: Tensor) -> tuple[Any, ...]:
        storages = tuple(self._kept.add(each) for each in storages_of(tensor) if each not in self._excluded)
        name, module, call = self._running[-1] if self._running else ("", self._model, None)
        if call is not None:
            self.calls[call].packs += 1
        keeper = Keeper(name, type(module).__name__, "", "", tuple(tensor.shape), _name_of(tensor.dtype))
        self.packs.append(_Pack(storages, str(tensor.device), call, keeper))
        return (*super()._pack(tensor), len(self.packs) - 1)

    def _unpack(self, packed: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        self._read.append(packed[-1])
        return SavedTensors._unpack(packed[:-1])

    def read(self, outputs: Iterable[object]) -> None:
        """Set the operation and the role of each saved tensor from the graph."""
        made = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
        todo, seen = [*made, *self._nodes], {None}
        self._nodes.clear()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += (function for function, _ in node.next_functions)
            for attribute in dir(node):
                if attribute.startswith("_saved_") or attribute == "saved_tensors":
                    op, role = _op_name(node.name()), attribute.removeprefix("_saved_")
                    self._read.clear()
                    try:
                        # a checkpoint would run its block again to unpack a tensor
                        with disable_saved_tensors_hooks(_NO_RECOMPUTING):
                            getattr(node, attribute)
                    except RuntimeError as error:
                        # another error: the tensor was changed in place, or freed by a backward pass in the forward
                        if _NO_RECOMPUTING not in str(error):
                            continue
                        op, role = "checkpoint", "input"
                    except AttributeError:
                        continue
                    for number in self._read:
                        self.packs[number].keeper = replace(self.packs[number].keeper, op=op, role=role)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = None
        name = self._names[module]
        if is_adapted(module):
            self._groups.enter(layer_input(args, kwargs))
        if is_linear_layer(module):
            x = layer_input(args, kwargs)
            if isinstance(x, Tensor):
                call = len(self.calls)
                dtype = compute_dtype(x)
                group = self._groups.find(x, module, None, dtype) or SharedSketch()
                known = LinearCall(
                    layer=name,
                    rows=x.numel() // max(1, x.shape[-1]),
                    sequences=sequences_of(x.shape),
                    in_features=features(module)[0],
                    out_features=features(module)[1],
                    dtype=_name_of(dtype),
                    status="kept" if module.training else "eval mode",
                    group=self._group_numbers.setdefault(group, len(self._group_numbers)),
                    stays=self._stays[module],
                    is_free=is_free_to_keep(x, dtype),
                )
                weight: Any = module.weight
                self.calls.append(_Call(known, module, weight.requires_grad))
        self._running.append((name, module, call))

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if is_adapted(module):
            self._groups.leave(layer_input(args, kwargs))
        if self._running and self._running[-1][1] is module:
            _, _, call = self._running.pop()
            if call is not None and isinstance(output, Tensor):
                self.calls[call].wants_gradient = output.requires_grad
                if output.grad_fn is not None:
                    self._nodes.append(output.grad_fn)

    def __enter__(self) -> "_Recorder":
        super().__enter__()
        self._names = {module: strip_wrappers(name) for name, module in self._model.named_modules()}
        heads = in_output_head(self._model)
        self._stays = {
            module: "output head" if module in heads else why_not(module, self._model) or ""
            for module in self._names
            if is_linear_layer(module)
        }
        self._watch(self._names, self._before, self._after)
        return self

    def report(self) -> MemoryReport:
        place = {key: number for number, key in enumerate(self._kept.sizes)}
        keepers: dict[StorageWeakRef, list[Keeper]] = {key: [] for key in place}
        devices: dict[StorageWeakRef, str] = {}
        inputs: dict[int, int | None] = {}
        copies: dict[int, int] = {}
        for pack in self.packs:
            keeper, number = pack.keeper, pack.call
            for key in pack.storages:
                keepers[key].append(keeper)
                devices[key] = pack.device
            first = place[pack.storages[0]] if pack.storages else None
            if number is not None and keeper.role in INPUT_ROLES:
                # a parameter's storage is excluded
                inputs[number] = inputs.get(number) if first is None else first
            elif number is not None and keeper.role in _WEIGHT_ROLES and first is not None:
                copies[number] = first
        return MemoryReport(
            model=type(self._model).__name__,
            storages=tuple(
                KeptStorage(size, devices[key], tuple(keepers[key])) for key, size in self._kept.sizes.items()
            ),
            linears=tuple(
                replace(
                    call.known,
                    status=self._status(call, number, inputs),
                    storage=inputs.get(number),
                    weight_copy=copies.get(number) if call.trains else None,
                )
                for number, call in enumerate(self.calls)
            ),
        )

    @staticmethod
    def _status(call: _Call, number: int, inputs: dict[int, int | None]) -> Status:
        if not call.trains:
            return "frozen"
        if not call.wants_gradient:
            return "no gradient"
        if call.packs == 0:
            return "checkpointed"
        if number in inputs:
            return "parameter" if call.known.status == "kept" and inputs[number] is None else call.known.status
        return "sketched" if isinstance(call.module, SketchedLayer) else "no gradient"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _op_name(node: str) -> str:
    """Return the operation of a node's name: "native_layer_norm" for "NativeLayerNormBackward0"."""
    name = re.sub(r"Backward\d*$", "", node).strip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def profile(model: nn.Module, *args: Any, **kwargs: Any) -> MemoryReport:
    """Run `model(*args, **kwargs)` and report the tensors that it keeps for the backward pass, which does not run.

    The model runs unchanged, converted, checkpointed or frozen; call `model.train()` first, and `profile` in the
    autocast region that the model trains in. Gradients, buffers and the random state are restored. The bytes of
    compiled parts are counted, but not attributed to their layers.

    Raises:
        ValueError: If `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    recorder = _Recorder(model)
    with unchanged(model), torch.enable_grad():
        with recorder:
            output = model(*args, **kwargs)
        recorder.read(_tensors(output))
        found = recorder.report()
        del output
    return found


def _tensors(output: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            # outputs of models that pytree does not know as containers
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
