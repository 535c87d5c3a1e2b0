"""Find the linear layers of a model, and select layers by the rules of PEFT.

A list names layers, in full or by the end of their dotted name; a string is a regular expression for the whole name;
"all-linear" is every linear layer outside the output head.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from rmm_linear.adapters import adapters_of, is_adapted
from rmm_linear.config import RMMConfig
from rmm_linear.convertible import why_no_layer
from rmm_linear.layer import is_linear_layer
from rmm_linear.names import in_output_head, listed, strip_wrappers

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a model, or a module of `other_modules`."""

    module: nn.Module
    # the name without wrappers' segments, for matching and reporting
    name: str
    # all names of the module: a shared module has several, a wrapped module a raw name as well
    aliases: tuple[str, ...]
    in_head: bool

    @property
    def label(self) -> str:
        """The layer's name in messages."""
        return self.name or "(the model)"


def _checked(option: str, patterns: str | Collection[str]) -> str | Collection[str]:
    if isinstance(patterns, str):
        try:
            re.compile(patterns)
        except re.error as error:
            raise ValueError(
                f"{option}={patterns!r} is not a regular expression ({error}); for plain names pass a list"
            ) from None
    elif not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{option}={patterns!r} is neither a string nor a list of strings")
    return patterns


def _matches(patterns: str | Collection[str], layer: LinearLayer) -> bool:
    if isinstance(patterns, str):
        return any(re.fullmatch(patterns, alias) for alias in layer.aliases)
    return any(f".{alias}".endswith(f".{end}") for alias in layer.aliases for end in patterns)


def _is_by_pattern(pattern: str, layer: LinearLayer) -> bool:
    """Tell whether a key of `overrides` matches: a name, the end of a name, or a regular expression."""
    return _matches([pattern], layer) or _matches(pattern, layer)


class Selection:
    """The options of a conversion that select the layers and their configurations."""

    def __init__(
        self,
        target_modules: str | Collection[str],
        exclude_modules: str | Collection[str] | None,
        overrides: Mapping[str, RMMConfig | None],
    ) -> None:
        self._targets = _checked("target_modules", target_modules)
        self._excluded = _checked("exclude_modules", exclude_modules or ())
        if not isinstance(overrides, Mapping):
            raise ValueError(f"overrides is a {type(overrides).__name__}; pass a dict of pattern -> RMMConfig or None")
        for pattern, wanted in overrides.items():
            if not isinstance(pattern, str):
                raise ValueError(f"overrides has the key {pattern!r}; pass names or regular expressions")
            _checked("overrides", pattern)
            if wanted is not None and not isinstance(wanted, RMMConfig):
                raise ValueError(f"overrides[{pattern!r}] is {wanted!r}; pass an RMMConfig, or None for an exact layer")
        self.overrides = overrides

    def is_meant(self, layer: LinearLayer) -> bool:
        """Tell whether a layer is a target, and not excluded."""
        is_targeted = not layer.in_head if self._targets == ALL_LINEAR else _matches(self._targets, layer)
        return is_targeted and not _matches(self._excluded, layer)

    def rule_for(self, layer: LinearLayer) -> str | None:
        """Return the first pattern of the overrides that matches."""
        return next((pattern for pattern in self.overrides if _is_by_pattern(pattern, layer)), None)

    def unused(self, everything: Collection[LinearLayer], matched: Collection[LinearLayer]) -> Iterator[str]:
        """Yield messages about patterns that match no layer."""
        excluded = self._excluded
        parts = [(excluded, excluded)] if isinstance(excluded, str) else [(name, [name]) for name in excluded]
        if found := [repr(name) for name, part in parts if not any(_matches(part, layer) for layer in everything)]:
            yield f"exclude_modules that match no linear layer: {listed(found)}"
        if found := [repr(each) for each in self.overrides if not any(_is_by_pattern(each, one) for one in matched)]:
            yield f"overrides that match none of the layers to convert: {listed(found)}"

    def __str__(self) -> str:
        without = f" without exclude_modules={self._excluded!r}" if self._excluded else ""
        return f"target_modules={self._targets!r}{without}"


def linear_layers(model: nn.Module, is_wanted: Callable[[nn.Module], bool] = is_linear_layer) -> Iterator[LinearLayer]:
    """Yield each linear layer once, in the model's order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_wanted(module):
            names.setdefault(module, []).append(name)
    heads = in_output_head(model)
    adapters = {adapter for module in model.modules() if is_adapted(module) for adapter in adapters_of(module)}
    for module, raw in names.items():
        stripped = [strip_wrappers(name) for name in raw]
        aliases = stripped + raw
        if module in adapters:
            # PEFT's "lora_A.default" ends with the adapter's name: "lora_A" matches too
            aliases += [name.rpartition(".")[0] for name in stripped]
        yield LinearLayer(module, stripped[0], tuple(dict.fromkeys(aliases)), module in heads)


def other_modules(model: nn.Module) -> Iterator[tuple[LinearLayer, str]]:
    """Yield the modules that a user might expect to be converted but that are no linear layers, with the reasons."""
    for layer in linear_layers(model, lambda module: why_no_layer(module) is not None):
        yield layer, why_no_layer(layer.module) or ""
