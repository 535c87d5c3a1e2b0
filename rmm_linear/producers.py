"""Does the operation that made a tensor keep it for its own backward pass? Then a layer keeps it too, exact and free.

ReLU, tanh and softmax have their gradient from their own output, and so does a fused attention. A sketch of such an
output frees nothing, since the output stays, and comes on top. So a layer whose input is one of these keeps the input
itself, as nn.Linear does: no memory, no noise, nothing to compute.

`grad_fn` is that operation, in eager mode and while AOTAutograd traces. Reading a node's saved tensor would run the
hooks of checkpoints and of offloading; the packed object, which they have put in its place, is read here.

A compiler chooses its saved tensors by itself. Where an output is needed it keeps that, and forms a sketch of it in the
backward pass, if it is given one: the same bytes, more noise, more work. Of ReLU's output it keeps a byte an element,
and there a sketch does pay.
"""

from typing import Any

import torch
from torch import Tensor

# The operations that keep their first output, by their autograd nodes, and what these call it.
KEEPS_OUTPUT = {
    "ReluBackward0": "result",
    # in place: their input is gone
    "LeakyReluBackward1": "result",
    # ELU, CELU and SELU
    "EluBackward1": "result",
    "CeluBackward1": "result",
    "ExpBackward0": "result",
    "LogSoftmaxBackward0": "result",
    "SigmoidBackward0": "result",
    "TanhBackward0": "result",
    "SoftmaxBackward0": "result",
    "ScaledDotProductFlashAttentionForCpuBackward0": "output",
    "ScaledDotProductFlashAttentionBackward0": "output",
    "ScaledDotProductEfficientAttentionBackward0": "output",
    "ScaledDotProductCudnnAttentionBackward0": "output",
    "ScaledDotProductFusedAttentionOverrideableBackward0": "output",
    "MkldnnRnnLayerBackward0": "result0",
    "CudnnRnnBackward0": "result0",
}
# Of these, those whose output a compiled graph does not need.
_NOT_IN_GRAPHS = frozenset({"ReluBackward0", "LeakyReluBackward1"})
# Operations whose output lies in the memory of their input.
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Slice")
    for number in range(3)
)


def is_free_to_keep(x: Tensor, dtype: torch.dtype, *, in_graph: bool = False) -> bool:
    """Tell whether a linear layer that computes in `dtype` can keep its input without a byte more than is kept anyway.

    True if the operation that made x keeps it, and the layer multiplies by the very memory, and not by a copy.
    `in_graph` tells that a compiler is tracing.
    """
    if x.dtype != dtype:
        return False
    producer = keeping_producer(x)
    return producer is not None and not (in_graph and producer in _NOT_IN_GRAPHS) and flattens_in_place(x)


def flattens_in_place(x: Tensor) -> bool:
    """Tell whether F.linear can view a tensor as (rows, features); it makes a copy otherwise, and keeps that."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    try:
        x.detach().view(-1, x.shape[-1])
    except (RuntimeError, ValueError):
        # fake tensors raise a ValueError
        return False
    return True


def keeping_producer(x: Tensor) -> str | None:
    """Return the autograd node, by name, that made a tensor (or its base) and keeps it; None if none is known to.

    Within a checkpoint that both are a part of, nothing is kept, and all of it is there in the second forward pass: the
    answer is the same in both. Where hooks on saved tensors have put something else in the tensor's place (a checkpoint
    that has ended, a copy on the CPU) there is none.
    """
    node: Any = x.grad_fn
    place = x.output_nr
    while node is not None and node.name() in _VIEWS:
        node, place = node.next_functions[0]
    output = None if node is None or place != 0 else KEEPS_OUTPUT.get(node.name())
    if output is None:
        return None
    saved = getattr(node, f"_raw_saved_{output}")
    if saved.unpack_hook is None:
        # None: a backward pass has freed it
        is_kept = saved.data is not None
    else:
        is_kept = _is_held(saved.data, x) or _is_of_this_checkpoint(saved)
    return node.name() if is_kept else None


def _is_held(packed: object, x: Tensor) -> bool:
    """Tell whether hooks on saved tensors have passed the tensor on, alone or in a tuple."""
    parts = packed if isinstance(packed, tuple) else (packed,)
    # others may have made it sparse, which lies in no one place
    dense = [part for part in parts if isinstance(part, Tensor) and part.layout == torch.strided]
    place = x.untyped_storage()._cdata
    return any(part.untyped_storage()._cdata == place for part in dense)


def _is_of_this_checkpoint(saved: Any) -> bool:
    current = torch._C._autograd._top_saved_tensors_default_hooks(False)
    is_checkpoint = type(saved.data).__module__ == "torch.utils.checkpoint"
    return is_checkpoint and current is not None and current[1] is saved.unpack_hook
