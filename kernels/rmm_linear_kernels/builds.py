"""What ships: each `kernel.py` lists the specialisations of its kernels that a training run would compile.

The lists serve ahead-of-time compilation, which needs no GPU: registers, spills and the instructions that were chosen
are known before anything runs (`kernels/benchmarks/resources.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# How triton writes the dtypes.
TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Build:
    """One specialisation of one kernel.

    Attributes:
        name: What it is for, unique, such as "hadamard_sketch bf16 p=32".
        kernel: The `triton.jit` function.
        types: Type of each argument that is no constant, as triton writes it: "*bf16", "i32", "fp32".
        constants: Value of each `tl.constexpr` argument, and of those that are 1 or None. BACKEND, where it is not
            None, is compiled as the target's.
        divisible: Arguments that are multiples of 16 (pointers, most often strides and sizes).
        num_warps: Warps of a program.
        num_stages: Stages of software pipelining.
        uses_tensor_cores: Whether matrix instructions have to be found in what is compiled.
        backends: Triton's names of those that it ships for: "cuda" for NVIDIA's GPUs, "hip" for AMD's.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = field(default=())
    num_warps: int = 4
    num_stages: int = 1
    uses_tensor_cores: bool = False
    backends: tuple[str, ...] = ("cuda", "hip")
