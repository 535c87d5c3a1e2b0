"""Which linear layers a model has, and which of them are meant: the rules of PEFT.

A list names layers, in full or by the end of their dotted name; a string is a regular expression for the whole name;
"all-linear" is every linear layer outside the output head.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from rmm_linear.adapters import adapters_of, is_adapted
from rmm_linear.config import RMMConfig
from rmm_linear.convertible import why_no_layer
from rmm_linear.layer import is_linear_layer
from rmm_linear.names import in_output_head, listed, strip_wrappers

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a model, or what it has in such a layer's place."""

    module: nn.Module
    # without wrappers' segments, for matching and reporting
    name: str
    # every name it goes by: shared modules have several, wrapped ones a raw one as well
    aliases: tuple[str, ...]
    in_head: bool

    @property
    def label(self) -> str:
        """What a message calls it."""
        return self.name or "(the model)"


class Matcher:
    """PEFT's rules for one option: a list of names or ends of names, or a regular expression for the whole name."""

    def __init__(self, option: str, patterns: str | Collection[str]) -> None:
        if isinstance(patterns, str):
            try:
                re.compile(patterns)
            except re.error as error:
                raise ValueError(
                    f"{option}={patterns!r} is not a regular expression ({error}); for plain names pass a list"
                ) from None
        elif not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"{option}={patterns!r} is neither a string nor a list of strings")
        self._patterns = patterns

    def matches(self, layer: LinearLayer) -> bool:
        """Tell whether a layer is meant, by any of its names."""
        if isinstance(self._patterns, str):
            return any(re.fullmatch(self._patterns, alias) for alias in layer.aliases)
        return any(f".{alias}".endswith(f".{end}") for alias in layer.aliases for end in self._patterns)

    def unused(self, layers: Collection[LinearLayer]) -> list[str]:
        """The names of a list, or the expression, that match none of the layers."""
        parts = [self._patterns] if isinstance(self._patterns, str) else [[name] for name in self._patterns]
        unused = [part for part in parts if not any(map(Matcher("", part).matches, layers))]
        return [repr(part if isinstance(part, str) else part[0]) for part in unused]


class Override(NamedTuple):
    """A pattern of `overrides`: a name, the end of a name, or a regular expression; and what the layers are to have."""

    pattern: str
    config: RMMConfig | None

    def matches(self, layer: LinearLayer) -> bool:
        """Tell whether a layer is meant, by any of its names."""
        return any(Matcher("overrides", each).matches(layer) for each in ([self.pattern], self.pattern))


class Selection:
    """The options of a conversion that say which layers, and with which configuration."""

    def __init__(
        self,
        target_modules: str | Collection[str],
        exclude_modules: str | Collection[str] | None,
        overrides: Mapping[str, RMMConfig | None],
    ) -> None:
        self._options = target_modules, exclude_modules
        self._targets = Matcher("target_modules", target_modules)
        self._excluded = Matcher("exclude_modules", exclude_modules or ())
        if not isinstance(overrides, Mapping):
            raise ValueError(f"overrides is a {type(overrides).__name__}; pass a dict of pattern -> RMMConfig or None")
        for pattern, wanted in overrides.items():
            if not isinstance(pattern, str):
                raise ValueError(f"overrides has the key {pattern!r}; pass names or regular expressions")
            if wanted is not None and not isinstance(wanted, RMMConfig):
                raise ValueError(f"overrides[{pattern!r}] is {wanted!r}; pass an RMMConfig, or None for an exact layer")
        self._rules = [Override(pattern, config) for pattern, config in overrides.items()]

    def is_meant(self, layer: LinearLayer) -> bool:
        """Tell whether a layer is a target, and not excluded."""
        is_targeted = not layer.in_head if self._options[0] == ALL_LINEAR else self._targets.matches(layer)
        return is_targeted and not self._excluded.matches(layer)

    def rule_for(self, layer: LinearLayer) -> Override | None:
        """Return the first of the overrides that matches."""
        return next((rule for rule in self._rules if rule.matches(layer)), None)

    def unused(self, everything: Collection[LinearLayer], matched: Collection[LinearLayer]) -> Iterator[str]:
        """Name the patterns that match nothing."""
        if parts := self._excluded.unused(everything):
            yield f"exclude_modules that match no linear layer: {listed(parts)}"
        if rules := [repr(rule.pattern) for rule in self._rules if not any(map(rule.matches, matched))]:
            yield f"overrides that match none of the layers to convert: {listed(rules)}"

    def __str__(self) -> str:
        targets, excluded = self._options
        without = "" if excluded is None else f" without exclude_modules={excluded!r}"
        return f"target_modules={targets!r}{without}"


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
            # PEFT's "lora_A.default": the name of the adapter is nothing of the layer's
            aliases += [name.rpartition(".")[0] for name in stripped]
        yield LinearLayer(module, stripped[0], tuple(dict.fromkeys(aliases)), module in heads)


def other_modules(model: nn.Module) -> Iterator[tuple[LinearLayer, str]]:
    """Find the modules that a user might expect to be converted, and that can't be; each with the reason."""
    for layer in linear_layers(model, lambda module: why_no_layer(module) is not None):
        yield layer, why_no_layer(layer.module) or ""
