"""The product of the two sketches: the weight gradient."""

from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import HALVES, chosen, is_for_kernels, odd_factor, product_scale, run, wants_half
from rmm_linear.ops.registration import define
from rmm_linear.ops.storage import Codes, decoded
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
# Tiles of a product that a large GPU works on at once, twice over.
_FEW_TILES = 256


@define(
    "sketched_grad_weight(Tensor sketched_g, Tensor sketched_x, Tensor? sums, Tensor? mean, float scale,"
    " ScalarType? dtype, ScalarType? bias_dtype, SymInt divisor=1) -> (Tensor, Tensor)"
)
def _sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    divisor: int = 1,
) -> tuple[Tensor, Tensor]:
    return product(sketched_g, sketched_x, sums, mean, scale * odd_factor(divisor), dtype, bias_dtype)


def product(
    sketched_g: Tensor,
    sketched_x: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return what `sketched_grad_weight` does: what its operator does, for other operators.

    Args:
        sketched_g: As for `sketched_grad_weight`.
        sketched_x: As for `sketched_grad_weight`, no codes.
        sums: As for `sketched_grad_weight`.
        mean: As for `sketched_grad_weight`.
        scale: Factor of the product.
        dtype: As for `sketched_grad_weight`.
        bias_dtype: As for `sketched_grad_weight`.

    Returns:
        As `sketched_grad_weight`.
    """
    dtype = dtype or sketched_g.dtype
    options: dict[str, Any] = {"scale": scale, "dtype": dtype, "bias_dtype": bias_dtype}
    operands = sketched_g, sketched_x, sums, mean
    is_half = sketched_g.dtype in HALVES and sketched_x.dtype == sketched_g.dtype
    if is_half and _is_one_launch(sketched_g, sketched_x, sums):
        return run("sketched_grad_weight", _grad_weight.sketched_grad_weight, *operands, **options)
    if sums is None or not _grad_weight.has_half_precision_product(sketched_g, dtype):
        return _grad_weight.sketched_grad_weight(*operands, **options)
    mean_part, bias = outer_product_of_sums(sums, mean, dtype, bias_dtype or dtype)
    grad_weight = _grad_weight.with_half_precision_product(mean_part, sketched_g, sketched_x, scale)
    return grad_weight, sketched_g.new_empty(0) if bias_dtype is None else bias


def outer_product_of_sums(
    sums: Tensor, mean: Tensor | None, dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """Return the mean's part of a gradient, and the sum of g: a part of the product's operator.

    Args:
        sums: Sums of parts of g over their rows, shape (parts, out), at least one part.
        mean: What goes with their sum, shape (in,), or None.
        dtype: Dtype of the outer product.
        bias_dtype: Dtype of the sum of g.

    Returns:
        (sum of g) mean^T, shape (out, in), None without a mean; sum of g (out,).
    """
    twin = _grad_weight.outer_product_of_sums
    return run("outer_product_of_sums", twin, sums, mean, dtype=dtype, bias_dtype=bias_dtype)


def _is_one_launch(sketched_g: Tensor, sketched_x: Tensor, sums: Tensor | None) -> bool:
    """Whether Triton's product runs, which takes in what else there is to do, rather than cuBLAS."""
    if chosen() != "auto":
        return chosen() == "triton"
    # A small product is through by the time that the host has launched another kernel. cuBLAS is the faster one of
    # large products until a measurement says otherwise.
    (rank, out), features = sketched_g.shape, sketched_x.shape[1]
    tiles = -(-out // _TILE) * -(-features // _TILE)
    return sketched_g.is_cuda and sums is not None and rank <= _SHORT_RANK and tiles <= _FEW_TILES


@torch.library.register_fake("rmm_linear::sketched_grad_weight")
def _(
    sketched_g: Tensor,
    sketched_x: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    divisor: int = 1,
) -> tuple[Tensor, Tensor]:
    return empty_results(sketched_g, sketched_x.shape[1], sums is not None, dtype, bias_dtype)


def empty_results(
    g: Tensor, features: int, has_sum: bool, dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return what a fake implementation of a product returns.

    Args:
        g: Shape (..., out).
        features: Columns of the gradient.
        has_sum: Whether there is a sum of g to be had.
        dtype: Dtype of the gradient, that of `g` if None.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, features); sum of g (out,) or (0,).
    """
    out = g.shape[1]
    grad_weight = g.new_empty((out, features), dtype=dtype)
    if not has_sum or bias_dtype is None:
        return grad_weight, g.new_empty((0,))
    return grad_weight, g.new_empty((out,), dtype=bias_dtype)


def reads_codes(rank: int, out: int, in_features: int, kind: str) -> bool:
    """Tell whether the product is formed straight from codes, on a GPU that chooses for itself.

    The kernel that does so spares the copy that `dequantize` writes and the product reads, and a launch; each of its
    tiles decodes for itself. By the instructions that a decoding takes and the bytes that a copy moves, it should be
    the faster one up to some four tiles of 64 rows of the result, if there are programs enough to fill a GPU, or
    little to do for each. This is an estimate without a measurement.

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
    " Tensor? sums, Tensor? mean, str kind, int group, float scale, ScalarType? dtype, ScalarType? bias_dtype,"
    " SymInt divisor=1) -> (Tensor, Tensor)"
)
def _sketched_grad_weight_low_bit(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    kind: str,
    group: int,
    scale: float,
    dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    divisor: int = 1,
) -> tuple[Tensor, Tensor]:
    scale *= odd_factor(divisor)
    parts = codes, steps, offsets, seed
    (rank, out), features = sketched_g.shape, steps.shape[-1]
    is_chosen = is_for_kernels(sketched_g) and chosen() == "auto" and reads_codes(rank, out, features, kind)
    # int3's and other groups' codes are unpacked by the kernel into memory as well
    is_readable = sketched_g.dtype in HALVES and kind != "int3" and group % 16 == 0
    if is_readable and (is_chosen or chosen() == "triton"):
        name, twin = "sketched_grad_weight_low_bit", _grad_weight.sketched_grad_weight_low_bit
        options: dict[str, Any] = {"kind": kind, "group": group, "scale": scale}
        return run(name, twin, sketched_g, *parts, sums, mean, **options, dtype=dtype, bias_dtype=bias_dtype)
    stored_dtype = sketched_g.dtype if sketched_g.dtype in HALVES else torch.float32
    sketched_x = decoded(Codes(*parts, kind, group), stored_dtype)
    return product(sketched_g, sketched_x, sums, mean, scale, dtype, bias_dtype)


@torch.library.register_fake("rmm_linear::sketched_grad_weight_low_bit")
def _(
    sketched_g: Tensor,
    codes: Tensor,
    steps: Tensor,
    offsets: Tensor,
    seed: Tensor,
    sums: Tensor | None,
    mean: Tensor | None,
    kind: str,
    group: int,
    scale: float,
    dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    divisor: int = 1,
) -> tuple[Tensor, Tensor]:
    return empty_results(sketched_g, steps.shape[1], sums is not None, dtype, bias_dtype)


def sketched_grad_weight(
    sketched_g: Tensor,
    sketched_x: Tensor | Codes,
    sums: Tensor | None = None,
    mean: Tensor | None = None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    divisor: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return scale * (S^T g)^T (S^T x), plus (sum of g) mean^T where the input was centred; and the sum of g.

    Args:
        sketched_g: Shape (rank, out), float32 or float64, or in half precision on a GPU.
        sketched_x: Shape (rank, in), any float dtype; or its codes, which are decoded into memory or on the way to the
            product, see `reads_codes`.
        sums: Sums of parts of g over their rows, shape (parts, out), at least one part; or None.
        mean: What goes with the sum of g, shape (in,): the column mean of x where the sketch of g was centred, what
            `hadamard_sketch_and_mean` left of it where not. None for an input that was not centred.
        scale: Factor of the first term.
        dtype: Dtype of the gradient; that of `sketched_g` if None.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.
        divisor: The first term is divided by it, and times the power of 2 next to it, which `sketched_g` is over
            already (see `odd_factor`): a whole number that may follow from the rows, as a factor may not.

    Returns:
        Gradient (out, in); sum of g (out,), (0,) where it is not wanted or there are no parts to form it of.
    """
    if isinstance(sketched_x, Codes):
        codes, steps, offsets, seed, kind, group = sketched_x
        return _sketched_grad_weight_low_bit(
            sketched_g, codes, steps, offsets, seed, sums, mean, kind, group, scale, dtype, bias_dtype, divisor
        )
    return _sketched_grad_weight(sketched_g, sketched_x, sums, mean, scale, dtype, bias_dtype, divisor)


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
