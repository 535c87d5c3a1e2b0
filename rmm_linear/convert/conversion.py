"""Convert the linear layers of a model to sketched layers, and back.

A module is converted by changing its class: the object stays the same, so optimizers, state dicts, tied weights,
adapters and wrappers stay valid. This is correct only for a module whose class is `nn.Linear` itself (or the `Conv1D`
of transformers) and whose forward is really called; other modules stay exact, with a reason (see `summary`).
"""

import warnings
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from rmm_linear.adapters import watch_adapted_layers
from rmm_linear.config import RMMConfig, config_for
from rmm_linear.convert.matching import ALL_LINEAR, LinearLayer, Selection, linear_layers, other_modules
from rmm_linear.convertible import has_foreign_forward, is_sharded_class, why_not
from rmm_linear.errors import first_line
from rmm_linear.layer import SketchedLayer, convertible_classes, sketched_class
from rmm_linear.memory import profile
from rmm_linear.names import listed, pattern
from rmm_linear.padding import TIME_FIRST, install_hooks, remove_hooks

# Below this ratio, the noise of an element is at least 3 times its gradient: noise is about sqrt((1 - ratio) / ratio).
_SMALL_RATIO = 0.1

# Attribute of a layer that `convert_linears(sample=...)` has left exact; its value is the reason.
LEFT_EXACT = "_rmm_left_exact"
# (FSDP2's class, base, new base) -> the same class with the new base
_SHARDED_CLASSES: dict[tuple[type, type, type], type] = {}

# a layer, and its planned configuration, or None for an exact layer
Planned = tuple[LinearLayer, RMMConfig | None]


def convert_linears(
    model: nn.Module,
    ratio: float | None = None,
    *,
    config: RMMConfig | None = None,
    target_modules: str | Collection[str] = ALL_LINEAR,
    exclude_modules: str | Collection[str] | None = None,
    overrides: Mapping[str, RMMConfig | None] | None = None,
    sample: object = None,
) -> nn.Module:
    """Convert the linear layers of a model to sketched layers, in place, and return the model.

    Modules keep their identity, parameters, hooks, state_dict keys and tied weights, so this may be called before or
    after the optimizer is made, and before or after wrapping. A second call re-configures the layers that match, and
    leaves other layers unchanged. Layers that cannot be converted are left exact and named in one warning.

    Warning:
        Too small a ratio makes the weight gradients noisy enough to spoil training, while the loss looks normal, since
        the output is exact. Compare with an exact run.

    Examples:
        >>> import torch
        >>> from rmm_linear import RMMConfig, convert_linears
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        >>> model = convert_linears(model, ratio=0.25, overrides={"2": None})
        >>> [type(layer).__name__ for layer in model]
        ['RMMLinear', 'GELU', 'Linear']

    Args:
        model: Any module, an `nn.Linear` included. If a configuration has `skip_padding`, submodules that take an
            `attention_mask` get a hook that announces the mask (see `rmm_linear.padding`).
        ratio: Rows kept over rows, short for `config=RMMConfig(ratio=ratio)`. 0.5 if neither is given.
        config: The settings of the sketches.
        target_modules: The layers to convert: "all-linear" (all outside the output head), a list of full names or ends
            of names ("query" is "encoder.0.query"), or a regular expression for the whole name.
        exclude_modules: Target layers to leave exact, by a list or a regular expression.
        overrides: Full name, end of a name or regular expression -> the configuration of the targeted layers that
            match, or None for exact layers. The first match wins.
        sample: A batch whose forward pass runs once, in training mode: layers in which a sketch frees no bytes are left
            exact, unless one of the `overrides` names them, and `summary` states the reason. A mapping is passed as
            keyword arguments, a tuple or list as positional arguments, any other object as the only argument. Call
            `convert_linears` in the autocast region, and with the checkpoints, that the model trains with.

    Raises:
        ValueError: If both `ratio` and `config` are given, a value is invalid, no layer matches, or no matching layer
            can be converted or frees bytes.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    default = config_for(ratio, config)
    selection = Selection(target_modules, exclude_modules, overrides or {})
    found, others = list(linear_layers(model)), list(other_modules(model))
    matched = _matched(model, selection, found, others)
    plan: list[Planned] = []
    skipped = []
    for layer in matched:
        rule = selection.rule_for(layer)
        wanted = default if rule is None else selection.overrides[rule]
        reason = why_not(layer.module, model) if wanted is not None else None
        if reason is not None:
            skipped.append(f"{layer.label}: {reason}")
        else:
            plan.append((layer, wanted))
    if not plan:
        raise ValueError("none of the layers that match can be converted; left exact: " + listed(skipped))
    useless = {} if sample is None else _useless(model, plan, sample)
    # layers that `overrides` names are converted even if a sketch frees nothing
    named = {layer.name for layer in matched if selection.rule_for(layer) is not None}
    useless = {name: reason for name, reason in useless.items() if name not in named}
    if len(useless) == len(plan):
        reasons = listed([f"{name}: {reason}" for name, reason in useless.items()])
        raise ValueError(f"a sketch frees nothing in any of the layers that match: {reasons}")
    for layer, wanted in plan:
        vars(layer.module).pop(LEFT_EXACT, None)
        if wanted is None or layer.name in useless:
            _to_exact(layer.module)
            if layer.name in useless:
                setattr(layer.module, LEFT_EXACT, useless[layer.name])
        else:
            for exact in convertible_classes():
                _swap(layer.module, exact, sketched_class(exact))
            layer.module.rmm_config = wanted  # type: ignore[assignment]
    watch_adapted_layers(model)
    unusual = [other for other in others if selection.is_meant(other[0])]
    messages = [_padding_message(model), *_advice(model, plan, skipped, unusual)]
    messages += selection.unused([*found, *(other for other, _ in others)], matched)
    for message in filter(None, messages):
        warnings.warn(message, UserWarning, stacklevel=2)
    return model


def _matched(
    model: nn.Module, selection: Selection, found: list[LinearLayer], others: list[tuple[LinearLayer, str]]
) -> list[LinearLayer]:
    if not found:
        instead = "; ".join(["", *(f"{other.label}: {reason}" for other, reason in others[:1])])
        raise ValueError(f"{type(model).__name__} has no linear layers; there is nothing to convert{instead}")
    matched = [layer for layer in found if selection.is_meant(layer)]
    if not matched:
        names = [f"{layer.label}{' (output head)' if layer.in_head else ''}" for layer in found]
        message = f"{selection} matches none of the model's {len(found)} linear layers: {listed(names)}"
        unlike = [f"{other.name}: {reason}" for other, reason in others if selection.is_meant(other)]
        raise ValueError("; ".join([message, *([listed(unlike)] if unlike else [])]))
    return matched


def _padding_message(model: nn.Module) -> str | None:
    """Hook the modules that take an attention mask if a layer skips padding; return a message if there is none."""
    if not any(isinstance(module, SketchedLayer) and module.rmm_config.skip_padding for module in model.modules()):
        remove_hooks(model.modules())
    elif not install_hooks(model):
        return (
            "skip_padding=True, but no part of the model takes an attention_mask that is known to cover all of its"
            " rows: all rows are kept, unless rmm_linear.valid_rows(mask) announces the valid rows"
        )
    return None


def _advice(
    model: nn.Module, plan: list[Planned], skipped: list[str], others: list[tuple[LinearLayer, str]]
) -> Iterator[str]:
    sketched = [(layer.module, wanted) for layer, wanted in plan if wanted and isinstance(layer.module, SketchedLayer)]
    overflowing = sum(layer.weight.dtype == torch.float16 and wanted.ratio < _SMALL_RATIO for layer, wanted in sketched)
    if overflowing:
        yield (
            f"{overflowing} sketched layers have float16 weights and a ratio below {_SMALL_RATIO}: their gradients are"
            " estimates whose noise is several times the gradient, so that they may exceed 65504 and become infinite"
            " where exact gradients are finite. Keep weights in float32 and train under"
            " torch.autocast(dtype=torch.float16) with a GradScaler; or use bfloat16, a larger ratio, or a smaller loss"
        )
    if any(wanted.keep_tokens for _, wanted in sketched) and _is_time_first(model):
        yield (
            f"keep_tokens counts along the last dimension but one, and the {type(model).__name__} holds (length, batch,"
            " features) in some of its layers: rows of other tokens are kept there; leave keep_tokens out"
        )
    # frozen modules keep no input, so that no saving is missed
    unusual = dict.fromkeys(
        f"{pattern(other.name)}: {reason}"
        for other, reason in others
        if any(parameter.requires_grad for parameter in other.module.parameters(recurse=False))
    )
    if skipped or unusual:
        yield "left exact: " + listed([*skipped, *unusual])
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if sketched and is_trained and not any(layer.weight.requires_grad for layer, _ in sketched):
        yield (
            f"none of the {len(sketched)} layers that are sketched now has a trainable weight: they keep nothing, and"
            " there is nothing to save. With adapters, add the adapters first and convert them, such as by"
            " target_modules=['lora_A']"
        )


def _useless(model: nn.Module, plan: list[Planned], sample: object) -> dict[str, str]:
    """Run a sample through the model with exact layers; return the layers whose sketch frees nothing, with reasons."""
    configs = {layer.name: wanted for layer, wanted in plan if wanted is not None}
    before = [(module, module.rmm_config) for module in model.modules() if isinstance(module, SketchedLayer)]
    modes = [(module, module.training) for module in model.modules()]
    # make converted layers exact for the duration of the run
    for layer, _ in before:
        layer.rmm_config = RMMConfig(ratio=1.0)
    # submodules in eval mode in a model in training mode stay in eval mode
    if not model.training:
        model.train()
    try:
        if isinstance(sample, Mapping):
            report = profile(model, **sample)
        else:
            report = profile(model, *(sample if isinstance(sample, (tuple, list)) else (sample,)))
    except Exception as error:
        raise ValueError(
            f"the {type(model).__name__} can't be run on sample, a {type(sample).__name__} ({first_line(error)}); pass"
            " a batch as the model takes it: a mapping of keyword arguments, a tuple of arguments, or the only argument"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
        for layer, config in before:
            layer.rmm_config = config
    return report.frees_nothing(configs)


def _is_time_first(model: nn.Module) -> bool:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return any(
        (isinstance(module, kinds) and not module.self_attn.batch_first)
        or getattr(getattr(module, "config", None), "model_type", None) in TIME_FIRST
        for module in model.modules()
    )


def revert_linears(model: nn.Module) -> nn.Module:
    """Turn every sketched layer of a model back into an `nn.Linear`, in place, and return the model.

    Raises:
        ValueError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    for module in model.modules():
        _to_exact(module)
        vars(module).pop(LEFT_EXACT, None)
    remove_hooks(model.modules())
    watch_adapted_layers(model)
    return model


def _with_base(kind: type, old: type, new: type) -> type:
    """Return FSDP2's dynamic class with another base, so that its unshard and reshard methods remain."""
    key = (kind, old, new)
    if key not in _SHARDED_CLASSES:
        bases = tuple(new if base is old else base for base in kind.__bases__)
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", "__doc__")}
        made = type(kind.__name__.replace(old.__name__, new.__name__), bases, own)
        _SHARDED_CLASSES[key] = made
        # the inverse key gives FSDP2's own class back
        _SHARDED_CLASSES[made, new, old] = kind
    return _SHARDED_CLASSES[key]


def _swap(module: nn.Module, old: type, new: type) -> None:
    kind: type = type(module)
    if kind is old:
        module.__class__ = new
    elif is_sharded_class(kind) and old in kind.__bases__:
        module.__class__ = _with_base(kind, old, new)
    else:
        return
    # accelerate, when it removes a hook, leaves the old class's forward bound to the instance
    vars(module).pop("forward", None)


def _to_exact(module: nn.Module) -> None:
    if not isinstance(module, SketchedLayer):
        return
    # A forward that was replaced on the instance may call the sketched class's forward, which needs `rmm_config`.
    if not has_foreign_forward(module):
        for exact in convertible_classes():
            _swap(module, sketched_class(exact), exact)
    if isinstance(module, SketchedLayer):
        module.rmm_config = module.rmm_config.replace(ratio=1.0, storage=None)
        warnings.warn(
            "a sketched layer that was changed after its conversion (a parametrization, or a forward on the instance,"
            " as accelerate's hooks set) was made exact by ratio=1.0 instead of being reverted; undo the change first"
            " to restore the layer's exact class",
            UserWarning,
            stacklevel=3,
        )
    else:
        vars(module).pop("rmm_config", None)
        vars(module).pop("_rows_check", None)
