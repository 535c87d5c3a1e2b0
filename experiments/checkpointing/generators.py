"""Graphs to try a planner on: chains, U-shapes, stars, random layers; and a backward pass for any of them."""

import random
from collections.abc import Sequence

from rmm_linear.planning.graph import Graph, Op, Storage


def of_edges(costs: Sequence[float], sizes: Sequence[int], edges: Sequence[tuple[int, int]]) -> Graph:
    """Make a forward graph of nodes that write one storage each: of an edge (u, v), u < v, v reads the storage of u."""
    before: list[list[int]] = [[] for _ in costs]
    for u, v in edges:
        before[v].append(u)
    ops = (Op(str(v), cost, tuple(sorted({*before[v]})), (v,)) for v, cost in enumerate(costs))
    outputs = sorted({*range(len(costs))}.difference(u for u, _ in edges))
    return Graph(tuple(ops), tuple(Storage(str(v), size) for v, size in enumerate(sizes)), tuple(outputs))


def with_backward(forward: Graph) -> Graph:
    """Add a backward pass, of an op a node, to a forward graph of nodes that write one storage each.

    The gradient of a node is as large as its storage, costs as much as the node, and is computed from the gradients of
    the nodes that read it, from all that these read, and from their results; the gradient of a node without readers
    from its own storage alone (Kusumoto et al. 2019, section 3). The last storages of the forward part are results,
    gradients of nodes that read nothing are outputs.
    """
    count = len(forward.ops)
    if forward.forward_count != count or any(len(op.writes) != 1 for op in forward.ops):
        raise ValueError("only forward ops that write one storage each can be given a backward pass")
    storages, ops = list(forward.storages), list(forward.ops)
    node_of = {op.writes[0]: node for node, op in enumerate(forward.ops)}
    successors: list[list[int]] = [[] for _ in range(count)]
    for node, op in enumerate(forward.ops):
        for index in op.reads:
            successors[node_of[index]].append(node)
    gradient_of: dict[int, int] = {}
    for node in reversed(range(count)):
        own = forward.ops[node].writes[0]
        gradient_of[node] = len(storages)
        reads = {own}
        for following in successors[node]:
            reads |= {gradient_of[following], *forward.ops[following].writes, *forward.ops[following].reads}
        storages.append(Storage(f"gradient of {storages[own].name}", storages[own].size_bytes))
        name, writes = f"backward of {ops[node].name}", (gradient_of[node],)
        ops.append(Op(name, ops[node].cost, tuple(sorted(reads)), writes, is_backward=True))
    results = tuple(op.writes[0] for node, op in enumerate(forward.ops) if not successors[node])
    inputs = tuple(gradient_of[node] for node, op in enumerate(forward.ops) if not op.reads)
    return Graph(tuple(ops), tuple(storages), (*results, *inputs), results, forward.cost_unit)


def chain(sizes: Sequence[int], costs: Sequence[float] | None = None) -> Graph:
    """Make a forward chain: each node reads the node before, and takes the time 1 if there are no costs."""
    edges = [(node, node + 1) for node in range(len(sizes) - 1)]
    return of_edges([1.0] * len(sizes) if costs is None else costs, sizes, edges)


def u_shape(depth: int, *, size: int = 64, seed: int = 0) -> Graph:
    """Make a forward U: on each level, the way up reads the results of the way down, as in a U-Net.

    It has 2 depth + 1 nodes. A storage of the top level has `size` bytes, and each level below has half as many.
    """
    draw = random.Random(seed)
    sizes = [max(1, size >> level) for level in (*range(depth + 1), *reversed(range(depth)))]
    edges = [(node, node + 1) for node in range(2 * depth)]
    edges += [(level, 2 * depth - level) for level in range(depth)]
    return of_edges([float(draw.randint(1, 9)) for _ in sizes], sizes, edges)


def star(arms: int, *, size: int = 16, seed: int = 0) -> Graph:
    """Make a forward star: one node, the arms that read it, and one that reads them all."""
    draw = random.Random(seed)
    edges = [(0, arm) for arm in range(1, arms + 1)] + [(arm, arms + 1) for arm in range(1, arms + 1)]
    return _with_random_numbers(arms + 2, edges, draw, size)


def _with_random_numbers(nodes: int, edges: Sequence[tuple[int, int]], draw: random.Random, size: int) -> Graph:
    costs = [float(draw.randint(1, 9)) for _ in range(nodes)]
    return of_edges(costs, [draw.randint(1, size) for _ in range(nodes)], edges)


def random_layers(nodes: int, *, seed: int, width: int = 3, size: int = 16, density: float = 0.4) -> Graph:
    """Make a random forward graph in layers: edges go from a layer to any later one.

    Every node but the first layer's reads something. A layer has at most `width` nodes, a storage at most `size` bytes.
    `density` is the probability of an edge between nodes of neighbouring layers; a third of it is that of other edges.
    """
    draw = random.Random(seed)
    layers, edges, count = list[range](), [], 0
    while count < nodes:
        layers.append(range(count, min(nodes, count + draw.randint(1, width))))
        count = layers[-1].stop
    for depth, layer in enumerate(layers[1:], start=1):
        for node in layer:
            sources = [
                earlier
                for distance, others in enumerate(reversed(layers[:depth]))
                for earlier in others
                if draw.random() < (density if distance == 0 else density / 3)
            ]
            edges += [(source, node) for source in sources or [draw.choice(layers[depth - 1])]]
    return _with_random_numbers(nodes, edges, draw, size)
