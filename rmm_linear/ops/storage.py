"""Low-bit storage: values to codes, and back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import run
from rmm_linear.ops.registration import define
from rmm_linear_kernels.low_bit import cpu as _low_bit_on_cpu
from rmm_linear_kernels.low_bit import reference as _low_bit


class Codes(NamedTuple):
    """Values in low bits, and what it takes to read them.

    Attributes:
        codes: As `quantize` returns them, shape (rows, ceil(features * bits / 8)).
        steps: As `quantize` returns them, shape (groups, features).
        offsets: As `quantize` returns them.
        seed: The seed that `quantize` had.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
    """

    codes: Tensor
    steps: Tensor
    offsets: Tensor
    seed: Tensor
    kind: str
    group: int


@define("quantize(Tensor y, Tensor seed, Tensor? mean, str kind, int group) -> (Tensor, Tensor, Tensor)")
def _quantize(y: Tensor, seed: Tensor, mean: Tensor | None, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    twin, on_cpu = _low_bit.quantize, _low_bit_on_cpu.quantize
    return run("quantize", twin, y, seed, mean, kind=kind, group=group, on_cpu=on_cpu)


@torch.library.register_fake("rmm_linear::quantize")
def _(y: Tensor, seed: Tensor, mean: Tensor | None, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty_codes(y, y.shape[0], kind, group)


def empty_codes(y: Tensor, rows: int, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the codes of so many rows.

    Args:
        y: A tensor on the device, as wide as what is coded.
        rows: Number of rows; may be a SymInt.
        kind: As for `quantize`.
        group: As for `quantize`.
    """
    features = y.shape[-1]
    codes = y.new_empty((rows, _low_bit.packed_width(features, kind)), dtype=torch.uint8)
    steps = y.new_empty(((rows + group - 1) // group, features), dtype=_low_bit.SCALE_DTYPE)
    return codes, steps, steps.new_empty(0) if kind == _low_bit.FP8 else torch.empty_like(steps)


def quantize(y: Tensor, seed: Tensor, mean: Tensor | None, *, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round y - 1 mean^T to 8, 4, 3 or 2 bits an element, at random and without bias.

    Args:
        y: Shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows of a column that share a step and an offset.

    Returns:
        Codes (rows, ceil(features * bits / 8)), uint8; steps (groups, features) in bfloat16; offsets like the steps,
        (0,) for fp8.
    """
    return _quantize(y, seed, mean, kind, group)


@define(
    "dequantize(Tensor codes, Tensor steps, Tensor offsets, Tensor seed, str kind, int group, ScalarType? dtype)"
    " -> Tensor"
)
def _dequantize(
    codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, kind: str, group: int, dtype: torch.dtype | None
) -> Tensor:
    return decoded(Codes(codes, steps, offsets, seed, kind, group), dtype or torch.float32)


def decoded(stored: Codes, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for: a part of two operators.

    Args:
        stored: The codes, and what it takes to read them.
        dtype: Dtype of the result.

    Returns:
        Shape (rows, features).
    """
    codes, steps, offsets, seed, kind, group = stored
    options: dict[str, Any] = {"kind": kind, "group": group, "features": steps.shape[-1], "dtype": dtype}
    twin, on_cpu = _low_bit.dequantize, _low_bit_on_cpu.dequantize
    return run("dequantize", twin, codes, steps, offsets, seed, on_cpu=on_cpu, **options)


@torch.library.register_fake("rmm_linear::dequantize")
def _(
    codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, kind: str, group: int, dtype: torch.dtype | None
) -> Tensor:
    return steps.new_empty((codes.shape[0], steps.shape[1]), dtype=dtype or torch.float32)


def dequantize(
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    *,
    kind: str,
    group: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `quantize`'s codes stand for.

    Args:
        codes: As `quantize` returns them.
        steps: As `quantize` returns them.
        offsets: As `quantize` returns them.
        seed: 0-d int64, the seed that `quantize` had.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.
        dtype: Dtype of the result, float32 if None.

    Returns:
        Shape (rows, features).
    """
    return _dequantize(codes, steps, offsets, seed, kind, group, dtype)
