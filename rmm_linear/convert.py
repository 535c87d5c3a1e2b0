"""Turn the linear layers of a model into sketched ones, back again, and say what was done.

A module is converted by changing its class: it stays the same object, with the same parameters, hooks and place in the
model, so optimizers, state dicts, tied weights, adapters and wrappers notice nothing. That is right only for a module
whose class is `nn.Linear` itself and whose forward will really be called; every other linear layer is left as it is,
with a reason (see `summary`).

Which layers: the rules of PEFT. A list names layers, in full or by the end of their dotted name; a string is a regular
expression for the whole name; "all-linear" is every linear layer outside the output head.
"""

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from rmm_linear.config import RMMConfig
from rmm_linear.linear import RMMLinear
from rmm_linear.memory import profile
from rmm_linear.names import strip_wrappers
from rmm_linear.padding import TIME_FIRST, install_hooks, remove_hooks

ALL_LINEAR = "all-linear"
DEFAULT_RATIO = 0.5
# Direct children of a model that hold its output head, by the names that model libraries give them.
HEAD_NAMES = (
    "lm_head", "score", "classifier", "classification_head", "qa_outputs", "embed_out", "head", "heads", "cls", "fc",
    "logits_proj",
)  # fmt: skip
# Attribute of a layer that `convert_linears(sample=...)` has left exact: why.
_LEFT_EXACT = "_rmm_left_exact"
_TENSOR_PARALLEL = "its weight is distributed over devices (tensor parallel)"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# How many names an error or a warning lists before it says how many more there are.
_LISTED = 12
# Rows at which `summary` states a layer's bytes per row: sketches round to whole rows of a block.
_SUMMARY_ROWS = 4096


@dataclass(frozen=True)
class _Found:
    """A linear layer of a model."""

    module: nn.Linear
    # without wrappers' segments, for matching and reporting
    name: str
    # every name it goes by: shared modules have several, wrapped ones a raw one as well
    aliases: tuple[str, ...]
    in_head: bool


@dataclass(frozen=True)
class LayerSummary:
    """One linear layer in a `ConversionSummary`.

    Attributes:
        name: Dotted name, without wrappers' prefixes; "" is the model itself.
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension.
        dtype: Dtype of the weight.
        config: How it is sketched, or None for an exact layer.
        exact_bytes_per_row: What an exact layer keeps of each row of its input.
        kept_bytes_per_row: What this one keeps, at 4096 rows that belong to no sequences (`keep_tokens` come on top).
        note: Why it is exact, or what else matters; "" if nothing does.
    """

    name: str
    in_features: int
    out_features: int
    dtype: str
    config: RMMConfig | None
    exact_bytes_per_row: float
    kept_bytes_per_row: float
    note: str


@dataclass(frozen=True)
class ConversionSummary:
    """What `summary` found: one row a linear layer, and a table of them as text.

    Attributes:
        rows: The layers, in the model's order.
    """

    rows: tuple[LayerSummary, ...]

    @property
    def converted(self) -> int:
        """Number of sketched layers."""
        return sum(row.config is not None for row in self.rows)

    @property
    def exact_bytes_per_row(self) -> float:
        """Sum over the layers of what exact ones keep of a row."""
        return sum(row.exact_bytes_per_row for row in self.rows)

    @property
    def kept_bytes_per_row(self) -> float:
        """Sum over the layers of what these keep of a row."""
        return sum(row.kept_bytes_per_row for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain values, ready for JSON.

        Returns:
            `rows`, each a dictionary, and the totals.
        """
        rows = []
        for row in self.rows:
            values = asdict(row)
            values["config"] = None if row.config is None else row.config.to_dict()
            rows.append(values)
        return {
            "rows": rows,
            "converted": self.converted,
            "exact_bytes_per_row": self.exact_bytes_per_row,
            "kept_bytes_per_row": self.kept_bytes_per_row,
        }

    def __str__(self) -> str:
        if not self.rows:
            return "no linear layers"
        table: list[tuple[str, ...]] = [("layer", "in -> out", "sketch", "bytes a row", "note")]
        for row in self.rows:
            amount = f"{row.exact_bytes_per_row:.0f} -> {row.kept_bytes_per_row:.0f}"
            shape = f"{row.in_features} -> {row.out_features}"
            table.append((row.name or "(the model)", shape, describe(row.config), amount, row.note))
        lines = aligned(table)
        lines.append(
            f"{self.converted} of {len(self.rows)} linear layers are sketched; their inputs, layer by layer:"
            f" {self.exact_bytes_per_row:.0f} -> {self.kept_bytes_per_row:.0f} bytes a row"
        )
        return "\n".join(lines)


def convert_linears(
    model: nn.Module,
    ratio: float | None = None,
    *,
    config: RMMConfig | None = None,
    target_modules: str | Collection[str] = ALL_LINEAR,
    exclude_modules: str | Collection[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    overrides: Mapping[str, RMMConfig | None] | None = None,
    sample: object = None,
) -> nn.Module:
    """Turn the linear layers of a model into sketched ones, in place.

    Modules keep their identity: parameters, hooks, state_dict keys and tied weights are untouched, so this may be
    called before or after the optimizer is made, and before or after wrapping. Calling it again does nothing, or
    re-configures the layers that match if the configuration differs; layers that were converted before and are not
    matched now stay as they are (`revert_linears` first, to begin anew). Layers that cannot be converted are left exact
    and named in one warning.

    Warning:
        A ratio chosen too small makes the weight gradients noisy enough to slow down or spoil training; the loss looks
        normal meanwhile, since the output is exact. Compare with an exact run.

    Example:
        >>> import torch
        >>> from rmm_linear import RMMConfig, convert_linears
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> model = convert_linears(model, ratio=0.25, overrides={"2": None})
        >>> [type(layer).__name__ for layer in model]
        ['RMMLinear', 'ReLU', 'Linear']

    Args:
        model: Any module; it may itself be an `nn.Linear`. If a configuration has `skip_padding`, the parts of it that
            take an `attention_mask` get a hook that announces it (see `rmm_linear.padding`).
        ratio: Rows kept over rows, short for `config=RMMConfig(ratio=ratio)`. 0.5 if neither is given.
        config: How to sketch.
        target_modules: Which layers: "all-linear" (every one outside the output head), a list of full names or ends
            of names ("query" is "encoder.0.query"), or a regular expression for the whole name.
        exclude_modules: Which of them not, by a list or a regular expression; one that matches nothing is named in a
            warning.
        filter_fn: Called with each layer that is still in question and its name; False leaves it out.
        overrides: Full name, end of a name or regular expression -> the configuration of the targeted layers that
            match, or None for exact ones. The first match wins.
        sample: A batch to run forward once, in training mode, to see which layers a sketch frees anything of: others
            are left exact, unless one of the `overrides` names them, and `summary` says why. A mapping is passed by
            name, a tuple or list as arguments, anything else as the only one. Run it in the autocast region, and
            wrapped in the checkpoints, that the model trains with. Without a sample all layers that match are
            converted; the input of an attention's output projection, which a fused attention keeps anyway, is the
            usual one of which a sketch frees nothing (`exclude_modules`).

    Returns:
        The same model.

    Raises:
        ValueError: If both `ratio` and `config` are given, a value is bad, no layer matches, or none of those that
            match can be converted or frees anything.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    default = _resolve_config(ratio, config)
    targets, excluded = _Matcher("target_modules", target_modules), _Matcher("exclude_modules", exclude_modules or ())
    rules = _check_overrides(overrides or {})

    found = list(_linear_layers(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layers; there is nothing to convert")
    matched = [
        layer
        for layer in found
        if (not layer.in_head if target_modules == ALL_LINEAR else targets.matches(layer))
        and not excluded.matches(layer)
        and (filter_fn is None or filter_fn(layer.module, layer.name))
    ]
    if not matched:
        raise ValueError(_nothing_matched(found, target_modules, exclude_modules, filter_fn))

    plan: list[tuple[_Found, RMMConfig | None]] = []
    skipped: list[str] = []
    unused_rules = [repr(rule.pattern) for rule in rules if not any(rule.matches(layer) for layer in matched)]
    unused_exclusions = [str(part) for part in excluded.parts() if not any(map(part.matches, found))]
    for layer in matched:
        rule = next((rule for rule in rules if rule.matches(layer)), None)
        wanted = default if rule is None else rule.config
        reason = why_not(layer.module, model) if wanted is not None else None
        if reason is not None:
            skipped.append(f"{layer.name or '(the model)'}: {reason}")
        else:
            plan.append((layer, wanted))
    if not plan:
        raise ValueError("none of the layers that match can be converted; left exact: " + listed(skipped))

    useless: dict[str, str] = {}
    if sample is not None:
        named = {layer.name for layer, _ in plan if any(rule.matches(layer) for rule in rules)}
        useless = _useless(model, plan, sample)
        useless = {name: reason for name, reason in useless.items() if name not in named}
        if len(useless) == len(plan):
            reasons = listed([f"{name}: {reason}" for name, reason in useless.items()])
            raise ValueError(f"a sketch frees nothing of any of the layers that match: {reasons}")
    for layer, wanted in plan:
        vars(layer.module).pop(_LEFT_EXACT, None)
        if wanted is None or layer.name in useless:
            _revert(layer.module)
            if layer.name in useless:
                setattr(layer.module, _LEFT_EXACT, useless[layer.name])
        else:
            _swap(layer.module, nn.Linear, RMMLinear)
            layer.module.rmm_config = wanted  # type: ignore[assignment]
    if not _announce_padding(model):
        warnings.warn(
            "skip_padding=True, but no part of the model takes an attention_mask that is known to speak of all of its"
            " rows: they are kept, unless rmm_linear.valid_rows(mask) announces which are valid",
            UserWarning,
            stacklevel=2,
        )
    if any(wanted is not None and wanted.keep_tokens for _, wanted in plan) and _is_time_first(model):
        warnings.warn(
            f"keep_tokens counts along the last dimension but one, and the {type(model).__name__} holds (length, batch,"
            " features) in some of its layers: other rows than these tokens' are kept there; leave keep_tokens out",
            UserWarning,
            stacklevel=2,
        )
    if skipped:
        warnings.warn("left exact: " + listed(skipped), UserWarning, stacklevel=2)
    if unused_exclusions:
        message = f"exclude_modules that match no linear layer: {listed(unused_exclusions)}"
        warnings.warn(message, UserWarning, stacklevel=2)
    if unused_rules:
        message = f"overrides that match none of the layers to convert: {listed(unused_rules)}"
        warnings.warn(message, UserWarning, stacklevel=2)
    return model


def _useless(model: nn.Module, plan: list[tuple[_Found, RMMConfig | None]], sample: object) -> dict[str, str]:
    """Run a sample through the model with exact layers, and say which sketches would free nothing."""
    configs = {layer.name: wanted for layer, wanted in plan if wanted is not None}
    before = [(module, module.rmm_config) for module in model.modules() if isinstance(module, RMMLinear)]
    modes = [(module, module.training) for module in model.modules()]
    # those that are converted already keep what an exact layer keeps meanwhile
    for layer, _ in before:
        layer.rmm_config = RMMConfig(ratio=1.0)
    # parts that are in eval mode in a model that trains are so on purpose
    if not model.training:
        model.train()
    try:
        if isinstance(sample, Mapping):
            report = profile(model, **sample)
        elif isinstance(sample, (tuple, list)):
            report = profile(model, *sample)
        else:
            report = profile(model, sample)
    finally:
        for module, training in modes:
            module.training = training
        for layer, config in before:
            layer.rmm_config = config
    return report.frees_nothing(configs)


def _is_time_first(model: nn.Module) -> bool:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for module in model.modules():
        if isinstance(module, kinds) and not module.self_attn.batch_first:
            return True
        if getattr(getattr(module, "config", None), "model_type", None) in TIME_FIRST:
            return True
    return False


def revert_linears(model: nn.Module) -> nn.Module:
    """Turn every sketched layer of a model back into an `nn.Linear`, in place.

    Args:
        model: Any module. Without sketched layers nothing happens.

    Returns:
        The same model.

    Raises:
        ValueError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    for module in model.modules():
        _revert(module)
        vars(module).pop(_LEFT_EXACT, None)
    remove_hooks(model)
    return model


def summary(model: nn.Module, *, file: TextIO | None = None) -> ConversionSummary:
    """Print which linear layers are sketched, how, and what each keeps of a row of its input.

    Computed from the model as it is now. Layers that share an input (query, key and value projections) keep it once in
    an exact model, and some attention kernels keep the input of the next projection anyway: the sums over layers say
    what the layers keep one by one, not what the model saves. `rmm_linear.memory.SavedTensors` and
    `rmm_linear.memory.MeasuredSaving` measure that.

    Args:
        model: Any module.
        file: Where to print to; standard output if None.

    Returns:
        The rows and totals that were printed.

    Raises:
        ValueError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    result = ConversionSummary(tuple(_summarize(layer, model) for layer in _linear_layers(model)))
    print(result, file=file if file is not None else sys.stdout)
    return result


def why_not(module: nn.Module, model: nn.Module | None = None) -> str | None:
    """Say why a linear layer cannot be converted.

    Args:
        module: The layer.
        model: The model that it is a part of, which tells sharded weights from tensor-parallel ones.

    Returns:
        The reason, or None if it can be converted (or is already).
    """
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return f"its class is {_class_name(kind)}, not nn.Linear"
    if isinstance(module, RMMLinear):
        # Converted already, whatever was done to it since: it can be re-configured.
        return _TENSOR_PARALLEL if _is_tensor_parallel(module, model) else None
    if parametrize.is_parametrized(module):
        return f"its {', '.join(module.parametrizations)} is parametrized"  # type: ignore[arg-type]
    if isinstance(module, nn.LazyLinear):
        return "its shape is not known yet (LazyLinear); run a batch through the model first"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if kind is not nn.Linear and not _is_sharded_class(kind):
        return f"its class is {_class_name(kind)}, not nn.Linear"
    if not isinstance(module._parameters.get("weight"), Tensor):
        return "its weight is not a parameter but computed by a hook (weight_norm, spectral_norm, pruning)"
    if _has_foreign_forward(module):
        return "its forward is replaced on the instance (accelerate's hooks do that), so that a class's is never called"
    if module.weight.dtype not in _DTYPES:
        return f"its weight has dtype {module.weight.dtype}"
    if _is_tensor_parallel(module, model):
        return _TENSOR_PARALLEL
    return None


class _Matcher:
    """PEFT's rules for one option: a list of names or ends of names, or a regular expression for the whole name."""

    def __init__(self, option: str, patterns: str | Collection[str]) -> None:
        self._option = option
        self._names: tuple[str, ...] = ()
        self._regex: re.Pattern[str] | None = None
        if isinstance(patterns, str):
            try:
                self._regex = re.compile(patterns)
            except re.error as error:
                raise ValueError(
                    f"{option}={patterns!r} is not a regular expression ({error}); for plain names pass a list"
                ) from None
        elif isinstance(patterns, Collection) and all(isinstance(pattern, str) for pattern in patterns):
            self._names = tuple(patterns)
        else:
            raise ValueError(f"{option}={patterns!r} is neither a string nor a list of strings")

    def matches(self, layer: _Found) -> bool:
        return any(self._matches_name(alias) for alias in layer.aliases)

    def parts(self) -> list["_Matcher"]:
        """One matcher for each name of a list; a regular expression is one part."""
        if self._regex is not None:
            return [self]
        return [_Matcher(self._option, [name]) for name in self._names]

    def __str__(self) -> str:
        return ", ".join(map(repr, self._names if self._regex is None else (self._regex.pattern,)))

    def _matches_name(self, name: str) -> bool:
        if self._regex is not None and self._regex.fullmatch(name):
            return True
        return any(name == end or name.endswith("." + end) for end in self._names)


class _Override:
    """A pattern of `overrides`: a name, the end of a name, or a regular expression."""

    def __init__(self, pattern: str, config: RMMConfig | None) -> None:
        self.pattern = pattern
        self.config = config
        self._matchers = (_Matcher("overrides", [pattern]), _Matcher("overrides", pattern))

    def matches(self, layer: _Found) -> bool:
        return any(matcher.matches(layer) for matcher in self._matchers)


def _announce_padding(model: nn.Module) -> bool:
    """Have the model announce its attention mask, if any layer wants it; tell whether those that want it get it."""
    if not any(isinstance(module, RMMLinear) and module.rmm_config.skip_padding for module in model.modules()):
        remove_hooks(model)
        return True
    return install_hooks(model) > 0


def _resolve_config(ratio: float | None, config: RMMConfig | None) -> RMMConfig:
    if config is None:
        return RMMConfig(ratio=DEFAULT_RATIO if ratio is None else ratio)
    if ratio is not None:
        raise ValueError(f"both ratio={ratio!r} and config are given; pass config=config.replace(ratio={ratio!r})")
    if not isinstance(config, RMMConfig):
        raise ValueError(f"config is a {type(config).__name__}; pass an RMMConfig")
    return config


def _check_overrides(overrides: Mapping[str, RMMConfig | None]) -> list[_Override]:
    if not isinstance(overrides, Mapping):
        raise ValueError(f"overrides is a {type(overrides).__name__}; pass a dict of pattern -> RMMConfig or None")
    for pattern, wanted in overrides.items():
        if not isinstance(pattern, str):
            raise ValueError(f"overrides has the key {pattern!r}; pass names or regular expressions")
        if wanted is not None and not isinstance(wanted, RMMConfig):
            raise ValueError(f"overrides[{pattern!r}] is {wanted!r}; pass an RMMConfig, or None for an exact layer")
    return [_Override(pattern, wanted) for pattern, wanted in overrides.items()]


def _linear_layers(model: nn.Module) -> Iterator[_Found]:
    """Yield each linear layer once, in the model's order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(module, []).append(name)
    heads = {inner for head in _output_heads(model) for inner in head.modules()}
    for module, raw in names.items():
        assert isinstance(module, nn.Linear)
        stripped = [strip_wrappers(name) for name in raw]
        yield _Found(module, stripped[0], tuple(dict.fromkeys(stripped + raw)), module in heads)


def _output_heads(model: nn.Module) -> Iterator[nn.Module]:
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


def _has_foreign_forward(module: nn.Module) -> bool:
    """Tell whether the instance has a forward that is not just its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _is_sharded_class(kind: type) -> bool:
    """Tell whether FSDP2 made this class of nn.Linear or RMMLinear: (FSDPModule, nn.Linear)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule") or len(kind.__bases__) != 2:
        return False
    return issubclass(kind.__bases__[0], fsdp.FSDPModule) and kind.__bases__[1] in (nn.Linear, RMMLinear)


def _is_tensor_parallel(module: nn.Module, model: nn.Module | None) -> bool:
    """Tell whether the weight is a DTensor that stays distributed while the layer runs."""
    placements = getattr(module.weight, "placements", None)
    if placements is None:
        return False
    # FSDP2 gathers a weight that it sharded before the layer runs. A second mesh dimension that shards is not its own.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    gathers = fsdp is not None and any(
        isinstance(outer, fsdp.FSDPModule) and any(inner is module for inner in outer.modules())
        for outer in (model if model is not None else module).modules()
    )
    return not gathers or sum(not placement.is_replicate() for placement in placements) > 1


# (FSDP2's class, base, new base) -> the same class with the new base
_SHARDED_CLASSES: dict[tuple[type, type, type], type] = {}


def _with_base(kind: type, old: type, new: type) -> type:
    """Return FSDP2's dynamic class with another base: its unshard and reshard survive."""
    key = (kind, old, new)
    if key not in _SHARDED_CLASSES:
        bases = tuple(new if base is old else base for base in kind.__bases__)
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", "__doc__")}
        made = type(kind.__name__.replace(old.__name__, new.__name__), bases, own)
        _SHARDED_CLASSES[key] = made
        # the way back leads to FSDP2's own class
        _SHARDED_CLASSES[made, new, old] = kind
    return _SHARDED_CLASSES[key]


def _swap(module: nn.Module, old: type, new: type) -> None:
    kind: type = type(module)
    if kind is old:
        module.__class__ = new
    elif _is_sharded_class(kind) and old in kind.__bases__:
        module.__class__ = _with_base(kind, old, new)
    else:
        return
    # what accelerate leaves behind when it takes a hook off: the old class's own forward, bound to the instance
    vars(module).pop("forward", None)


def _revert(module: nn.Module) -> None:
    if not isinstance(module, RMMLinear):
        return
    # What replaced an instance's forward holds the class's own, which needs the configuration.
    if not _has_foreign_forward(module):
        _swap(module, RMMLinear, nn.Linear)
    if isinstance(module, RMMLinear):
        module.rmm_config = module.rmm_config.replace(ratio=1.0, storage=None)
        warnings.warn(
            "a sketched layer that was changed after its conversion (a parametrization, or a forward on the instance,"
            " as accelerate's hooks put there) was made exact by ratio=1.0 instead of being reverted; undo the change"
            " first to have an nn.Linear again",
            UserWarning,
            stacklevel=3,
        )
    else:
        vars(module).pop("rmm_config", None)
        vars(module).pop("_rows_check", None)


def _summarize(layer: _Found, model: nn.Module) -> LayerSummary:
    module = layer.module
    config = module.rmm_config if isinstance(module, RMMLinear) else None
    weight = module.weight
    known = not nn.parameter.is_lazy(weight)
    trains = known and weight.requires_grad
    exact = float(module.in_features * weight.dtype.itemsize) if trains else 0.0
    kept = exact
    if trains and config is not None:
        kept = config.saved_bytes(_SUMMARY_ROWS, module.in_features, weight.dtype) / _SUMMARY_ROWS
    return LayerSummary(
        name=layer.name,
        in_features=module.in_features,
        out_features=module.out_features,
        dtype=str(weight.dtype).removeprefix("torch."),
        config=config,
        exact_bytes_per_row=exact,
        kept_bytes_per_row=kept,
        note=_note(layer, model, frozen=known and not trains),
    )


def _note(layer: _Found, model: nn.Module, *, frozen: bool) -> str:
    notes = []
    reason = why_not(layer.module, model)
    if reason is not None:
        notes.append(f"exact: {reason}")
    elif not isinstance(layer.module, RMMLinear):
        why = getattr(layer.module, _LEFT_EXACT, None)
        if why is not None:
            notes.append(f"exact: a sketch frees nothing: {why}")
        else:
            notes.append("exact: output head" if layer.in_head else "exact: not targeted, or excluded")
    elif layer.module.rmm_config.is_exact:
        notes.append("exact: ratio 1")
    if frozen:
        notes.append("frozen weight: keeps no input")
    return "; ".join(notes)


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Lay a table out in columns, with a rule below its first row.

    Args:
        table: Rows of as many cells each.

    Returns:
        Lines.
    """
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    rows = [table[0], tuple("-" * width for width in widths), *table[1:]]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]


def describe(config: RMMConfig | None) -> str:
    """Say in a few words how a layer keeps its input.

    Args:
        config: Its configuration, or None for an exact layer.

    Returns:
        Such as "hadamard 0.5 centered in int4, from 128 rows"; "-" for an exact layer.
    """
    if config is None:
        return "-"
    # at ratio 1 a storage holds the input itself, without a sketch
    kind = "input" if config.ratio == 1 and config.storage is not None else f"{config.sketch} {config.ratio:g}"
    centered = " centered" if config.center else ""
    storage = f" in {config.storage}" if config.storage is not None else ""
    padding = ", without padding" if config.skip_padding else ""
    tokens = f", beside tokens {', '.join(map(str, config.keep_tokens))}" if config.keep_tokens else ""
    return f"{kind}{centered}{storage}{padding}{tokens}, from {config.min_rows} rows"


def _nothing_matched(
    found: list[_Found],
    target_modules: str | Collection[str],
    exclude_modules: str | Collection[str] | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> str:
    wanted = f"target_modules={target_modules!r}"
    if exclude_modules is not None:
        wanted += f" without exclude_modules={exclude_modules!r}"
    if filter_fn is not None:
        wanted += " and filter_fn"
    names = [f"{layer.name or '(the model)'}{' (output head)' if layer.in_head else ''}" for layer in found]
    return f"{wanted} matches none of the model's {len(found)} linear layers: {listed(names)}"


def listed(items: list[str]) -> str:
    """Join items for an error or a warning, which names a dozen at most.

    Args:
        items: The items.

    Returns:
        The first of them, and how many more there are.
    """
    more = len(items) - _LISTED
    return "; ".join(items[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
