"""Which tensors a step keeps as codes, and which ones as they are: what a plan says of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from rmm_linear.byte_sizes import Unit

KINDS = ("norm", "activation", "attention", "linear")
# Exact tensors that are named: so many, and each of a part of what is coded.
_MOST_NAMED, _PART = 5, 100


@dataclass(frozen=True)
class CodedTensor:
    """A tensor that is kept as a code.

    Attributes:
        name: The node that computes it.
        block: The module that it belongs to.
        kind: One of `KINDS`.
        bits: Bits of an element.
        tensor_bytes: Bytes of the tensor.
        code_bytes: Bytes of the code.
        bias: A bound of the bias of what is read, relative to the function that is read; 0 if it is unbiased.
    """

    name: str
    block: str
    kind: str
    bits: int
    tensor_bytes: int
    code_bytes: int
    bias: float


@dataclass(frozen=True)
class ExactTensor:
    """A tensor that the backward pass reads as it is.

    Attributes:
        name: The node that computes it.
        block: The module that it belongs to.
        tensor_bytes: Bytes of the tensor.
        reader: The op that reads it.
    """

    name: str
    block: str
    tensor_bytes: int
    reader: str


@dataclass(frozen=True)
class Coding:
    """What became of the tensors that a backward pass reads.

    Attributes:
        coded: Tensors that are kept as codes.
        exact: Tensors that the backward pass reads as they are; some may be computed again there.
    """

    coded: tuple[CodedTensor, ...] = ()
    exact: tuple[ExactTensor, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors that are kept as codes."""
        return sum(tensor.tensor_bytes for tensor in self.coded)

    @property
    def code_bytes(self) -> int:
        """Bytes of their codes."""
        return sum(tensor.code_bytes for tensor in self.coded)

    def lines(self, unit: Unit) -> Iterator[str]:
        """Say it to people.

        Args:
            unit: The unit of sizes.
        """
        if not self.coded:
            return
        kinds: dict[tuple[str, int], int] = {}
        for tensor in self.coded:
            kinds[tensor.kind, tensor.bits] = kinds.get((tensor.kind, tensor.bits), 0) + 1
        sizes = f"{unit.of(self.tensor_bytes)} -> {unit.of(self.code_bytes)} {unit.name}"
        told = ", ".join(f"{count} {kind} in {bits} bits" for (kind, bits), count in kinds.items())
        bias = max(tensor.bias for tensor in self.coded)
        yield (
            f"codes of {len(self.coded)} tensors, {sizes}: {told};"
            f" readings of functions are biased by {100 * bias:.2f} % at most"
        )
        large = (tensor for tensor in self.exact if _PART * tensor.tensor_bytes >= self.tensor_bytes)
        named = sorted(large, key=lambda tensor: -tensor.tensor_bytes)[:_MOST_NAMED]
        if named:
            names = (f"{each.name}, {unit.of(each.tensor_bytes)}, by {each.reader}" for each in named)
            yield f"read as they are: {'; '.join(names)}"
