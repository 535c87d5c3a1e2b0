"""The opaque torch operators: a seed is drawn, an input is compressed, a weight's gradient is formed, keys are split.

`torch.library` defines the operators, so that torch.compile, CUDA graphs, selective checkpointing, FLOP counters and
fake tensors see one node with a known output shape. Sizes that follow from the number of rows are SymInts: a compiled
model does not recompile for every sequence length. A configuration is passed as text, its `graph_key`. All operators
run with autocast off.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear import backend
from rmm_linear.config import config_of
from rmm_linear.sketches.base import SavedSketch, accumulate_dtype
from rmm_linear.sketches.row_sampling import ColumnRowSampling

# Odd multiplier of splitmix64 (Steele et al. 2014): rank r's seeds are shifted by r times it, modulo 2**64.
_RANK_STRIDE = 0x9E3779B97F4A7C15
# The largest number is never drawn: a range ends before its end.
_FROM, _TO = -(1 << 63), (1 << 63) - 1


def _define(schema: str, *, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as an operator for every device, with autocast off; return the operator."""
    name, _, signature = schema.partition("(")
    torch.library.define(f"rmm_linear::{name}", "(" + signature, tags=tags)
    operator = getattr(torch.ops.rmm_linear, name).default

    def without_autocast(x: Tensor, *args: Any) -> Any:
        with torch.autocast(device_type=x.device.type, enabled=False):
            return operator(x, *args)

    def register(implementation: Callable[..., Any]) -> Any:
        torch.library.impl(f"rmm_linear::{name}", "default")(implementation)
        for key in ("AutocastCPU", "AutocastCUDA"):
            torch.library.impl(f"rmm_linear::{name}", key)(without_autocast)
        return operator

    return register


def data_parallel_rank() -> int:
    """Return this process's rank, 0 without an initialised process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


_added_rank = ContextVar("added_rank", default=0)


@contextmanager
def ranked_higher(by: int) -> Iterator[None]:
    """Draw the seeds that a process with a rank higher by `by` would draw from the same random state."""
    token = _added_rank.set(by)
    try:
        yield
    finally:
        _added_rank.reset(token)


# without a default: compiled code would pass the argument by keyword, which takes longer
@_define("draw_seed(Tensor x, Tensor? token) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(x: Tensor, token: Tensor | None) -> Tensor:
    seed = torch.randint(_FROM, _TO, (), dtype=torch.int64, device=x.device)
    rank = data_parallel_rank() + _added_rank.get()
    if rank == 0:
        return seed
    shift = (rank * _RANK_STRIDE) % (1 << 64)
    return seed + (shift - (1 << 64) if shift >= 1 << 63 else shift)


# Since torch 2.15 compilers merge equal calls of an op only if this declares it pure. The partitioner reads from the
# tag that the op is random and must not run twice.
torch.ops.rmm_linear.draw_seed.default._nondeterministic_seeded = False


@torch.library.register_fake("rmm_linear::draw_seed")
def _(x: Tensor, token: Tensor | None) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


def draw_seed(x: Tensor, *, alone: bool = False) -> Tensor:
    """Draw a sketch's seed, 0-d int64, from the default generator of the device of `x`, which is to be sketched.

    `torch.manual_seed`, checkpointing's `preserve_rng_state` and resumed runs therefore govern it. The op is tagged
    `nondeterministic_seeded`: the AOT partitioner must save the seed, never draw it anew in the backward pass. The
    process's rank is mixed in, so that data-parallel ranks that were seeded alike still draw different sketches.

    AOTAutograd merges equal calls: layers of one graph that draw for the same tensor draw once, equal calls of the
    sketching op are merged then as well, and the layers keep one sketch. AOTAutograd also moves nodes that the output
    does not need into the backward pass, if their arguments are saved: a draw and its sketch move together if the
    sketch is made of this `x`. If `x` were another saved tensor, the draw would move alone, and the sketch would have
    another seed. In eager mode only the device of `x` matters. `alone` keeps this draw from being merged.
    """
    # calls of torch.empty are not merged
    return _draw_seed(x, torch.empty((), device=x.device) if alone else None)


@_define("unbind_copy(Tensor x) -> Tensor[]")
def unbind_copy(x: Tensor) -> list[Tensor]:
    """Return copies of the rows of a matrix, (columns,) each.

    Inductor removes `aten.clone` of a row and writes the row's offset into each kernel that reads the row, so that it
    would compile one kernel for each layer. This op is opaque to Inductor.
    """
    rows = [x.new_empty(x.shape[1]) for _ in range(x.shape[0])]
    torch.split_with_sizes_copy(x.flatten(), [x.shape[1]] * x.shape[0], out=rows)
    return rows


@torch.library.register_fake("rmm_linear::unbind_copy")
def _(x: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape[1]) for _ in range(x.shape[0])]


@_define("compress(Tensor x, Tensor seed, str config, Tensor? gradient_norms=None) -> Tensor[]")
def compress(x: Tensor, seed: Tensor, config: str, gradient_norms: Tensor | None = None) -> list[Tensor]:
    """Return the tensors that a layer keeps of the sketch of rows (rows, in).

    Norms of the gradient's rows (rows,) are used by sketches that sample rows.
    """
    sketch = config_of(config).sketch_object
    if gradient_norms is not None and isinstance(sketch, ColumnRowSampling):
        return list(sketch.compress(x, seed, gradient_norms=gradient_norms).tensors)
    return list(sketch.compress(x, seed).tensors)


@torch.library.register_fake("rmm_linear::compress")
def _(x: Tensor, seed: Tensor, config: str, gradient_norms: Tensor | None = None) -> list[Tensor]:
    stored = config_of(config).sketch_object.stored(x.shape[0], x.shape[1], x.dtype)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in stored]


@_define(
    "grad_weight(Tensor g, Tensor seed, Tensor[] tensors, str config, bool beside, SymInt features, bool need_bias,"
    " ScalarType? dtype) -> (Tensor, Tensor)"
)
def grad_weight(
    g: Tensor,
    seed: Tensor,
    tensors: list[Tensor],
    config: str,
    beside: bool,
    features: int,
    need_bias: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the estimate of g^T x, (out, in), and the column sum of g, (out,), or (0,) without `need_bias`.

    g (rows, out) is the gradient at the rows that `compress` was given. Without a dtype, the estimate is float32
    (float64 for float64). With `beside`, the tensor is x itself at the rows beside a sketch, and the product exact.
    """
    if beside:
        return backend.estimate(g, tensors[0], backend.product_dtype(g)), g.new_empty(0)
    saved = SavedSketch(seed, tuple(tensors))
    grad_weight, grad_bias = config_of(config).sketch_object.backward(g, saved, need_bias=need_bias, dtype=dtype)
    return grad_weight, g.new_empty(0) if grad_bias is None else grad_bias


@torch.library.register_fake("rmm_linear::grad_weight")
def _(g: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, features, need_bias, dtype = others
    weight_dtype = accumulate_dtype(g.dtype) if dtype is None else dtype
    return g.new_empty((g.shape[1], features), dtype=weight_dtype), g.new_empty(g.shape[1] if need_bias else 0)


@register_flop_formula(torch.ops.rmm_linear.compress)
def _(x: tuple[int, int], seed: object, config: str, *args: Any, **kwargs: Any) -> int:
    """Count 2 FLOPs a multiply-add, for matrix products alone, as torch does for its own operators."""
    return 2 * x[1] * config_of(config).sketch_object.multiply_adds(x[0])


@register_flop_formula(torch.ops.rmm_linear.grad_weight)
def _(g: tuple[int, int], *others: Any, **kwargs: Any) -> int:
    _, _, config, beside, features, *_ = others
    sketch = config_of(config).sketch_object
    rank, own = (g[0], 0) if beside else (sketch.rank(g[0]), sketch.multiply_adds(g[0]))
    return 2 * g[1] * (own + rank * features)
