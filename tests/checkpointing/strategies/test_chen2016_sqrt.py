"""Segments of Chen et al. 2016: sqrt(n) on uniform chains, caps that hold, and cuts where few bytes cross."""

import random

import pytest

from experiments.checkpointing.generators import chain, random_layers, with_backward
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.strategies import get_strategy
from rmm_linear.planning.strategies.chen2016_sqrt import ChenSqrt, greedy_cuts
from rmm_linear.planning.strategies.segments import orders_of_cuts, segments_of_cuts


@pytest.mark.parametrize(("layers", "expected"), [(100, 21), (400, 41), pytest.param(1600, 81, marks=pytest.mark.slow)])
def test_uniform_chains_take_two_square_roots_of_memory(layers, expected):
    """2 sqrt(n) + 1: sqrt(n) - 1 kept states and a segment of sqrt(n), as published, and two gradients beside them.

    The last state needs no place of its own: it is the end of the last segment.
    """
    leanest = ChenSqrt().frontier(with_backward(chain([10] * layers)))[-1]
    assert leanest.peak_bytes == 10 * expected
    # one more forward pass at most
    assert leanest.cost < 3 * layers


def test_more_than_one_forward_pass_is_never_added():
    for seed in range(6):
        graph = with_backward(random_layers(30, seed=seed, density=0.3))
        forward = sum(op.cost for op in graph.ops[: graph.forward_count])
        assert all(proposal.cost <= graph.cost + forward for proposal in ChenSqrt().frontier(graph))


def test_greedy_segments_keep_their_cap():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.randint(0, 9) for _ in range(draw.randint(1, 30))]
        prices = [draw.randint(0, 9) for _ in range(len(sizes) + 1)]
        cap = draw.randint(1, 40)
        segments = segments_of_cuts(len(sizes), greedy_cuts(sizes, prices, cap))
        assert [op for segment in segments for op in segment] == list(range(len(sizes)))
        for segment in segments:
            assert len(segment) == 1 or sum(sizes[op] for op in segment) <= cap


def test_the_last_segment_is_not_computed_again_where_nothing_is_gained():
    graph = with_backward(chain([4] * 9))
    first = next(orders_of_cuts(graph, [(3, 6)]))
    assert all(first.count(op) == 1 for op in (6, 7, 8))
    assert first.count(0) == first.count(1) == first.count(3) == 2
    # the ends of segments are kept
    assert first.count(2) == first.count(5) == 1


@pytest.mark.parametrize("name", ["chen2016_sqrt", "hong2025_linear"])
def test_a_graph_without_forward_ops_has_the_plain_plan(name):
    graph = Graph((Op("backward", 1.0, (), (0,), is_backward=True),), (Storage("gradient", 4),), (0,))
    assert get_strategy(name).plan(graph, 4).order == (0,)
