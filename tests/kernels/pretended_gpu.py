"""A GPU that is none, so that a machine without one shows what is compiled, launched and allocated for one.

    with pretended_gpu() as gpu:
        kernel[grid](...)          # on CPU tensors
    gpu.launches                   # which kernels, with which grids and arguments

Triton compiles as for a GPU, all of its host code runs, and at its end the launch is noted instead of made. Results are
garbage: nothing is computed, and what a kernel was to write stays as torch allocated it.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import max_shared_mem
from triton.runtime import driver

from rmm_linear.ops import dispatch
from rmm_linear_kernels import launching
from rmm_linear_kernels.interpreter import IS_INTERPRETED

_MOST_THREADS = 1024
# What triton calls a GPU, and the bytes of shared memory that one program may have there.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
# Below 0, so that nothing that Triton remembers of them by their number is ever taken for a real device's.
_numbers = itertools.count(-1, -1)
_handles = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch, as Triton's launcher got it.

    Attributes:
        kernel: Name of the kernel.
        handle: Of the compiled kernel: equal for launches of one and the same.
        grid: Programs along each axis.
        arguments: All of the kernel's, constants included.
        device: Number of the device.
    """

    kernel: str
    handle: int
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    device: int


@dataclass
class PretendedGPU:
    """What `pretended_gpu` gives.

    Attributes:
        launches: Those made so far. They keep their tensors; `launches.clear()` lets go of them.
        device: Number of the current device.
        hooks: Triton's hooks before and after launches, as the last launch was given them.
        told: What the last launch was given to tell them.
    """

    launches: list[Launch] = field(default_factory=list)
    device: int = field(default_factory=lambda: next(_numbers))
    hooks: tuple[Any, Any] = (None, None)
    told: Any = None

    def switch_device(self) -> int:
        """Make a device the current one that has not been in use.

        Returns:
            Its number, by which `device` can be set to it again.
        """
        self.device = next(_numbers)
        return self.device


class _Driver:
    """What Triton asks of its driver: enough of it to compile and to launch."""

    def __init__(self, gpu: PretendedGPU, target: str) -> None:
        self.gpu = gpu
        self.target, self.shared = TARGETS[target]
        self.utils = self
        self.kernels: dict[int, Any] = {}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        gpu, name = self.gpu, metadata.name
        self.kernels[id(source.fn)] = source.fn

        def launcher(
            x: int,
            y: int,
            z: int,
            stream: int,
            handle: int,
            packed: Any,
            told: Any,
            before: Any,
            after: Any,
            *arguments,
        ) -> None:
            gpu.hooks, gpu.told = (before, after), told
            gpu.launches.append(Launch(name, handle, (x, y, z), arguments, gpu.device))

        return launcher

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        # module, function, registers, spills, threads
        return 0, next(_handles), 0, 0, _MOST_THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared}

    def get_current_device(self) -> int:
        return self.gpu.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def pretended_gpu(target: str = "sm_90") -> Iterator[PretendedGPU]:
    """Let Triton's kernels be launched on CPU tensors, and note the launches. They compute nothing.

    Args:
        target: The GPU that is compiled for, a key of `TARGETS`.

    Raises:
        RuntimeError: Under TRITON_INTERPRET, where nothing is compiled.
    """
    if IS_INTERPRETED:
        raise RuntimeError("Triton's interpreter launches nothing: unset TRITON_INTERPRET")
    pretended = _Driver(PretendedGPU(), target)
    # the attribute: asking for the driver by its property would look for a GPU
    before = driver._active
    launching.forget()
    driver.set_active(pretended)
    try:
        yield pretended.gpu
    finally:
        driver.set_active(before)
        launching.forget()
        max_shared_mem.cache_clear()
        for kernel in pretended.kernels.values():
            for device in [number for number in kernel.device_caches if number < 0]:
                for compiled in kernel.device_caches.pop(device)[0].values():
                    # there is nothing that a GPU could unload
                    compiled.module = None


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[PretendedGPU]:
    """Let layers on CPU tensors go the ways of half precision on a GPU, float32 as well. What they return is garbage.

    They go the ways of large inputs, whatever the size: a kernel for each thing to do, and the product of the sketches
    by cuBLAS. In float32 they may not have a storage, for which there is another kernel in half precision.
    """
    patches = {
        "rmm_linear.ops.is_for_kernels": lambda g: True,
        "rmm_linear.ops.dispatch.is_for_kernels": lambda g: True,
        "rmm_linear.ops.grad_weight.is_for_kernels": lambda g: True,
        "rmm_linear.ops.dispatch._reason_against": lambda name, x: None,
        "rmm_linear.ops.grad_weight.HALVES": (torch.float32, torch.bfloat16),
        "rmm_linear.ops.grad_weight._is_one_launch": lambda *operands: False,
        "rmm_linear_kernels.sketched_grad_weight.reference.has_half_precision_product": lambda g, dtype: True,
    }
    for way in ("input", "gradient"):
        patches[f"rmm_linear_kernels.hadamard_at_once.reference.holds_{way}"] = lambda *sizes: False
    with pretended_gpu() as gpu, contextlib.ExitStack() as stack:
        # graphs of these ways are not to be found by who goes the ways of a CPU, nor the other way round
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        for place, value in patches.items():
            stack.enter_context(mock.patch(place, value))
        # after all else, and before it is as it was
        dispatch.forget_launches()
        stack.callback(dispatch.forget_launches)
        yield gpu
