"""Triton's names of what it compiles for: "cuda" for NVIDIA's GPUs, "hip" for AMD's."""

import torch

from .interpreter import IS_INTERPRETED


def triton_backend() -> str:
    """Return what this torch's GPUs are compiled for: it is made either for NVIDIA's or for AMD's.

    Returns:
        "cuda" or "hip"; "cuda" for a torch that knows no GPU.
    """
    return "cuda" if torch.version.hip is None else "hip"


def compiled_backend() -> str | None:
    """Return the value of a kernel's constant BACKEND, for which ahead-of-time compilation takes the target's.

    Returns:
        `triton_backend()`, or None in Triton's interpreter, which compiles nothing.
    """
    return None if IS_INTERPRETED else triton_backend()
