"""Two-level recomputation: every order can run, and long chains take less than one level can give."""

import pytest
from network_shapes import dense_blocks, residual_chain, transformer

from rmm_linear.planning.generators import chain, random_layers, u_shape, with_backward
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.schedule import Schedule, validate
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies import get_strategy
from rmm_linear.planning.strategies.kusumoto2019_lower_sets import Kusumoto2019Approximate
from rmm_linear.planning.strategies.nested_lower_sets import NestedLowerSets, order_of_nested_segments
from rmm_linear.planning.strategies.segments import order_of_segments


def cut(graph: Graph, fine: int, coarse: int) -> list[list[list[int]]]:
    ops = list(range(graph.forward_count))
    segments = [ops[first : first + fine] for first in range(0, len(ops), fine)]
    return [segments[first : first + coarse] for first in range(0, len(segments), coarse)]


def test_nested_orders_can_run_on_all_shapes() -> None:
    graphs = [with_backward(random_layers(17, seed=seed, width=4)) for seed in range(10)]
    graphs += [with_backward(u_shape(6)), dense_blocks(2, 3), residual_chain(4), transformer()[0], chain([1, 2, 3])]
    for graph in graphs:
        for fine, coarse in ((1, 2), (2, 2), (3, 2), (2, 5), (5, 1), (100, 1)):
            order = order_of_nested_segments(graph, cut(graph, fine, coarse))
            validate(graph, Schedule.from_order(graph, order))
            assert set(order) == set(range(len(graph.ops)))


def test_forward_ops_of_a_chain_run_at_most_three_times() -> None:
    graph = with_backward(chain([1] * 27))
    order = order_of_nested_segments(graph, cut(graph, 3, 3))
    counts = [order.count(op) for op in range(27)]
    # twice where the coarse run leaves its inner boundary behind, once where a boundary or the last segment is kept
    assert counts == [3, 3, 2, 3, 3, 2, 2, 2, 1] * 2 + [3, 3, 2, 3, 3, 2, 1, 1, 1]


def test_what_the_backward_pass_does_not_read_is_not_computed_again() -> None:
    ops = [
        Op("a", 1.0, (), (0,)),
        Op("b", 1.0, (0,), (1,)),
        Op("c", 1.0, (1,), (2,)),
        Op("loss", 1.0, (2,), (3,)),
        Op("backward", 1.0, (0, 2, 3), (4,), is_backward=True),
    ]
    graph = Graph(tuple(ops), tuple(Storage(str(i), 8) for i in range(5)), (3, 4), (3,))
    # c is kept, a is computed again, and b stays between them
    assert order_of_nested_segments(graph, [[[0, 1, 2]], [[3]]]) == [0, 1, 2, 3, 0, 4]


def test_segments_that_miss_an_op_are_refused() -> None:
    graph = with_backward(chain([1] * 4))
    with pytest.raises(ValueError, match="each forward op once"):
        order_of_nested_segments(graph, [[[0, 1]], [[3]]])


def test_two_levels_lower_the_peak_of_a_long_chain_and_of_a_transformer() -> None:
    graph = with_backward(chain([10] * 100))
    one = get_strategy("kusumoto2019_approximate").frontier(graph)[-1]
    two = get_strategy("nested_lower_sets").frontier(graph)[-1]
    assert two.peak_bytes < 0.9 * one.peak_bytes
    assert two.cost < 1.25 * one.cost
    graph, blocks = transformer()
    bar, _ = peak_and_cost(graph, order_of_segments(graph, blocks))
    assert get_strategy("nested_lower_sets").frontier(graph)[-1].peak_bytes < 0.85 * bar


@pytest.mark.parametrize("without", ["plans_of_program", "plans_of_chen"])
def test_chains_of_either_kind_are_nested(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = residual_chain(24)
    both = {tuple(order) for order in NestedLowerSets().orders(graph)}
    monkeypatch.setattr(Kusumoto2019Approximate, without, lambda *arguments: iter(()))
    one = {tuple(order) for order in NestedLowerSets().orders(graph)}
    assert one < both
    # each has some that the other has not
    assert len(both - one) >= 10
