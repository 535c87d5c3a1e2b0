"""POET: Patil et al. 2022, "Training Tiny Transformers on Edge Devices by Rematerialization and Paging" (2207.07697).

Checkmate's integer program (`rmm_linear.planning.strategies.jain2020_checkmate`), in which a tensor may also be paged
out to a secondary storage, and loaded before an op reads it. To Checkmate's variables come

    L(t, i)      storage i is loaded when stage t begins; it was computed in an earlier stage
    P(i)         storage i is paged out, which it is at once when it is computed first

and S(t, i) + L(t, i), which is at most 1, takes the place of S(t, i) where that says that a storage is in memory.

**How the paper's model is mapped.** The paper minimises energy under a limit of the step's time, in a budget of bytes.
Here an op's energy is its time times a power, and that of paging is its time times another: `page_weight` is the second
power over the first. The time has no limit here; with a weight of 1 the least time is sought, as all strategies do.
Paging takes time: `Graph.page_cost` a byte and direction. The paper's program leaves it out of the step's time; here
nothing runs while a tensor is paged, so that a device that overlaps both takes less. The paper chooses the stage in
which a tensor is paged out; a tensor that was paged out at once is loaded as well as one that was paged out later.
Tensors of the forward pass are paged, but for results, which belong to the caller.

Loads of a stage of several ops (graphs of more than 80) all come at its beginning in the program. In one of the orders
that are proposed, each comes just before its tensor is read: that order may fit, or cost less, where the program has no
solution.

A graph without a cost of paging pages nothing, and has Checkmate's plans.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

from rmm_linear.planning.graph import Graph
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.jain2020_checkmate import Checkmate, Program


class PagingProgram(Program):
    """POET's program of one graph: `page_weight` is the cost of a unit of time in which a tensor is paged."""

    def __init__(self, graph: Graph, *, page_weight: float = 1.0) -> None:
        self._page_weight = page_weight
        self._paged: dict[int, int] = {}
        super().__init__(graph)

    def _load_variables(self, number: int) -> dict[int, int]:
        graph, loaded = self._graph, {}
        stays = {*graph.outputs, *graph.results}
        for index, kept in self._kept[number].items() if graph.page_cost is not None else ():
            if index not in stays and not graph.ops[graph.writer[index]].is_backward:
                loaded[index] = self._variable(0, 1, is_integral=True)
                if index not in self._paged:
                    self._paged[index] = self._variable(0, 1)
                self._add([(self._paged[index], 1), (loaded[index], -1)])
                self._add([(kept, 1), (loaded[index], 1)], -math.inf, 1)
        return loaded

    def relaxed(self, budget_bytes: float, time_limit_s: float) -> tuple[float, list[tuple[int, ...]]]:
        """Solve the program without integrality, and round it; Checkmate's rounded orders are proposed as well."""
        if not self._paged:
            return super().relaxed(budget_bytes, time_limit_s)
        bound, orders = super().relaxed(budget_bytes, time_limit_s / 2)
        _, without = self._without_paging.relaxed(budget_bytes, time_limit_s / 2)
        return bound, list(dict.fromkeys((*orders, *without)))

    @cached_property
    def _without_paging(self) -> Program:
        return Program(self._graph)

    def _costs(self) -> Iterator[tuple[int, float]]:
        yield from super()._costs()
        ops, loads = len(self._graph.ops), self._graph.runnable
        for variables in (*self._loaded, self._paged):
            for index, variable in variables.items():
                yield variable, self._page_weight * loads[ops + index].cost / self._graph.cost

    def _price(self, order: Sequence[int]) -> tuple[int, float]:
        peak_bytes, cost = peak_and_cost(self._graph, order)
        of_ops = sum(self._graph.ops[op].cost for op in order if op < len(self._graph.ops))
        return peak_bytes, of_ops + self._page_weight * (cost - of_ops)


class Poet(Checkmate):
    """Patil et al. 2022: the integer program, solved anew for each budget."""

    name: ClassVar[str] = "patil2022_poet"
    pages: ClassVar[bool] = True
    program: ClassVar[type[Program]] = PagingProgram
