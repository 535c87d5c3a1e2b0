"""The ops that Inductor computes inside of the loop of another op: their results take no memory.

Inductor inlines an elementwise op into its only reader, if the reader is elementwise or a reduction; planners see both
as one op. A backward loop that reads elementwise results of the forward pass can compute them again inside of itself,
from their own inputs. That costs no memory and hardly any time, so that it is done before anything is planned. A
minimum cut chooses the tensors that are kept for backward loops: of all sets from which the loops can be computed, the
one of the fewest bytes, except that no long chain is computed again. (torch's own partitioner chooses by such a cut
too.)
"""

from collections.abc import Collection

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import Tensor, fx

from rmm_linear.compiler.fake_memory import tensors_of
from rmm_linear.compiler.rewrites.step import UNTAGGED, Step
from rmm_linear.compiler.torch_private import fake_mode_of

# Elementwise ops without the tag, and ops of indices.
_NAMES = ("full", "arange", "constant_pad_nd", "slice_backward", "select_backward")
_LOOPS = {*UNTAGGED, *(getattr(torch.ops.aten, name).default for name in _NAMES)}
_LOOPS |= {torch.ops.aten.arange.start_step, torch.ops.aten.index.Tensor}
# Chains of ops that are computed again are shorter: each loop runs its own, and Inductor inlines about 30 ops at most.
_LONGEST = 16


def fuse(joint: fx.GraphModule, tangents: Collection[fx.Node], updated: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Compute elementwise results of the forward pass again where backward loops read them.

    The joint graph, a functional one, is changed in place. `tangents` are placeholders of the gradients of its results,
    and `updated` are placeholders of inputs that the step writes into after the forward pass. Return, for each node
    that is inlined, the node in whose loop it is computed.
    """
    backward = _Fusion(joint, tangents, updated).recompute()
    forward = _Fusion(joint, tangents, updated).inlined(are_backward=False)
    return backward | forward


class _Fusion:
    def __init__(self, joint: fx.GraphModule, tangents: Collection[fx.Node], updated: Collection[fx.Node]) -> None:
        self._joint, self._updated = joint, set(updated)
        step = Step(joint, tangents, {})
        # the node that writes the memory that a value lies in; each of several results is on its own
        self._base = step.base
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._ops: list[fx.Node] = []
        self._backward: set[fx.Node] = set()
        for node in joint.graph.nodes:
            if self._base.get(node, node) is not node or node.op not in ("call_function", "output"):
                continue
            self._ops.append(node)
            self._readers[node] = []
            if self._backward or node in step.gradients or "is_backward" in node.meta:
                self._backward.add(node)
            for source in self._sources(node):
                self._readers.setdefault(source, []).append(node)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return list(dict.fromkeys(self._base[source] for source in node.all_input_nodes))

    def inlined(self, *, are_backward: bool) -> dict[fx.Node, fx.Node]:
        """For each node of a pass that is inlined, the node in whose loop it is computed."""
        found: dict[fx.Node, fx.Node] = {}
        for node in reversed(self._ops):
            if not _is_loop(node) or (node in self._backward) is not are_backward:
                continue
            readers = self._readers[node]
            loops = {found.get(reader, reader) for reader in readers}
            is_alone = len(loops) == 1 and all(map(_is_fusible, readers))
            if is_alone and (readers[0] in self._backward) is are_backward:
                found[node] = loops.pop()
        return found

    def recompute(self) -> dict[fx.Node, fx.Node]:
        """Compute tensors of the forward pass again inside of the backward loops that read them; returns the copies."""
        inlined = self.inlined(are_backward=True)
        again = self._recomputed()
        copies: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        graph = self._joint.graph

        def copy(source: fx.Node, reader: fx.Node) -> fx.Node:
            """The value of a forward node, computed inside of the reader's loop if it is not kept."""
            if self._base[source] not in again:
                return source
            loop = inlined.get(reader, reader)
            if (loop, source) not in copies:
                sources = {each: copy(each, reader) for each in source.all_input_nodes}
                with graph.inserting_before(reader):
                    made = graph.node_copy(source, sources.__getitem__)
                values = fx.node.map_arg((made.args, made.kwargs), lambda each: each.meta["val"])
                with fake_mode_of([made.meta["val"]]):
                    made.meta["val"] = made.target(*values[0], **values[1])  # type: ignore[operator]
                copies[loop, source] = made
                if self._base[source] is source:
                    inlined[made] = loop
            return copies[loop, source]

        for reader in self._ops:
            if reader in self._backward and _is_fusible(reader):
                sources = {source: copy(source, reader) for source in reader.all_input_nodes}
                for source, made in sources.items():
                    if made is not source:
                        reader.replace_input_with(source, made)
        for node in reversed(list(graph.nodes)):
            if self._base.get(node) in again and not node.users:
                graph.erase_node(node)
        return inlined

    def _recomputed(self) -> set[fx.Node]:
        """Forward loops whose results backward loops compute again, in chains that are short."""
        kept: set[fx.Node] = set()
        while True:
            again = self._cut(kept)
            length: dict[fx.Node, int] = {}
            for node in filter(again.__contains__, self._ops):
                length[node] = 1 + max((length.get(source, 0) for source in self._sources(node)), default=0)
            far = [node for node in length if length[node] % _LONGEST == 0]
            if not far:
                return again
            kept.update(far)

    def _cut(self, kept: Collection[fx.Node]) -> set[fx.Node]:
        """Forward loops that are computed again if the fewest bytes are kept, and some by all means where needed."""
        wanted = {
            source
            for reader in self._ops
            if reader in self._backward and _is_fusible(reader)
            for source in self._sources(reader)
            if source.op == "call_function" and source not in self._backward
        }
        network = nx.DiGraph()
        network.add_node("inputs")
        network.add_node("tangents")
        waiting, seen = list(wanted), set(wanted)
        while waiting:
            node = waiting.pop()
            is_kept = any(reader in self._backward and not _is_fusible(reader) for reader in self._readers[node])
            size = 0 if is_kept else sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(node))
            network.add_edge((node, "computed"), (node, "kept"), capacity=size)
            if node in wanted:
                network.add_edge((node, "kept"), "tangents")
            sources = self._sources(node)
            if not _is_loop(node) or is_kept or node in kept or not self._updated.isdisjoint(sources):
                network.add_edge("inputs", (node, "computed"))
                continue
            for source in sources:
                if source.op == "call_function":
                    network.add_edge((source, "kept"), (node, "computed"))
                    if source not in seen:
                        seen.add(source)
                        waiting.append(source)
        if not wanted:
            return set()
        # of equal cuts the cut nearest to the backward pass, which recomputes least
        _, (_, near) = nx.minimum_cut(network, "inputs", "tangents", flow_func=boykov_kolmogorov)
        return {node for node in seen if (node, "computed") in near}


def _is_loop(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_elementwise = node.target in _LOOPS or torch.Tag.pointwise in tags
    return is_elementwise and torch.Tag.nondeterministic_seeded not in tags and isinstance(node.meta["val"], Tensor)


def _is_fusible(node: fx.Node) -> bool:
    is_reduction = torch.Tag.reduction in getattr(node.target, "tags", ()) and isinstance(node.meta["val"], Tensor)
    return is_reduction or _is_loop(node)
