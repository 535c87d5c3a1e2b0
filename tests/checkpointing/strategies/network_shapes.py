"""Graphs shaped like networks: residual chains, dense blocks that copy what they concatenate, Transformers."""

from rmm_linear.planning.generators import with_backward
from rmm_linear.planning.graph import Graph, Op, Storage


def residual_chain(blocks: int, *, size: int = 64) -> Graph:
    """A training graph: each third node of a chain also reads the one three before."""
    count = 3 * blocks + 1
    edges = [(node, node + 1) for node in range(count - 1)] + [(3 * block, 3 * block + 3) for block in range(blocks)]
    return with_backward(Graph.from_edges([[1.0, 4.0, 4.0][node % 3] for node in range(count)], [size] * count, edges))


def dense_blocks(blocks: int, layers: int, *, growth: int = 8) -> Graph:
    """A training graph: each layer of a block copies all outputs before it into one, and reads that."""
    costs, sizes, edges = [4.0], [2 * growth], []

    def layer(sources: list[int], width: int) -> int:
        copied = len(costs)
        costs.extend((1.0, 5.0 + len(sources)))
        sizes.extend((sum(sizes[source] for source in sources), width))
        edges.extend([*((source, copied) for source in sources), (copied, copied + 1)])
        return copied + 1

    last = 0
    for _ in range(blocks):
        outputs = [last]
        for _ in range(layers):
            outputs.append(layer(outputs, growth))
        last = layer(outputs, 2 * growth)
    return with_backward(Graph.from_edges(costs, sizes, edges))


class _Tape:
    """Forward ops one by one, each with what its backward ops read; then the backward pass."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.saved: list[tuple[int, ...]] = []
        self.without_gradient: set[int] = set()

    def store(self, name: str, size: int) -> int:
        self.storages.append(Storage(name, size))
        return len(self.storages) - 1

    def op(self, name: str, cost: float, reads: list[int], size: int, saved: str = "", *, random: bool = False) -> int:
        """`saved` names what the backward ops read: digits for reads, "w" for what it writes."""
        wrote = self.store(name, size)
        self.ops.append(Op(name, cost, tuple(reads), (wrote,), is_random=random, block=name.split(".")[0]))
        self.saved.append(tuple(wrote if letter == "w" else reads[int(letter)] for letter in saved))
        return wrote

    def training_graph(self, loss: int, weight_bytes: int) -> Graph:
        outputs = [loss]
        arrived: dict[int, int] = {}
        for op, saved in reversed(list(zip(tuple(self.ops), self.saved, strict=True))):
            (wrote,) = op.writes
            if wrote in self.without_gradient or (wrote != loss and wrote not in arrived):
                continue
            reads = tuple(dict.fromkeys((*([] if wrote == loss else [arrived[wrote]]), *saved)))

            def add(name: str, size: int, reads: tuple[int, ...], cost: float) -> int:
                index = self.store(name, size)
                self.ops.append(Op(name, cost, reads, (index,), is_backward=True))
                return index

            if op.name.endswith("mm"):
                outputs.append(add(f"{op.name} for the weight", weight_bytes, reads, op.cost))
            for index in op.reads:
                if index not in self.without_gradient:
                    size = self.storages[index].size_bytes
                    gradient = add(f"{op.name} backward", size, reads, op.cost)
                    if index in arrived:
                        gradient = add(f"{op.name} sum", size, (arrived[index], gradient), 1.0)
                    arrived[index] = gradient
        return Graph(tuple(self.ops), tuple(self.storages), tuple(outputs), (loss,))


def transformer(
    blocks: int = 16, *, rows: int = 512, width: int = 64, heads: int = 4, length: int = 128
) -> tuple[Graph, list[list[int]]]:
    """A training graph of pre-norm blocks of 44 forward ops with dropout, and its forward ops by block."""
    tape = _Tape()
    hidden, scores, column = 4 * rows * width, 4 * rows * length * heads, 4 * rows

    def norm(name: str, x: int) -> int:
        mean = tape.op(f"{name}.mean", 1, [x], column)
        centered = tape.op(f"{name}.sub", 1, [x, mean], hidden)
        variance = tape.op(f"{name}.var", 1, [tape.op(f"{name}.square", 1, [centered], hidden, "0")], column)
        scale = tape.op(f"{name}.rsqrt", 0.25, [variance], column, "w")
        normal = tape.op(f"{name}.mul", 1, [centered, scale], hidden, "01")
        return tape.op(f"{name}.bias", 1, [tape.op(f"{name}.gain", 1, [normal], hidden, "0")], hidden)

    def linear(name: str, x: int, cost: float, size: int) -> int:
        return tape.op(f"{name}.add", 1, [tape.op(f"{name}.mm", cost, [x], size, "0")], size)

    x = tape.op("embedding", 2, [], hidden)
    first = [0]
    for number in range(blocks):
        if number:
            first.append(len(tape.ops))
        at = f"block{number}"
        y = norm(f"{at}.norm1", x)
        q, k, v = (tape.op(f"{at}.{n}.turn", 1, [linear(f"{at}.{n}", y, 8, hidden)], hidden) for n in "qkv")
        product = tape.op(f"{at}.scores", 10, [q, k], scores, "01")
        masked = tape.op(f"{at}.mask", 2, [tape.op(f"{at}.scale", 2, [product], scores)], scores)
        probabilities = tape.op(f"{at}.softmax", 4, [masked], scores, "w")
        drawn = tape.op(f"{at}.draw", 2, [], scores, random=True)
        mask = tape.op(f"{at}.keep", 2, [drawn], scores // 4)
        tape.without_gradient |= {drawn, mask}
        dropped = tape.op(f"{at}.drop", 2, [probabilities, mask], scores, "1")
        context = tape.op(f"{at}.merge", 1, [tape.op(f"{at}.context", 10, [dropped, v], hidden, "01")], hidden)
        x = tape.op(f"{at}.residual1", 1, [x, linear(f"{at}.out", context, 8, hidden)], hidden)
        up = linear(f"{at}.up", norm(f"{at}.norm2", x), 32, 4 * hidden)
        gelu = tape.op(f"{at}.gelu", 4, [up, tape.op(f"{at}.erf", 4, [up], 4 * hidden, "0")], 4 * hidden, "01")
        x = tape.op(f"{at}.residual2", 1, [x, linear(f"{at}.down", gelu, 32, hidden)], hidden)
    head = tape.op("head.mm", 10, [x], hidden, "0")
    loss = tape.op("loss", 1, [head], 4, "0")
    ends = [*first[1:], len(tape.ops)]
    return tape.training_graph(loss, 4 * width**2), [list(range(*pair)) for pair in zip(first, ends, strict=True)]
