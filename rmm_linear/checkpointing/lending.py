"""A model lends its places to the tensors of a trace: afterwards it holds what it held, however the run ended."""

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


class NotFollowedError(Exception):
    """The step does what a plan would lose; the text says what, and what can be done."""


@contextlib.contextmanager
def lent(model: nn.Module, state: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put other tensors in the place of a model's own for a run, however it ends; refuse what a plan would lose.

    Args:
        model: The model.
        state: Its parameters and buffers, each once.
        tensors: What takes their places.

    Yields:
        Nothing.

    Raises:
        NotFollowedError: If the run leaves other tensors or modules behind.
    """
    # by identity, and not by name: a module may be registered under several
    lent = {id(own): tensor for own, tensor in zip(state, tensors, strict=True)}
    before = [_Attributes(name, module) for name, module in model.named_modules()]
    try:
        for attributes in before:
            attributes.lend(lent)
        yield
        lost = [text for attributes in before for text in attributes.lost()]
    finally:
        for attributes in before:
            attributes.restore()
    if lost:
        raise NotFollowedError(
            f"the step {'; '.join(lost)}, which a plan would lose: write into a buffer that is there (`copy_`, `add_`),"
            " or return what is needed after the step; what is computed once is made before"
        )


class _Attributes:
    """What a module holds, also in its lists and dicts: parameters, buffers and modules are in such dicts."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._module, self._path = module, path
        self._own = dict(vars(module))
        self._contents = [(name, *each) for name, value in self._own.items() for each in _contents(value)]

    def lend(self, tensors: Mapping[int, Tensor]) -> None:
        for registry in ("_parameters", "_buffers"):
            own = self._own[registry]
            own.update({name: tensors[id(tensor)] for name, tensor in own.items() if tensor is not None})
        self._lent = {registry: dict(self._own[registry]) for registry in _REGISTRIES}

    def lost(self) -> Iterator[str]:
        """Say what the run has changed and a plan would leave as it was."""
        for registry, lent in self._lent.items():
            kind, now = _REGISTRIES[registry], self._own[registry]
            for name in {**lent, **now}:
                path = f"{self._path}.{name}".lstrip(".")
                if name not in lent:
                    yield f"registers {kind} {path!r}"
                elif now.get(name) is not lent[name]:
                    yield f"puts another {kind} in the place of {kind} {path!r}"
        now = vars(self._module)
        changed = {name for name in now if now[name] is not self._own.get(name)}
        changed.update(name for name, value, before in self._contents if not _is_same(value, before))
        # torch's own recurrent layers list their parameters in `_flat_weights`, and write it anew with each of them
        for name in sorted(changed.difference((*_REGISTRIES, "_flat_weights"))):
            if any(isinstance(leaf, (FakeTensor, FunctionalTensor)) for leaf in pytree.tree_leaves(now.get(name))):
                yield f"sets `{type(self._module).__name__}.{name}` to a tensor"

    def restore(self) -> None:
        _give_back(vars(self._module), self._own)
        for _, value, before in self._contents:
            _give_back(value, before)


_REGISTRIES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Lists and dicts in a value, each with what is in it."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if isinstance(found, (list, dict)) and id(found) not in seen:
            seen.add(id(found))
            yield found, found.copy()
            waiting.extend(found.values() if isinstance(found, dict) else found)


def _is_same(value: Any, before: Any) -> bool:
    parts = [
        each if isinstance(each, list) else [part for pair in each.items() for part in pair] for each in (value, before)
    ]
    return len(parts[0]) == len(parts[1]) and all(map(operator.is_, *parts))


def _give_back(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
    elif list(value) == list(before):
        # what is there is never missing in between, for other threads
        value.update(before)
    else:
        value.clear()
        value.update(before)
