"""Which implementation an operator runs: a Triton kernel, or its twin in plain torch.

"auto" takes the kernels on a GPU that they were made for, and the twins everywhere else. Where a kernel cannot be
compiled or started, one warning says so, and its twin computes the same from then on. `use_kernels`, or the environment
variable RMM_LINEAR_KERNELS, force either.

A CPU has ways of its own for what draws random numbers, as its own generator is many times faster than Philox in plain
torch. Which S belongs to a seed does not depend on what is chosen: a forward and a backward pass may differ in that.
"""

import importlib
import math
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rmm_linear_kernels.interpreter import IS_INTERPRETED

ENVIRONMENT = "RMM_LINEAR_KERNELS"
CHOICES = ("auto", "triton", "torch")
# Kernel -> the folder of `rmm_linear_kernels` whose kernel.py has it.
KERNELS = {
    "hadamard_sketch": "hadamard_sketch",
    "hadamard_sketch_and_mean": "hadamard_sketch",
    "hadamard_sketch_and_sums": "hadamard_sketch",
    "hadamard_sketch_quantized": "hadamard_sketch_quantized",
    "sketch_and_mean_at_once": "hadamard_at_once",
    "grad_weight_at_once": "hadamard_at_once",
    "random_projection": "random_projection",
    "quantize": "low_bit",
    "dequantize": "low_bit",
    "quantize_and_mean": "quantize_and_mean",
    "outer_product_of_sums": "sketched_grad_weight",
    "sketched_grad_weight": "sketched_grad_weight",
    "sketched_grad_weight_low_bit": "sketched_grad_weight",
}
# Triton's interpreter compares kernels with their references, on tensors of a CPU that draws as these do.
STANDS_IN_FOR_GPU = IS_INTERPRETED
# Those that take x in runs.
_READING_RUNS = (
    "hadamard_sketch",
    "hadamard_sketch_and_mean",
    "hadamard_sketch_and_sums",
    "hadamard_sketch_quantized",
    "sketch_and_mean_at_once",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
HALVES = (torch.bfloat16, torch.float16)
# Distinct launches that are remembered, and numbers of rows whose factors are: batches of sentences have another number
# of them each.
MOST_REMEMBERED = 4096
# bfloat16 on the tensor cores
_LEAST_CAPABILITY = (8, 0)


class _State:
    """What was asked for, and what was found out while running."""

    def __init__(self, choice: str) -> None:
        self.choice = choice
        # (kernel, dtype, device) -> why its twin runs instead
        self.broken: dict[tuple[str, torch.dtype, torch.device], str] = {}
        self.warned: set[str] = set()
        # what decides on a launch -> the launch, of kernels that have run as things are
        self.settled: dict[tuple[Any, ...], Callable[..., list[Any]]] = {}


def _checked(choice: str, source: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{source}={choice!r} is none of {', '.join(CHOICES)}")
    return choice


_state = _State(_checked(os.environ.get(ENVIRONMENT) or "auto", ENVIRONMENT))


class use_kernels:  # noqa: N801  a function to its users, as torch.set_grad_enabled is
    """Choose between the Triton kernels and plain torch, from now on or within a `with` block, in all threads.

    Example:
        >>> import rmm_linear
        >>> with rmm_linear.use_kernels("torch"):
        ...     pass  # forward and backward passes in here run without Triton

    Args:
        choice: "auto" for kernels where they run and cuBLAS for the product of two sketches; "torch" for plain torch
            everywhere; "triton" for kernels, that of the product as well, or an error. What has no kernel (float64, the
            trigonometric sketches) runs in plain torch whatever is chosen.

    Raises:
        ValueError: If it is none of these.
    """

    def __init__(self, choice: str) -> None:
        self._before = _state.choice
        _choose(_checked(choice, "choice"))

    def __enter__(self) -> None:
        """Nothing is left to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Go back to what was chosen before."""
        _choose(self._before)


def _choose(choice: str) -> None:
    _state.choice = choice
    # who is about to write into the old one has begun before
    _state.settled = {}


def forget_launches() -> None:
    """Forget what `run_settled` finds, for whoever replaces a part of what it skips: no training run has to."""
    _state.settled = {}


def run_settled(key: tuple[Any, ...], x: Tensor, *others: Tensor | None) -> list[Any] | None:
    """Launch a kernel that has been launched before, all that `run` does for it being settled by a key.

    Of the host's time of a step on a small input, most goes to what Python does between the operator and the launch.

    Args:
        key: All that decides on the launch, and so on the results' shapes and dtypes, but for what is chosen: the
            operator, `x`'s device, dtypes, shapes, strides, options. `run` was given the same. The other tensors are on
            `x`'s device.
        x: First tensor that the kernel reads.
        *others: The others, or None.

    Returns:
        What the kernel writes; None if it has to be run by `run`.

    Raises:
        OutOfMemoryError: If there is no memory for that.
    """
    launch = _state.settled.get(key)
    if launch is None or (x.is_cuda and x.get_device() != torch.cuda.current_device()):
        return None
    try:
        return launch(x, *others)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of any kind, and told by `run`
        _state.settled.pop(key, None)
        return None


def product_dtype(dtype: torch.dtype, half: bool) -> torch.dtype:
    """Return the dtype of a sketch of g that goes into the product with the sketch of x.

    Args:
        dtype: Dtype of the gradient.
        half: Whether half precision stays what it is.

    Returns:
        float64 for float64; otherwise float32, or the gradient's half precision if wanted.
    """
    if half and dtype in HALVES:
        return dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_scale(dtype: torch.dtype, ratio: float) -> float:
    """Return the factor that a sketch of g in this dtype lacks.

    The sketch of g over the storage scale has the size of g over the ratio, so that float16 would overflow where the
    elements of g do not. Over the factor it is between half of g's size and all of it: neither end of the range is
    lost.

    Args:
        dtype: A value of `product_dtype`.
        ratio: Rows kept over rows.

    Returns:
        The largest power of 2 up to 2 / ratio for float16, and 1 for all others.
    """
    return 2.0 ** math.floor(math.log2(2 / ratio)) if dtype == torch.float16 else 1.0


def near_power_of_2(number: float) -> float:
    """Return the power of 2 next to a number, in proportion.

    Args:
        number: More than 0.

    Returns:
        Between `number` / sqrt(2) and `number` * sqrt(2).
    """
    return 2.0 ** round(math.log2(number))


@lru_cache
def odd_factor(divisor: int) -> float:
    """Return what is left of a division when the power of 2 next to the divisor has been divided by.

    A half-precision operand of the product is divided by that power alone, which is exact. The other part of the factor
    would round all of its elements by up to 2**-9, and the combinations of a row that is alone in its block all alike,
    so that the error would not average out: it is the product's, in float32.

    Args:
        divisor: More than 0.

    Returns:
        The power of 2 over the divisor.
    """
    return near_power_of_2(divisor) / divisor


def reads_runs(x: Tensor) -> bool:
    """Tell whether kernels sketch a tensor that comes in runs, as far as is known before they have run.

    Args:
        x: The tensor.

    Returns:
        False where a twin does, which would put the rows in order for itself; and for subclasses of tensors.
    """
    return type(x) is Tensor and all(_reason_against(name, x) is None for name in _READING_RUNS)


def is_for_kernels(g: Tensor) -> bool:
    """Tell whether a backward pass takes the ways that are made for GPUs. Simple enough to be traced by a compiler.

    Args:
        g: The gradient.

    Returns:
        True on a GPU, also where a twin will run; and where Triton's interpreter is at work.
    """
    return g.is_cuda or (IS_INTERPRETED and _state.choice == "triton")


def is_on_cpu(x: Tensor) -> bool:
    """Tell whether a CPU works for itself, with its own random numbers, and does not stand in for a GPU.

    Args:
        x: What is sketched, its gradient, or a seed.

    Returns:
        False in a process of Triton's interpreter, which compares kernels with their references.
    """
    return x.is_cpu and not STANDS_IN_FOR_GPU and not is_for_kernels(x)


def wants_half(g: Tensor) -> bool:
    """Tell whether the weight gradient is formed by a half-precision product: on a GPU, for half-precision gradients.

    Args:
        g: The gradient.

    Returns:
        Always false on a CPU, where float32 products are as fast.
    """
    return g.dtype in HALVES and is_for_kernels(g)


def run(
    name: str,
    twin: Callable[..., Any],
    x: Tensor,
    *args: Any,
    key: tuple[Any, ...] | None = None,
    on_cpu: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Run a kernel where it can run, and its twin where it cannot or fails.

    Args:
        name: A key of `KERNELS`.
        twin: The same in plain torch.
        x: First argument of both, whose device and dtype decide.
        *args: More arguments.
        key: By which `run_settled` is to find the launch from now on, if a kernel runs that has one launch to prepare.
        on_cpu: What runs in the place of the twin where `is_on_cpu`; None for the twin.
        **kwargs: More arguments.

    Raises:
        ValueError: If Triton is forced, and cannot run.
        OutOfMemoryError: If the kernel finds no memory: no fault of its own.
    """
    if on_cpu is not None and _state.choice != "triton" and is_on_cpu(x):
        return on_cpu(x, *args, **kwargs)
    settled = _state.settled
    reason = _reason_against(name, x)
    if reason is None:
        try:
            kernel = _loaded(name)
            if x.is_cuda and x.device.index != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    return kernel(x, *args, **kwargs)
            found = kernel(x, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no driver, a chip that Triton does not know: all have their own
            if _state.choice == "triton":
                raise
            return _instead(name, error, twin, x, *args, **kwargs)
        prepare = getattr(kernel, "prepared", None)
        if key is not None and prepare is not None and (launch := prepare(x, *args, **kwargs)) is not None:
            if len(settled) >= MOST_REMEMBERED:
                settled.clear()
            settled[key] = launch
        return found
    if x.dtype in _DTYPES:
        if _state.choice == "triton":
            raise ValueError(
                f"the Triton kernel of {name} is asked for and cannot run: {reason}; use_kernels('auto') takes plain"
                " torch"
            )
        if x.is_cuda and _state.choice == "auto":
            _warn(reason)
    if on_cpu is not None and is_on_cpu(x):
        return on_cpu(x, *args, **kwargs)
    return twin(x, *args, **kwargs)


def _reason_against(name: str, x: Tensor) -> str | None:
    if _state.choice == "torch":
        return "plain torch is asked for"
    if x.dtype not in _DTYPES:
        return f"there is no kernel for {x.dtype}"
    if _state.broken and (name, x.dtype, x.device) in _state.broken:
        return _state.broken[name, x.dtype, x.device]
    if x.is_cuda:
        return unusable(x.device.index or 0)
    if IS_INTERPRETED and _state.choice == "triton" and x.device.type == "cpu":
        return None
    return f"the tensors are on {x.device.type}, and the kernels are for GPUs"


@lru_cache
def unusable(device: int) -> str | None:
    """Return why no Triton kernel can run on a GPU.

    Returns:
        A reason for people, None if there is none.
    """
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation may raise anything
        return f"triton cannot be imported ({error}); pip install 'rmm-linear[kernels]'"
    if torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return None


def _instead(name: str, error: Exception, twin: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the twin of a kernel that has failed, now and from now on."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the Triton kernel of {name} failed while a CUDA graph was captured; run a step before the capture, so"
            " that kernels are compiled and loaded"
        ) from error
    # Before the verdict: the caller's mistakes, and what has broken the GPU itself, are raised from the twin.
    found = twin(x, *args, **kwargs)
    reason = f"the Triton kernel of {name} failed for {x.dtype} ({type(error).__name__}: {error})"
    # what is broken is most often all of Triton, which each kernel finds out by itself
    if not _state.broken:
        _warn(f"{reason}; of others that fail, nothing is said")
    _state.broken[name, x.dtype, x.device] = reason
    _state.settled = {}
    _state.warned.add(reason)
    return found


@lru_cache
def _loaded(name: str) -> Callable[..., Any]:
    """The kernel's launcher: triton is imported when it first runs."""
    return getattr(importlib.import_module(f"rmm_linear_kernels.{KERNELS[name]}.kernel"), name)


def _warn(reason: str) -> None:
    if reason not in _state.warned:
        _state.warned.add(reason)
        warnings.warn(
            f"rmm_linear runs in plain torch, right but slower: {reason}. `rmm-linear doctor` tells more;"
            f" {ENVIRONMENT}=torch silences this",
            RuntimeWarning,
            stacklevel=4,
        )


def kernel_status(device: torch.device) -> dict[str, str | None]:
    """Return which kernels run on a device, as far as is known before they have run.

    Args:
        device: The device.

    Returns:
        Kernel -> why its twin runs instead; None if the kernel runs.
    """
    x = torch.empty(0, dtype=torch.bfloat16, device=device)
    return {name: _reason_against(name, x) for name in KERNELS}


def chosen() -> str:
    """Return what `use_kernels` or the environment chose.

    Returns:
        "auto", "triton" or "torch".
    """
    return _state.choice
