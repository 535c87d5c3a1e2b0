"""The seam between the library and its kernels: opaque torch operators, and nothing else imports the kernels.

Each op is defined with `torch.library` so that torch.compile, CUDA graphs and selective checkpointing see one node
with a known output shape. Sizes that follow from the number of rows are SymInt: a compiled model does not recompile
for every sequence length. All ops run with autocast off: a caller inside an autocast region (a backward pass run
within one, say) must not have its float32 sums lowered.

The stored sketch of x is S^T x times c = sqrt(rank / rows), in x's dtype: its entries then have the size of x's own,
where S^T x itself would overflow float16. The sketch of g is S^T g / c, in float32 (float64 for float64), where there
is room. Their product is the same. The flag `gradient` of the sketching ops tells which of the two is wanted, and not
a factor: a factor that depends on the number of rows would make a compiled model recompile for each.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from rmm_linear_kernels.hadamard_sketch import reference as _hadamard
from rmm_linear_kernels.low_bit import reference as _low_bit
from rmm_linear_kernels.random_projection import reference as _projection
from rmm_linear_kernels.row_gather import reference as _rows
from rmm_linear_kernels.sketched_grad_weight import reference as _grad_weight
from rmm_linear_kernels.trigonometric_sketch import reference as _trigonometric

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Odd multiplier of splitmix64 (Steele et al. 2014): rank r's seeds are shifted by r times it, modulo 2**64.
_RANK_STRIDE = 0x9E3779B97F4A7C15


def _autocast_off(device_type: str) -> AbstractContextManager[object]:
    return torch.autocast(device_type=device_type, enabled=False)


def _define(schema: str, *, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register the decorated function as the op's implementation for every device, with autocast off."""
    name = "rmm_linear::" + schema.partition("(")[0]
    torch.library.define(name, "(" + schema.partition("(")[2], tags=tags)

    def register(implementation: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(implementation)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = args[0]
            assert isinstance(first, Tensor)
            if first.device.type == "meta" or not torch.is_autocast_enabled(first.device.type):
                return implementation(*args, **kwargs)
            with _autocast_off(first.device.type):
                return implementation(*args, **kwargs)

        torch.library.impl(name, "default")(run)
        return implementation

    return register


def _result_dtype(x: Tensor, gradient: bool) -> torch.dtype:
    if not gradient:
        return x.dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def data_parallel_rank() -> int:
    """Return this process's rank, 0 without an initialised process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


@_define("draw_seed(Tensor x, Tensor? token=None) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(x: Tensor, token: Tensor | None = None) -> Tensor:
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=x.device)
    shift = (data_parallel_rank() * _RANK_STRIDE) % (1 << 64)
    return seed + (shift - (1 << 64) if shift >= 1 << 63 else shift)


@torch.library.register_fake("rmm_linear::draw_seed")
def _(x: Tensor, token: Tensor | None = None) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


def draw_seed(x: Tensor, *, alone: bool = False) -> Tensor:
    """Draw a sketch's seed from the default generator of `x`'s device.

    `torch.manual_seed`, checkpointing's `preserve_rng_state` and resumed runs therefore govern it. The op is tagged
    `nondeterministic_seeded`: the AOT partitioner must save the seed, never draw it anew in the backward pass. The
    process's rank is mixed in, so that data-parallel ranks that were seeded alike still draw different sketches.

    AOTAutograd treats the op as it treats any other. It merges equal calls: layers that are compiled together and draw
    for the same tensor draw once, equal calls of the sketching op are merged then as well, and they keep one sketch.
    And it moves what the output does not need into the backward pass, where the arguments are there: a draw and its
    sketch together, if `x` is what the sketch is made of. Of a tensor that stays when that one goes, the draw would
    move alone, and the sketch would have another seed.

    Args:
        x: The tensor that is to be sketched; in eager mode any other will do, since only its device matters.
        alone: Under torch.compile, make this draw unlike any other.

    Returns:
        0-d int64 on the device of `x`.
    """
    # calls of torch.empty are not merged
    token = torch.empty((), device=x.device) if alone and torch.compiler.is_compiling() else None
    return torch.ops.rmm_linear.draw_seed.default(x, token)


@_define("hadamard_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt blocks, SymInt kept, bool gradient) -> Tensor")
def _hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    block_rows = max(1, x.shape[0]) / max(1, blocks)
    scale = block_rows**0.5 / kept if gradient else block_rows**-0.5
    dtype = _result_dtype(x, gradient)
    return _hadamard.hadamard_sketch(x, seed, mean, blocks=blocks, kept=kept, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::hadamard_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, blocks: int, kept: int, gradient: bool) -> Tensor:
    return x.new_empty((blocks * kept, x.shape[1]), dtype=_result_dtype(x, gradient))


def hadamard_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, gradient: bool) -> Tensor:
    """Return S^T (x - 1 mean^T) for the strided-block Hadamard S, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        blocks: Number of strided blocks.
        kept: Hadamard rows kept of each block.
        gradient: False for the stored sketch of x, true for that of g (see the module's docstring).

    Returns:
        Shape (blocks * kept, features).
    """
    return torch.ops.rmm_linear.hadamard_sketch.default(x, seed, mean, blocks, kept, gradient)


@_define("random_projection(Tensor x, Tensor seed, Tensor? mean, SymInt rank, bool gaussian, bool gradient) -> Tensor")
def _random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, gaussian: bool, gradient: bool
) -> Tensor:
    rows = max(1, x.shape[0])
    scale = rows**0.5 / max(1, rank) if gradient else rows**-0.5
    dtype = _result_dtype(x, gradient)
    return _projection.random_projection(x, seed, mean, rank=rank, gaussian=gaussian, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::random_projection")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, gaussian: bool, gradient: bool) -> Tensor:
    return x.new_empty((rank, x.shape[1]), dtype=_result_dtype(x, gradient))


def random_projection(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, gaussian: bool, gradient: bool
) -> Tensor:
    """Return S^T (x - 1 mean^T) for a dense S of normal or +-1 entries, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        rank: Columns of S.
        gaussian: Normal entries if true, signs otherwise.
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        Shape (rank, features).
    """
    return torch.ops.rmm_linear.random_projection.default(x, seed, mean, rank, gaussian, gradient)


@_define("trigonometric_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt rank, str kind, bool gradient) -> Tensor")
def _trigonometric_sketch(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, kind: str, gradient: bool) -> Tensor:
    scale = x.shape[0] / max(1, rank) if gradient else 1.0
    dtype = _result_dtype(x, gradient)
    return _trigonometric.trigonometric_sketch(x, seed, mean, rank=rank, kind=kind, scale=scale, dtype=dtype)


@torch.library.register_fake("rmm_linear::trigonometric_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, kind: str, gradient: bool) -> Tensor:
    return x.new_empty((rank, x.shape[1]), dtype=_result_dtype(x, gradient))


def trigonometric_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, kind: str, gradient: bool
) -> Tensor:
    """Return S^T (x - 1 mean^T) for signed columns of the DCT-II or real DFT, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        rank: Columns of the transform kept.
        kind: "dct" or "dft".
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        Shape (rank, features).
    """
    return torch.ops.rmm_linear.trigonometric_sketch.default(x, seed, mean, rank, kind, gradient)


@_define(
    "uniform_row_sketch(Tensor x, Tensor seed, Tensor? mean, SymInt rank, bool replacement, bool gradient) -> Tensor"
)
def _uniform_row_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, replacement: bool, gradient: bool
) -> Tensor:
    index = _rows.uniform_rows(seed, rows=x.shape[0], rank=rank, replacement=replacement)
    scale = x.shape[0] / max(1, rank) if gradient else 1.0
    return _rows.gather_rows(x, index, mean, None, scale=scale, dtype=_result_dtype(x, gradient))


@torch.library.register_fake("rmm_linear::uniform_row_sketch")
def _(x: Tensor, seed: Tensor, mean: Tensor | None, rank: int, replacement: bool, gradient: bool) -> Tensor:
    return x.new_empty((rank, x.shape[1]), dtype=_result_dtype(x, gradient))


def uniform_row_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, rank: int, replacement: bool, gradient: bool
) -> Tensor:
    """Return uniformly drawn rows of x - 1 mean^T, over or times the storage scale.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        rank: Number of draws.
        replacement: Independent draws if true, else a uniform subset.
        gradient: False for the stored sketch of x, true for that of g.

    Returns:
        Shape (rank, features).
    """
    return torch.ops.rmm_linear.uniform_row_sketch.default(x, seed, mean, rank, replacement, gradient)


@_define(
    "importance_rows(Tensor x, Tensor seed, Tensor? mean, Tensor? grad_norms, SymInt rank, bool winner_take_all)"
    " -> (Tensor, Tensor)"
)
def _importance_rows(
    x: Tensor, seed: Tensor, mean: Tensor | None, grad_norms: Tensor | None, rank: int, winner_take_all: bool
) -> tuple[Tensor, Tensor]:
    norms = _rows.row_norms(x, mean)
    if grad_norms is not None:
        norms = norms * grad_norms.to(norms.dtype)
    sample = _rows.sample_rows_winner_take_all if winner_take_all else _rows.sample_rows
    index, squared = sample(norms, seed, rank=rank)
    return index.to(torch.int32), squared.to(_result_dtype(x, True))


@torch.library.register_fake("rmm_linear::importance_rows")
def _(
    x: Tensor, seed: Tensor, mean: Tensor | None, grad_norms: Tensor | None, rank: int, winner_take_all: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty((rank,), dtype=torch.int32), x.new_empty((rank,), dtype=_result_dtype(x, True))


def importance_rows(
    x: Tensor,
    seed: Tensor,
    mean: Tensor | None,
    grad_norms: Tensor | None,
    *,
    rank: int,
    winner_take_all: bool,
) -> tuple[Tensor, Tensor]:
    """Draw rows of x - 1 mean^T with probabilities proportional to their norms.

    Args:
        x: Shape (rows, features), any float dtype.
        seed: 0-d int64.
        mean: Shape (features,), or None.
        grad_norms: Norms of the rows of g, shape (rows,), to multiply the norms with, or None.
        rank: Number of rows.
        winner_take_all: Keep the heaviest rows as they are (WTA-CRS) if true, plain CRS otherwise.

    Returns:
        Row numbers (rank,), int32, and squared entries of S (rank,), float32 (float64 for a float64 `x`).
    """
    return torch.ops.rmm_linear.importance_rows.default(x, seed, mean, grad_norms, rank, winner_take_all)


@_define("gather_rows(Tensor x, Tensor index, Tensor? mean, Tensor? scales) -> Tensor")
def _gather_rows(x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None) -> Tensor:
    return _rows.gather_rows(x, index, mean, scales, scale=1.0, dtype=_result_dtype(x, scales is not None))


@torch.library.register_fake("rmm_linear::gather_rows")
def _(x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]), dtype=_result_dtype(x, scales is not None))


def gather_rows(x: Tensor, index: Tensor, mean: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """Return x[index_j] - mean, each row times scales_j where scales are given.

    Args:
        x: Shape (rows, features), any float dtype.
        index: Row numbers, shape (rank,), int32 or int64.
        mean: Shape (features,), or None.
        scales: Shape (rank,), or None.

    Returns:
        Shape (rank, features); in x's dtype without scales, else in float32 (float64 for float64).
    """
    return torch.ops.rmm_linear.gather_rows.default(x, index, mean, scales)


@_define("quantize(Tensor y, Tensor seed, Tensor? mean, str kind, int group) -> (Tensor, Tensor, Tensor)")
def _quantize(y: Tensor, seed: Tensor, mean: Tensor | None, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return _low_bit.quantize(y, seed, mean, kind=kind, group=group)


@torch.library.register_fake("rmm_linear::quantize")
def _(y: Tensor, seed: Tensor, mean: Tensor | None, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, features = y.shape
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
    return torch.ops.rmm_linear.quantize.default(y, seed, mean, kind, group)


@_define("dequantize(Tensor codes, Tensor steps, Tensor offsets, Tensor seed, str kind, int group) -> Tensor")
def _dequantize(codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, kind: str, group: int) -> Tensor:
    return _low_bit.dequantize(codes, steps, offsets, seed, kind=kind, group=group, features=steps.shape[-1])


@torch.library.register_fake("rmm_linear::dequantize")
def _(codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, kind: str, group: int) -> Tensor:
    return steps.new_empty((codes.shape[0], steps.shape[1]), dtype=torch.float32)


def dequantize(codes: Tensor, steps: Tensor, offsets: Tensor, seed: Tensor, *, kind: str, group: int) -> Tensor:
    """Return what `quantize`'s codes stand for.

    Args:
        codes: As `quantize` returns them.
        steps: As `quantize` returns them.
        offsets: As `quantize` returns them.
        seed: 0-d int64, the seed that `quantize` had.
        kind: "int8", "int4", "int3", "int2" or "fp8".
        group: Rows that share a step.

    Returns:
        Shape (rows, features), float32.
    """
    return torch.ops.rmm_linear.dequantize.default(codes, steps, offsets, seed, kind, group)


@_define("sketched_grad_weight(Tensor sketched_g, Tensor sketched_x, Tensor? column_sum, Tensor? mean) -> Tensor")
def _sketched_grad_weight(
    sketched_g: Tensor, sketched_x: Tensor, column_sum: Tensor | None, mean: Tensor | None
) -> Tensor:
    return _grad_weight.sketched_grad_weight(sketched_g, sketched_x, column_sum, mean)


@torch.library.register_fake("rmm_linear::sketched_grad_weight")
def _(sketched_g: Tensor, sketched_x: Tensor, column_sum: Tensor | None, mean: Tensor | None) -> Tensor:
    return sketched_g.new_empty((sketched_g.shape[1], sketched_x.shape[1]))


def sketched_grad_weight(
    sketched_g: Tensor, sketched_x: Tensor, column_sum: Tensor | None = None, mean: Tensor | None = None
) -> Tensor:
    """Return (S^T g)^T (S^T x), plus column_sum mean^T where the input was centred.

    Args:
        sketched_g: Shape (rank, out), float32 or float64: the dtype of the product and of the result.
        sketched_x: Shape (rank, in), any float dtype.
        column_sum: Sum of g over the rows, shape (out,), or None.
        mean: Column mean of x, shape (in,), or None; given exactly when `column_sum` is.

    Returns:
        Shape (out, in).
    """
    return torch.ops.rmm_linear.sketched_grad_weight.default(sketched_g, sketched_x, column_sum, mean)


# S itself, and the sampling weights, for closed forms and tests: plain functions that no layer calls.
hadamard_order = _hadamard.hadamard_order
hadamard_dense = _hadamard.hadamard_dense
projection_slab = _projection.projection_slab
trigonometric_dense = _trigonometric.trigonometric_dense
uniform_rows = _rows.uniform_rows
row_norms = _rows.row_norms
row_weights = _rows.integer_weights
sample_rows = _rows.sample_rows
sample_rows_winner_take_all = _rows.sample_rows_winner_take_all
winners = _rows.winners
rounding_variance = _low_bit.rounding_variance
STORAGE_BITS = _low_bit.BITS
packed_width = _low_bit.packed_width
SCALE_DTYPE = _low_bit.SCALE_DTYPE
