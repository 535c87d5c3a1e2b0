"""What stands in the place of a module's `forward` while it is checkpointed."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class ReplacedForward:
    """A `forward` that knows which one it replaces, and has its name, signature and docstring.

    Args:
        run: What is called in its place.
        replaced: The forward that it replaces.
        before: The instance's own forward before, None if it was its class's.
    """

    def __init__(
        self, run: Callable[..., Any], replaced: Callable[..., Any], before: Callable[..., Any] | None = None
    ) -> None:
        self.run, self.before = run, before
        # trainers read there which columns of a data set the model takes
        functools.update_wrapper(self, replaced, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands in the forward's place.

        Args:
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returns.
        """
        return self.run(*args, **kwargs)


def replace_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Let something else run in the place of a module's forward.

    Args:
        module: The module.
        run: What runs.
    """
    module.__dict__["forward"] = ReplacedForward(run, module.forward, module.__dict__.get("forward"))


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


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Let a module run as it was written.

    Args:
        module: The module.

    Yields:
        Nothing.
    """
    replaced = module.__dict__.get("forward")
    if not isinstance(replaced, ReplacedForward):
        yield
        return
    _put_back(module, replaced)
    try:
        yield
    finally:
        module.__dict__["forward"] = replaced


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
            _put_back(module, replaced)
    return model


def _put_back(module: nn.Module, replaced: ReplacedForward) -> None:
    del module.__dict__["forward"]
    if replaced.before is not None:
        module.__dict__["forward"] = replaced.before
