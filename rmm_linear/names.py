"""Names of modules, as users know them."""

import re

# Names that wrappers put in front of, or between, the names of the model they wrap.
_WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_LEADING_WRAPPER_SEGMENTS = (*_WRAPPER_SEGMENTS, "module")
# How many names an error or a warning lists before it says how many more there are.
_LISTED = 12


def strip_wrappers(name: str) -> str:
    """Return a module's name without what torch.compile, DDP, FSDP and checkpoint wrappers add to it.

    Args:
        name: Dotted name, as `named_modules` gives it.

    Returns:
        The name in the unwrapped model; "" is the model itself.
    """
    segments = name.split(".")
    while segments and segments[0] in _LEADING_WRAPPER_SEGMENTS:
        segments.pop(0)
    return ".".join(segment for segment in segments if segment not in _WRAPPER_SEGMENTS)


def pattern(name: str) -> str:
    """Return a module's name with its numbers left open: those of a stack's layers are alike.

    Returns:
        Such as "encoder.layer.*.output"; "(the model)" for "".
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) or "(the model)"


def listed(items: list[str]) -> str:
    """Join items for an error or a warning, which names a dozen at most.

    Returns:
        The first of them, and how many more there are.
    """
    more = len(items) - _LISTED
    return "; ".join(items[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
