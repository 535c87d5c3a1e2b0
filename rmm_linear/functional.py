"""The method, in a page: a linear layer that keeps a sketch of its input instead of the input.

For x (rows, in), weight (out, in) and the output's gradient g (rows, out), a linear layer has three matmuls:

    output      = x weight^T + bias
    grad_input  = g weight
    grad_weight = g^T x

Only the third needs x: for its sake the whole input of every layer is kept from the forward to the backward pass.
Bershatsky et al. 2022 ("Memory-Efficient Backpropagation through Large Linear Layers", arXiv 2201.13195) estimate
grad_weight: draw a random S (rows, rank) with E[S S^T] = I, keep S^T x (rank, in), and form

    grad_weight ~ (S^T g)^T (S^T x) = g^T (S S^T) x,        whose mean is g^T x

The estimate is unbiased, as a minibatch gradient is; its variance depends on the sketch (each sketch's file derives
the variance) and falls as the ratio rank / rows grows. Output and grad_input are bit-equal to
`torch.nn.functional.linear`, and grad_bias, the sum of g over its rows, is exact (on a GPU up to the rounding of
another order of summation: one pass over g computes both grad_bias and the sketch of g).

S is never stored. It is a function of a 64-bit seed, one for CPUs and one for GPUs. The seed is drawn on x's device by
an op of our own and saved as a tensor: `torch.manual_seed` governs it, checkpointing replays it, and the compiler can't
draw it twice.

The modules:

    linear            decides whether to sketch, draws the seed, compresses x      (outside autograd)
    producers         tells whether the operation that made x saves x anyway: the layer then keeps x itself
    padding           finds rows that carry no gradient, and leaves them out of x and g; one of them represents all
    rows              finds the rows that are kept beside the sketch of the others
    norm_cache        remembers the row norms of g from the previous epoch, by which rows may be sampled
    sharing           finds layers that read the same x, which keep one sketch of it
    _compiled         is `linear` for compilers, which see one operator
    _SketchedLinear   forward: the output; backward: grad_input, grad_weight and grad_bias (keeps weight, seed, sketch)
    ops               the opaque operators: draw_seed, compress, grad_weight
    sketches          the computations of compress and grad_weight
"""

from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from rmm_linear import ops
from rmm_linear.config import RMMConfig, config_of
from rmm_linear.errors import DoubleBackwardError, TracingError, TransformError
from rmm_linear.norm_cache import RowNorms
from rmm_linear.padding import Look, RowsCheck, ValidRows, drawn_row, needed_check
from rmm_linear.producers import flattens_in_place, is_free_to_keep
from rmm_linear.rows import NO_ROWS_KEPT, Layout, layout_of, split
from rmm_linear.sharing import SharedSketch
from rmm_linear.torch_private import is_batched, is_exporting, is_mapped, is_torch_func_active


class _Kept(NamedTuple):
    """The tensors that a layer keeps of its input for the backward pass, and their description."""

    config: RMMConfig
    features: int
    layout: Layout
    # functions that the backward pass calls with its gradient
    looks: tuple[Look, ...]
    shared: SharedSketch | None
    # numbers of the rows that are not left out, rows kept beside the sketch first; None for all rows
    valid: Tensor | None
    seed: Tensor
    # the number of one row that is left out, the row, and the number of rows left out; or empty
    left_out: tuple[Tensor, ...]
    # tensors of the rows beside the sketch, and of the sketch of the rest
    beside: tuple[Tensor, ...]
    sketch: tuple[Tensor, ...]

    def flattened(self) -> tuple[Any, ...]:
        """First the `_PLAIN` values that are not tensors, then the tensors."""
        plain = *self[:5], len(self.left_out), len(self.beside)
        return *plain, self.valid, self.seed, *self.left_out, *self.beside, *self.sketch


_PLAIN = 7


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: RMMConfig,
    seed: Tensor | int | None = None,
    valid_rows: ValidRows | None = None,
    rows_check: RowsCheck | None = None,
    shared: SharedSketch | None = None,
    row_norms: RowNorms | None = None,
) -> Tensor:
    """Apply a linear map whose weight gradient is estimated from a sketch of `x` (Bershatsky et al. 2022, sec. 2).

    Output and grad_input are bit-equal to `torch.nn.functional.linear`, grad_bias is exact, and grad_weight is
    unbiased. The function *is* `torch.nn.functional.linear` where no weight gradient is needed (a frozen weight,
    `torch.no_grad`), at ratio 1 without a storage, below `config.min_rows` rows, for nested and sparse inputs, and
    where the op that made x saves x anyway (ReLU, tanh, a fused attention: see `rmm_linear.producers`), so that a
    sketch would free no memory. Autocast applies as to F.linear.

    A seed is drawn under `torch.no_grad` too: reentrant checkpointing runs its first forward in that mode, and dropout
    after this layer must find the generator in the same state in both passes. Compilers drop draws that are not used,
    and move others: checkpoint compiled code with use_reentrant=False.

    Warning:
        Noise inflates the gradient's norm by sqrt(1 + relative variance). Clipping at a fixed norm then clips more
        often, and a clipped gradient is no longer unbiased.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig
        >>> from rmm_linear.functional import linear
        >>> x, weight = torch.randn(256, 16), torch.randn(8, 16, requires_grad=True)
        >>> linear(x, weight, config=RMMConfig(ratio=0.25)).sum().backward()
        >>> weight.grad.shape
        torch.Size([8, 16])

    Args:
        x: Activations, shape (..., in), any float dtype; rows are all dimensions but the last. If x has no view of
            shape (rows, in), as `x[:, 1:]` has none, F.linear and the sketch make a copy each.
        weight: Shape (out, in), dtype of `x` (or castable to it under autocast).
        bias: Shape (out,), or None.
        config: The settings of the sketch.
        seed: 64-bit seed of S: an int, or a 0-d int64 tensor on x's device. Drawn from the device's default
            generator if None. Two layers that share a seed share S.
        valid_rows: Rows that are sketched; the others are padding, whose gradient is zero. If a padding row carries a
            gradient, the estimate stays unbiased, but is noisy (see `rmm_linear.padding`). All rows if None. Applies
            for any `config.skip_padding`, which concerns the model's own mask.
        rows_check: Checks in backward passes that the rows left out carry no gradient; each layer has its own. None
            checks only if `valid_rows` asks for it.
        shared: The group of layers that keep one sketch of `x`, made by the first of them; a `seed` argument becomes
            the group's. None for a separate sketch. Not used by a compiler, which merges equal sketches itself.
        row_norms: Norms by which a row-sampling sketch draws (see `rmm_linear.norm_cache`). Not used by a compiler.

    Returns:
        Shape (..., out).

    Raises:
        ValueError: If shapes, dtypes, the seed or the valid rows do not fit.
        PaddingGradientError: In the backward pass, if the valid rows are to be checked (see `rmm_linear.padding`) and
            another row carries a gradient.
        DoubleBackwardError: In the backward pass of a backward pass: a sketch has no second derivative.
        TransformError: Under `torch.vmap` and forward-mode differentiation, and in a backward pass under `vmap`.
        TracingError: Under `torch.export` and `torch.jit.trace`, whose graphs have no backward pass.
            `export(strict=True)` quotes it in an error of the compiler's own.
    """
    dtype = _check(x, weight, bias, config, valid_rows)
    if torch.compiler.is_compiling():
        return _compiled(x, weight, bias, config, seed, valid_rows, dtype)
    is_plain = x.layout == torch.strided and not x.is_nested
    # Inference mode draws no seed: no checkpoint runs in it.
    if not weight.requires_grad or weight.shape[0] == 0 or not is_plain or torch.is_inference_mode_enabled():
        return F.linear(x, weight, bias)
    rows = x.numel() // max(1, x.shape[-1])
    if not config.sketches(rows):
        return F.linear(x, weight, bias)
    keeps_graph = torch.is_grad_enabled()
    if keeps_graph and torch.jit.is_tracing():  # type: ignore[attr-defined]
        _refuse_tracing()
    # Under no_grad as well: see the docstring.
    seed = ops.draw_seed(x.detach()) if seed is None else _seed_tensor(seed, x)
    if shared is not None:
        seed = shared.seed_or(seed)
    # After the seed: in a reentrant checkpoint's first forward x has no grad_fn, and both passes must draw a seed.
    if not keeps_graph or (x.grad_fn is not None and is_free_to_keep(x, dtype)):
        return F.linear(x, weight, bias)
    index = None if valid_rows is None else valid_rows.index_on(x.device, config.keep_tokens)
    layout = layout_of(x.shape, config.keep_tokens, index) if config.keep_tokens else NO_ROWS_KEPT
    # After the seed: a checkpoint's second forward may not know the valid rows, and both passes must draw a seed.
    rows = rows if index is None else index.shape[0]
    if (index is not None or layout.kept) and not config.sketches(rows, layout.kept):
        return F.linear(x, weight, bias)
    if x.dtype != dtype:
        x = x.to(dtype)
    if is_torch_func_active() and is_mapped(x):
        _refuse_transform("torch.vmap")
    made = None if shared is None else shared.tensors()
    if made is None:
        known = None if row_norms is None else row_norms.known(x.device)
        made = _compressed(x.detach(), seed, config, layout, index, valid_rows, known)
        if shared is not None:
            shared.remember(*made)
            shared.row_norms = row_norms
    elif shared is not None:
        # one draw of rows for all members, by the norms of all of their gradients
        row_norms = shared.row_norms
    check = None if index is None or valid_rows is None else needed_check(valid_rows, rows_check)
    looks = *(() if check is None else (check,)), *(() if row_norms is None else (row_norms.look,))
    kept = _Kept(config, x.shape[-1], layout, looks, shared, index, seed, *made)
    return _SketchedLinear.apply(x, weight, bias, *kept.flattened())


def _compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: RMMConfig,
    seed: Tensor | int | None,
    valid_rows: ValidRows | None,
    dtype: torch.dtype,
) -> Tensor:
    """`linear` for compilers: the decisions that need more than tensors and the configuration's text."""
    if not weight.requires_grad or weight.shape[0] == 0 or x.is_nested or x.layout != torch.strided:
        return F.linear(x, weight, bias)
    if is_exporting():
        if torch.is_grad_enabled() and config.sketches(x.numel() // max(1, x.shape[-1])):
            _refuse_tracing()
        return F.linear(x, weight, bias)
    x = x.to(dtype)
    # `ops.draw_seed` must get the very tensor that is sketched, so `values` is computed before the seed.
    mask = None if valid_rows is None else valid_rows.mask
    # Rows left out are set to zero: a compiled graph has static shapes.
    values = _flat((x if mask is None else torch.where(mask.unsqueeze(-1) != 0, x, 0)).detach())
    seed = None if seed is None else _seed_tensor(seed, x)
    return torch.ops.rmm_linear.sketched_linear.default(x, weight, bias, values, mask, seed, config.graph_key)


def _sketched_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    values: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    graph_key: str,
) -> Tensor:
    """A layer as one operator of the graph that Dynamo makes; AOTAutograd, which comes next, sees through it.

    Otherwise Dynamo would trace each function here for each layer, which takes most of its time, and guard each
    attribute at every step. A configuration is immutable: its key is the only guard, and the only part of the key of a
    graph in the cache on disk.
    """
    config = config_of(graph_key)
    rows = values.shape[0]
    layout = layout_of(x.shape, config.keep_tokens, None)
    if not config.sketches(rows):
        return F.linear(x, weight, bias)
    # also where no sketch follows: later layers and dropouts of a planned step draw as in eager mode
    if seed is None:
        seed = ops.draw_seed(values, alone=not config.share_sketch)
    is_exact = not torch.is_grad_enabled() or not config.sketches(rows, layout.kept)
    if is_exact or is_free_to_keep(x, x.dtype, in_graph=True):
        return F.linear(x, weight, bias)
    _, beside, sketch = _compressed(values, seed, config, layout, None, None)
    left_out: tuple[Tensor, ...] = ()
    if mask is not None:
        number, times = drawn_row(mask, seed)
        left_out = number, _flat(x.detach()).index_select(0, number), times
    kept = _Kept(config, x.shape[-1], layout, (), None, None, seed, left_out, beside, sketch)
    return _SketchedLinear.apply(x, weight, bias, *kept.flattened())


torch.library.define(
    "rmm_linear::sketched_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor values, Tensor? mask, Tensor? seed, str graph_key) -> Tensor",
)
# CompositeImplicitAutograd: autograd, autocast and fake tensors see the operators inside.
torch.library.impl("rmm_linear::sketched_linear", "CompositeImplicitAutograd")(_sketched_linear)


def _compressed(
    x: Tensor,
    seed: Tensor,
    config: RMMConfig,
    layout: Layout,
    index: Tensor | None,
    valid_rows: ValidRows | None,
    gradient_norms: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], ...]:
    """The kept tensors of a detached x: one row left out, the rows beside the sketch, and the sketch of the rest."""
    left_out: tuple[Tensor, ...] = ()
    beside: tuple[Tensor, ...] = ()
    rest = _flat(x)
    if layout.kept or index is not None:
        kept, rest = split(rest, layout, index)
        if layout.kept:
            beside = (kept,)
        if index is not None and valid_rows is not None:
            number, times = valid_rows.one_left_out(seed)
            left_out = number, _flat(x).index_select(0, number), times
    if gradient_norms is not None:
        gradient_norms = split(gradient_norms.unsqueeze(1), layout, index)[1].squeeze(1)
    return left_out, beside, tuple(ops.compress(rest, seed, config.graph_key, gradient_norms))


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that F.linear computes in: autocast lowers all floats but float64."""
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def _seed_tensor(seed: Tensor | int, x: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        if seed.dim() != 0 or seed.dtype != torch.int64 or seed.device != x.device:
            raise ValueError(
                f"seed is a {seed.dim()}-d {seed.dtype} tensor on {seed.device}; pass a 0-d int64 tensor on {x.device},"
                " an int, or None to draw one"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed={seed!r} is not a 64-bit int; pass one, a 0-d int64 tensor, or None to draw one")
    # filled on the device: a copy from the host would synchronise
    return torch.full((), seed, dtype=torch.int64, device=x.device)


def _refuse_tracing() -> None:
    raise TracingError(
        "a sketched linear layer in training mode cannot be exported or traced: the graph would hold an exact"
        " layer. Use model.eval(), or revert_linears(model)"
    )


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: RMMConfig, valid_rows: ValidRows | None
) -> torch.dtype:
    """Refuse arguments that do not fit each other, and return the dtype to compute in."""
    if not isinstance(config, RMMConfig):
        raise ValueError(f"config is a {type(config).__name__}; pass an RMMConfig, such as RMMConfig(ratio=0.5)")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, which is not a real floating dtype; cast it, e.g. x.float()")
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (out, in)")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; x's last dimension must be the weight's"
            f" {weight.shape[1]} input features"
        )
    if valid_rows is not None and not isinstance(valid_rows, ValidRows):
        raise ValueError(
            f"valid_rows is a {type(valid_rows).__name__}; pass rmm_linear.padding.ValidRows(mask), of a mask that is"
            " non-zero where a row is valid"
        )
    if valid_rows is not None and not valid_rows.fits(x):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and the mask of its valid rows {tuple(valid_rows.mask.shape)}; the mask must"
            " have x's shape without the last dimension"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), the output features")
    dtype = compute_dtype(x)
    if any(compute_dtype(other) != dtype for other in (weight, bias) if other is not None):
        raise ValueError(
            f"x has dtype {x.dtype}, weight {weight.dtype}{'' if bias is None else f' and bias {bias.dtype}'}; cast"
            " them to one, or run under torch.autocast (which leaves float64 alone)"
        )
    return dtype


def _is_column_major(x: Tensor) -> bool:
    """Tell whether autograd takes x, flattened to (rows, in) without a copy, for a matrix stored by columns."""
    # Autograd tests for strides of (1, rows), which a single row may have as well.
    rows = x.numel() // max(1, x.shape[-1])
    if x.stride(-1) != rows or not flattens_in_place(x):
        return False
    matrix = x if x.dim() == 2 else x.detach().view(-1, x.shape[-1])
    return matrix.stride() == (1, rows)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Cast by hand: autocast's weight cache must not learn a cast made here, where gradients are off, or a later
    # F.linear on the same weight (tied embeddings) would get no weight gradient.
    output = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    # _unsafe_view, since the matrix product has no other use: the output may be changed in place.
    return torch.ops.aten._unsafe_view.default(output, output.shape) if output.dim() > 2 else output


class _SketchedLinear(torch.autograd.Function):
    """F.linear forward; in the backward pass the weight gradient comes from the sketch.

    torch.func requires a `setup_context`, and tensors as direct arguments: hence a `_Kept` is flattened.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *kept: Any) -> Tensor:
        return _output(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, *kept = inputs
        # As nn.Linear does: only grad_input needs the weight.
        ctx.save_for_backward(weight if x.requires_grad else None, *kept[_PLAIN:])
        ctx.kept = kept[:_PLAIN]
        ctx.is_column_major = x.requires_grad and _is_column_major(x)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # autograd.grad(is_grads_batched=True) passes a legacy batched tensor
        if is_batched(g):
            _refuse_transform("torch.vmap over gradients")
        shared = ctx.kept[4]
        if shared is not None:
            shared.close()
        # gradients are enabled here only with create_graph=True
        if torch.is_grad_enabled():
            with torch.no_grad():
                grads = _gradients(ctx, g)
            # create_graph=True is allowed as long as the gradients are not differentiated again
            wanted = [grad for grad in grads if grad is not None]
            refused = iter(_RefuseSecondDerivative.apply(g, ctx.saved_tensors[0], *wanted))
            grads = [None if grad is None else next(refused) for grad in grads]
        else:
            grads = _gradients(ctx, g)
        return (*grads, *(None,) * (len(ctx.needs_input_grad) - len(grads)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        _refuse_transform("torch.vmap")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_transform("forward-mode differentiation")


def _refuse_transform(name: str) -> NoReturn:
    raise TransformError(
        f"{name} (vmap, jvp, jacrev, jacfwd, hessian, per-sample gradients) of a sketched linear layer: one sketch"
        " stands for all rows of its input. Use model.eval(), ratio=1.0 with storage=None, or revert_linears(model)"
    )


def _gradients(ctx: Any, g: Tensor) -> list[Tensor | None]:
    """The gradients of x, weight and bias, None where a gradient is not needed."""
    weight, valid, seed, *tensors = ctx.saved_tensors
    config, features, layout, looks, shared, left_out, beside = ctx.kept
    beside += left_out
    parts = [tuple(part) for part in (tensors[:left_out], tensors[left_out:beside], tensors[beside:])]
    kept = _Kept(config, features, layout, looks, shared, valid, seed, *parts)
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    rows_of_g = _flat(g)
    for look in looks:
        look(rows_of_g, valid)
    grad_input = grad_weight = grad_bias = None
    if need_weight:
        grad_weight, grad_bias = _weight_gradient(kept, rows_of_g, need_bias, ctx.weight_dtype)
    elif need_bias:
        grad_bias = rows_of_g.sum(0)
    if need_input:
        assert weight is not None
        lowered = weight.to(g.dtype)
        # bit-equal to autograd's product for nn.Linear: the transposed product may sum in another order
        if ctx.is_column_major:
            grad_input = torch.mm(lowered.t(), rows_of_g.t()).t()
        else:
            grad_input = torch.mm(rows_of_g, lowered)
        if g.dim() != 2:
            grad_input = grad_input.reshape(*g.shape[:-1], features)
    return [grad_input, grad_weight, None if grad_bias is None else grad_bias.to(ctx.bias_dtype)]


def _weight_gradient(kept: _Kept, g: Tensor, need_bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weight gradient, from left-out, kept and sketched rows, and the sum of g in the order of nn.Linear."""
    layout, key, features = kept.layout, kept.config.graph_key, kept.features
    if kept.valid is None and not layout.kept:
        wanted = None if kept.left_out else dtype
        found, grad_bias = ops.grad_weight(g, kept.seed, kept.sketch, key, False, features, need_bias, wanted)
    else:
        grad_bias = g.sum(0) if need_bias else None
        beside, rest = split(g, layout, kept.valid)
        found, _ = ops.grad_weight(rest, kept.seed, kept.sketch, key, False, features, False, None)
        if layout.kept:
            part, _ = ops.grad_weight(beside, kept.seed, kept.beside, key, True, features, False, None)
            found = part.add_(found)
    if kept.left_out:
        # One left-out row stands for all: it adds zero if no left-out row carries a gradient.
        number, row, times = kept.left_out
        g_row = g.index_select(0, number)
        # If the row carries no gradient, a NaN in x must not reach the product.
        row = torch.where(g_row.any(), row, 0).to(found.dtype)
        found = found.addmm_((g_row.to(found.dtype) * times).t(), row)
    return found.to(dtype), grad_bias if need_bias else None


class _RefuseSecondDerivative(torch.autograd.Function):
    """Pass gradients on, and raise when they are differentiated."""

    @staticmethod
    def forward(g: Tensor, weight: Tensor | None, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise DoubleBackwardError(
            "a sketched linear layer has no second derivative: it keeps a sketch of its input. For gradient penalties"
            " and Hessian products use model.eval(), ratio=1.0 with storage=None, or revert_linears(model)"
        )
