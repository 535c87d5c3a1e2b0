"""Which tensors a step keeps as codes (in how many bits), as sketches, and as they are."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rmm_linear.byte_sizes import Unit

KINDS = ("norm", "activation", "attention", "linear")
# The number of ops and exact tensors that are named; a tensor is named if it has 1 / _PART of the freed bytes.
_MOST_NAMED, _PART = 5, 100


@dataclass(frozen=True)
class Bits:
    """Bits of the codes of each kind of tensors: 8, 4, or 0 for tensors that stay exact.

    Attributes:
        norm: Tensors that LayerNorm or RMSNorm has normalised.
        activation: Inputs of smooth elementwise functions; masks of ReLU, for any bits.
        attention: Queries, keys, values, outputs and probabilities.
        linear: Other tensors that matrix products, or elementwise products with a gradient, read. ReLU's result
            needs both kinds where a product reads it.
        only: Names of the tensors that are coded, see `CodedTensor`; None for all.
    """

    norm: int = 0
    activation: int = 0
    attention: int = 0
    linear: int = 0
    only: frozenset[str] | None = None

    @classmethod
    def of(cls, given: Any) -> "Bits":
        """Read the option `bits`.

        It is 8 or 4 for all kinds; a dict of kinds, each 8, 4, or None for exact; or None for exact. The dict may have
        "only", a list of names of tensors: others stay exact.

        Raises:
            ValueError: If it is something else.
        """
        each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(KINDS, given)
        only = each.pop("only", None)
        if isinstance(only, str) or not all(isinstance(name, str) for name in only or ()):
            raise ValueError(f"bits: only={only!r} is no list of names of tensors")
        for kind, bits in each.items():
            if kind not in KINDS:
                raise ValueError(f"bits: kind {kind!r} is unknown; choose among {', '.join(KINDS)}")
            if bits is not None and (type(bits) is not int or bits not in (8, 4)):
                raise ValueError(f"bits={bits!r} is none of 8, 4 and None (exact); pass {{{kind!r}: 8}}, or 8 for all")
        if only is not None and not any(each.values()):
            raise ValueError('bits: "only" names tensors, and no kind has bits: pass {"norm": 8, ..., "only": [...]}')
        named = None if only is None else frozenset(only)
        return cls(**{kind: bits or 0 for kind, bits in each.items()}, only=named)

    def as_given(self) -> dict[str, Any]:
        """Return the option `bits` that is read as these."""
        only = {} if self.only is None else {"only": sorted(self.only)}
        return {kind: getattr(self, kind) or None for kind in KINDS} | only


def sketch_ratio(given: Any) -> float | None:
    """Read the option `sketch`: the share of rows that a sketch has, in (0, 1); None for exact weight gradients.

    Raises:
        ValueError: If it is something else.
    """
    if given is None:
        return None
    if not isinstance(given, float) or not 0 < given < 1:
        raise ValueError(
            f"sketch={given!r} is not in (0, 1); pass the share of rows that sketches have, such as 0.375, or None for"
            " exact weight gradients"
        )
    return given


@dataclass(frozen=True)
class CodedTensor:
    """A tensor that is kept as a code.

    Attributes:
        name: The node that computes it.
        kind: One of `KINDS`.
        bits: Bits of an element; 1 for a mask, which is exact.
        tensor_bytes: Bytes of the tensor.
        code_bytes: Bytes of the code.
        bias: A bound of the bias of readings; 0 if all are unbiased. For a function f of u, it is the largest value of
            (1 + u^2) |mean of the reading - f(u)| over |u| <= 40, relative to the largest |f| within +-1: a factor of f
            in a gradient may grow as u^2. None for queries and keys, of which no bound is known: gradients of their
            attention are biased by half the variance of the errors of its scores.
    """

    name: str
    kind: str
    bits: int
    tensor_bytes: int
    code_bytes: int
    bias: float | None


@dataclass(frozen=True)
class ExactTensor:
    """A tensor that the backward pass reads as it is.

    Attributes:
        name: The node that computes it.
        tensor_bytes: Bytes of the tensor.
        reader: The op that reads it.
    """

    name: str
    tensor_bytes: int
    reader: str


@dataclass(frozen=True)
class FreedMemory:
    """Memory that need not be kept.

    Attributes:
        name: The node that writes it.
        size_bytes: Its size.
        codes: Names of the tensors whose codes are read in its place: it is freed by all of them together.
    """

    name: str
    size_bytes: int
    codes: tuple[str, ...]


@dataclass(frozen=True)
class SketchedTensor:
    """An input of linear layers whose weight gradients are estimated from a sketch of it.

    Attributes:
        name: The first product that reads it.
        layers: How many layers read it.
        is_kept: Whether the sketch is kept in its place. If not, it is made in the backward pass.
        tensor_bytes: Bytes of the tensor.
        sketch_bytes: Bytes of the sketch.
    """

    name: str
    layers: int
    is_kept: bool
    tensor_bytes: int
    sketch_bytes: int


@dataclass(frozen=True)
class Coding:
    """The tensors that a backward pass reads: coded, sketched and exact.

    Attributes:
        coded: Tensors that are kept as codes.
        exact: Tensors that the backward pass reads as they are; some may be computed again there.
        freed: Memory that need not be kept, for the backward pass reads codes in its place.
        bending: Ops of the backward pass that are not linear in gradients with noise: the gradients behind them are
            biased.
        sketched: Inputs of linear layers of which the backward pass reads sketches.
        ratio: The share of rows that sketches have; None if there are none.
    """

    coded: tuple[CodedTensor, ...] = ()
    exact: tuple[ExactTensor, ...] = ()
    freed: tuple[FreedMemory, ...] = ()
    bending: tuple[str, ...] = ()
    sketched: tuple[SketchedTensor, ...] = ()
    ratio: float | None = None

    @property
    def names(self) -> frozenset[tuple[str, int]]:
        """Name and bits of each tensor that is coded; of one that is sketched, 0 bits."""
        coded = {(tensor.name, tensor.bits) for tensor in self.coded}
        return frozenset(coded | {(tensor.name, 0) for tensor in self.sketched})

    @property
    def is_exact(self) -> bool:
        """Whether gradients have no noise of codes or sketches."""
        return not self.sketched and all(tensor.bits == 1 for tensor in self.coded)

    @property
    def freed_bytes(self) -> int:
        """Bytes that need not be kept."""
        return sum(memory.size_bytes for memory in self.freed)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return sum(tensor.code_bytes for tensor in self.coded)

    def lines(self, unit: Unit) -> Iterator[str]:
        """Yield lines of a report, with sizes in a unit."""
        if self.sketched:
            kept = [tensor for tensor in self.sketched if tensor.is_kept]
            before = unit.of(sum(tensor.tensor_bytes for tensor in kept))
            after = unit.of(sum(tensor.sketch_bytes for tensor in kept))
            yield (
                f"weight gradients of {sum(tensor.layers for tensor in self.sketched)} linear layers from sketches of"
                f" {self.ratio:g} of the rows: {len(kept)} kept, {before} -> {after} {unit.name};"
                f" {len(self.sketched) - len(kept)} made in the backward pass"
            )
        if not self.coded:
            return
        kinds = Counter((tensor.kind, tensor.bits) for tensor in self.coded)
        sizes = f"{unit.of(self.freed_bytes)} -> {unit.of(self.code_bytes)} {unit.name}"
        told = ", ".join(f"{count} {kind} in {bits} bit{'s' * (bits > 1)}" for (kind, bits), count in kinds.items())
        yield f"codes of {len(self.coded)} tensor{'s' * (len(self.coded) > 1)}, {sizes}: {told}"
        bias = max(tensor.bias or 0 for tensor in self.coded)
        if bias:
            yield f"readings of functions are biased by {100 * bias:.1g} % of their values near 1 at most"
        if any(tensor.bias is None for tensor in self.coded):
            yield "gradients of attention are biased by half the variance of its scores' errors; no bound is known"
        if self.bending:
            others = f"; {len(self.bending) - _MOST_NAMED} more" if len(self.bending) > _MOST_NAMED else ""
            ops = "; ".join(self.bending[:_MOST_NAMED]) + others
            yield f"gradients behind ops that are not linear in them are biased: {ops}"
        large = (tensor for tensor in self.exact if _PART * tensor.tensor_bytes >= self.freed_bytes)
        named = sorted(large, key=lambda tensor: -tensor.tensor_bytes)[:_MOST_NAMED]
        if named:
            names = (f"{each.name}, {unit.of(each.tensor_bytes)} {unit.name}, by {each.reader}" for each in named)
            yield f"read as they are: {'; '.join(names)}"
