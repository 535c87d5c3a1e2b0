"""Do the sketches of a conversion free anything? Seen in the first training step, and told if they do not.

A sketch is kept in place of a layer's input. If that input is still there when the backward pass comes to the first of
the layers, something else keeps it: a gated product, an exact layer that reads it as well, or whoever holds the tensor
in Python, as a training loop holds its batch. Then the sketch has freed nothing, and came on top. A weak reference
tells, at no cost after the first step. (What is needed before the backward pass comes to the last layer is gone by
then, and not seen.)

Inputs that what made them keeps are known before (`producers.py`): those layers are exact. Of an input that the layer
casts or copies, an exact layer keeps the copy, which a sketch frees whoever holds the input. Nothing is seen under a
compiler, in captured steps, and in checkpointed blocks.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rmm_linear.config import RMMConfig
from rmm_linear.functional import compute_dtype
from rmm_linear.names import listed
from rmm_linear.producers import flattens_in_place, is_free_to_keep
from rmm_linear.rows import sequences_of

# What became of a layer's input: the layer keeps it as it is; a sketch has freed it; something else keeps it.
AS_IT_IS, FREED, ON_TOP = "as it is", "freed", "on top"
# Of several calls of a layer the last of these counts, in whatever order they come.
_RANKS = (None, AS_IT_IS, ON_TOP, FREED)
_MIB = 2**20
# Calls of a layer that are looked at together: forward passes that no backward pass follows come to an end.
_MOST_CALLS = 16


class FirstStep:
    """What was seen of the layers of one conversion.

    Args:
        is_over: Whether there is nothing to see, because a sample has told already.

    Attributes:
        is_over: Whether it has been told.
    """

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over = is_over
        self._watches: list[InputWatch] = []
        # calls before a backward pass: who, what is known to become of its input, or else the input, and its sketch's
        # bytes
        self._calls: list[tuple[InputWatch, str | StorageWeakRef, int]] = []
        # storages that an observer of ours holds
        self._held: set[int] = set()
        # sketches that came on top, whose and of how many bytes, by their inputs: layers of one input keep one
        self._spent: dict[int, tuple[InputWatch, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # a copy looks for itself: weak references to storages can't be copied
        return {**vars(self), "_calls": [], "_held": set()}

    def watch(self, name: str) -> "InputWatch":
        """Take one more layer into account."""
        self._watches.append(InputWatch(name, self))
        return self._watches[-1]

    def add(self, watch: "InputWatch", node: Any, kept: str | StorageWeakRef, size: int) -> None:
        """Take note of a call of a layer.

        Args:
            watch: The layer's.
            node: The output's autograd node.
            kept: A reference to the input's storage; or what becomes of the input, if that is known.
            size: Bytes of the sketch.
        """
        if len(self._calls) < _MOST_CALLS * len(self._watches):
            self._calls.append((watch, kept, size))
            node.register_prehook(self._look)

    def disregard(self, x: Tensor) -> None:
        """Leave an input out: it is held by someone who looks at it in the backward pass, and will not be later."""
        self._held.add(x.untyped_storage()._cdata)

    def _look(self, gradients: object) -> None:
        """See which inputs are still there, now that a backward pass has come to the first of the layers."""
        calls, self._calls = self._calls, []
        held, self._held = self._held, set()
        for watch, kept, size in calls:
            if isinstance(kept, str):
                outcome = kept
            elif kept.cdata in held:
                continue
            elif kept.expired():
                outcome = FREED
            else:
                outcome = ON_TOP
                self._spent[kept.cdata] = watch, size
            watch.outcome = max(watch.outcome, outcome, key=_RANKS.index)

    def end(self) -> None:
        """Warn of the layers whose sketches came on top, once."""
        if self.is_over:
            return
        self.is_over = True
        names = [watch.name or "(the model)" for watch in self._watches if watch.outcome == ON_TOP]
        if names:
            spent = sum(size for watch, size in self._spent.values() if watch.outcome == ON_TOP)
            warnings.warn(
                f"{len(names)} of the {len(self._watches)} layers that convert_linears has converted free nothing:"
                " their inputs are still there in the backward pass, kept by something else (a batch by the training"
                f" loop), and their sketches take {spent / _MIB:.2f} MiB on top: {listed(names)}. Leave them exact:"
                " convert_linears(model, ..., exclude_modules=[...]) with these names, or sample=batch, which finds"
                " those whose input the model keeps",
                UserWarning,
                stacklevel=3,
            )


class InputWatch:
    """Looks what became of one layer's input.

    Attributes:
        name: The layer's.
        outcome: What was seen; None before. A layer that runs several times frees something if any of its calls
            does, and a sketch of any of them counts before an input that is kept as it is.
        is_open: Whether there is anything left to see.
        step: What is seen of all layers.
    """

    __slots__ = ("is_open", "name", "outcome", "step")

    def __init__(self, name: str, step: FirstStep) -> None:
        self.name = name
        self.step = step
        self.outcome: str | None = None
        self.is_open = not step.is_over

    def see(self, x: Tensor, output: Tensor, config: RMMConfig) -> None:
        """Look at a call of the layer in training mode."""
        if self.outcome is not None:
            # it has been through a backward pass, and comes again
            self.step.end()
        if self.step.is_over:
            self.is_open = False
            return
        node: Any = output.grad_fn
        if node is None or x.layout != torch.strided or _is_special():
            return
        dtype = compute_dtype(x)
        if is_free_to_keep(x, dtype):
            self.step.add(self, node, AS_IT_IS, 0)
        elif "Sketched" in node.name():
            rows = x.numel() // max(1, x.shape[-1])
            size = config.saved_bytes(rows, x.shape[-1], dtype, sequences=sequences_of(x.shape))
            is_copied = x.dtype != dtype or not flattens_in_place(x)
            self.step.add(self, node, FREED if is_copied else StorageWeakRef(x.untyped_storage()), size)


def _is_special() -> bool:
    """Tell whether this is no plain step: a transform or a trace, which hold all tensors, or a checkpoint."""
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    # a forward pass within a backward pass is a reentrant checkpoint's, which holds its input
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
