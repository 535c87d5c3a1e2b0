"""Triton or plain torch: the only module that imports the kernels.

"auto" runs the Triton kernels on GPUs that support them, and their plain-torch references everywhere else. If a kernel
cannot be compiled or started, one warning says so, and the reference computes the same result from then on.
`use_kernels`, or the environment variable RMM_LINEAR_KERNELS, forces either. S depends on the seed and the kind of
device alone, so that a forward pass may run kernels and its backward pass plain torch.

Autocast is off in all of these functions: an autocast region around a call must not lower the float32 sums.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# "as" with the same name marks a re-export
from rmm_linear_kernels import random as random
from rmm_linear_kernels.hadamard.reference import hadamard_dense as hadamard_dense
from rmm_linear_kernels.hadamard.reference import hadamard_order as hadamard_order
from rmm_linear_kernels.interpreter import IS_INTERPRETED as IS_INTERPRETED
from rmm_linear_kernels.low_bit import cpu as _low_bit_on_cpu
from rmm_linear_kernels.low_bit import reference as _low_bit
from rmm_linear_kernels.low_bit.reference import SCALE_DTYPE as SCALE_DTYPE
from rmm_linear_kernels.low_bit.reference import packed_width as packed_width
from rmm_linear_kernels.low_bit.reference import rounding_variance as rounding_variance
from rmm_linear_kernels.projection import reference as _projection
from rmm_linear_kernels.projection.reference import projection_dense as projection_dense

ENVIRONMENT = "RMM_LINEAR_KERNELS"
STORAGE_BITS = _low_bit.BITS
CHOICES = ("auto", "triton", "torch")
# Kernel -> its folder of `rmm_linear_kernels`: kernel.py has the launcher, reference.py the reference.
KERNELS = {
    "hadamard_sketch": "hadamard",
    "random_projection": "projection",
    "quantize": "low_bit",
    "dequantize": "low_bit",
}
KERNELS_FOLDER = Path(random.__file__).parent
_REFERENCES: dict[str, Callable[..., Any]] = {
    name: getattr(importlib.import_module(f"rmm_linear_kernels.{folder}.reference"), name)
    for name, folder in KERNELS.items()
}
_ON_CPU = {name: getattr(_low_bit_on_cpu, name) for name in ("quantize", "dequantize")}
HALVES = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, *HALVES, torch.uint8)
# the first compute capability with bfloat16 tensor cores
_LEAST_CAPABILITY = (8, 0)


class _State:
    """The choice of `use_kernels`, and the kernels that have failed."""

    def __init__(self, choice: str) -> None:
        self.choice = choice
        # (kernel, dtype, device) -> why its reference runs instead
        self.broken: dict[tuple[str, torch.dtype, torch.device], str] = {}
        self.warned: set[str] = set()


def _checked(choice: str, source: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{source}={choice!r} is none of {', '.join(CHOICES)}")
    return choice


_state = _State(_checked(os.environ.get(ENVIRONMENT) or "auto", ENVIRONMENT))


class use_kernels:  # noqa: N801  called like a function, as torch.set_grad_enabled is
    """Choose between the Triton kernels and plain torch, from now on or within a `with` block, in all threads.

    Examples:
        >>> import rmm_linear
        >>> with rmm_linear.use_kernels("torch"):
        ...     pass  # forward and backward passes in here run without Triton

    Args:
        choice: "auto" for kernels where the device supports them; "torch" for plain torch everywhere; "triton" for
            kernels, or an error. float64, and sketches that have no kernel, run in plain torch in any case.

    Raises:
        ValueError: If `choice` is none of these.
    """

    def __init__(self, choice: str) -> None:
        self._before = _state.choice
        _state.choice = _checked(choice, "choice")

    def __enter__(self) -> None:
        """Do nothing: `__init__` has made the choice."""

    def __exit__(self, *error: object) -> None:
        _state.choice = self._before


def chosen() -> str:
    """Return the choice of `use_kernels` or of the environment: "auto", "triton" or "torch"."""
    return _state.choice


def kernel_status(device: torch.device) -> dict[str, str | None]:
    """Return for each kernel the reason why its reference runs on a device; None if no reason is known."""
    x = torch.empty(0, dtype=torch.bfloat16, device=device)
    return {name: _reason_against(name, x) for name in KERNELS}


def _reason_against(name: str, x: Tensor) -> str | None:
    if _state.choice == "torch":
        return "plain torch is asked for"
    if x.dtype not in _DTYPES:
        return f"there is no kernel for {x.dtype}"
    if (name, x.dtype, x.device) in _state.broken:
        return _state.broken[name, x.dtype, x.device]
    if x.is_cuda:
        return _unusable(x.device.index or 0)
    if IS_INTERPRETED and _state.choice == "triton" and x.device.type == "cpu":
        return None
    return f"the tensors are on {x.device.type}, and the kernels are for GPUs"


@lru_cache
def _unusable(device: int) -> str | None:
    """The reason why no Triton kernel can run on a GPU; None if kernels can run."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation may raise anything
        return f"triton cannot be imported ({error}); pip install 'rmm-linear[kernels]'"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and the"
            " kernels need an NVIDIA GPU of 8.0 or more"
        )
    return None


def run(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel if the device and the dtype of x have it, and its reference if not, or if the kernel fails.

    `name` is a key of `KERNELS`, and the arguments are the reference's.

    Raises:
        ValueError: If Triton is forced, and cannot run.
        RuntimeError: If a kernel fails while a CUDA graph is captured.
        OutOfMemoryError: If the GPU is out of memory; the kernel is not marked as broken then.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(device_type=x.device.type, enabled=False):
            return run(name, x, *args, **kwargs)
    reference = _REFERENCES[name]
    if x.is_cpu and not random.STANDS_IN_FOR_GPU:
        reference = _ON_CPU.get(name, reference)
    if x.is_cpu and _state.choice != "triton":
        return reference(x, *args, **kwargs)
    reason = _reason_against(name, x)
    if reason is None:
        try:
            launch = _launcher(name)
            if x.is_cuda and x.device.index != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    return launch(x, *args, **kwargs)
            return launch(x, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a missing compiler, a missing driver, an unknown chip: each raises its own class
            if _state.choice == "triton":
                raise
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the Triton kernel of {name} failed while a CUDA graph was captured; run a step before the"
                    " capture, so that kernels are compiled and loaded"
                ) from error
            reason = f"the Triton kernel of {name} failed for {x.dtype} ({type(error).__name__}: {error})"
        # Before the kernel is marked as broken: bad arguments and a failing GPU raise in the reference too.
        found = reference(x, *args, **kwargs)
        # one warning for all kernels: most often Triton itself is broken, and each kernel fails in turn
        if not _state.broken:
            _warn(f"{reason}; no further failures are reported")
        _state.broken[name, x.dtype, x.device] = reason
        _state.warned.add(reason)
        return found
    if x.dtype in _DTYPES:
        if _state.choice == "triton":
            raise ValueError(
                f"the Triton kernel of {name} is asked for and cannot run: {reason}; use_kernels('auto') falls back to"
                " plain torch"
            )
        if x.is_cuda and _state.choice == "auto":
            _warn(reason)
    return reference(x, *args, **kwargs)


def _launcher(name: str) -> Callable[..., Any]:
    # triton is imported when a kernel first runs
    return getattr(importlib.import_module(f"rmm_linear_kernels.{KERNELS[name]}.kernel"), name)


def _warn(reason: str) -> None:
    if reason not in _state.warned:
        _state.warned.add(reason)
        warnings.warn(
            f"rmm_linear runs in plain torch, right but slower: {reason}. `rmm-linear doctor` tells more;"
            f" {ENVIRONMENT}=torch silences this warning",
            RuntimeWarning,
            stacklevel=3,
        )


def projected_grad_weight(g: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the weight's gradient of a dense projection by the cheaper order of products, in plain torch.

    None where the sketch of g has a kernel. `rmm_linear_kernels.projection.reference` has the arguments.
    """
    if not g.is_meta and torch.is_autocast_enabled(g.device.type):
        with torch.autocast(device_type=g.device.type, enabled=False):
            return projected_grad_weight(g, *args, **kwargs)
    if _reason_against("random_projection", g) is None:
        return None
    return _projection.projected_grad_weight(g, *args, **kwargs)


def product_dtype(g: Tensor) -> torch.dtype:
    """Return the dtype in which the two sketches are multiplied: on a GPU the dtype of g.

    On a CPU, half precision becomes float32, whose products are as fast there.
    """
    if g.dtype in HALVES and g.is_cuda:
        return g.dtype
    return torch.float64 if g.dtype == torch.float64 else torch.float32


def estimate(sketched_g: Tensor, sketched_x: Tensor, dtype: torch.dtype, headroom: float = 1.0) -> Tensor:
    """Return (S^T g)^T (S^T x), shape (out, in), with sums in float32 or float64.

    S^T g over the storage scale is (rank, out), S^T x times the scale (rank, in); the factors have `dtype`, given by
    `product_dtype`. A float16 S^T g is divided by `headroom`, a power of 2, before the product: its elements are about
    `headroom` times as large as those of g.
    """
    if not sketched_g.is_meta and torch.is_autocast_enabled(sketched_g.device.type):
        with torch.autocast(device_type=sketched_g.device.type, enabled=False):
            return estimate(sketched_g, sketched_x, dtype, headroom)
    if dtype not in HALVES:
        return torch.mm(sketched_g.t().to(dtype), sketched_x.to(dtype))
    if dtype == torch.bfloat16:
        headroom = 1.0
    half = sketched_g.mul(1 / headroom).to(dtype) if headroom != 1 else sketched_g.to(dtype)
    # cuBLAS sums in float32 without float32 copies of the sketches
    product = torch.mm(half.t(), sketched_x.to(dtype), out_dtype=torch.float32)
    return product.mul_(headroom) if headroom != 1 else product
