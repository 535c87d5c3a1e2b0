"""What is dear per byte is kept."""

from rmm_linear.checkpointing import get_strategy
from rmm_linear.planning.generators import chain, with_backward
from rmm_linear.planning.strategies.segments import order_of_segments


def convolutions(blocks):
    """A chain of a dear op, a cheap one as large, and a cheaper one."""
    return with_backward(chain([64] * 3 * blocks, [90.0, 3.0, 1.0] * blocks))


def test_dear_ops_are_computed_once_and_segments_go_further():
    graph = convolutions(16)
    frontier = get_strategy("cost_per_byte").frontier(graph)
    plain = frontier[0].peak_bytes
    # all that is cheap computed again: a third of the memory for 4 of 94 parts of the forward time
    third = [point for point in frontier if point.peak_bytes < 0.45 * plain]
    assert third[0].cost < graph.cost * 1.03
    chen = [point for point in get_strategy("chen2016_sqrt").frontier(graph) if point.peak_bytes < 0.45 * plain]
    assert third[0].cost < chen[0].cost
    # and beyond, where dear ops must be computed again as well
    assert frontier[-1].peak_bytes <= 0.3 * plain


def test_a_detour_over_thousands_of_ops_is_planned():
    # of one op a segment, each of which needs the one before: recursion would end after a thousand
    graph = with_backward(chain([64] * 4000, [1.0] * 3999 + [50.0]))
    order = order_of_segments(graph, [[op] for op in range(4000)], kept=())
    # the last op's gradient comes first; then all but the last again, in one go
    assert order[4000:8000] == [4000, *range(3999)]
    frontier = get_strategy("cost_per_byte").frontier(graph)
    assert frontier[-1].peak_bytes < 0.1 * frontier[0].peak_bytes
