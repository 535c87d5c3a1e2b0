"""Graphs of parts: an order of parts, spelled out, costs as much and takes at most as many bytes."""

import random
from dataclasses import replace

import pytest

from experiments.checkpointing.generators import chain, random_layers, with_backward
from rmm_linear.planning.contraction import contracted, divided
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.schedule import Schedule, validate
from rmm_linear.planning.simulate import peak_and_cost


def with_statistics(graph, draw):
    """Some forward ops also write a result, draw random numbers, need temporaries, or run once alone."""
    ops, storages, results = list(graph.ops), list(graph.storages), list(graph.results)
    for number, op in enumerate(ops[: graph.forward_count]):
        ops[number] = op = replace(op, is_random=draw.random() < 0.2, temporary_bytes=draw.choice([0, 0, 5]))
        if draw.random() < 0.3:
            storages.append(Storage("statistics", draw.randint(1, 4)))
            results.append(len(storages) - 1)
            ops[number] = replace(op, writes=(*op.writes, len(storages) - 1))
        elif draw.random() < 0.2:
            ops[number] = replace(op, is_recomputable=False)
    return replace(graph, ops=tuple(ops), storages=tuple(storages), results=tuple(results))


def random_order(graph, draw):
    """The ops in their order, and before some of the backward ones forward ops that may run again."""
    order = []
    for number, op in enumerate(graph.ops):
        if op.is_backward and draw.random() < 0.7:
            again = {op for op in range(number) if graph.ops[op].is_recomputable and draw.random() < 0.3}
            order += sorted(op for op in again if not graph.ops[op].is_backward)
        order.append(number)
    return order


@pytest.mark.parametrize("seed", range(40))
def test_an_order_of_parts_is_an_order_of_ops(seed):
    draw = random.Random(seed)
    graph = with_statistics(with_backward(random_layers(draw.randint(8, 30), seed=seed, width=3)), draw)
    parts = divided(graph, draw.randint(2, 6))
    assert sorted(op for part in parts for op in part) == list(range(len(graph.ops)))
    coarse = contracted(graph, parts)
    for order in (range(len(coarse.ops)), *(random_order(coarse, draw) for _ in range(10))):
        validate(coarse, Schedule.from_order(coarse, order))
        spelled = [op for part in order for op in parts[part]]
        validate(graph, Schedule.from_order(graph, spelled))
        (peak, cost), (coarse_peak, coarse_cost) = peak_and_cost(graph, spelled), peak_and_cost(coarse, order)
        assert peak <= coarse_peak
        assert cost == pytest.approx(coarse_cost)


def test_parts_end_where_few_bytes_live_on():
    graph = with_backward(chain([9, 1, 9, 9, 9, 1, 9, 9, 9, 1, 9, 9]))
    parts = divided(graph, 4)
    assert [part[-1] for part in parts[:3]] == [1, 5, 9]


def test_an_op_that_runs_once_does_not_keep_its_neighbours_from_running_again():
    once = Op("counter", 1.0, writes=(1,), is_recomputable=False)
    ops = (
        *(Op("a", 1.0, writes=(0,)), once, Op("b", 1.0, reads=(0,), writes=(2,))),
        *(Op("c", 1.0, reads=(2, 1), writes=(3,)), Op("d", 1.0, reads=(3,), writes=(4,))),
    )
    graph = Graph(ops, tuple(Storage(name, 1) for name in "abcde"), outputs=(4,))
    # c reads the counter, and so begins another part; d writes an output
    assert divided(graph, 1) == [[0, 2], [1], [3], [4]]
    assert [op.is_recomputable for op in contracted(graph, divided(graph, 1)).ops] == [True, False, True, True]
