"""The product of the two sketches: the weight gradient."""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import HALVES, chosen, is_for_kernels, odd_factor, product_scale, run, wants_half
from rmm_linear.ops.registration import define
from rmm_linear.ops.storage import Codes
from rmm_linear_kernels.low_bit import reference as _low_bit
from rmm_linear_kernels.sketched_grad_weight import reference as _grad_weight

# The kernel that reads codes: rows and columns of a tile of the product, and the columns of a step through the rank.
_TILE = 64
# Tiles one below the other that decode the same codes: more of them cost more than a decoded copy in memory does.
_MOST_DECODINGS = 4
# Programs that fill a large GPU; each goes through all of the rank.
_MANY_PROGRAMS = 128
# A rank that a single program is through with by the time that a second kernel has been launched.
_SHORT_RANK = 512


def _shifted(mean: Tensor | None, stored: Tensor, ones: Tensor | None) -> Tensor | None:
    """Mean - stored^T ones, in the dtype of the mean."""
    if mean is None or ones is None:
        return mean
    if stored.is_cuda and stored.dtype in HALVES and mean.dtype == torch.float32:
        # No float32 copy of what is stored: the shift is small next to the noise of the sketch, its rounding smaller
        # by 2**-9 again. Times the rank, the ones are about as large as 1, and no float16 of them vanishes.
        rank = max(1, stored.shape[0])
        scaled = (ones * rank).to(stored.dtype).unsqueeze(0)
        return mean - torch.mm(scaled, stored, out_dtype=torch.float32).squeeze(0) / rank
    return mean - torch.mv(stored.to(mean.dtype).t(), ones.to(mean.dtype))


@define(
    "sketched_grad_weight(Tensor sketched_g, Tensor sketched_x, Tensor? column_sum, Tensor? mean, Tensor? ones,"
    " float scale, ScalarType? dtype, SymInt divisor=1) -> Tensor"
)
def _sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    ones: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    divisor: int = 1,
) -> Tensor:
    scale *= odd_factor(divisor)
    operands = sketched_g, sketched_x, column_sum, _shifted(mean, sketched_x, ones)
    # cuBLAS is the faster one until a measurement says otherwise: Triton's runs where it is asked for
    if chosen() == "triton" and sketched_g.dtype in HALVES and sketched_x.dtype == sketched_g.dtype:
        return run("sketched_grad_weight", _grad_weight.sketched_grad_weight, *operands, scale=scale, dtype=dtype)
    return _grad_weight.sketched_grad_weight(*operands, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::sketched_grad_weight")
def _(
    sketched_g: Tensor,
    sketched_x: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    ones: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    divisor: int = 1,
) -> Tensor:
    return sketched_g.new_empty((sketched_g.shape[1], sketched_x.shape[1]), dtype=dtype)


def reads_codes(rank: int, out: int, in_features: int, kind: str) -> bool:
    """Tell whether the product is formed straight from codes, on a GPU that chooses for itself.

    The kernel that does so spares the copy that `dequantize` writes and the product reads, and a launch; each of its
    tiles decodes for itself. By the instructions that a decoding takes and the bytes that a copy moves, it should be
    the faster one up to some four tiles of 64 rows of the result, if there are programs enough to fill a GPU, or
    little to do for each. This is an estimate without a measurement: `kernels/benchmarks/each_kernel.py` compares the
    two.

    Args:
        rank: Rows of both sketches.
        out: Rows of the result.
        in_features: Columns of the result.
        kind: "int8", "int4", "int3", "int2" or "fp8".

    Returns:
        True for few rows of the result, in kinds that the kernel decodes: all but int3.
    """
    bits = _low_bit.BITS[kind]
    decodings = -(-out // _TILE)
    is_busy = decodings * -(-in_features // _TILE) >= _MANY_PROGRAMS or rank <= _SHORT_RANK
    return bits & (bits - 1) == 0 and decodings <= _MOST_DECODINGS and is_busy


@define(
    "sketched_grad_weight_low_bit(Tensor sketched_g, Tensor codes, Tensor steps, Tensor offsets, Tensor seed,"
    " Tensor? column_sum, Tensor? mean, Tensor? ones, str kind, int group, float scale, ScalarType? dtype,"
    " SymInt divisor=1) -> Tensor"
)
def _sketched_grad_weight_low_bit(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    ones: Tensor | None,
    kind: str,
    group: int,
    scale: float,
    dtype: torch.dtype | None,
    divisor: int = 1,
) -> Tensor:
    stored = codes, steps, offsets, seed
    (rank, out), features = sketched_g.shape, steps.shape[-1]
    # S^T 1 is decoded for as well: one tile more
    decoded = out if ones is None else out + _TILE
    is_chosen = is_for_kernels(sketched_g) and chosen() == "auto" and reads_codes(rank, decoded, features, kind)
    # int3's and other groups' codes are unpacked by the kernel into memory as well
    is_readable = sketched_g.dtype in HALVES and kind != "int3" and group % 16 == 0
    if not is_readable or not (is_chosen or chosen() == "triton"):
        stored_dtype = sketched_g.dtype if sketched_g.dtype in HALVES else torch.float32
        options: dict[str, Any] = {"kind": kind, "group": group, "features": features, "dtype": stored_dtype}
        sketched_x = run("dequantize", _low_bit.dequantize, *stored, **options)
        return _sketched_grad_weight(sketched_g, sketched_x, column_sum, mean, ones, scale, dtype, divisor)

    def product(left: Tensor, column_sum: Tensor | None, mean: Tensor | None, **options: Any) -> Tensor:
        twin = _grad_weight.sketched_grad_weight_low_bit
        name = "sketched_grad_weight_low_bit"
        return run(name, twin, left, *stored, column_sum, mean, kind=kind, group=group, **options)

    if mean is not None and ones is not None:
        # as `_shifted` has it: times the rank, the ones are about as large as 1
        left = (ones * max(1, rank)).to(sketched_g.dtype).unsqueeze(1)
        mean = mean - product(left, None, None, scale=1 / max(1, rank), dtype=torch.float32).squeeze(0)
    return product(sketched_g, column_sum, mean, scale=scale * odd_factor(divisor), dtype=dtype)


@torch.library.register_fake("rmm_linear::sketched_grad_weight_low_bit")
def _(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    column_sum: Tensor | None,
    mean: Tensor | None,
    ones: Tensor | None,
    kind: str,
    group: int,
    scale: float,
    dtype: torch.dtype | None,
    divisor: int = 1,
) -> Tensor:
    return sketched_g.new_empty((sketched_g.shape[1], steps.shape[1]), dtype=dtype)


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor | Codes,
    column_sum: Tensor | None = None,
    mean: Tensor | None = None,
    *,
    ones: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    divisor: int = 1,
) -> Tensor:
    """Return scale * (S^T g)^T (S^T x), plus column_sum (mean - (S^T x)^T ones)^T where the input was centred.

    Args:
        sketched_g: Shape (rank, out), float32 or float64, or in half precision on a GPU.
        sketched_x: Shape (rank, in), any float dtype; or its codes, which are decoded into memory or on the way to the
            product, see `reads_codes`.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.
        ones: S^T 1 over the rows, shape (rank,), where the sketch of g was not centred (see
            `rmm_linear.sketches.centered`), or None.
        scale: Factor of the first term.
        divisor: The first term is divided by it, and times the power of 2 next to it, which `sketched_g` is over
            already (see `odd_factor`): a whole number that may follow from the rows, as a factor may not.
        dtype: Dtype of the result; that of `sketched_g` if None.

    Returns:
        Shape (out, in).
    """
    if isinstance(sketched_x, Codes):
        *stored, kind, group = sketched_x
        return torch.ops.rmm_linear.sketched_grad_weight_low_bit.default(
            sketched_g, *stored, column_sum, mean, ones, kind, group, scale, dtype, divisor
        )
    return torch.ops.rmm_linear.sketched_grad_weight.default(
        sketched_g, sketched_x, column_sum, mean, ones, scale, dtype, divisor
    )


def as_operand(sketched: Tensor, g: Tensor, ratio: float) -> tuple[Tensor, float]:
    """Return a float32 sketch of g as the product takes it, and the factor that it lacks then.

    Args:
        sketched: S^T g over the storage scale, shape (rank, out), float32 or float64, memory that nobody else has.
        g: The gradient itself, which says what product it will be.
        ratio: Rows kept over rows.

    Returns:
        The sketch, in the gradient's own half precision where that is multiplied as it is, and the factor.
    """
    if not wants_half(g):
        return sketched, 1.0
    scale = product_scale(g.dtype, ratio)
    return sketched.mul_(1 / scale).to(g.dtype) if scale != 1 else sketched.to(g.dtype), scale


def product_operand(g: Tensor) -> Tensor:
    """Return rows of g as a sketch of themselves, for the product with stored rows.

    Args:
        g: Shape (rows, out), any float dtype.

    Returns:
        `g` where half precision is multiplied as it is; a copy in float32 otherwise (float32 and float64 as they are).
    """
    return g if wants_half(g) or g.dtype == torch.float64 else g.to(torch.float32)
