"""Rewrites of a training step: the backward pass reads codes of 8 or 4 bits in the place of tensors, without bias.

    codes.py         a tensor as a code, and back
    step.py          which backward ops read which tensors
    readings.py      what they read instead
    norms.py, activations.py, attention.py, products.py: codes of tensors, each with the reads that it serves
    editing.py       changes the graph

A tensor is freed if all reads of it are served; a code is made if it frees more bytes than it takes. What is not
recognised stays exact, and is reported.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import activations, attention, norms, products
from rmm_linear.compiler.rewrites.coded import Code
from rmm_linear.compiler.rewrites.codes import draw_keys
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Readings
from rmm_linear.compiler.rewrites.rewrite import Rewrite
from rmm_linear.compiler.rewrites.step import Read, Step, size_bytes
from rmm_linear.planning.coding import KINDS, CodedTensor, Coding, ExactTensor


@dataclass(frozen=True)
class Bits:
    """Bits of the codes of each kind of ops; 0 for tensors that stay exact.

    Attributes:
        norm: Of LayerNorm and RMSNorm.
        activation: Of smooth elementwise functions.
        attention: Of queries, keys, values, outputs and probabilities.
        linear: Of what linear layers and products alone read.
    """

    norm: int = 0
    activation: int = 0
    attention: int = 0
    linear: int = 0

    @classmethod
    def of(cls, given: Any) -> "Bits":
        """Read the option `bits`.

        Args:
            given: 8 or 4 for all kinds; a dict of kinds, each 8, 4, or None for exact; None for exact.

        Raises:
            ValueError: If it is something else.
        """
        each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(KINDS, given)
        for kind, bits in each.items():
            if kind not in KINDS:
                raise ValueError(f"bits: kind {kind!r} is unknown; choose among {', '.join(KINDS)}")
            if bits not in (8, 4, None) or isinstance(bits, bool):
                raise ValueError(f"bits={bits!r} is none of 8, 4 and None (exact); pass {{{kind!r}: 8}}, or 8 for all")
        return cls(**{kind: bits or 0 for kind, bits in each.items()})


def code_step(
    joint: fx.GraphModule, tangents: Collection[fx.Node], blocks: Mapping[fx.Node, str], bits: Bits
) -> Coding:
    """Let the backward pass of a step read codes.

    Args:
        joint: The joint graph, functional; changed in place.
        tangents: Placeholders of the gradients of its results.
        blocks: The module that each node belongs to.
        bits: Bits of the codes.
    """
    step = Step(joint, tangents, blocks)
    chosen = _Choice(step, bits)
    chosen.choose()
    if chosen.rewrites:
        _apply(step, chosen)
    coded = tuple(
        CodedTensor(
            rewrite.code.node.name,
            blocks.get(rewrite.code.node, ""),
            rewrite.code.kind,
            rewrite.code.bits,
            rewrite.code.node_bytes,
            rewrite.code.code_bytes,
            rewrite.bias,
        )
        for rewrite in chosen.rewrites
    )
    exact: dict[fx.Node, ExactTensor] = {}
    for read in chosen.unserved:
        for node in step.memories(read.source):
            tensor = ExactTensor(node.name, blocks.get(node, ""), size_bytes(node), str(read.reader.target))
            exact.setdefault(node, tensor)
    return Coding(coded, tuple(exact.values()))


class _Choice:
    """Chooses the codes of a step.

    Attributes:
        rewrites: What was chosen.
        readings: What can be read from codes.
        served: Reads of tensors that are computed from codes where they are read.
        unserved: Reads of tensors as they are.
        computed_again: Attention whose output is computed again from what is read.
    """

    def __init__(self, step: Step, bits: Bits) -> None:
        self._step, self._bits = step, bits
        self._candidates: list[Rewrite] = []
        self.rewrites: list[Rewrite] = []
        if bits.norm:
            self._candidates += norms.candidates(step, bits.norm)
        if bits.activation:
            self._candidates += activations.candidates(step, bits.activation)
        if bits.attention:
            self._candidates += attention.candidates(step, bits.attention)
        self.computed_again: set[fx.Node] = set()
        # reads that would read a code twice in one path
        self._refused: set[Read] = set()

    def choose(self) -> None:
        """Choose among the candidates: leave out what does not pay until all that is left does."""
        dropped: set[fx.Node] = set()
        while True:
            self._serve([each for each in self._candidates if each.code.node not in dropped], dropped)
            bad = self._read_twice()
            if bad:
                self._refused |= bad
                continue
            useless = self._useless()
            if not useless:
                return
            dropped |= {rewrite.code.node for rewrite in useless}

    def _serve(self, rewrites: list[Rewrite], dropped: Collection[fx.Node]) -> None:
        self.readings = Readings(self._step)
        self.rewrites = []
        special: set[Read] = set()
        # a read is served once
        for rewrite in rewrites:
            if special.isdisjoint(rewrite.serves):
                self._take(rewrite)
                special.update(rewrite.serves)
        if self._bits.attention == 4:
            again = [read for read in self._step.reads if attention.is_computed_again(*read)]
            self.computed_again = {read.reader for read in again}
            special.update(again)
        waiting = [read for read in self._step.reads if read not in special and read not in self._refused]
        if self._bits.linear or self._bits.attention:
            # of products of two tensors, the tensors are coded first
            for is_product in (False, True):
                left = [read for read in waiting if not self._can_read(read)]
                for rewrite in products.candidates(self._step, left, self._bits.linear, self._bits.attention):
                    node = rewrite.code.node
                    is_elementwise = torch.Tag.pointwise in getattr(self._step.base[node].target, "tags", ())
                    if rewrite.code.bits and is_elementwise is is_product and node not in dropped:
                        self._take(rewrite)
        self.served = [read for read in waiting if self._can_read(read)]
        served = special.union(self.served)
        self.unserved = [read for read in self._step.reads if read not in served]

    def _take(self, rewrite: Rewrite) -> None:
        self.rewrites.append(rewrite)
        rewrite.provide(self.readings)

    def _can_read(self, read: Read) -> bool:
        return products.is_linear(read) and self.readings.codes_of(read.source) is not None

    def _read_twice(self) -> set[Read]:
        """Reads after which the same code is read again in one path."""
        readers: dict[Code, dict[fx.Node, Read | None]] = {}
        for rewrite in self.rewrites:
            readers[rewrite.code] = {read.reader: None for read in rewrite.serves}
        for read in self.served:
            for code in self.readings.codes_of(read.source) or ():
                readers[code].setdefault(read.reader, read)
        bad: set[Read] = set()
        for own in readers.values():
            ordered = sorted(own, key=self._step.number.__getitem__)
            for place, first in enumerate(ordered):
                for last in ordered[place + 1 :]:
                    # the reads of one rewrite have a formula for it
                    either = own[first] or own[last]
                    if either is not None and self._step.leads_to(first, last):
                        bad.add(either)
        return bad

    def _useless(self) -> list[Rewrite]:
        """Codes that free no more bytes than they take."""
        kept = {node for read in self.unserved for node in self._step.memories(read.source)}
        freed: dict[Code, set[fx.Node]] = {rewrite.code: set() for rewrite in self.rewrites}
        for rewrite in self.rewrites:
            for read in rewrite.serves:
                freed[rewrite.code] |= self._step.memories(read.source) - kept
        for read in self.served:
            for code in self.readings.codes_of(read.source) or ():
                freed[code] |= self._step.memories(read.source) - kept
        return [
            rewrite for rewrite in self.rewrites if sum(map(size_bytes, freed[rewrite.code])) <= rewrite.code.code_bytes
        ]


def _apply(step: Step, chosen: _Choice) -> None:
    graph = step.joint.graph
    editor = Editor(step)
    first = next(node for node in graph.nodes if node.op == "call_function")
    keys = editor.insert(_keys, step.input, before=first, block_of=first, count=len(chosen.rewrites))
    replacing: dict[fx.Node, Rewrite] = {}
    for number, rewrite in enumerate(chosen.rewrites):
        rewrite.code.key = editor.insert(torch.select, keys, before=first, block_of=first, dim=0, index=number)
        rewrite.encode(editor)
        replacing |= {read.reader: rewrite for read in rewrite.serves}
    served: dict[fx.Node, list[fx.Node]] = {}
    for read in chosen.served:
        served.setdefault(read.reader, []).append(read.source)
    for node in step.number:
        for source in served.get(node, ()):
            node.replace_input_with(source, chosen.readings.read(source, editor, node))
        if node in replacing:
            replacing[node].replace(node, editor, chosen.readings)
        if node in chosen.computed_again:
            attention.compute_again(node, editor)
    graph.eliminate_dead_code()
    graph.lint()
    step.joint.recompile()


def _keys(x: Tensor, *, count: int) -> Tensor:
    return draw_keys(torch.ops.rmm_linear.draw_seed.default(x, None), count)
