"""A GPU that is none, so that a machine without one tells what the host does for a launch, and how long that takes.

    with pretended_gpu() as gpu:
        kernel[grid](...)          # on CPU tensors
    gpu.launches                   # which kernels, with which grids and arguments

Triton compiles as for a GPU, all of its host code runs, and at its end the launch is noted instead of made. RESULTS ARE
GARBAGE: nothing is computed, and what a kernel was to write stays as torch allocated it.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import max_shared_mem
from triton.runtime import driver

from rmm_linear_kernels import launching
from rmm_linear_kernels.ahead_of_time import TARGETS, Target
from rmm_linear_kernels.interpreter import IS_INTERPRETED

_MOST_THREADS = 1024
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
        is_noting: False to note no launches, for what measures time.
        device: Number of the current device.
        hooks: Triton's hooks before and after launches, as the last launch was given them.
        told: What the last launch was given to tell them.
    """

    launches: list[Launch] = field(default_factory=list)
    is_noting: bool = True
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

    def __init__(self, gpu: PretendedGPU, target: Target) -> None:
        self.gpu = gpu
        self.target = target
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
            if gpu.is_noting:
                gpu.launches.append(Launch(name, handle, (x, y, z), arguments, gpu.device))

        return launcher

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        # module, function, registers, spills, threads
        return 0, next(_handles), 0, 0, _MOST_THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.target.shared_of_block}

    def get_current_device(self) -> int:
        return self.gpu.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(*self.target.triton_name)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def pretended_gpu(target: str = "sm_90") -> Iterator[PretendedGPU]:
    """Let Triton's kernels be launched on CPU tensors, and note the launches. They compute nothing.

    Args:
        target: The GPU that is compiled for, a key of `rmm_linear_kernels.ahead_of_time.TARGETS`.

    Raises:
        RuntimeError: Under TRITON_INTERPRET, where nothing is compiled.
    """
    if IS_INTERPRETED:
        raise RuntimeError("Triton's interpreter launches nothing: unset TRITON_INTERPRET")
    pretended = _Driver(PretendedGPU(), TARGETS[target])
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
