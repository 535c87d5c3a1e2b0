"""Names of modules for messages; and the output head, which conversions leave exact by default."""

import re
from collections.abc import Iterator

from torch import nn

# Segments that wrappers insert into the module names of the wrapped model.
_WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_LEADING_WRAPPER_SEGMENTS = (*_WRAPPER_SEGMENTS, "module")
# The most names that an error or a warning lists.
_LISTED = 12
# Direct children of a model that hold its output head, by the names that model libraries give them.
HEAD_NAMES = (
    "lm_head", "score", "classifier", "classification_head", "qa_outputs", "embed_out", "head", "heads", "cls", "fc",
    "logits_proj",
)  # fmt: skip


def strip_wrappers(name: str) -> str:
    """Return a module's name without the segments of torch.compile, DDP, FSDP and checkpoint wrappers."""
    segments = name.split(".")
    while segments and segments[0] in _LEADING_WRAPPER_SEGMENTS:
        segments.pop(0)
    return ".".join(segment for segment in segments if segment not in _WRAPPER_SEGMENTS)


def pattern(name: str) -> str:
    """Return a module's name with "*" for its numbers, as in "encoder.layer.*.output"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) or "(the model)"


def listed(items: list[str]) -> str:
    """Join items for an error or a warning: a dozen at most, and the number of the rest."""
    more = len(items) - _LISTED
    return "; ".join(items[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


def in_output_head(model: nn.Module) -> set[nn.Module]:
    """Find the modules of a model's output head, by the model's own methods or by the usual names of heads."""
    heads: list[nn.Module] = []
    for name, module in model.named_modules():
        is_model = hasattr(module, "get_output_embeddings") or hasattr(module, "get_classifier")
        if is_model:
            heads += _named_by_model(module)
        if is_model or strip_wrappers(name) == "":
            heads += (child for child_name, child in module.named_children() if child_name in HEAD_NAMES)
    return {inner for head in heads for inner in head.modules()}


def _named_by_model(model: nn.Module) -> Iterator[nn.Module]:
    for method in ("get_output_embeddings", "get_classifier"):
        try:
            head = getattr(model, method)()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        for module in head if isinstance(head, (tuple, list)) else (head,):
            if isinstance(module, nn.Module):
                yield module
