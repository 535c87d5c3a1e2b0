"""What stands in the place of a module's `forward` while it is checkpointed."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _InThisThread(threading.local):
    """What holds in one thread alone; a `ContextVar` would, too, but torch.compile knows none."""

    as_written: tuple[nn.Module, ...] = ()


_in_this_thread = _InThisThread()
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class ReplacedForward:
    """A `forward` that knows which one it replaces, and has its name, signature and docstring.

    Args:
        run: What is called in its place.
        module: The module whose forward it becomes.

    Attributes:
        before: The instance's own forward before, None if it was its class's.
    """

    def __init__(self, run: Callable[..., Any], module: nn.Module) -> None:
        self.run, self._module = run, module
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        # trainers read there which columns of a data set the model takes
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands in the forward's place, or inside of `own_forward` the forward itself.

        Args:
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returns.
        """
        if not any(module is self._module for module in _in_this_thread.as_written):
            return self.run(*args, **kwargs)
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def replace_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Let something else run in the place of a module's forward.

    Args:
        module: The module.
        run: What runs.
    """
    module.__dict__["forward"] = ReplacedForward(run, module)


def stands_in(module: nn.Module) -> Callable[..., Any] | None:
    """Tell what runs in the place of a module's forward.

    Args:
        module: The module.

    Returns:
        What `replace_forward` was given; None if the forward is the module's own.
    """
    replaced = module.__dict__.get("forward")
    return replaced.run if isinstance(replaced, ReplacedForward) else None


def refuse_twice(module: nn.Module) -> None:
    """Refuse a module that is checkpointed already.

    Args:
        module: The module.

    Raises:
        ValueError: If it is.
    """
    if stands_in(module) is not None:
        raise ValueError("the model is checkpointed already; call remove_checkpointing(model) first")


def refuse_inner_plans(model: nn.Module) -> None:
    """Refuse a model that can't be planned as one since a module in it is a program of its own.

    Args:
        model: The model; its own forward may be replaced.

    Raises:
        ValueError: If the model, or a module in it, wraps another one for training on several devices, or a module in
            it is checkpointed.
    """
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            kind = type(module).__name__
            subject = f"the module {name!r} is" if name else "the model is"
            raise ValueError(
                f"{subject} a {kind}, whose hooks and communication belong to no plan: plan the module that it wraps"
                f" before you wrap it, as in checkpoint_model(model.module, ...); model = {kind}(model.module)"
            )
        if name and stands_in(module) is not None:
            raise ValueError(
                f"the module {name!r} ({type(module).__name__}) is checkpointed already, and plans are not made of"
                f" plans: call remove_checkpointing(model.get_submodule({name!r})) first, or leave the model as it is"
            )


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Let a module run as it was written, in this thread; it stays as it is, for others may be training it.

    Args:
        module: The module.

    Yields:
        Nothing.
    """
    before = _in_this_thread.as_written
    _in_this_thread.as_written = (*before, module)
    try:
        yield
    finally:
        _in_this_thread.as_written = before


def remove_checkpointing(model: nn.Module) -> nn.Module:
    """Give a model, and every module in it, its own forward back.

    Args:
        model: A model that `checkpoint_model` or `checkpoint_sequential` was called on, or that holds such modules.

    Returns:
        The model.
    """
    for module in model.modules():
        replaced = module.__dict__.get("forward")
        if isinstance(replaced, ReplacedForward):
            del module.__dict__["forward"]
            if replaced.before is not None:
                module.__dict__["forward"] = replaced.before
    return model
