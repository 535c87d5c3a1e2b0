"""Rows that carry no gradient: padding, left out before an input is sketched.

Batches are padded to a common length, and the rows of x at padded positions get no gradient: the attention mask keeps
every other token from reading them, and the loss does not read them either. Where g is zero, leaving the row of x out
is exact, and a sketch of the remaining rows at the same ratio has fewer bytes and less variance.

A model does not hand its mask to its linear layers, so it is announced to them while the forward pass runs:

- `convert_linears` with `RMMConfig(skip_padding=True)` hooks the modules that take an `attention_mask` argument;
- `valid_rows(mask)` is the same by hand, for models that take none.

A layer uses the mask if the leading dimensions of its input are the mask's. All rows are kept:

- outside the innermost model that is given the mask (a vision tower beside a text model is not under the text's mask),
  and in models that take a second sequence, or an image, without a separate submodel;
- for other shapes: a mask of four dimensions, cached keys, pooled or flattened inputs;
- in checkpointed blocks, whose second forward runs where no mask is announced: a sketch there saves only a transient;
- in a decoder whose own mask is not given. Its cross-attention's keys and values use the encoder's mask: the layers
  recognise the encoder's output.

Some models do have a gradient at the rows left out: through a convolution over the sequence, a mean over all positions,
labels at padded positions, or left padding where the first position is read. So:

- Each layer checks its backward passes until one pass had gradients on kept rows alone (`RowsCheck`). A gradient on a
  row left out raises `PaddingGradientError` until then. `valid_rows(mask, check=True)` has all passes checked.
- The estimate is unbiased for any g. Of the n rows left out, one is drawn by the sketch's seed and kept exactly: n
  times its g_i x_i^T has the n rows' part of g^T x as its mean, and is zero if no such row carries a gradient. If a row
  does, as may happen later (a gate that starts at zero), this adds a variance of n times the sum of the n rows'
  ||g_i||^2 ||x_i||^2.

A NaN of x in a row without a gradient does not reach the weight gradient, unlike in an exact layer.

Under `torch.compile` shapes are static: the rows are set to zero instead of left out. The variance falls (by less,
since centering takes the mean over all rows), the bytes do not. No pass is checked; the estimate is unbiased as well.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.errors import PaddingGradientError
from rmm_linear.rows import kept_first
from rmm_linear.torch_private import assert_async, innermost_saved_tensors_hooks

_MASK_ARGUMENT = "attention_mask"
_MEMORY_ARGUMENTS = ("encoder_hidden_states", "encoder_attention_mask")
# Models whose layers get (length, batch, features): the mask of a square batch would be applied transposed.
TIME_FIRST = ("xlnet", "fsmt")
# Arguments whose rows are not those of the masked sequence, though their shape may equal its shape by chance.
_OTHER_SEQUENCES = (
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "visual_feats", "visual_embeds",
    "pixel_values", "image", "images", "inputs", "input_features", "input_values",
)  # fmt: skip
_MASK_DIMENSIONS = 2
# Called with a gradient, shape (rows, out), and the numbers of the rows that were kept, or None for all.
Look = Callable[[Tensor, Any], None]


class ValidRows:
    """The rows of an input that are kept: the non-zero elements of a mask. Arguments and errors are as in `valid_rows`.

    If the number of valid rows is not given, it is counted once per mask, with a device synchronisation.
    """

    def __init__(self, mask: Tensor, *, count: int | None = None, check: bool = False) -> None:
        if not isinstance(mask, Tensor) or mask.dim() == 0 or mask.is_complex():
            given = f"shape {tuple(mask.shape)}, {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"mask is {given}; pass a tensor of the input's shape without its last dimension, such as (batch,"
                " length), non-zero where a row is valid"
            )
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"count={count!r} is not a positive int; pass the number of valid rows, or None")
        self.mask = mask
        self.check = check
        self._count = count
        # numbers of the valid rows, numbers of the other rows, and the count of the latter
        self._found: dict[torch.device, tuple[Tensor, ...]] = {}
        self._ordered: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def fits(self, x: Tensor) -> bool:
        """Tell whether the mask has one element for each row of `x`, shape (..., features)."""
        return x.shape[:-1] == self.mask.shape

    @property
    def count(self) -> int:
        """Number of valid rows. Synchronises the device at the first call, unless the number was given."""
        if self._count is None:
            self._find(self.mask.device)
        assert self._count is not None
        return self._count

    def index_on(self, device: torch.device, keep_tokens: tuple[int, ...] = ()) -> Tensor | None:
        """Return the numbers of the valid rows of the flattened input, (count,), int32; None if all rows are valid.

        Rows of `keep_tokens` come first; layers on one device share one tensor.

        Raises:
            ValueError: If no row is valid, or their number is not the given `count`.
        """
        index = self._find(device)[0]
        if self._count == self.mask.numel():
            return None
        if not keep_tokens or self.mask.dim() < _MASK_DIMENSIONS:
            return index
        key = (device, keep_tokens)
        if key not in self._ordered:
            length = self.mask.shape[-1]
            self._ordered[key] = kept_first(index, self.mask.numel() // length, length, keep_tokens)
        return self._ordered[key]

    def one_left_out(self, seed: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one of the rows that `index_on` leaves out, by a seed on that device, without a synchronisation.

        Returns the row's number, uniformly drawn, shape (1,), and the number of rows left out, 0-d; both int32.
        """
        _, rows, times = self._found[seed.device]
        return rows.index_select(0, seed.remainder(rows.shape[0]).reshape(1)), times

    def _find(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._found:
            found = next(iter(self._found.values())) if self._found else self._divided()
            self._found[device] = tuple(part.to(device) for part in found)
        return self._found[device]

    def _divided(self) -> tuple[Tensor, ...]:
        mask = self.mask.detach().flatten()
        valid = mask != 0
        if self._count is None:
            # both numbers in one copy, for one device synchronisation
            negative, self._count = torch.stack(((mask < 0).sum(), valid.sum())).tolist()
            if negative:
                raise ValueError(
                    f"the mask of shape {tuple(self.mask.shape)} has negative values, as additive attention masks have;"
                    " pass a mask that is non-zero where a row is valid"
                )
            if self._count == 0:
                raise ValueError(
                    f"the mask of shape {tuple(self.mask.shape)} marks no row valid (non-zero); a batch needs at least"
                    " one token"
                )
        else:
            is_right = valid.sum() == self._count
            if valid.device.type == "cuda" and assert_async is not None:
                assert_async(is_right)
            elif not is_right:
                raise ValueError(
                    f"count={self._count}, but the mask marks {int(valid.sum())} rows valid; pass the mask's number"
                )
        # in ascending order, without a device synchronisation
        order = torch.argsort((~valid).to(torch.uint8), stable=True)
        # copies: a slice would keep the whole tensor alive
        valid_rows, left_out = order[: self._count].int(), order[self._count :].int()
        return valid_rows, left_out, torch.full((), left_out.shape[0], dtype=torch.int32, device=order.device)


def drawn_row(mask: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """`ValidRows.one_left_out` for compilers, with static shapes; both results are int64.

    If all rows are valid, the number is that of an arbitrary row.
    """
    # rows left out up to and including each row
    found = (mask.flatten() == 0).cumsum(0)
    times = found[-1]
    place = seed.remainder(times.clamp(min=1))
    return (found <= place).sum().clamp(max=found.shape[0] - 1).reshape(1), times


@dataclass(eq=False)
class _Scope:
    """The announcement that holds while one module's forward runs."""

    rows: ValidRows | None
    # the encoder's output, which a decoder's cross-attention reads, and the rows of that output
    memory: Tensor | None = None
    of_memory: ValidRows | None = None
    owner: nn.Module | None = None
    # shapes of the inputs that were looked up, and whether any fitted
    asked: list[tuple[int, ...]] = field(default_factory=list)
    fitted: bool = False

    def rows_of(self, x: Tensor) -> ValidRows | None:
        rows = self.rows
        if self.memory is not None:
            if _is_same(x, self.memory):
                rows = self.of_memory
            elif torch.compiler.is_compiling() and x.shape[:-1] == self.memory.shape[:-1]:
                # unknown whether x was computed from the encoder's output: all rows are kept
                rows = None
        found = rows if rows is not None and rows.fits(x) else None
        if not torch.compiler.is_compiling():
            self.fitted |= found is not None
            self.asked.append(tuple(x.shape))
        return found


def _is_same(x: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are one object, or equal views of one memory, as wrappers such as FSDP pass them on."""
    if x is other:
        return True
    if torch.compiler.is_compiling() or x.shape != other.shape or x.dtype != other.dtype or x.numel() == 0:
        return False
    return x.data_ptr() == other.data_ptr() and x.stride() == other.stride()


class _Announced(threading.local):
    """Scopes of this thread, the innermost last: `DataParallel` runs its replicas in threads."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


_announced = _Announced()


def current_valid_rows(x: Tensor) -> ValidRows | None:
    """Return the announced valid rows of an input (..., in), or None if no mask applies: all rows are kept then."""
    if not torch.compiler.is_compiling() and in_checkpoint():
        return None
    return _announced.scopes[-1].rows_of(x) if _announced.scopes else None


class valid_rows:  # noqa: N801 - a context manager, used as a function
    """Announce which rows are valid, for layers with `RMMConfig(skip_padding=True)` that run inside.

    Of use for models that take no `attention_mask`, and for collators that know the number of valid rows: counting the
    rows synchronises the device once a step. A model's own hook takes `count` over if it is given the same mask.

    Warning:
        The rows left out must carry no gradient: the loss may not depend on them. Otherwise the weight gradients are
        noisy, though not biased. Each layer checks its backward passes until one pass had no such gradient;
        `check=True` checks all.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig, RMMLinear, valid_rows
        >>> layer = RMMLinear(16, 8, config=RMMConfig(ratio=0.5, skip_padding=True))
        >>> x, mask = torch.randn(4, 64, 16), torch.arange(64) < torch.tensor([[64], [40], [50], [7]])
        >>> with valid_rows(mask, check=True):
        ...     y = layer(x)
        >>> y[mask].sum().backward()

    Args:
        mask: Shape of the inputs without their last dimension; non-zero where a row is valid.
        count: The number of valid rows, if known.
        check: Whether all backward passes check that rows left out carry no gradient.

    Raises:
        ValueError: If the mask is no tensor, has negative values, marks no row valid, does not mark `count` rows valid,
            or fits the input of none of the layers that ran inside.
    """

    def __init__(self, mask: Tensor, *, count: int | None = None, check: bool = False) -> None:
        self._make = partial(ValidRows, mask, count=count, check=check)
        # a bad mask is refused here, not at the first layer
        self._make()
        self._entered: list[_Scope] = []

    def __enter__(self) -> None:
        # new ValidRows at each entry: the mask may have been overwritten in place
        scope = _Scope(self._make())
        self._entered.append(scope)
        _announced.scopes.append(scope)

    def __exit__(self, kind: object, *error: object) -> None:
        scope = self._entered.pop()
        # an interrupted forward may have left inner scopes
        del _announced.scopes[_announced.scopes.index(scope) :]
        if kind is None and scope.asked and not scope.fitted:
            assert scope.rows is not None
            shapes = ", ".join(str(shape) for shape in dict.fromkeys(scope.asked))
            raise ValueError(
                f"the mask of shape {tuple(scope.rows.mask.shape)} fits none of the layers' inputs, which have the"
                f" shapes {shapes}; pass a mask of such a shape without the last dimension"
            )


class RowsCheck:
    """Satisfied after a backward pass with a finite gradient on the kept rows and none on the rows left out."""

    is_satisfied = False

    def see(self, g: Tensor, index: Tensor) -> None:
        """Check one gradient (rows, out), of which the rows of `index` were kept. Synchronises the device.

        Values that are not finite pass: an overflow spreads to all rows, and a `GradScaler` skips the step.

        Raises:
            PaddingGradientError: If a row outside `index` is finite and not zero.
        """
        carries = ((g != 0) & g.isfinite()).any(1)
        wrong = carries.index_fill(0, index.long(), False)
        if wrong.any():
            rows = wrong.nonzero().flatten().tolist()
            raise PaddingGradientError(
                f"{len(rows)} of {g.shape[0] - index.shape[0]} rows that were left out as padding carry a gradient, the"
                f" first of them row {rows[0]} of {g.shape[0]}: the loss depends on masked positions (labels there, a"
                " mean over all positions, a convolution over the sequence, a mask whose non-zero elements are the"
                " padding). Use skip_padding=False for this model, or mask the loss"
            )
        self.is_satisfied |= bool(carries.any()) and bool(g.isfinite().all())


class MaskHook:
    """Announces the mask that a module is given, while its forward runs."""

    def __init__(self, module: nn.Module) -> None:
        self._places = {name: place for place, name in enumerate(_parameters_of(module))}
        self._has_warned = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Announce; a forward pre-hook."""
        # A forward that was interrupted without its after-hook (a notebook's stop button) has left its scope.
        for place, scope in enumerate(_announced.scopes):
            if scope.owner is module:
                del _announced.scopes[place:]
                break
        memory, of_memory = (self._argument(name, args, kwargs) for name in _MEMORY_ARGUMENTS)
        mask = self._argument(_MASK_ARGUMENT, args, kwargs)
        if mask is None and memory is None and _announced.scopes:
            # an announcement around the model applies inside as well
            rows = _announced.scopes[-1].rows
        else:
            rows = self._rows(module, mask)
        _announced.scopes.append(_Scope(rows, memory=memory, of_memory=self._rows(module, of_memory), owner=module))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """End the announcement; a forward hook with always_call=True."""
        # `before` may have raised
        if _announced.scopes and _announced.scopes[-1].owner is module:
            scope = _announced.scopes.pop()
            outer = _announced.scopes[-1] if _announced.scopes else None
            if outer is not None and outer.rows is scope.rows and not torch.compiler.is_compiling():
                outer.fitted |= scope.fitted
                outer.asked += scope.asked

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self._places.get(name)
        if place is None:
            return None
        return args[place] if place < len(args) else kwargs.get(name)

    def _rows(self, module: nn.Module, mask: object) -> ValidRows | None:
        if not module.training or not isinstance(mask, Tensor):
            return None
        if mask.dim() != _MASK_DIMENSIONS:
            if not self._has_warned and not torch.compiler.is_compiling():
                self._has_warned = True
                warnings.warn(
                    f"skip_padding=True, but {type(module).__name__} was given a mask of shape {tuple(mask.shape)},"
                    " which does not mark rows as padding: all are kept; pass a mask of shape (batch, length)",
                    UserWarning,
                    stacklevel=2,
                )
            return None
        for scope in reversed(_announced.scopes):
            # the same mask: reuse its ValidRows, whose count may be known
            if scope.rows is not None and scope.rows.mask is mask:
                return scope.rows
        return ValidRows(mask)


def needed_check(rows: ValidRows, check: RowsCheck | None) -> Look | None:
    """Return the check of the next backward pass, if the rows ask for one or the layer's check is not satisfied yet."""
    if rows.check:
        return (check or RowsCheck()).see
    return None if check is None or check.is_satisfied else check.see


def install_hooks(model: nn.Module) -> int:
    """Hook the modules of a model that take an attention mask, unless already hooked; return the number of modules."""
    modules = list(_modules_with_mask(model))
    # there may be older hooks, of a submodule that was converted before
    remove_hooks(module for module in model.modules() if module not in modules)
    for module in modules:
        if not any(map(_is_mask_hook, module._forward_pre_hooks.values())):
            hook = MaskHook(module)
            module.register_forward_pre_hook(hook.before, with_kwargs=True)
            module.register_forward_hook(hook.after, with_kwargs=True, always_call=True)
    return len(modules)


def remove_hooks(modules: Iterable[nn.Module]) -> None:
    """Remove the hooks of `install_hooks`."""
    for module in modules:
        take_off_hooks(module, _is_mask_hook)


def take_off_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    """Remove forward hooks and pre-hooks of a module by type, since copies of a model have no hook handles."""
    tables: list[tuple[Any, ...]] = [
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ]
    for hooks, *flags in tables:
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            for table in (hooks, *flags):
                table.pop(key, None)


def _is_mask_hook(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), MaskHook)


def _modules_with_mask(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose attention mask applies to all of their layers.

    Of nested models of transformers, only the innermost: an outer model that passes its mask on may have other towers.
    Of other nested modules, only the outermost.
    """
    takers = {name: module for name, module in model.named_modules() if _MASK_ARGUMENT in _parameters_of(module)}
    models = {
        name: module
        for name, module in takers.items()
        if hasattr(module, "get_input_embeddings") and hasattr(module, "config")
    }
    for name, module in (models or takers).items():
        others = (models or takers).keys() - {name}
        is_wanted = not any(_is_inside(other, name) if models else _is_inside(name, other) for other in others)
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        has_others = not set(_OTHER_SEQUENCES).isdisjoint(_parameters_of(module))
        if is_wanted and not has_others and model_type not in TIME_FIRST:
            yield module


def _is_inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(outer + ".")


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def in_checkpoint() -> bool:
    """Tell whether the innermost saved-tensor hooks are a checkpoint's."""
    hooks = innermost_saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
