"""Weight gradients of linear layers from sketches: (S^T g)^T (S^T x) in the place of g^T x, without bias.

S is the Hadamard sketch of `rmm_linear.sketches`. Where the backward pass reads x for such products alone, S^T x is
made in the forward pass and kept in the place of x. Where x is read from a code, or is kept anyway, S^T x is made of it
in the backward pass, if the two sketches and the shorter product take less arithmetic than the product. Products with
the same x share S and S^T x; S is independent of all other S and of the codes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites.choice import Choice
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.step import Read, Step, ancestors, node_at, shape_of, size_bytes
from rmm_linear.compiler.torch_private import aot
from rmm_linear.config import RMMConfig

aten = torch.ops.aten
# Products over fewer rows take little, and their estimates are noisy.
_FEWEST_ROWS = 256
# Ops between a product and the gradient of a parameter, beside views.
_SUMS_AND_COPIES = {aten.add.Tensor, aten._to_copy.default, aten.clone.default}


@dataclass(eq=False)
class Sketch:
    """A tensor x of the forward pass, (rows, in), and the weight gradients that are estimated from its sketch.

    Attributes:
        reads: The products: g^T x, or x^T g of the transpose of x if `is_transposed`.
        rows: Rows of x, which has `features` columns.
        memories: The memories that are kept if the products read x as it is.
        is_kept: Whether S^T x is kept in the place of x.
        seed: The node of the seed of S.
    """

    reads: list[Read]
    is_transposed: bool
    rows: int
    features: int
    config: RMMConfig
    memories: frozenset[fx.Node]
    is_kept: bool
    seed: fx.Node = field(init=False)
    _made: fx.Node | None = field(init=False, default=None)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of x."""
        return self.reads[0].source.meta["val"].nbytes

    @property
    def sketch_bytes(self) -> int:
        """Bytes of S^T x."""
        return self.config.sketch_object.rank(self.rows) * self.tensor_bytes // self.rows

    @property
    def saves_arithmetic(self) -> bool:
        """Whether the sketches and the shorter products take less arithmetic than the products."""
        product = sum(shape_of(read.reader).numel() for read in self.reads)
        sketch = self.config.sketch_object
        sketching = sketch.multiply_adds(self.rows) * (self.features + product // self.features)
        return sketching + sketch.rank(self.rows) * product < self.rows * product

    def encode(self, step: Step, editor: Editor, key: fx.Node, first: fx.Node) -> None:
        """Write the seed into the forward pass, and the sketch if it is kept."""
        self.seed = editor.insert(_seed, key, before=first, block_of=self.reads[0].reader, is_backward=False)
        if not self.is_kept:
            return
        *views, base = ancestors(step, self.reads[0].source)
        where: Any = {"before": base.next, "block_of": base, "is_backward": False}
        x = base
        # views of the backward pass come too late
        made: dict[fx.Node, fx.Node] = {}
        for view in reversed(views):
            made[view] = x = editor.copy(view, made, **where)
        self._made = editor.insert(_compressed, x, self.seed, **self._how, **where)

    def replace(self, reader: fx.Node, editor: Editor) -> None:
        """Let a product read the sketch of x; products come in the order of the graph, and read x as is then known."""
        first, second = node_at(reader, 0), node_at(reader, 1)
        x, gradient = (first, second) if self.is_transposed else (second, first)
        if self._made is None:
            self._made = editor.insert(_compressed, x, self.seed, before=reader, **self._how)
        options = {"dtype": reader.meta["val"].dtype, **self._how}
        editor.replace(reader, editor.insert(_product, gradient, self.seed, self._made, before=reader, **options))

    @property
    def _how(self) -> dict[str, Any]:
        return {"config": self.config.graph_key, "is_transposed": self.is_transposed}


def sketches(step: Step, chosen: Choice, parameters: Collection[fx.Node], ratio: float) -> list[Sketch]:
    """Find weight gradients that are worth a sketch of such a ratio, beside the codes that are chosen."""
    config = RMMConfig.from_recipe("fast", ratio=ratio, min_rows=_FEWEST_ROWS)
    served = set(chosen.served)
    groups: dict[Any, list[Read]] = {}
    for read in _weight_gradients(step, parameters):
        groups.setdefault((_identity(step, read), read in served), []).append(read)
    found = []
    for (_, is_served), reads in groups.items():
        is_transposed = reads[0].reader.args[0] is reads[0].source
        rows, features = shape_of(reads[0].source)[:: -1 if is_transposed else 1]
        if not config.sketches(rows):
            continue
        memories = frozenset().union(*(step.memories(read.source) for read in reads))
        sketch = Sketch(reads, is_transposed, rows, features, config, memories, is_kept=False)
        # a tensor that the backward pass computes can't be sketched in the forward pass
        is_of_forward = all(step.memories(read.source) == {step.base[read.source]} for read in reads)
        sketch.is_kept = not is_served and is_of_forward and sketch.sketch_bytes < sum(map(size_bytes, memories))
        found.append(sketch)
    useless = found
    while useless:
        others = set(chosen.unserved).difference(*(sketch.reads for sketch in found if sketch.is_kept))
        needed = {memory for read in others for memory in step.memories(read.source)}
        useless = [sketch for sketch in found if sketch.is_kept and not needed.isdisjoint(sketch.memories)]
        for sketch in useless:
            sketch.is_kept = False
    return [sketch for sketch in found if sketch.is_kept or sketch.saves_arithmetic]


def _weight_gradients(step: Step, parameters: Collection[fx.Node]) -> Iterator[Read]:
    """Yield reads of products of a gradient and an input of a linear layer, which are gradients of parameters."""
    (output,) = (node for node in step.joint.graph.nodes if node.op == "output")
    own = {node.meta["desc"] for node in parameters}
    is_own: dict[fx.Node, bool] = {}
    for key, node in zip(output.meta["desc"], output.args[0], strict=True):
        if node is not None:
            is_own[node] = is_own.get(node, True) and isinstance(key, aot.GradAOTOutput) and key.grad_of in own

    def ends_there(node: fx.Node) -> bool:
        is_known = node.target in _SUMS_AND_COPIES or getattr(node.target, "is_view", False)
        users = (user for user in node.users if user is not output)
        return is_known and is_own.get(node, True) and all(map(ends_there, users))

    # the other factor of the gradient of a layer's input is computed of parameters alone
    of_batch: set[fx.Node] = set()
    for node in step.number:
        if (node.op == "placeholder" and node not in parameters) or not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
    for read in step.reads:
        reader, source = read
        if reader.target is aten.mm.default and source in of_batch and step.is_float(source):
            users = [user for user in reader.users if user is not output]
            if is_own.get(reader, bool(users)) and all(map(ends_there, users)):
                yield read


def _identity(step: Step, read: Read) -> Any:
    """Equal for the same rows of the same tensor; autocast casts a tensor anew for each layer."""
    base, x = step.base[read.source], read.source.meta["val"]
    is_cast = base.target is aten._to_copy.default
    lies = x.shape, x.stride(), x.storage_offset(), x.dtype
    return base.args[0] if is_cast else base, lies, read.reader.args[0] is read.source


def _seed(key: Tensor) -> Tensor:
    return (key[0].to(torch.int64) << 32) + key[1]


def _compressed(x: Tensor, seed: Tensor, *, config: str, is_transposed: bool) -> Tensor:
    return torch.ops.rmm_linear.compress.default(x.t() if is_transposed else x, seed, config)[0]


def _product(
    g: Tensor, seed: Tensor, sketch: Tensor, *, config: str, dtype: torch.dtype, is_transposed: bool
) -> Tensor:
    rows = g if is_transposed else g.t()
    grad_weight = torch.ops.rmm_linear.grad_weight.default
    found: Tensor = grad_weight(rows, seed, [sketch], config, False, sketch.shape[1], False, dtype)[0]
    return found.t() if is_transposed else found
