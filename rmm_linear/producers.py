"""Tell whether the operation that made a tensor saves it for its own backward pass: a layer then keeps the tensor too.

ReLU, tanh, softmax and fused attentions compute their gradient from their output, which they save. A sketch of such an
output frees no bytes and adds its own. So a layer whose input is such an output keeps the input itself, as nn.Linear
does: without more memory, noise or computation.

`grad_fn` is that operation, in eager mode and while AOTAutograd traces. Reading a node's saved tensor would run the
hooks of checkpoints and of offloading; this module reads the packed object that the hooks stored.

A compiler chooses its saved tensors by itself. If the backward pass needs an output, the compiler saves the output and
forms the sketch, if there is one, in the backward pass: with the same bytes, more noise and more work. Of ReLU's output
it saves one byte an element, so that a sketch does pay.
"""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.torch_private import innermost_saved_tensors_hooks

# Autograd nodes of the operations that save their first output -> the node's name for the output.
KEEPS_OUTPUT = {
    "ReluBackward0": "result",
    # the in-place leaky_relu_, whose input is overwritten
    "LeakyReluBackward1": "result",
    # the in-place elu_, celu_ and selu_
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
# Nodes of KEEPS_OUTPUT whose output a compiled graph does not save.
_NOT_IN_GRAPHS = frozenset({"ReluBackward0", "LeakyReluBackward1"})
# Operations whose output lies in the memory of their input.
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Slice")
    for number in range(3)
)


def is_free_to_keep(x: Tensor, dtype: torch.dtype, *, in_graph: bool = False) -> bool:
    """Tell whether a linear layer that computes in `dtype` can keep its input without further bytes.

    True if the operation that made x saves x, and the layer multiplies by x itself, not by a copy. `in_graph` is True
    while a compiler traces.
    """
    if x.dtype != dtype:
        return False
    producer = keeping_producer(x)
    return producer is not None and not (in_graph and producer in _NOT_IN_GRAPHS) and flattens_in_place(x)


def flattens_in_place(x: Tensor) -> bool:
    """Tell whether F.linear can view a tensor as (rows, features); otherwise F.linear copies, and saves the copy."""
    if x.dim() <= 2 or x.is_contiguous():
        return True
    try:
        x.detach().view(-1, x.shape[-1])
    except (RuntimeError, ValueError):
        # fake tensors raise a ValueError
        return False
    return True


def keeping_producer(x: Tensor) -> str | None:
    """Return the name of the autograd node that made a tensor (or its base) and saves it; None if there is none.

    If the node and the layer lie in one checkpoint, its first forward pass saves no tensors and its second all: the
    answer is the same in both. If saved-tensor hooks have stored another object (of a checkpoint that has ended, or a
    copy on the CPU), the answer is None.
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
        # None if a backward pass has freed the tensor
        is_kept = saved.data is not None
    else:
        is_kept = _is_held(saved.data, x) or _is_of_this_checkpoint(saved)
    return node.name() if is_kept else None


def _is_held(packed: object, x: Tensor) -> bool:
    """Tell whether saved-tensor hooks have packed the tensor itself, alone or in a tuple."""
    parts = packed if isinstance(packed, tuple) else (packed,)
    # other hooks may have packed a sparse tensor, which has several storages
    dense = [part for part in parts if isinstance(part, Tensor) and part.layout == torch.strided]
    place = x.untyped_storage()._cdata
    return any(part.untyped_storage()._cdata == place for part in dense)


def _is_of_this_checkpoint(saved: Any) -> bool:
    current = innermost_saved_tensors_hooks()
    is_checkpoint = type(saved.data).__module__ == "torch.utils.checkpoint"
    return is_checkpoint and current is not None and current[1] is saved.unpack_hook
