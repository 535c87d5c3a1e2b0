"""summary: the sketched layers, their settings, and why other layers stay exact."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rmm_linear.config import RMMConfig
from rmm_linear.convert.conversion import LEFT_EXACT
from rmm_linear.convert.matching import LinearLayer, linear_layers, other_modules
from rmm_linear.convertible import why_not
from rmm_linear.layer import SketchedLayer, features
from rmm_linear.names import pattern
from rmm_linear.tables import aligned

# Rows at which `summary` states a layer's bytes per row: sketches round to whole rows of a block.
_SUMMARY_ROWS = 4096


@dataclass(frozen=True)
class LayerSummary:
    """One linear layer in a `ConversionSummary`.

    Attributes:
        name: Dotted name, without wrappers' prefixes; "" is the model itself.
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension.
        dtype: Dtype of the weight.
        config: The configuration of a converted layer, or None for an exact layer.
        exact_bytes_per_row: Bytes that an exact layer keeps of each row of its input.
        kept_bytes_per_row: Bytes that this layer keeps, at 4096 rows without sequences (`keep_tokens` come on top).
        note: The reason why the layer is exact, or another remark; "" for none.
        is_sketched: Whether the layer is converted, its weight trains, and its configuration is not exact.
    """

    name: str
    in_features: int
    out_features: int
    dtype: str
    config: RMMConfig | None
    exact_bytes_per_row: float
    kept_bytes_per_row: float
    note: str
    is_sketched: bool


@dataclass(frozen=True, repr=False)
class ConversionSummary:
    """The result of `summary`: one row per linear layer, printed as a table.

    Attributes:
        rows: The layers, in the model's order.
        others: Name -> reason, of modules that multiply by weights of their own and are no linear layers: quantized and
            fused layers of other libraries, and mixtures of experts. The sums leave them out: their bytes are unknown.
    """

    rows: tuple[LayerSummary, ...]
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def sketched(self) -> int:
        """Number of layers that keep a sketch."""
        return sum(row.is_sketched for row in self.rows)

    @property
    def exact_bytes_per_row(self) -> float:
        """Sum over the layers of the bytes that an exact layer keeps of a row."""
        return sum(row.exact_bytes_per_row for row in self.rows)

    @property
    def kept_bytes_per_row(self) -> float:
        """Sum over the layers of the bytes that the layer keeps of a row."""
        return sum(row.kept_bytes_per_row for row in self.rows)

    def __repr__(self) -> str:
        if not self.rows:
            return "\n".join(["no linear layers", *self._lines_of_others()])
        table: list[tuple[str, ...]] = [("layer", "in -> out", "sketch", "bytes a row", "note")]
        for row in self.rows:
            amount = f"{row.exact_bytes_per_row:.0f} -> {row.kept_bytes_per_row:.0f}"
            shape = f"{row.in_features} -> {row.out_features}"
            table.append((row.name or "(the model)", shape, describe(row.config), amount, row.note))
        lines = aligned(table)
        lines.append(
            f"{self.sketched} of {len(self.rows)} linear layers are sketched; their inputs, layer by layer:"
            f" {self.exact_bytes_per_row:.0f} -> {self.kept_bytes_per_row:.0f} bytes a row"
        )
        if self.sketched:
            lines.append("at most: rmm_linear.memory.profile shows inputs that another operation keeps anyway")
        return "\n".join([*lines, *self._lines_of_others()])

    def _lines_of_others(self) -> list[str]:
        """One line for each kind of module, since a stack repeats its modules."""
        kinds = Counter((pattern(name), reason) for name, reason in self.others.items())
        return [
            f"exact: {name}{f' ({count} of them)' if count > 1 else ''}: {reason}"
            for (name, reason), count in kinds.items()
        ]


def summary(model: nn.Module) -> ConversionSummary:
    """List linear layers, their sketches, and the bytes that each keeps of a row of its input: `print(summary(model))`.

    The model does not run. The sums over layers count each layer by itself and are not the model's saving, since layers
    that share an input keep it once. `rmm_linear.memory.MeasuredSaving` measures the model's saving.

    Raises:
        ValueError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    return ConversionSummary(
        tuple(_summarize(layer, model) for layer in linear_layers(model)),
        {other.name: reason for other, reason in other_modules(model)},
    )


def _summarize(layer: LinearLayer, model: nn.Module) -> LayerSummary:
    module = layer.module
    config = module.rmm_config if isinstance(module, SketchedLayer) else None
    weight: Any = module.weight
    inside, outside = features(module)
    known = not nn.parameter.is_lazy(weight)
    trains = known and weight.requires_grad
    kept = exact = float(inside * weight.dtype.itemsize) if trains else 0.0
    if trains and config is not None:
        kept = config.saved_bytes(_SUMMARY_ROWS, inside, weight.dtype) / _SUMMARY_ROWS
    return LayerSummary(
        name=layer.name,
        in_features=inside,
        out_features=outside,
        dtype=str(weight.dtype).removeprefix("torch."),
        config=config,
        exact_bytes_per_row=exact,
        kept_bytes_per_row=kept,
        note=_note(layer, model, frozen=known and not trains),
        is_sketched=trains and config is not None and not config.is_exact,
    )


def _note(layer: LinearLayer, model: nn.Module, *, frozen: bool) -> str:
    notes = []
    if (reason := why_not(layer.module, model)) is not None:
        notes.append(f"exact: {reason}")
    elif not isinstance(layer.module, SketchedLayer):
        if (why := getattr(layer.module, LEFT_EXACT, None)) is not None:
            notes.append(f"exact: a sketch frees nothing: {why}")
        else:
            notes.append("exact: output head" if layer.in_head else "exact: not targeted, or excluded")
    elif layer.module.rmm_config.is_exact:
        notes.append("exact: ratio 1")
    if frozen:
        notes.append("frozen weight: keeps no input")
    return "; ".join(notes)


def describe(config: RMMConfig | None) -> str:
    """Describe a configuration: "hadamard 0.5 centered in int4, from 128 rows"; "-" for None, an exact layer."""
    if config is None:
        return "-"
    # at ratio 1 a storage holds the input itself, without a sketch
    kind = "input" if config.ratio == 1 and config.storage is not None else f"{config.sketch} {config.ratio:g}"
    centered = " centered" if config.center else ""
    storage = f" in {config.storage}" if config.storage is not None else ""
    padding = ", without padding" if config.skip_padding else ""
    tokens = f", beside tokens {', '.join(map(str, config.keep_tokens))}" if config.keep_tokens else ""
    return f"{kind}{centered}{storage}{padding}{tokens}, from {config.min_rows} rows"
