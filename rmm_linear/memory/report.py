"""MemoryReport: the bytes that one forward pass of a model keeps for its backward pass, and that sketches could free.

Every storage is counted once, even if several operations keep it. For linear layers the report distinguishes

    own bytes       storages that are kept as inputs of linear layers alone, for their weight gradients: the most that
                    sketches can free at any ratio
    shared bytes    inputs that another operation keeps as well (an attention kernel its output, a residual block's
                    LayerNorm): sketching these frees nothing

and predicts the kept bytes with any configuration, to the byte, before a layer is converted. `recorder.py` makes it.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from rmm_linear.byte_sizes import unit_for
from rmm_linear.config import RMMConfig, config_for
from rmm_linear.names import listed, pattern
from rmm_linear.tables import aligned

# The names by which a linear layer's product saves its input, by the operation that computes the product.
INPUT_ROLES = ("mat1", "self", "input")
# Statuses of a linear layer's call.
Status = Literal["kept", "sketched", "frozen", "checkpointed", "no gradient", "eval mode", "parameter"]
LINEAR_INPUTS = "inputs of linear layers alone"
# The most layers, operations and modules that a report prints.
_PRINTED = 12


@dataclass(frozen=True)
class Keeper:
    """An operation that keeps a storage.

    Attributes:
        module: Name of the innermost module that was running, without wrappers' prefixes; "" for the model itself.
        kind: The module's class.
        op: The operation, named after its autograd node; "" if the graph does not tell.
        role: The name by which the operation saves the tensor, such as "mat1"; "" if the graph does not tell.
        shape: Shape of the tensor that is kept.
        dtype: Dtype of the tensor.
    """

    module: str
    kind: str
    op: str
    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class KeptStorage:
    """One storage that the backward pass needs.

    Attributes:
        bytes: The size of the whole storage, which a view keeps alive.
        device: The storage's device.
        keepers: All operations that keep the storage, in the order of saving.
    """

    bytes: int
    device: str
    keepers: tuple[Keeper, ...]


@dataclass(frozen=True)
class LinearCall:
    """One call of a linear layer.

    Attributes:
        layer: Name of the layer.
        rows: Rows of its input.
        sequences: Sequences that the rows belong to; 0 for a matrix.
        in_features: Columns of its input.
        out_features: Columns of its output.
        dtype: Dtype that it computes in.
        status: "kept": its input is kept for the weight gradient; "sketched"; "frozen": the weight gets no gradient;
            "checkpointed": nothing is kept, the layer runs again in the backward pass; "no gradient": the output needs
            no gradient; "eval mode": its input is kept, and a converted layer is exact in this mode; "parameter": its
            input is a parameter or buffer, which lives anyway, so that a sketch would only add bytes.
        storage: Index of its input in the report's storages, or None if the input is not kept.
        weight_copy: Index of the cast copy of its weight (by autocast) in the storages, or None.
        group: Equal for calls with the same tensor, whose layers share a sketch if their configurations are equal.
        stays: Why `convert_linears` leaves the layer exact by default: "output head", or the reason why the layer
            can't be converted; "" for other layers.
        is_free: Whether the operation that made the input saves it (see `rmm_linear.producers`): a converted layer
            keeps the input itself.
    """

    layer: str
    rows: int
    sequences: int
    in_features: int
    out_features: int
    dtype: str
    status: Status
    storage: int | None = None
    weight_copy: int | None = None
    group: int = 0
    stays: str = ""
    is_free: bool = False

    def saved_bytes(self, config: RMMConfig) -> int:
        """Return the bytes that a sketch of this input would keep, with padding counted as rows."""
        return config.saved_bytes(self.rows, self.in_features, getattr(torch, self.dtype), sequences=self.sequences)

    def is_sketched_by(self, config: RMMConfig) -> bool:
        """Tell whether a configuration would sketch this input: it is kept, not for free, and has enough rows."""
        kept = min(self.rows, self.sequences * len(config.keep_tokens))
        return self.status in ("kept", "parameter") and not self.is_free and config.sketches(self.rows, kept)


@dataclass(frozen=True)
class MemoryReport:
    """The storages that one forward pass keeps, and the bytes that sketches could free.

    Attributes:
        model: The model's class.
        storages: Every storage that is kept, in the order in which they were first saved.
        linears: Every call of a linear layer, in order.
    """

    model: str
    storages: tuple[KeptStorage, ...]
    linears: tuple[LinearCall, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.bytes for storage in self.storages)

    @property
    def own_bytes(self) -> int:
        """Bytes that are kept for weight gradients of linear layers alone: the most that sketches can free."""
        return sum(storage.bytes for place, storage in enumerate(self.storages) if self._is_own(place))

    @property
    def default_layers(self) -> set[str]:
        """Names of the layers that ran and that `convert_linears` converts by default."""
        return {call.layer for call in self.linears if not call.stays}

    def predict(self, config: RMMConfig, *, layers: Collection[str] | None = None) -> int:
        """Return the bytes that the model would keep with some of its layers converted.

        The result equals a measurement of the converted model on the same inputs, to the byte. With `skip_padding` it
        is an upper bound, which counts padding as rows. `layers` are names; the default is `default_layers`.

        Raises:
            ValueError: If `config` is no RMMConfig, a named layer did not run, or a layer was sketched when it ran.
        """
        configs = dict.fromkeys(self.default_layers if layers is None else layers, config_for(None, config))
        ran = {call.layer for call in self.linears}
        if unknown := [name for name in configs if name not in ran]:
            raise ValueError(f"layers={unknown} did not run; pass names of layers that ran: {listed(sorted(ran))}")
        if sketched := [call.layer for call in self.linears if call.layer in configs and call.status == "sketched"]:
            raise ValueError(
                f"{sketched[0]!r} was sketched when it was profiled, and the bytes of its exact input are not known;"
                " call revert_linears(model) and profile the model again"
            )
        return self._kept_with(configs)

    def _kept_with(self, configs: Mapping[str, RMMConfig]) -> int:
        """The bytes that the model would keep with these layers converted."""
        sketched: list[LinearCall] = []
        exact: list[LinearCall] = []
        for call in self.linears:
            is_sketched = call.layer in configs and call.is_sketched_by(configs[call.layer])
            (sketched if is_sketched else exact).append(call)
        # one sketch for the layers of a group with equal configurations
        sketches: dict[object, int] = {}
        for number, call in enumerate(sketched):
            config = configs[call.layer]
            sketches[(call.group, config) if config.share_sketch else number] = call.saved_bytes(config)
        inputs = {call.storage for call in sketched if call.status == "kept"}
        inputs -= {call.storage for call in exact if call.status == "kept"}
        freed = {place for place in inputs if place is not None and self._is_own(place)}
        # a sketched layer saves its uncast weight, and casts it again in the backward pass
        copies = {call.weight_copy for call in sketched} - {call.weight_copy for call in exact}
        freed |= {place for place in copies if place is not None}
        return self.total_bytes + sum(sketches.values()) - sum(self.storages[place].bytes for place in freed)

    def frees_nothing(self, configs: Mapping[str, RMMConfig]) -> dict[str, str]:
        """Return the layers that would free nothing if converted to these configurations (by name), with the reasons.

        A layer that runs several times frees bytes if any of its calls does.
        """
        reasons = [(call.layer, self._why_no_gain(call, configs)) for call in self.linears if call.layer in configs]
        pays = {layer for layer, reason in reasons if reason is None}
        found: dict[str, str] = {}
        for layer, reason in reasons:
            if reason is not None and layer not in pays:
                found.setdefault(layer, reason)
        return found

    def _why_no_gain(self, call: LinearCall, configs: Mapping[str, RMMConfig]) -> str | None:
        if call.status != "kept" or call.storage is None:
            return _STATUS_WORDS.get(call.status, "it keeps no input")
        others = f"{', '.join(self.others(call))} keeps its input as well"
        if call.is_free:
            return others
        if not call.is_sketched_by(configs[call.layer]):
            return f"its input has {call.rows} rows, too few for min_rows={configs[call.layer].min_rows}"
        together = [each for each in self.linears if each.storage == call.storage]
        chosen = {each.layer: configs[each.layer] for each in together if each.layer in configs}
        if self._kept_with(chosen) < self.total_bytes:
            return None
        if self.others(call):
            return others
        exact = [
            each.layer for each in together if each.layer not in chosen or not each.is_sketched_by(chosen[each.layer])
        ]
        if exact:
            return f"its input is shared with {', '.join(dict.fromkeys(exact))}, which stays exact"
        return "a sketch would keep more than it frees"

    def by_op(self) -> dict[str, int]:
        """Return the bytes of each kind of operation, each storage once, the largest first.

        A storage that only linear layers keep, as inputs, counts as `LINEAR_INPUTS`; another storage counts for its
        first keeper that does not keep it as a linear layer's input.
        """
        found: Counter[str] = Counter()
        for place, storage in enumerate(self.storages):
            found[self._op_of(place)] += storage.bytes
        return dict(found.most_common())

    def _op_of(self, place: int) -> str:
        if self._is_own(place):
            return LINEAR_INPUTS
        keeper = self.storages[place].keepers[0]
        return next(iter(self._others(place)), keeper.op or keeper.kind)

    def _is_own(self, place: int) -> bool:
        names = {call.layer for call in self.linears if call.status == "kept" and call.storage == place}
        return bool(names) and all(_is_linear_input(keeper, names) for keeper in self.storages[place].keepers)

    def others(self, call: LinearCall) -> tuple[str, ...]:
        """Return the operations, other than linear layers' products, that keep a call's input."""
        return () if call.storage is None else tuple(self._others(call.storage))

    def _others(self, place: int) -> dict[str, None]:
        names = {call.layer for call in self.linears}
        found = [each for each in self.storages[place].keepers if not _is_linear_input(each, names)]
        return dict.fromkeys(keeper.op or keeper.kind for keeper in found)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "total_bytes": self.total_bytes, "own_bytes": self.own_bytes}

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        unit, plural = unit_for(self.total_bytes), "s" if len(self.storages) != 1 else ""
        total, own = (f"{unit.of(size)} {unit.name}" for size in (self.total_bytes, self.own_bytes))
        share = 100 * self.own_bytes / max(1, self.total_bytes)
        head = f"{self.model} keeps {total} for its backward pass, in {len(self.storages)} storage{plural}"
        most = (
            f"{own} of it ({share:.1f} %) are inputs of linear layers that nothing else needs: the most that sketches"
            " can free"
        )
        return "\n".join([head, most, "", *_op_lines(self), "", *_layer_lines(self)])


def _op_lines(report: MemoryReport) -> list[str]:
    counts = Counter(report._op_of(place) for place in range(len(report.storages)))
    sums = list(report.by_op().items())
    shown, rest = sums[:_PRINTED], sums[_PRINTED:]
    if rest:
        shown.append((f"{len(rest)} more", sum(size for _, size in rest)))
        counts[shown[-1][0]] = sum(counts[op] for op, _ in rest)
    unit = unit_for(report.total_bytes)
    rows = [("kept by", unit.name, "%", "storages")]
    for op, size in shown:
        rows.append((op, unit.of(size), f"{100 * size / max(1, report.total_bytes):.1f}", str(counts[op])))
    return aligned(rows, numbers=(1, 2, 3), has_rule=False)


def _layer_lines(report: MemoryReport) -> list[str]:
    """The table of linear layers; similar layers of a stack, members of a group, and idle layers share a line."""
    half = RMMConfig(ratio=0.5)
    found: dict[tuple[str, ...], list[int]] = {}
    for calls in _units(report):
        kept = [call for call in calls if call.status == "kept"]
        if kept:
            others = list(dict.fromkeys(op for call in kept for op in report.others(call)))
            why = f"also kept by {', '.join(others)}" if others else "kept for the weight gradient alone"
        else:
            why = _STATUS_WORDS[calls[0].status]
        places = {call.storage for call in kept if call.storage is not None}
        size = sum(report.storages[place].bytes for place in places)
        stays = next((call.stays for call in kept if call.stays), "")
        why += f"; left exact: {stays}" if stays else ""
        sketched = [call for call in kept if not call.stays and call.is_sketched_by(half)]
        sketches = {call.group: call.saved_bytes(half) for call in sketched}
        freed = sum(report.storages[place].bytes for place in places if report._is_own(place)) if sketches else 0
        names = _merged([pattern(call.layer) for call in calls])
        sums = found.setdefault((names, str(calls[0].rows), why), [0, 0, 0])
        sums[0] += 1 if kept else len(calls)
        sums[1] += size
        sums[2] += freed - sum(sketches.values())
    unit = unit_for(report.total_bytes)
    rows = [("linear layers", "rows", "times", f"input {unit.name}", "freed at ratio 0.5", "")]
    for (names, count, why), (times, size, freed) in list(found.items())[: 2 * _PRINTED]:
        rows.append((names, count, str(times), unit.of(size), unit.of(freed), why))
    if len(found) > 2 * _PRINTED:
        rows.append((f"{len(found) - 2 * _PRINTED} more", "", "", "", "", ""))
    return aligned(rows, numbers=(1, 2, 3, 4), has_rule=False)


def _units(report: MemoryReport) -> list[list[LinearCall]]:
    """Group calls that keep one input or copies of it; and calls that keep no input, by status and rows."""
    units: dict[object, list[LinearCall]] = {}
    of_storage: dict[int, object] = {}
    for call in report.linears:
        key: object = (call.status, call.rows)
        if call.status == "kept" and call.storage is not None:
            # the key of an earlier call that keeps this storage, or else the call's own group
            key = of_storage.setdefault(call.storage, call.group)
        units.setdefault(key, []).append(call)
    return list(units.values())


_STATUS_WORDS: Mapping[Status, str] = {
    "sketched": "sketched",
    "frozen": "its weight is frozen: keeps nothing",
    "checkpointed": "checkpointed: keeps nothing",
    "no gradient": "no gradient is wanted, or a reentrant checkpoint runs it again: keeps nothing",
    "eval mode": "in eval mode, where it stays exact",
    "parameter": "its input is a parameter, which lives anyway",
}


def _merged(names: list[str]) -> str:
    """Merge names, as in "layer.*.{query, key, value}"."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    differ = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if len({name.count(".") for name in names}) == 1 and len(differ) == 1 and len(columns) > 1:
        segments = [column[0] for column in columns]
        segments[differ[0]] = f"{{{', '.join(columns[differ[0]])}}}"
        return ".".join(segments)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _is_linear_input(keeper: Keeper, names: Collection[str]) -> bool:
    return keeper.module in names and keeper.role in INPUT_ROLES
