"""profile: what does one forward pass of a model keep for its backward pass, and who keeps it?

One forward is watched. Autograd hands over each tensor that it keeps (`kept.py`); which module is running then is known
from hooks on all modules, and which operation keeps it, and as what, from the graph afterwards: reading a node's saved
tensors calls the same hooks backwards. No backward pass runs. What was found makes a `MemoryReport` (`report.py`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from rmm_linear.adapters import is_adapted
from rmm_linear.convertible import why_not
from rmm_linear.functional import compute_dtype
from rmm_linear.layer import SketchedLayer, features, is_linear_layer, layer_input
from rmm_linear.memory.kept import SavedTensors, StorageSet, WatchedModules, storages_of
from rmm_linear.memory.report import (
    CHECKPOINTED,
    EVALUATING,
    FROZEN,
    INPUT_ROLES,
    KEPT,
    NO_GRADIENT,
    PARAMETER,
    SKETCHED,
    Keeper,
    KeptStorage,
    LinearCall,
    MemoryReport,
)
from rmm_linear.memory.unchanged import unchanged
from rmm_linear.names import in_output_head, strip_wrappers
from rmm_linear.producers import is_free_to_keep
from rmm_linear.rows import sequences_of
from rmm_linear.sharing import InputGroups, SharedSketch

# What it keeps its weight as.
_WEIGHT_ROLES = ("mat2", "weight", "other")
_NO_RECOMPUTING = "rmm_linear reads a graph without running any of it"


@dataclass
class _Pack:
    """A tensor that autograd handed over."""

    storages: tuple[int, ...]
    module: str
    kind: str
    # number of the linear layer's call that it belongs to
    call: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    op: str = ""
    role: str = ""


@dataclass
class _Call:
    """A call of a linear layer, as its hooks saw it."""

    layer: str
    module: nn.Module
    rows: int
    sequences: int
    dtype: torch.dtype
    trains: bool
    group: int
    is_training: bool
    is_free: bool
    wants_gradient: bool = False
    packs: int = 0


class _Recorder(WatchedModules):
    """Writes down which module saved what."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # modules that are running, the innermost last
        self._running: list[tuple[str, nn.Module, int | None]] = []
        self.packs: list[_Pack] = []
        self.calls: list[_Call] = []
        self._read: list[int] = []
        self._groups = InputGroups()
        # nodes that modules have made: what a model returns need not lead to all of them
        self._nodes: list[Any] = []
        self._group_numbers: list[SharedSketch] = []
        self._keys = StorageSet()

    def _pack(self, tensor: Tensor) -> tuple[Any, ...]:
        storages = tuple(self._keys.add(each) for each in storages_of(tensor) if each not in self._excluded)
        name, module, call = self._running[-1] if self._running else ("", self._model, None)
        if call is not None:
            self.calls[call].packs += 1
        self.packs.append(
            _Pack(storages, name, type(module).__name__, call, tuple(tensor.shape), tensor.dtype, str(tensor.device))
        )
        return (*super()._pack(tensor), len(self.packs) - 1)

    def _unpack(self, packed: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        self._read.append(packed[-1])
        return SavedTensors._unpack(packed[:-1])

    def read(self, outputs: Iterable[object]) -> None:
        """Find out from the graph which operation keeps what."""
        made = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
        todo = list(dict.fromkeys([*made, *self._nodes]))
        seen = set(todo)
        self._nodes.clear()
        while todo:
            node = todo.pop()
            for function, _ in node.next_functions:
                if function is not None and function not in seen:
                    seen.add(function)
                    todo.append(function)
            op = _op_name(node.name())
            for attribute in dir(node):
                if attribute.startswith("_saved_") or attribute == "saved_tensors":
                    role = attribute.removeprefix("_saved_")
                    self._read.clear()
                    try:
                        # a checkpoint would run its block again to have what it has not kept
                        with disable_saved_tensors_hooks(_NO_RECOMPUTING):
                            getattr(node, attribute)
                    except RuntimeError as error:
                        # otherwise: changed in place since, or freed by a backward pass of the model's own
                        if _NO_RECOMPUTING not in str(error):
                            continue
                        op_of_read, role = "checkpoint", "input"
                    except AttributeError:
                        continue
                    else:
                        op_of_read = op
                    for number in self._read:
                        self.packs[number].op, self.packs[number].role = op_of_read, role

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = None
        name = self._names[module]
        if is_adapted(module):
            self._groups.enter(layer_input(args, kwargs))
        if is_linear_layer(module):
            x = layer_input(args, kwargs)
            if isinstance(x, Tensor):
                call = len(self.calls)
                rows = x.numel() // max(1, x.shape[-1])
                group = self._group_of(x, module)
                weight: Any = module.weight
                trains, dtype = weight.requires_grad, compute_dtype(x)
                is_free = is_free_to_keep(x, dtype)
                self.calls.append(
                    _Call(name, module, rows, sequences_of(x.shape), dtype, trains, group, module.training, is_free)
                )
        self._running.append((name, module, call))

    def _group_of(self, x: Tensor, module: nn.Module) -> int:
        group = self._groups.find(x, module, None, compute_dtype(x)) or SharedSketch()
        if group not in self._group_numbers:
            self._group_numbers.append(group)
        return self._group_numbers.index(group)

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
        self._watch(self._names)
        return self

    def report(self) -> MemoryReport:
        """Put together what was written down."""
        place = {key: number for number, key in enumerate(self._keys.sizes)}
        keepers: list[list[Keeper]] = [[] for _ in place]
        devices = [""] * len(place)
        inputs: dict[int, int] = {}
        copies: dict[int, int] = {}
        of_parameters: set[int] = set()
        for pack in self.packs:
            role = pack.role
            if pack.call is not None and not role:
                role = self._guessed_role(pack, self.calls[pack.call])
            keeper = Keeper(pack.module, pack.kind, pack.op, role, pack.shape, str(pack.dtype).removeprefix("torch."))
            for key in pack.storages:
                keepers[place[key]].append(keeper)
                devices[place[key]] = pack.device
            if pack.call is not None and not pack.storages and role in INPUT_ROLES:
                of_parameters.add(pack.call)
            if pack.call is not None and pack.storages:
                if role in INPUT_ROLES:
                    inputs[pack.call] = place[pack.storages[0]]
                elif role in _WEIGHT_ROLES:
                    copies[pack.call] = place[pack.storages[0]]
        return MemoryReport(
            model=type(self._model).__name__,
            storages=tuple(
                KeptStorage(size, device, tuple(who))
                for size, device, who in zip(self._keys.sizes.values(), devices, keepers, strict=True)
            ),
            linears=tuple(
                self._linear_call(number, inputs, copies, of_parameters) for number in range(len(self.calls))
            ),
        )

    @staticmethod
    def _guessed_role(pack: _Pack, call: _Call) -> str:
        """Of a tensor whose node does not lead to what the model returned."""
        elements = torch.Size(pack.shape).numel()
        weight = features(call.module)
        own: Any = call.module.weight
        # another dtype than the parameter's: a copy
        if pack.dtype != own.dtype and pack.shape in (weight, weight[::-1]):
            return _WEIGHT_ROLES[0]
        is_input = pack.shape[-1:] == weight[:1] and elements == call.rows * weight[0]
        return INPUT_ROLES[0] if is_input and call.trains else ""

    def _linear_call(
        self, number: int, inputs: dict[int, int], copies: dict[int, int], of_parameters: set[int]
    ) -> LinearCall:
        call = self.calls[number]
        if not call.trains:
            status = FROZEN
        elif not call.wants_gradient:
            status = NO_GRADIENT
        elif call.packs == 0:
            status = CHECKPOINTED
        elif number in inputs:
            status = KEPT if call.is_training else EVALUATING
        elif number in of_parameters:
            status = PARAMETER if call.is_training else EVALUATING
        else:
            status = SKETCHED if isinstance(call.module, SketchedLayer) else NO_GRADIENT
        return LinearCall(
            layer=call.layer,
            rows=call.rows,
            sequences=call.sequences,
            in_features=features(call.module)[0],
            out_features=features(call.module)[1],
            dtype=str(call.dtype).removeprefix("torch."),
            status=status,
            storage=inputs.get(number),
            weight_copy=copies.get(number) if call.trains else None,
            group=call.group,
            stays=self._stays[call.module],
            is_free=call.is_free,
        )


def _op_name(node: str) -> str:
    """Such as "native_layer_norm" of "NativeLayerNormBackward0"."""
    name = re.sub(r"Backward\d*$", "", node).strip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def profile(model: nn.Module, *args: Any, **kwargs: Any) -> MemoryReport:
    """Run one forward pass of a model and report what it keeps for the backward pass.

    The model runs as it is: in the mode that it is in, with whatever is converted, checkpointed or frozen; call
    `model.train()` first for what training keeps, and run it in the autocast region that it trains in. Gradients,
    buffers and the random state are afterwards what they were. No backward pass runs, and what the forward returned is
    dropped. Compiled parts are counted, but not told apart.

    Example:
        >>> import torch
        >>> from rmm_linear import RMMConfig
        >>> from rmm_linear.memory import profile
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> report = profile(model, torch.randn(1024, 64))
        >>> report.total_bytes, report.own_bytes
        (2359296, 1310720)
        >>> report.predict(RMMConfig(ratio=0.1, center=False)) < 0.52 * report.total_bytes
        True

    Args:
        model: Any module, converted or not.
        *args: What to call it with.
        **kwargs: The same by name.

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
            # outputs of models that are no containers for pytree
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
