"""Chooses the tensors of a step that are coded."""

import itertools
from collections.abc import Iterator

import networkx as nx
import torch
from torch import fx

from rmm_linear.compiler.rewrites import activations, attention, norms, products, relu
from rmm_linear.compiler.rewrites.coded import Code
from rmm_linear.compiler.rewrites.readings import Readings, Rewrite
from rmm_linear.compiler.rewrites.step import Read, Step, size_bytes
from rmm_linear.planning.coding import Bits


class Choice:
    """The codes of a step, and the reads that they serve.

    A read that would make a gradient biased is refused, and is served by no code. A code that frees no more bytes than
    it takes is dropped. Both change which other reads can be served, so that the choice is repeated until it is stable.

    Attributes:
        rewrites: One for each code.
        readings: Tells which tensors can be read from the codes.
        served: Reads of tensors that are read from codes, beside the rewrites' own.
        unserved: Reads of tensors as they are.
    """

    def __init__(self, step: Step, bits: Bits) -> None:
        self._step, self._bits = step, bits
        self._candidates: list[Rewrite] = []
        if bits.norm:
            self._candidates += norms.candidates(step, bits.norm)
        if bits.activation:
            self._candidates += activations.candidates(step, bits.activation)
            self._candidates += relu.candidates(step)
        if bits.attention:
            self._candidates += attention.candidates(step, bits.attention)
        self._refused: set[Read] = set()
        self._dropped: set[tuple[type[Rewrite], fx.Node]] = set()
        while True:
            self._serve()
            refused = set(self._dependent_reads()) - self._refused
            self._refused |= refused
            if not refused and not self._drop():
                return

    def _serve(self) -> None:
        self.readings = Readings(self._step)
        self.rewrites: list[Rewrite] = []
        own: set[Read] = set()
        for rewrite in self._candidates:
            if own.isdisjoint(rewrite.serves) and self._take(rewrite):
                own.update(rewrite.serves)
        waiting = [read for read in self._step.reads if read not in own and read not in self._refused]
        if self._bits.linear or self._bits.attention:
            # of products of two tensors, the tensors are coded first
            for is_product in (False, True):
                left = [read for read in waiting if not self._can_read(read)]
                for rewrite in products.candidates(self._step, left, self._bits):
                    base = self._step.base[rewrite.code.node]
                    is_elementwise = torch.Tag.pointwise in getattr(base.target, "tags", ())
                    if is_elementwise is is_product:
                        self._take(rewrite)
        self.served = [read for read in waiting if self._can_read(read)]
        own.update(self.served)
        self.unserved = [read for read in self._step.reads if read not in own]

    def _take(self, rewrite: Rewrite) -> bool:
        provided = rewrite.provided()
        only = self._bits.only
        is_wanted = only is None or rewrite.code.name in only
        is_wanted &= (type(rewrite), rewrite.code.node) not in self._dropped
        # a tensor is read from the codes of one rewrite
        is_free = self.readings.provided.keys().isdisjoint(provided)
        if is_wanted and is_free and self._refused.isdisjoint(rewrite.serves):
            self.rewrites.append(rewrite)
            self.readings.provide(rewrite.code, provided)
            return True
        return False

    def _can_read(self, read: Read) -> bool:
        found = self.readings.codes_of(read.source)
        if found is None or not products.is_linear(read):
            return False
        return not attention.is_score(read) or all(code.bits == 8 for code in found)

    def served_by(self) -> Iterator[tuple[Code, Read]]:
        """Yield each read that is served, with each code that serves it; a rewrite's own reads come first."""
        for rewrite in self.rewrites:
            for read in rewrite.serves:
                yield rewrite.code, read
        for read in self.served:
            for code in self.readings.codes_of(read.source) or ():
                yield code, read

    def _dependent_reads(self) -> Iterator[Read]:
        """Yield reads through which two readings of one code would be multiplied, in one op or along a gradient."""
        readers: dict[Code, dict[fx.Node, Read]] = {rewrite.code: {} for rewrite in self.rewrites}
        for code, read in self.served_by():
            if readers[code].setdefault(read.reader, read).source is not read.source and read in self.served:
                yield read
        for rewrite in self.rewrites:
            own = readers[rewrite.code]
            ordered = sorted(own, key=self._step.number.__getitem__)
            for first, last in itertools.combinations(ordered, 2):
                served = next((own[each] for each in (first, last) if own[each] not in rewrite.serves), None)
                is_known = served is None and rewrite.are_joint(first, last)
                if not is_known and self._step.leads_to(first, last):
                    yield from rewrite.serves if served is None else [served]

    def freed(self) -> dict[fx.Node, set[Code]]:
        """Return the nodes whose memory need not be kept for the backward pass, each with all codes that serve it."""
        exact = self.readings.exact.union(read.source for read in self.unserved)
        kept = frozenset().union(*map(self._step.memories, exact))
        found: dict[fx.Node, set[Code]] = {}
        for code, read in self.served_by():
            for node in self._step.memories(read.source) - kept:
                found.setdefault(node, set()).add(code)
        return found

    def _drop(self) -> bool:
        """Drop codes that free no more bytes than they take, and tell whether there are any."""
        # memory is freed by all of its codes together: a minimum cut finds the codes that are worth their bytes
        flow = nx.DiGraph([("bytes freed", "bytes of codes")])
        flow["bytes freed"]["bytes of codes"]["capacity"] = 0
        for node, codes in self.freed().items():
            flow.add_edge("bytes freed", node, capacity=size_bytes(node))
            flow.add_edges_from((node, code) for code in codes)
        for rewrite in self.rewrites:
            # a code that frees as much as it takes is dropped
            flow.add_edge(rewrite.code, "bytes of codes", capacity=rewrite.code.code_bytes + 1)
        _, (worth, _) = nx.minimum_cut(flow, "bytes freed", "bytes of codes")
        useless = {(type(rewrite), rewrite.code.node) for rewrite in self.rewrites if rewrite.code not in worth}
        self._dropped |= useless
        return bool(useless)
