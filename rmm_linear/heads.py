"""Which modules of a model make its output: its head, which a conversion leaves exact unless it is asked for."""

from collections.abc import Iterator

from torch import nn

from rmm_linear.names import strip_wrappers

# Direct children of a model that hold its output head, by the names that model libraries give them.
HEAD_NAMES = (
    "lm_head", "score", "classifier", "classification_head", "qa_outputs", "embed_out", "head", "heads", "cls", "fc",
    "logits_proj",
)  # fmt: skip


def in_output_head(model: nn.Module) -> set[nn.Module]:
    """Find the modules of a model's output head."""
    return {inner for head in _heads(model) for inner in head.modules()}


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that make a model's output: by the model's own word, or by their usual names."""
    for name, module in model.named_modules():
        is_model = hasattr(module, "get_output_embeddings") or hasattr(module, "get_classifier")
        if is_model:
            yield from _named_by_model(module)
        if is_model or strip_wrappers(name) == "":
            yield from (child for child_name, child in module.named_children() if child_name in HEAD_NAMES)


def _named_by_model(model: nn.Module) -> Iterator[nn.Module]:
    for method in ("get_output_embeddings", "get_classifier"):
        try:
            head = getattr(model, method)()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        for module in head if isinstance(head, (tuple, list)) else (head,):
            if isinstance(module, nn.Module):
                yield module
