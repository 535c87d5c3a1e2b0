"""Forward hooks that are found by what they are, and not by a handle: copies and pickles of a model have none."""

from collections.abc import Callable
from typing import Any

from torch import nn


def take_off_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    """Take forward hooks and forward pre-hooks off a module.

    Args:
        module: The module.
        is_ours: Tells of a hook whether to take it off.
    """
    tables: list[tuple[Any, ...]] = [
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ]
    for hooks, *flags in tables:
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            for table in (hooks, *flags):
                table.pop(key, None)
