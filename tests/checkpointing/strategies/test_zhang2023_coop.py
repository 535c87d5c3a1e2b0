"""Coop: the arena, its windows against all of them, and no address given twice."""

import itertools
import random
from dataclasses import replace

import pytest
from strategy_contract import large_graphs

from experiments.checkpointing.arenas import DtrInArena, least_arena
from experiments.checkpointing.generators import chain, random_layers, with_backward
from rmm_linear.planning.graph import Storage
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import simulate
from rmm_linear.planning.strategies.kirisame2021_dtr import budgets_to_try
from rmm_linear.planning.strategies.zhang2023_coop import Arena, Block, CoopRun


def _filled(draw, size=60):
    arena, owners = Arena(size), itertools.count()
    while arena.place(next(owners), draw.randint(1, 9), is_low=draw.random() < 0.5):
        pass
    for block in list(arena.blocks):
        if block.owner is not None and draw.random() < 0.3:
            arena.free(block.owner)
    return arena


def test_dear_storages_lie_low_and_cheap_ones_high():
    arena = Arena(10)
    for owner, is_low in ((0, True), (1, False), (2, True), (3, False)):
        assert arena.place(owner, 2, is_low=is_low)
    assert arena.blocks == [Block(2, 0), Block(2, 2), Block(2, None), Block(2, 3), Block(2, 1)]
    assert not arena.place(4, 3, is_low=True)
    arena.free(3)
    assert arena.blocks == [Block(2, 0), Block(2, 2), Block(4, None), Block(2, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_no_window_is_cheaper(seed):
    draw = random.Random(seed)
    arena, size = _filled(draw), draw.randint(5, 40)
    prices = {block.owner: draw.choice([None, 1, 2, 5, 9]) for block in arena.blocks if block.owner is not None}
    windows = [arena.blocks[a:b] for a, b in itertools.combinations(range(len(arena.blocks) + 1), 2)]
    owners = [[block.owner for block in each if block.owner is not None] for each in windows]
    sums = [
        sum(prices[owner] for owner in each)
        for window, each in zip(windows, owners, strict=True)
        if sum(block.size_bytes for block in window) >= size and None not in map(prices.get, each)
    ]
    found = arena.cheapest_window(size, prices.get)
    assert (None if found is None else sum(map(prices.get, found))) == min(sums, default=None)


def _with_second_results(graph):
    """Let each forward op write a second storage, which its backward op reads."""
    storages, ops = list(graph.storages), list(graph.ops)
    for forward in range(graph.forward_count):
        backward = len(ops) - 1 - forward
        ops[forward] = replace(ops[forward], writes=(*ops[forward].writes, len(storages)))
        ops[backward] = replace(ops[backward], reads=(*ops[backward].reads, len(storages)))
        storages.append(Storage(f"second result of {ops[forward].name}", 1 + 7 * forward % 20))
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


@pytest.mark.parametrize("kind", [CoopRun, DtrInArena])
def test_the_arena_holds_what_is_in_memory_and_no_more(kind):
    class Checked(kind):
        def _run_op(self, op):
            super()._run_op(op)
            held = {block.owner: block.size_bytes for block in self.arena.blocks if block.owner is not None}
            assert held == {index: self._graph.sizes[index] for index in self._live if self._graph.sizes[index]}
            assert sum(block.size_bytes for block in self.arena.blocks) == self._budget_bytes

    ended = 0
    for graph in (*dict(large_graphs()).values(), *map(_with_second_results, dict(large_graphs()).values())):
        for budget in list(budgets_to_try(graph))[::5]:
            run = Checked(graph, budget)
            if run.run():
                ended += 1
                # the simulator counts what an op writes anew twice while it runs
                again = max(graph.bytes_while_running) if len(graph.ops[0].writes) > 1 else 0
                assert simulate(graph, Schedule.from_order(graph, run.order)).peak_bytes <= budget + again
    assert ended >= 16


def test_windows_need_no_larger_an_arena_than_dtr():
    # over six random graphs; on a single one either may be ahead
    graphs = [with_backward(random_layers(30, seed=seed, density=0.1)) for seed in range(5)]
    graphs.append(with_backward(chain([1 + 37 * node % 101 for node in range(40)])))
    coop, dtr = ([least_arena(graph, kind) for graph in graphs] for kind in (CoopRun, DtrInArena))
    assert sum(least for least, _ in coop) <= sum(least for least, _ in dtr)
    assert sum(free for _, free in coop) < 0.6 * sum(free for _, free in dtr)
