"""Names of modules, as users know them."""

# Names that wrappers put in front of, or between, the names of the model they wrap.
_WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_LEADING_WRAPPER_SEGMENTS = (*_WRAPPER_SEGMENTS, "module")


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
