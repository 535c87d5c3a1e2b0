"""The instrument that peaks are measured with; it shares no code with the simulator.

Every op that torch dispatches is seen; the storages of what it returns are counted from then on until they are gone.
"""

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class MeasuredPeak(TorchDispatchMode):
    """Bytes of the storages made inside that are alive, and the most there were."""

    def __init__(self, *outside):
        super().__init__()
        self.outside = {tensor.untyped_storage()._cdata for tensor in pytree.tree_leaves(outside) if is_tensor(tensor)}
        self.alive = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look(result)
        return result

    def look(self, result=None):
        for memory, (reference, size) in list(self.alive.items()):
            if reference.expired():
                del self.alive[memory]
                self.now -= size
        for tensor in pytree.tree_leaves(result):
            if is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.outside and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)


def is_tensor(leaf):
    return isinstance(leaf, torch.Tensor)
