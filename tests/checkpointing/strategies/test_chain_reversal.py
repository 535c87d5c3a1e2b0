"""A training graph as a chain of stages."""

from experiments.checkpointing.generators import random_layers, with_backward
from rmm_linear.planning.strategies.chain_reversal import ChainView, balanced_cuts, crossing_bytes
from rmm_linear.planning.strategies.segments import segments_of_cuts


def test_crossing_bytes_are_those_that_stages_after_a_cut_read():
    for seed in range(10):
        graph = with_backward(random_layers(15, seed=seed))
        prices = crossing_bytes(graph)
        assert prices[0] == prices[-1] == 0
        for cut in range(1, graph.forward_count):
            view = ChainView(graph, segments_of_cuts(graph.forward_count, [cut]))
            assert prices[cut] == sum(graph.sizes[index] for index in view.state[1])
            crossing = {
                index
                for op in graph.ops[cut : graph.forward_count]
                for index in op.reads
                if graph.writer[index] < cut and index not in graph.outputs
            }
            assert prices[cut] == sum(graph.storages[index].size_bytes for index in crossing)


def test_cuts_are_balanced_and_move_to_cheap_places_within_their_slack():
    flat = [0] * 13
    assert balanced_cuts([1] * 12, flat, 4, slack=0.0) == (3, 6, 9)
    assert balanced_cuts([1] * 12, flat, 1, slack=0.5) == ()
    assert balanced_cuts([9, 1, 1, 1], [0] * 5, 2, slack=0.0) == (1,)
    prices = [9] * 13
    prices[7] = 1
    assert balanced_cuts([1] * 12, prices, 2, slack=0.0) == (6,)
    assert balanced_cuts([1] * 12, prices, 2, slack=0.5) == (7,)
    # too far away
    assert balanced_cuts([1] * 12, prices, 4, slack=0.3) == (3, 6, 9)
