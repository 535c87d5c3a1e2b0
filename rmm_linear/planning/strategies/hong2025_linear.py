"""Optimal checkpoints of a chain of layers: Hong et al. 2025, "GPU memory usage optimization" (arXiv 2502.12499).

Layer l writes d_l bytes. Some layers are checkpoints; the others of a segment between two checkpoints are computed
again when the backward pass reaches it. The planner minimises one of two models of the peak:

1. The bytes of all checkpoints, and those of a segment beside them: for each cap c on a segment (`fewest_kept_bytes`),
   f(j) = d_j + min f(i) over the checkpoints i whose segment up to j has at most c bytes.
2. Checkpoints that the backward pass has left behind are gone, and gradients take room: `least_peak`, O(n). If the
   last checkpoint is at layer n - 1, and U(i, j) is what the backward pass takes between the checkpoints i and j,

       M(n - 1) = d_(n-1)        M(i) = d_i + min over j > i of max(M(j), U(i, j))

   and the answer is M(0): the first layer is always kept.

The gradient's part of U, derived anew. Walking back over the segment, the gradient of layer l is made from that of
l + 1 and from the activations. At the step that makes the gradient of layer l - 1, memory holds the activations of
i + 1, ..., l (later ones are gone by then), the gradient of l, and that of l - 1:

       U(i, j) = max over i < l <= j of  d_(i+1) + ... + d_l + d_l + d_(l-1)

On such a chain, this is the simulated peak, to the byte. In the paper a gradient is written over the one that
it is made from, and no activation is freed before the segment is through: d_(i+1) + ... + d_j + max(d_i, ..., d_j).
Both grow as j grows and as i falls, and that is all that the O(n) algorithm needs.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.chain_reversal import crossing_bytes, some_counts, written_bytes
from rmm_linear.planning.strategies.segments import orders_of_cuts

_ALL_UP_TO = 12
_CAPS = 48


def fewest_kept_bytes(sizes: Sequence[int], prices: Sequence[int], cap: int) -> tuple[int, ...]:
    """Choose the cheapest checkpoints, rising, under a cap on the bytes between them, neither counted, in O(n).

    `prices` are the bytes that each layer takes if it is kept; the last layer is a checkpoint.

    Raises:
        ValueError: If there is no layer, sizes and prices are not of one length, or something is negative.
    """
    _check(sizes)
    if len(prices) != len(sizes) or min(prices) < 0 or cap < 0:
        raise ValueError(f"{len(sizes)} sizes and {len(prices)} prices, cap={cap}: as many of each, and all at least 0")
    before = list(accumulate(sizes, initial=0))
    # place j stands for layer j - 1, and place 0 for a checkpoint before the first layer
    total = [0] * (len(sizes) + 1)
    previous = [0] * (len(sizes) + 1)
    # checkpoints that j may follow, by rising total: the first one is the best
    window = deque([0])
    for j in range(1, len(sizes) + 1):
        # layers between the checkpoints i and j have before[j - 1] - before[i] bytes
        while before[j - 1] - before[window[0]] > cap:
            window.popleft()
        previous[j] = window[0]
        total[j] = total[window[0]] + prices[j - 1]
        while window and total[window[-1]] >= total[j]:
            window.pop()
        window.append(j)
    layers = []
    j = len(sizes)
    while j:
        layers.append(j - 1)
        j = previous[j]
    return tuple(reversed(layers))


def least_peak(sizes: Sequence[int]) -> tuple[int, ...]:
    """Minimise the peak of the backward pass over a chain, in O(n): return checkpoints that reach M(0), rising.

    Of two candidates j < j' for the checkpoint after i, j' is worth looking at only if M(j') < M(j), for U grows with
    j. So candidates stand in a queue, M falling from left to right. As i falls, U grows, and the best candidate, where
    M and U meet, only moves left: the right end of the queue goes once its neighbour is as good, and never comes back.
    The first and the last layer are checkpoints.

    Examples:
        >>> least_peak([1] * 16)
        (0, 5, 9, 12, 14, 15)

    Raises:
        ValueError: If there is no layer, or a size is negative.
    """
    _check(sizes)
    last = len(sizes) - 1
    before = list(accumulate(sizes, initial=0))
    peaks = [0] * len(sizes)
    following = [last] * len(sizes)
    peaks[last] = sizes[last]
    # candidates for the next checkpoint, from near to far
    queue: deque[int] = deque()
    # places of the window between i and the farthest candidate, their values falling from near to far removed: the
    # maximum of the window is at its right end
    highest: deque[tuple[int, int]] = deque()

    def segment(i: int, j: int) -> int:
        while highest[-1][0] > j:
            highest.pop()
        return highest[-1][1] - before[i + 1]

    for i in range(last - 1, -1, -1):
        near = i + 1
        while queue and peaks[queue[0]] >= peaks[near]:
            queue.popleft()
        queue.appendleft(near)
        # the bytes of the step at this layer, and the activations up to it
        taken = before[near + 1] + sizes[near] + sizes[i]
        while highest and highest[0][1] <= taken:
            highest.popleft()
        highest.appendleft((near, taken))
        while len(queue) > 1 and segment(i, queue[-1]) >= peaks[queue[-2]]:
            queue.pop()
        following[i] = queue[-1]
        peaks[i] = sizes[i] + max(peaks[queue[-1]], segment(i, queue[-1]))
    layers = [0]
    while layers[-1] != last:
        layers.append(following[layers[-1]])
    return tuple(layers)


def _check(sizes: Sequence[int]) -> None:
    if not sizes:
        raise ValueError("there are no layers; pass the bytes of at least one")
    if min(sizes) < 0:
        raise ValueError(f"a layer has {min(sizes)} bytes; sizes are at least 0")


class HongLinear(Strategy):
    """Hong et al. 2025: segments that are optimal for a chain, for every cap on their bytes.

    On a graph the layers are the forward ops in their order. Keeping a layer means to cut behind it, and costs the
    bytes that cross that cut. Proposals are the cheapest cuts for a sweep of caps, and the cuts of the least modelled
    peak.
    """

    name: ClassVar[str] = "hong2025_linear"

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        return orders_of_cuts(graph, _cuts(graph))


def _cuts(graph: Graph) -> Iterator[tuple[int, ...]]:
    prices, sizes = crossing_bytes(graph)[1:], written_bytes(graph)
    # a chain's checkpoint is no part of a segment; here any storage may cross a cut, and counts twice
    cheapest = (fewest_kept_bytes(sizes, prices, cap) for cap in _caps(sizes))
    for layers in (least_peak(prices), *cheapest):
        yield tuple(layer + 1 for layer in layers if layer + 1 < graph.forward_count)


def _caps(sizes: Sequence[int]) -> list[int]:
    """Every sum of consecutive ops in a small graph, or else sums from one op's to all, a constant factor apart."""
    before = list(accumulate(sizes, initial=0))
    if len(sizes) <= _ALL_UP_TO:
        return sorted({high - low for place, high in enumerate(before) for low in before[: place + 1]})
    return sorted({before[-1] // parts for parts in some_counts(len(sizes), all_up_to=_CAPS, number=_CAPS)})
